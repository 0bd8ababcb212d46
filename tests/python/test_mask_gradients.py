"""Gradients of masks that are broadcast: sums over what reads an element."""

import math

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
