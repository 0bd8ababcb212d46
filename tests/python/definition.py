"""Attention by its definition (docs/design.md, section 1), one row at a time.

A row computes with the keys it keeps and with nothing else, so that a NaN in a masked one cannot
matter, and autograd differentiates it. Slow, and independent of everything under test.
`attention_at_once` is the same for finite numbers, quick enough for thousands of samples.
"""

import math
from typing import Optional

import numpy
import torch
from torch import Tensor


def kept_pairs(
    m: int,
    n: int,
    is_causal: bool,
    window: Optional[tuple[int, int]],
    query_offset: int,
    mask: Optional[Tensor],
    key_mask: Optional[Tensor],
) -> Tensor:
    """keep(i, j), (M, N), of one head; mask is (M, N), key_mask (N). Or of many heads: what they
    are broadcast to."""
    p = torch.arange(m).unsqueeze(1) + query_offset
    j = torch.arange(n).unsqueeze(0)
    keep = torch.ones(m, n, dtype=torch.bool)
    if is_causal:
        keep &= j <= p
    left, right = (-1, -1) if window is None else window
    if left >= 0:
        keep &= j >= p - left
    if right >= 0:
        keep &= j <= p + right
    if key_mask is not None:
        keep = keep & key_mask
    if mask is not None:
        keep = keep & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return keep


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011) for one counter, or for arrays (uint64) of them."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_factors(seed: int, h: int, i: int, n: int, p: float) -> Tensor:
    """What dropout multiplies the weights of row (h, i) with, (N)."""
    threshold = round(p * 65536)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    numbers = []
    for group in range((n + 7) // 8):
        for word in philox((group, i, h, 0), key):
            numbers += [word & 0xFFFF, word >> 16]
    stays = torch.tensor(numbers[:n]) >= threshold
    return stays.double() * (65536 / (65536 - threshold) if threshold < 65536 else 0.0)


def attention_row(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    scale: float,
    bias: Optional[Tensor],
    softcap: float,
    slope: Optional[Tensor],
    distances: Tensor,
    sink: Optional[Tensor],
    factors: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (Dv), logsumexp and weights (N) of one query that keeps the keys numbered `kept`."""
    weights = q.new_zeros(key.shape[0])
    if kept.numel() == 0:
        lse = q.new_tensor(-math.inf) if sink is None else sink
        return q.new_zeros(value.shape[1]), lse, weights
    scores = scale * (key[kept] @ q)
    if softcap != 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[kept]
    if slope is not None:
        scores = scores - slope * distances[kept].abs()
    lse = torch.logsumexp(scores if sink is None else torch.cat([scores, sink.reshape(1)]), 0)
    p = torch.exp(scores - lse)
    used = p if factors is None else p * factors[kept].to(p.dtype)
    return used @ value[kept], lse, weights.index_put((kept,), p)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and weights, in the dtype of the query (float64, usually).

    For dropout, draws the seeds as the operator does: int64, one for each batch element.
    """
    q, k, v = (x.unsqueeze(0) if x.dim() == 2 else x for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    kv_heads = max(k.shape[-3], v.shape[-3])
    heads = q.shape[-3] if q.shape[-3] != 1 else kv_heads
    m, n, d = q.shape[-2], k.shape[-2], q.shape[-1]
    if scale is None:
        scale = 1.0 / math.sqrt(d) if d > 0 else 1.0

    def per_batch(x: Optional[Tensor], *inner: int) -> Optional[Tensor]:
        return None if x is None else x.expand(*batch, *inner).reshape(math.prod(batch), *inner)

    q, k, v = (
        per_batch(q, heads, m, d),
        per_batch(k, kv_heads, n, d),
        per_batch(v, kv_heads, n, v.shape[-1]),
    )
    masks, key_masks = per_batch(attn_mask, heads, m, n), per_batch(key_mask, n)
    slopes, sinks = per_batch(alibi_slopes, heads), per_batch(sinks, heads)

    seeds = torch.randint(2**63 - 1, batch).flatten().tolist() if dropout_p > 0 else None

    rows = []
    for b in range(q.shape[0]):
        for h in range(heads):
            mask = None if masks is None else masks[b, h]
            keep = kept_pairs(
                m,
                n,
                is_causal,
                window,
                query_offset,
                mask,
                None if key_masks is None else key_masks[b],
            )
            bias = None if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
            group = h // (heads // kv_heads)
            for i in range(m):
                rows.append(
                    attention_row(
                        q[b, h, i],
                        k[b, group],
                        v[b, group],
                        keep[i].nonzero().squeeze(1),
                        scale,
                        None if bias is None else bias[i],
                        softcap,
                        None if slopes is None else slopes[b, h].to(q.dtype),
                        torch.arange(n, dtype=q.dtype) - (i + query_offset),
                        None if sinks is None else sinks[b, h].to(q.dtype),
                        None if seeds is None else dropout_factors(seeds[b], h, i, n, dropout_p),
                    )
                )

    def assembled(column: int, *inner: int) -> Tensor:
        shape = (*batch, heads, m, *inner)
        x = torch.stack([r[column] for r in rows]).reshape(shape) if rows else q.new_zeros(shape)
        return x.squeeze(0) if query.dim() == key.dim() == value.dim() == 2 else x

    return assembled(0, v.shape[-1]), assembled(1), assembled(2, n)


def all_dropout_factors(seeds: list[int], heads: int, m: int, n: int, p: float) -> Tensor:
    """dropout_factors of every row, (B, H, M, N)."""
    threshold = round(p * 65536)
    h, i, j = numpy.ogrid[:heads, :m, :n]
    counter = (x.astype(numpy.uint64) for x in (j // 8, i, h, numpy.zeros_like(j)))
    counter = numpy.broadcast_arrays(*counter)
    drawn = []
    for seed in seeds:
        words = numpy.stack(philox(tuple(counter), (seed & 0xFFFFFFFF, seed >> 32)))
        word = numpy.take_along_axis(words, (j % 8 // 2)[None], 0)[0]
        drawn.append(word >> (j % 2 * 16).astype(numpy.uint64) & 0xFFFF)
    stays = torch.tensor(numpy.stack(drawn).astype(numpy.int64)) >= threshold
    return stays.double() * (65536 / (65536 - threshold) if threshold < 65536 else 0.0)


def attention_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    window: Optional[tuple[int, int]] = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    key_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """attention() of finite numbers, with all rows in whole tensors (test_definition.py compares
    the two)."""
    q, k, v = (x.unsqueeze(0) if x.dim() == 2 else x for x in (query, key, value))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    kv_heads = max(k.shape[-3], v.shape[-3])
    heads = q.shape[-3] if q.shape[-3] != 1 else kv_heads
    m, n, d = q.shape[-2], k.shape[-2], q.shape[-1]
    if scale is None:
        scale = 1.0 / math.sqrt(d) if d > 0 else 1.0

    k, v = (
        x.expand(*x.shape[:-3], kv_heads, n, -1).repeat_interleave(heads // max(kv_heads, 1), -3)
        for x in (k, v)
    )
    scores = (scale * (q @ k.mT)).expand(*batch, heads, m, n)
    if softcap != 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    keep = kept_pairs(
        m,
        n,
        is_causal,
        window,
        query_offset,
        attn_mask,
        None if key_mask is None else key_mask[..., None, None, :],
    )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(q.dtype)
    if alibi_slopes is not None:
        distances = torch.arange(n) - torch.arange(m).unsqueeze(1) - query_offset
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * distances.abs()
    scores = scores.masked_fill(~keep, -math.inf)
    if sinks is None:
        empty = ~keep.any(-1).expand(scores.shape[:-1])
        # The logsumexp of nothing, but with the derivative 0.
        lse = scores.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        lse = lse.masked_fill(empty, -math.inf)
    else:
        sink = sinks.to(q.dtype)[..., None, None].expand(*batch, heads, m, 1)
        lse = torch.cat([scores, sink], -1).logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
    used = weights
    if dropout_p > 0:
        seeds = torch.randint(2**63 - 1, batch).flatten().tolist()
        factors = all_dropout_factors(seeds, heads, m, n, dropout_p)
        used = weights * factors.view(weights.shape).to(weights.dtype)
    out = used @ v
    if query.dim() == key.dim() == value.dim() == 2:
        return out.squeeze(0), lse.squeeze(0), weights.squeeze(0)
    return out, lse, weights
