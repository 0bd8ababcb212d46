"""Typed functions over the operators ``torch.ops.qkv.*``."""

from typing import Any, Optional

import torch
from torch import Tensor


def _number(name: str, x: Optional[float]) -> Optional[float]:
    """The operator would take the number in a tensor, and its gradient would be lost."""
    if type(x) is float or not isinstance(x, Tensor):  # the first is faster
        return x
    if torch.jit.is_tracing() and not x.requires_grad:  # computed from sizes; see _whole
        return float(x)
    raise TypeError(
        f"qkv: {name} must be a number, but is a tensor. There is no gradient of it"
        + ("" if name == "dropout_p" else "; to learn a scale, multiply query by it")
    )


def _whole(name: str, x: Optional[int]) -> Optional[int]:
    """An operator takes the int in a tensor by itself, but not while a graph is made of it. While
    ``torch.jit.trace`` runs, sizes are tensors, which would become constants without a word: in
    Python it warns of that."""
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():  # the operator would take its whole part
        raise TypeError(f"qkv: {name} must be an int, but is a tensor of {x.dtype}")
    if x.numel() != 1:
        raise ValueError(f"qkv: {name} must be one int, but is a tensor of shape {list(x.shape)}")
    return int(x) if torch.jit.is_tracing() else x.item()


def _window(window: Optional[tuple[int, int]]) -> Optional[tuple[int, int]]:
    numbers = window if isinstance(window, (tuple, list)) else (window,)
    if any(isinstance(x, float) for x in numbers) or isinstance(window, int):
        # (The operator would say that it wants a list and has found a tuple.)
        raise TypeError(f"qkv: window must be (left, right), two ints, but is {window!r}")
    if numbers is window and any(isinstance(x, Tensor) for x in numbers):
        return tuple(_whole("each number of window", x) for x in numbers)
    return window


def check_mask(who: str, mask: Optional[Tensor]) -> None:
    """Nobody writes the memory of a CausalBias: F.scaled_dot_product_attention knows what it
    means, operators read it."""
    if not torch.jit.is_scripting():
        if type(mask).__name__ == "CausalBias":
            raise TypeError(
                f"{who}: attn_mask must be a mask, but is a CausalBias: ask for causal attention "
                "instead, for that of causal_lower_right with query_offset=N - M"
            )


def _options(
    scale: Optional[float],
    enable_gqa: bool,
    window: Optional[tuple[int, int]],
    query_offset: Optional[int],
    softcap: Optional[float],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    key_mask: Optional[Tensor],
) -> dict[str, Any]:
    """Those that are not the operators' defaults. To read an argument by its name takes PyTorch 0.5
    us, all of them as much as attention to a few keys."""
    options: dict[str, Any] = {}
    if scale is not None:
        options["scale"] = _number("scale", scale)
    if enable_gqa is not False:
        options["enable_gqa"] = enable_gqa
    if window is not None:
        options["window"] = _window(window)
    if query_offset is not None:
        options["query_offset"] = _whole("query_offset", query_offset)
    if softcap is not None and (softcap := _number("softcap", softcap)) != 0.0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        options["sinks"] = sinks
    if key_mask is not None:
        options["key_mask"] = key_mask
    return options


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: Optional[int] = None,
    softcap: Optional[float] = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
) -> Tensor:
    """Scaled dot-product attention, ``softmax(scale * Q K^T + mask) V``, without the M x N matrix.

    The positional arguments and their meaning are those of
    ``torch.nn.functional.scaled_dot_product_attention``; masks, ``is_causal``, ``window`` and
    ``key_mask`` compose: a pair (i, j) is kept if all of them keep it. Differentiable to any order
    in reverse and forward mode. (FlashAttention-2, arXiv:2307.08691.)

    Letters: B.. batch dimensions (any number, also none), Hq query heads, Hkv key/value heads,
    M queries, N keys, D head dim of query and key, Dv head dim of value. A single query head is
    broadcast to the key/value heads, and Hq is their number then. So is a single head of key or of
    value to those of the other.

    Args:
        query: (B.., Hq, M, D), (Hq, M, D) or (M, D); float64, float32, bfloat16 or float16; any
            strides.
        key: (B.., Hkv, N, D). Batch dimensions broadcast, without copies. Hkv is Hq or 1, or any
            divisor of Hq with ``enable_gqa``.
        value: (B.., Hkv, N, Dv).
        attn_mask: broadcasts to (B.., Hq, M, N). bool: True = may attend. Float (query's dtype or
            float32): added to the scores, -inf = may not attend; gets a gradient if it requires
            one.
        dropout_p: probability of setting a weight to zero, rounded to a multiple of 2^-16; the
            others grow by 1 / (1 - dropout_p).
        is_causal: query i attends to keys j <= i + query_offset only.
        scale: factor on the scores, 1/sqrt(D) by default.
        enable_gqa: query head h uses key/value head h // (Hq // Hkv).
        window: (left, right): query i attends to keys
            i + query_offset - left <= j <= i + query_offset + right only; -1 = unbounded,
            less is an error.
        query_offset: position of query 0 among the keys. 0, the default, aligns causal masks to
            the upper left as PyTorch does; N - M to the lower right as FlashAttention does.
        softcap: scores become softcap * tanh(score / softcap) before masks are added; 0 or
            None = off.
        alibi_slopes: (Hq) or (B.., Hq), query's dtype or float32: subtracts
            slope * |i + query_offset - j| (ALiBi, arXiv:2108.12409).
        sinks: (Hq) or (B.., Hq), query's dtype or float32: a further score in each row's softmax
            that has no value.
        key_mask: bool, broadcasts to (B.., N): True = may be attended to.

    Returns:
        (B.., Hq, M, Dv), laid out in memory as query is. A row that may attend to no key is 0.

    Raises:
        ValueError, TypeError: naming the rule and what was found, before any work.
        RuntimeError: as of any operator, for what its schema does not take: a str for a tensor.
    """
    check_mask("qkv.attention", attn_mask)
    return torch.ops.qkv.attention(
        query,
        key,
        value,
        attn_mask,
        _number("dropout_p", dropout_p),
        is_causal,
        **_options(scale, enable_gqa, window, query_offset, softcap, alibi_slopes, sinks, key_mask),
    )


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: Optional[int] = None,
    softcap: Optional[float] = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` and the log of its softmax denominators, both differentiable.

    Args and Raises: as those of :func:`attention`.

    Returns:
        The output, and logsumexp (B.., Hq, M): natural log, float32 (float64 for float64). Of a row
        that may attend to no key it is its head's sink, -inf without sinks.
    """
    check_mask("qkv.attention_with_lse", attn_mask)
    return torch.ops.qkv.attention_with_lse(
        query,
        key,
        value,
        attn_mask,
        _number("dropout_p", dropout_p),
        is_causal,
        **_options(scale, enable_gqa, window, query_offset, softcap, alibi_slopes, sinks, key_mask),
    )


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: Optional[int] = None,
    softcap: Optional[float] = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
) -> Tensor:
    """The attention weights, before dropout: the M x N matrix that :func:`attention` never builds.

    Args and Raises: as those of :func:`attention`.

    Returns:
        (B.., Hq, M, N) in query's dtype, differentiable. A row adds up to 1, with sinks to
        1 - exp(sink - logsumexp), and to 0 if it may attend to no key.
    """
    check_mask("qkv.attention_weights", attn_mask)
    return torch.ops.qkv.attention_weights(
        query,
        key,
        attn_mask,
        is_causal,
        **_options(scale, enable_gqa, window, query_offset, softcap, alibi_slopes, sinks, key_mask),
    )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: Optional[int] = None,
    softcap: Optional[float] = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
) -> str:
    """Which kernels :func:`attention` and its derivatives would run on these arguments, or why none
    is fused, and what the band is. Computes nothing.

    Args and Raises: as those of :func:`attention`.
    """
    check_mask("qkv.explain", attn_mask)
    return torch.ops.qkv.explain(
        query,
        key,
        value,
        attn_mask,
        _number("dropout_p", dropout_p),
        is_causal,
        **_options(scale, enable_gqa, window, query_offset, softcap, alibi_slopes, sinks, key_mask),
    )
