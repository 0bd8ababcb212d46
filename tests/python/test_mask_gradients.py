"""Gradients of masks that are broadcast: sums over what reads an element."""

import itertools
import math

import definition
import pytest
import samples
import torch
from test_masks import DTYPES, _layouts

import qkv


@DTYPES
def test_gradient_of_a_mask_adds_up_to_0(dtype):
    """The second pass of a mask that heads share; softmax does not mind a constant."""
    query = torch.randn(3, 2, 3, 64, dtype=dtype) * 1e3
    key, value = (
        torch.randn(3, 2, 200, 64, dtype=dtype) * 1e3,
        torch.randn(3, 2, 200, 3, dtype=dtype),
    )
    mask = torch.zeros(3, 200, dtype=dtype, requires_grad=True)
    out = qkv.attention(query, key, value, mask)
    (grad,) = torch.autograd.grad(out, mask, torch.randn_like(out))
    torch.testing.assert_close(grad.sum(1), torch.zeros_like(grad[:, 0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes, shape",
    [
        ((1, 4, 3001, 3001), (4, 1, 1)),
        ((1, 1, 4097, 4099), (1,)),
        ((16, 8, 2050, 65), (65,)),
        ((8, 8, 30, 3001), (30, 1)),
    ],
    ids=str,
)
def test_gradient_of_a_mask_that_many_pairs_share(sizes, shape, dtype):
    """Each pair adds to the lse's derivative as much as the last: a running sum in float32 lost them."""
    batch, heads, m, n = sizes
    q, k, v = (torch.zeros(batch, heads, rows, 1, dtype=dtype) for rows in (m, n, n))
    mask = torch.zeros(shape, requires_grad=True)
    _, lse = qkv.attention_with_lse(q, k, v, mask)
    (grad,) = torch.autograd.grad(lse.sum(), mask)
    expected = torch.full_like(grad, batch * heads * m / mask.numel())
    torch.testing.assert_close(grad, expected, atol=0, rtol=1e-5)


def test_second_derivative_of_a_mask_that_many_pairs_share():
    """Of sigmoid(mask + log(keys) - sink), what rows give to their keys, all values 1."""
    q, k = torch.zeros(1, 4001, 8), torch.zeros(1, 6001, 8)
    mask = torch.zeros(1, requires_grad=True)
    out = qkv.attention(q, k, torch.ones_like(k), mask, sinks=torch.tensor([9.0]))
    (first,) = torch.autograd.grad(out.sum(), mask, create_graph=True)
    (second,) = torch.autograd.grad(first, mask)
    w = 6001 / (6001 + math.exp(9))
    expected = torch.tensor([w * (1 - w), w * (1 - w) * (1 - 2 * w)]) * out.numel()
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=0, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_gradients_do_not_depend_on_where_a_mask_lies(dtype, rows, kv_heads):
    g, n = samples.generator(3), 200

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    query = normal(2, 3, rows, 8).requires_grad_()
    key, value = (normal(2, kv_heads, n, 8).requires_grad_() for _ in range(2))
    masks = {
        **_layouts(rows, n, 3, dtype),
        "keys apart": normal(n, 3).t().unsqueeze(1),
        "rows apart": normal(rows, 3).t().unsqueeze(2),
        "of the batch": normal(n, 2).t()[:, None, None],
    }

    def results(mask):
        mask = mask.detach().requires_grad_()
        out = qkv.attention(query, key, value, mask, enable_gqa=True)
        first = torch.autograd.grad(out.sin().sum(), (mask, query), create_graph=True)
        second = sum(x.sin().sum() for x in first)
        return out, *first, *torch.autograd.grad(second, (mask, query, key, value))

    for name, mask in masks.items():
        dense = mask.clone(memory_format=torch.contiguous_format)
        for found, expected in zip(results(mask), results(dense), strict=True):
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, rows", [(3, 3, 1), (4, 2, 2), (8, 1, 1), (2, 2, 3)])
def test_gradients_of_masks_of_few_rows(dtype, heads, kv_heads, rows):
    """However a mask is broadcast, with other gradients and alone, to the same bits. Keys at both
    ends are not seen."""
    g, n = samples.generator(5), 1100
    slopes = torch.rand(heads, generator=g).mul_(0.01).requires_grad_()
    options = {"window": (700, 3), "query_offset": 900, "softcap": 3.0, "dropout_p": 0.3}
    options |= {"alibi_slopes": slopes, "sinks": torch.zeros(heads), "enable_gqa": True}

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    query = normal(2, heads, rows, 33).requires_grad_()
    key = normal(2, kv_heads, n, 33).requires_grad_()
    value = normal(2, kv_heads, n, 20).requires_grad_()
    out_grad = normal(2, heads, rows, 20)

    def gradients(attention, mask, *of):
        torch.manual_seed(7)
        out = attention(query, key, value, mask, **options)
        return torch.autograd.grad(out, of, out_grad.to(out.dtype))

    def in_float64(q, k, v, mask, **options):
        return definition.attention_at_once(q.double(), k.double(), v.double(), mask, **options)[0]

    others = query, key, value, slopes
    real = torch.float64 if dtype == torch.float64 else torch.float32
    bound = 1e-14 if dtype == torch.float64 else 2e-6
    for sizes in itertools.product((1, 2), (1, heads), (1, rows), (1, n)):
        mask = torch.randn(sizes, generator=g, dtype=real).requires_grad_()
        mask.data[torch.rand(sizes, generator=g) < 0.2] = -math.inf
        (expected,) = gradients(in_float64, mask, mask)
        (alone,) = gradients(qkv.attention, mask, mask)
        atol = bound if sizes[3] == n else 20 * bound  # sums of all keys are near 0
        torch.testing.assert_close(alone, expected, atol=atol, rtol=bound, msg=str(sizes))
        together = gradients(qkv.attention, mask, mask, *others)
        apart = alone, *gradients(qkv.attention, mask.detach(), *others)
        for found, same in zip(together, apart, strict=True):
            assert torch.equal(found, same), sizes
