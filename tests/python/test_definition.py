"""The operators against the definition in float64: values and gradients, every sample and dtype."""

import os
import subprocess
import sys

import definition
import pytest
import samples
import torch

import qkv

# Relative to the largest number of the result, for sums of up to a thousand terms.
TOLERANCE = {torch.float64: 2e-14, torch.float32: 3e-6}


def assert_near(name, actual, expected, tolerance):
    expected = expected.to(actual.dtype)
    assert actual.shape == expected.shape, name
    finite = expected.isfinite()
    # The -inf of empty rows must be where it belongs, and nothing else may be infinite.
    assert torch.equal(actual[~finite], expected[~finite]), name
    scale = max(1.0, *expected[finite].abs().flatten().tolist(), 0.0) if finite.any() else 1.0
    torch.testing.assert_close(
        actual[finite],
        expected[finite],
        rtol=0,
        atol=tolerance * scale,
        msg=lambda m: f"{name}: {m}",
    )


def test_philox():
    """The definition's own random numbers: the known answers published with Random123."""
    all_ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((all_ones,) * 4, (all_ones,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (pi, (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), words in known.items():
        assert definition.philox(counter, key) == words


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_other_instruction_sets(isa):
    """The tests of this file once more, on kernels that are not this processor's best."""
    environment = {**os.environ, "QKV_CPU_ISA": isa}
    known = subprocess.run(
        [sys.executable, "-c", "import torch, qkv; qkv.explain(*[torch.ones(2, 2)] * 3)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "this processor does not have it" in known.stderr:
        pytest.skip(f"no {isa} here")
    tests = f"{__file__}::test_values_and_gradients"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tests],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@samples.parametrize()
def test_values_and_gradients(entry, dtype):
    check_values_and_gradients(entry, dtype, TOLERANCE[dtype])


def check_values_and_gradients(entry, dtype, tolerance):
    # Both start from the same numbers: rounding the input is not an error of the operator.
    sample = samples.make(entry, dtype).requires_grad()
    exact = sample.to(torch.float64).requires_grad()
    out, lse, weights = exact.call(definition.attention)
    actual_out, actual_lse = sample.call(qkv.attention_with_lse)
    assert_near("output", actual_out, out, tolerance)
    assert_near("logsumexp", actual_lse, lse, tolerance)
    assert "forward, backward  fused cpu" in sample.call(qkv.explain)
    assert torch.equal(sample.call(qkv.attention), actual_out)
    options = {n: x for n, x in sample.kwargs.items() if n != "dropout_p"}
    actual_weights = qkv.attention_weights(sample.query, sample.key, **options)
    assert_near("weights", actual_weights, weights, tolerance)

    grad_out = torch.randn(out.shape, dtype=torch.float64)
    # Where logsumexp is -inf it has no gradient.
    grad_lse = torch.randn(lse.shape, dtype=torch.float64).masked_fill(lse.isinf(), 0.0)
    total = (out * grad_out).sum() + (lse.masked_fill(lse.isinf(), 0.0) * grad_lse).sum()
    names = list(exact.differentiable)
    if total.requires_grad:
        expected = torch.autograd.grad(
            total, list(exact.differentiable.values()), materialize_grads=True
        )
    else:
        expected = [torch.zeros_like(x) for x in exact.differentiable.values()]
    actual = torch.autograd.grad(
        (actual_out, actual_lse),
        list(sample.differentiable.values()),
        (grad_out.to(dtype), grad_lse.to(actual_lse.dtype)),
    )
    for name, a, e in zip(names, actual, expected, strict=True):
        assert_near(f"gradient of {name}", a, e, 10 * tolerance)
