"""How many floating-point operations the operators take, for ``FlopCounterMode``."""

import math
from typing import Callable

import torch


def formulas() -> dict[Callable, Callable]:
    """The ``custom_mapping`` with which ``torch.utils.flop_counter.FlopCounterMode`` counts calls
    of ``qkv``, which it leaves out by itself.

    ::

        with FlopCounterMode(custom_mapping=qkv.flops.formulas()) as counter:
            model(x).sum().backward()
        counter.get_total_flops()

    Counted as PyTorch counts its own attention: two for each multiply-add of the matrix products,
    all M x N pairs, kept or not; nothing for the softmax. Two products forward, five backward, up
    to five in forward mode and twelve in the double backward, fewer where fewer operands have a
    tangent or cotangent. Of the weights, one and three.

    Returns:
        Operators and functions from the shapes of their arguments to numbers.
    """
    ops = torch.ops.qkv
    return {
        ops._attention_forward: _forward,
        ops._attention_backward: _backward,
        ops._attention_weights: _weights,
        ops._attention_weights_backward: _weights_backward,
        ops._attention_jvp: _jvp,
        ops._attention_backward_backward: _backward_backward,
    }


def _products(query, key, value, of_head_dim: int, of_value_dim: int) -> int:
    """So many products of M x N numbers with D and with Dv columns."""
    batch = torch.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    multiply_adds = math.prod(batch) * math.prod(query[-3:-1]) * key[-2]
    return 2 * multiply_adds * (of_head_dim * query[-1] + of_value_dim * value[-1])


def _forward(query, key, value, *rest, **_) -> int:
    return _products(query, key, value, 1, 1)


def _backward(query, key, value, *rest, **_) -> int:
    """S, dQ and dK; dP and dV."""
    return _products(query, key, value, 3, 2)


def _weights(query, key, value, *rest, **_) -> int:
    return _products(query, key, value, 1, 0)


def _weights_backward(query, key, value, *rest, **_) -> int:
    """S, dQ and dK."""
    return _products(query, key, value, 3, 0)


def _jvp(query, key, value, *rest, **_) -> int:
    """S, K Q' and K' Q; P' V, unless only values move, and P V'."""
    query_t, key_t, value_t, *of_scores = (x is not None for x in rest[13:18])
    moves = query_t or key_t or any(of_scores)
    return _products(query, key, value, 1 + query_t + key_t, moves + value_t)


def _backward_backward(query, key, value, *rest, **_) -> int:
    """As along the cotangents, and dQ' and dK', of two parts each; dV', dP, and V' dO."""
    query_t, key_t, value_t, *of_scores = (x is not None for x in rest[15:20])
    moves = query_t or key_t or any(of_scores)
    return _products(query, key, value, 3 + 2 * (query_t + key_t), 1 + 2 * (moves + value_t))
