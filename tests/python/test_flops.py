"""What FlopCounterMode counts, against the matrix products of the definition, which it knows."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv

B, HQ, HKV, M, N, D, DV = 3, 4, 2, 5, 7, 8, 6
SCORES, VALUES = (2 * B * HQ * M * N * width for width in (D, DV))


def tensors():
    return [
        torch.randn(shape, requires_grad=True)
        for shape in ((B, HQ, M, D), (1, HKV, N, D), (B, HKV, N, DV))
    ]


def attention(query, key, value):
    return qkv.attention(query, key, value, is_causal=True, enable_gqa=True)


def definition(query, key, value):
    key, value = (x.repeat_interleave(HQ // HKV, 1).expand(B, -1, -1, -1) for x in (key, value))
    return torch.softmax(query @ key.transpose(-2, -1), -1) @ value


def counted(f, *args) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=qkv.flops.formulas())
    with counter:
        f(*args)
    return counter.get_total_flops()


def test_forward_is_that_of_the_definition():
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert counted(attention, *tensors()) == counted(definition, *tensors())
    assert counted(attention, *tensors()) == SCORES + VALUES


def test_backward_computes_the_scores_again():
    def backward(f):
        args = tensors()
        out = f(*args).sum()
        return counted(torch.autograd.grad, out, args)

    assert backward(attention) == backward(definition) + SCORES == 3 * SCORES + 2 * VALUES


@pytest.mark.parametrize(
    ("moved", "expected"),
    [([0], 2 * SCORES + VALUES), ([2], SCORES + VALUES), ([0, 1, 2], 3 * SCORES + 2 * VALUES)],
)
def test_forward_mode(moved, expected):
    args = [x.detach() for x in tensors()]

    def f(*some):
        every = list(args)
        for position, x in zip(moved, some):
            every[position] = x
        return attention(*every)

    some = tuple(args[i] for i in moved)
    of_output = SCORES + VALUES
    assert counted(torch.func.jvp, f, some, some) == of_output + expected


def test_double_backward():
    args = tensors()
    out = attention(*args)
    grads = torch.autograd.grad(out, args, torch.randn_like(out), create_graph=True)
    squares = sum((g * g).sum() for g in grads)
    assert counted(torch.autograd.grad, squares, args) == 7 * SCORES + 5 * VALUES


def test_a_mask_that_moves():
    q, k, v = torch.randn(B, HQ, M, D), torch.randn(B, HQ, N, D), torch.randn(B, HQ, N, DV)
    mask = torch.randn(M, N, requires_grad=True)

    def f(mask):
        return qkv.attention(q, k, v, mask)

    along = (mask.detach(),)
    assert counted(torch.func.jvp, f, along, along) == 2 * SCORES + 2 * VALUES
    out = f(mask)
    (first,) = torch.autograd.grad(out, mask, torch.randn_like(out), create_graph=True)
    assert counted(torch.autograd.grad, first.sin().sum(), mask) == 3 * SCORES + 3 * VALUES
