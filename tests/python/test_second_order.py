"""Double backward and forward mode against the definition in float64, for problems of many tiles and
for every dtype. (test_gradients.py checks both by numerical differences, on small problems.)"""

import definition
import pytest
import samples
import torch
from test_definition import TOLERANCE, assert_near
from torch.autograd import forward_ad

import qkv

LARGE = [
    "tiles",
    "tiles_window",
    "tiles_gqa_causal",
    "tiles_bool_mask",
    "tiles_float_mask",
    "tiles_float_mask_of_keys",
    "tiles_splits",
]


def directions(sample, seed=3):
    """Cotangents of output and logsumexp, and one direction for each differentiable tensor."""
    g = torch.Generator().manual_seed(seed)
    out, lse, *_ = sample.call(definition.attention)
    normal = lambda x: torch.randn(x.shape, generator=g, dtype=torch.float64)  # noqa: E731
    # A logsumexp of -inf is constant.
    return (
        (normal(out), normal(lse).masked_fill(lse.isinf(), 0.0)),
        {n: normal(x) for n, x in sample.differentiable.items()},
    )


def double_backward(op, sample, incoming, along):
    """Gradients of <gradients, along>, by name, those of the incoming gradients included."""
    out, lse, *_ = sample.call(op)
    incoming = [
        x.detach().to(y.dtype).requires_grad_() for x, y in zip(incoming, (out, lse), strict=True)
    ]
    inputs = list(sample.differentiable.values())
    grads = torch.autograd.grad(
        (out, lse.masked_fill(lse.isinf(), 0.0)),
        inputs,
        incoming,
        create_graph=True,
        materialize_grads=True,
    )
    found = torch.autograd.grad(
        [g for g in grads if g.requires_grad],
        [*inputs, *incoming],
        [t.to(g.dtype) for g, t in zip(grads, along.values(), strict=True) if g.requires_grad],
        materialize_grads=True,
    )
    return dict(zip([*sample.differentiable, "grad_output", "grad_logsumexp"], found, strict=True))


def forward_mode(sample, along):
    with forward_ad.dual_level():
        duals = {
            n: forward_ad.make_dual(x.detach(), along[n].to(x.dtype))
            for n, x in sample.differentiable.items()
        }
        results = sample.replaced(duals).call(qkv.attention_with_lse)
        return [forward_ad.unpack_dual(x).tangent for x in results]


def problem(entry, dtype):
    """A sample, the same in float64, and what is derived along: numbers of dtype, all of them."""
    sample = samples.make(entry, dtype).requires_grad()
    exact = sample.to(torch.float64).requires_grad()
    incoming, along = directions(exact)
    incoming = [x.to(dtype).double() for x in incoming]
    return sample, exact, incoming, {n: x.to(dtype).double() for n, x in along.items()}


def check(entry, dtype, tolerance):
    sample, exact, incoming, along = problem(entry, dtype)
    expected = double_backward(definition.attention, exact, incoming, along)
    actual = double_backward(qkv.attention_with_lse, sample, incoming, along)
    for name, e in expected.items():
        assert_near(f"second gradient of {name}", actual[name], e, tolerance)
    # The double backward is linear in the cotangents of output and logsumexp; the factors are the
    # directional derivatives of these.
    out_t, lse_t = forward_mode(sample, along)
    assert_near("output_t", out_t, expected["grad_output"], tolerance)
    empty = exact.call(definition.attention)[1].isinf()
    assert_near("logsumexp_t", lse_t.masked_fill(empty, 0.0), expected["grad_logsumexp"], tolerance)


@samples.parametrize(large=False, empty=False)
def test_small_float32(entry):
    check(entry, torch.float32, 50 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", LARGE)
def test_many_tiles(name, dtype):
    check(samples.entry(name), dtype, 50 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["plain", "gqa_causal", "everything", "softcap_alibi_sinks", "dropout_softcap_alibi_sinks"],
)
def test_half_types(name, dtype):
    """At most twice the error of PyTorch operations of the same dtype, as test_half_types.py."""
    sample, exact, incoming, along = problem(samples.entry(name), dtype)
    expected = double_backward(definition.attention, exact, incoming, along)
    actual = double_backward(qkv.attention_with_lse, sample, incoming, along)
    same_dtype = double_backward(definition.attention, sample, incoming, along)
    actual["output_t"], actual["logsumexp_t"] = forward_mode(sample, along)
    for name, a in actual.items():
        of = {"output_t": "grad_output", "logsumexp_t": "grad_logsumexp"}.get(name, name)
        error, of_same_dtype, of_rounding = (
            (x.double() - expected[of]).abs().max().item()
            for x in (a, same_dtype[of], expected[of].to(dtype))
        )
        assert error <= max(2 * of_same_dtype, of_rounding) + 1e-6, name
