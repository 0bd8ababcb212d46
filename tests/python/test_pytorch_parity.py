"""qkv.attention is torch.nn.functional.scaled_dot_product_attention, argument by argument."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import qkv

CASES = {
    "plain": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), {}),
    "causal": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), {"is_causal": True}),
    "causal_tall": ((2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 4), {"is_causal": True}),
    "scale": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), {"scale": 0.7}),
    "gqa": ((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), {"enable_gqa": True}),
    "value_dim": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), {}),
    "three_dims": ((3, 5, 4), (3, 7, 4), (3, 7, 4), {}),
    "two_dims": ((5, 4), (7, 4), (7, 4), {}),
    "five_dims": ((2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 4), {}),
    "batch_broadcast": ((2, 3, 5, 4), (1, 3, 7, 4), (1, 3, 7, 4), {}),
    "head_broadcast": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4), {}),
    "decode": ((2, 3, 1, 4), (2, 3, 700, 4), (2, 3, 700, 4), {}),
    "long": ((1, 2, 300, 16), (1, 2, 500, 16), (1, 2, 500, 16), {}),
}
MASKS = {
    "full": (2, 3, 5, 7),
    "rows_and_keys": (5, 7),
    "batch": (2, 1, 5, 7),
    "heads": (1, 3, 5, 7),
    "keys": (2, 1, 1, 7),
}


def compare(query, key, value, **kwargs):
    leaves = [x.requires_grad_() for x in (query, key, value)]
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_())
    ours, theirs = qkv.attention(query, key, value, **kwargs), None
    theirs = scaled_dot_product_attention(query, key, value, **kwargs)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, grad),
        torch.autograd.grad(theirs, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_shapes_and_options(case, dtype):
    *shapes, kwargs = CASES[case]
    torch.manual_seed(0)
    compare(*(torch.randn(shape, dtype=dtype) for shape in shapes), **kwargs)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, kind):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(s).double() for s in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    )
    keep = torch.rand(MASKS[mask]) < 0.7
    keep[..., 0] = True
    compare(
        query, key, value, attn_mask=keep if kind == "bool" else torch.randn(keep.shape).double()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", ["plain", "causal", "gqa", "value_dim", "long"])
def test_half_types(case, dtype):
    """Error at most twice that of PyTorch in the same dtype, both against float64."""
    *shapes, kwargs = CASES[case]
    torch.manual_seed(0)
    exact = [torch.randn(shape).to(dtype).double().requires_grad_() for shape in shapes]
    expected = scaled_dot_product_attention(*exact, **kwargs)
    grad = torch.randn_like(expected).to(dtype).double()
    expected = [expected, *torch.autograd.grad(expected, exact, grad)]

    def error(attend):
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = attend(*leaves, **kwargs)
        found = [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]
        assert all(x.dtype == dtype for x in found)
        return [(f.double() - e).abs().max().item() for f, e in zip(found, expected, strict=True)]

    for ours, theirs in zip(error(qkv.attention), error(scaled_dot_product_attention), strict=True):
        assert ours <= 2 * theirs


def test_dropout_is_the_same_in_distribution():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 64, 8)
    value = torch.eye(64).expand(1, 4, 64, 64)  # the output is the weights
    weights = qkv.attention_weights(query, key)
    dropped = qkv.attention(query, key, value, dropout_p=0.3)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (weights / 0.7)[kept], rtol=1e-4, atol=1e-6)
    assert abs(kept.float().mean() - 0.7) < 5 * (0.3 * 0.7 / kept.numel()) ** 0.5


def test_dropout_gradient_sees_the_same_mask():
    query, key, value = (torch.randn(1, 2, 5, 4).double().requires_grad_() for _ in range(3))

    def attend(*x):
        torch.manual_seed(3)
        return qkv.attention(*x, dropout_p=0.4)

    assert torch.autograd.gradcheck(attend, (query, key, value))
    assert torch.autograd.gradgradcheck(attend, (query, key, value))
