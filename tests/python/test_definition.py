"""The operators against the definition in float64: values and gradients, every sample and dtype."""

import os
import subprocess
import sys

import definition
import pytest
import samples
import torch

import qkv

# Relative to the largest number of the result, for sums of up to a thousand terms. Results of 16
# bits are float32 results rounded once, hence further from the exact number x than x's own rounding
# by at most twice their error in float32. (As |round(y) - x| <= |round(x) - y| + |y - x|.)
TOLERANCE = {
    torch.float64: 2e-14,
    torch.float32: 3e-6,
    torch.bfloat16: 6e-6,
    torch.float16: 6e-6,
}


def assert_near(name, actual, expected, tolerance, allowed=0.0):
    """That `actual`, of any dtype, is as near to `expected`, of float64, as its dtype allows."""
    assert actual.shape == expected.shape, name
    finite = expected.isfinite()
    # The -inf of empty rows must be where it belongs, and nothing else may be infinite.
    assert torch.equal(actual[~finite].double(), expected[~finite]), name
    if not finite.any():
        return
    expected, actual = expected[finite], actual[finite]
    error = (actual.double() - expected).abs()
    rounding = (expected.to(actual.dtype).double() - expected).abs()
    beyond = (error - rounding.clamp(min=allowed)).max().item()
    relative = beyond / max(1.0, expected.abs().max().item())
    assert relative <= tolerance, f"{name}: off by {relative:.1e}, more than {tolerance:.1e}"


def results(op, sample, grad_dtype):
    """Output, logsumexp, and gradients of a function of both; incoming ones of `grad_dtype`."""
    out, lse, *_ = sample.call(op)
    g = samples.generator(2)
    grad_out, grad_lse = (
        torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype).to(x.dtype)
        for x, dtype in ((out, grad_dtype), (lse, torch.promote_types(grad_dtype, torch.float32)))
    )
    # Where logsumexp is -inf it has no gradient.
    pairs = [(out, grad_out), (lse, grad_lse.masked_fill(lse.isinf(), 0.0))]
    pairs = [(x, grad) for x, grad in pairs if x.requires_grad]  # nothing does if nothing attends
    leaves = sample.differentiable
    if pairs:
        grads = torch.autograd.grad(
            [x for x, _ in pairs],
            list(leaves.values()),
            [g for _, g in pairs],
            materialize_grads=True,
        )
    else:
        grads = [torch.zeros_like(x) for x in leaves.values()]
    grads = {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"output": out.detach(), "logsumexp": lse.detach(), **grads}


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


# Set in processes that run the table once more: for them the definition's quick form will do.
AGAIN = "QKV_TEST_AGAIN"
DEFINITION = definition.attention_at_once if AGAIN in os.environ else definition.attention


def run_table(samples_named="", **environment):
    """The table once more in another process."""
    tests = [f"{__file__}::test_values_and_gradients", "-k", samples_named]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests],
        env={**os.environ, AGAIN: "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_other_instruction_sets(isa):
    """Kernels that are not this processor's best."""
    known = subprocess.run(
        [sys.executable, "-c", "import torch, qkv; qkv.explain(*[torch.ones(2, 2)] * 3)"],
        env={**os.environ, "QKV_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "this processor does not have it" in known.stderr:
        pytest.skip(f"no {isa} here")
    run_table(QKV_CPU_ISA=isa)


def test_memory_that_is_not_ours():
    """glibc fills what is allocated and what is freed with other bytes: nothing reads either."""
    run_table(
        "everything or alibi or sinks or dropout or mask",
        MALLOC_PERTURB_="165",
        GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )


@samples.parametrize()
def test_attention_at_once(entry):
    """The definition's quick form against the definition."""
    sample = samples.make(entry).requires_grad()
    actual = results(definition.attention_at_once, sample, torch.float64)
    for name, expected in results(definition.attention, sample, torch.float64).items():
        assert_near(name, actual[name], expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@samples.parametrize()
def test_values_and_gradients(entry, dtype):
    check_values_and_gradients(entry, dtype, TOLERANCE[dtype])


def check_values_and_gradients(entry, dtype, tolerance, define=DEFINITION):
    """The operators on a sample of the table against the definition, in either of its forms."""
    # Both start from the same numbers: rounding the input is not an error of the operator.
    sample = samples.make(entry, dtype).requires_grad()
    exact = sample.to(torch.float64).requires_grad()
    assert f"forward, backward  fused {sample.query.device.type}" in sample.call(qkv.explain)
    expected = results(define, exact, dtype)
    actual = results(qkv.attention_with_lse, sample, dtype)
    assert torch.equal(sample.call(qkv.attention), actual["output"])
    allowed = dict.fromkeys(expected, 0.0)
    if dtype.itemsize == 2:
        allowed |= allowed_in_16_bits(define, sample, exact, expected)
    if dtype == torch.bfloat16:
        allowed["output"] = allowed_with_rounded_weights(sample)
    for name, e in expected.items():
        of_gradients = 10 if name.startswith("gradient") else 1
        assert_near(name, actual[name], e, of_gradients * tolerance, allowed[name])

    options = {n: x for n, x in sample.kwargs.items() if n != "dropout_p"}
    weights = qkv.attention_weights(sample.query, sample.key, **options)
    assert_near("weights", weights, exact.call(define)[2].detach(), tolerance)


def allowed_with_rounded_weights(sample):
    """How far an output of bfloat16 may be off where products are in bfloat16 (AVX512-BF16): weights
    w are then rounded, relatively by half of eps, and divided by the sum of the rounded ones, so that
    each w·v errs by up to eps/2 · w·|v - out|; and the output is rounded."""
    dropout_p = sample.kwargs.get("dropout_p", 0.0)
    if sample.value.numel() == 0 or dropout_p == 1.0:
        return 0.0
    return 1.5 * torch.finfo(torch.bfloat16).eps * sample.value.abs().max().item() / (1 - dropout_p)


def allowed_in_16_bits(define, sample, exact, expected):
    """How far gradients of 16 bits may be off, by name."""
    dtype = sample.query.dtype

    def largest(x):
        return x.abs().max().item() if x.numel() > 0 else 0.0

    # FlashAttention's bound: at most twice the error of PyTorch operations in the same dtype. (Some
    # error is unavoidable in delta = <dO, O>: the output is saved in 16 bits, and in another 16
    # what rounding took.)
    same_dtype = results(define, sample, dtype)
    allowed = {
        name: 2 * largest(same_dtype[name].double() - e)
        for name, e in expected.items()
        if name.startswith("gradient")
    }
    # Gradients of what is broadcast over the batch are rounded for each batch element, and PyTorch
    # sums them. By luck its own were exact.
    batch = exact.query.shape[:-3]
    if exact.key.shape[:-3] != batch:
        every = exact.replaced(
            {n: getattr(exact, n).expand(*batch, -1, -1, -1) for n in ("key", "value")}
        )
        parts = results(define, every.requires_grad(), dtype)
        for name in ("gradient of key", "gradient of value"):
            e = expected[name]
            rounding = (parts[name].to(dtype).double() - parts[name]).abs().sum_to_size(e.shape)
            rounding = 2 * rounding + (e.to(dtype).double() - e).abs()  # as for TOLERANCE
            allowed[name] = max(allowed[name], largest(rounding))
    return allowed


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_sums_over_many_keys(rows):
    """Terms of one sign: errors of a single running sum would add up to 1e-5."""
    n = 2**15
    query, key, value = torch.randn(1, rows, 64), torch.randn(1, n, 64), torch.rand(1, n, 64)
    expected = definition.attention_at_once(query.double(), key.double(), value.double())[0]
    assert_near("output", qkv.attention(query, key, value), expected, TOLERANCE[torch.float32])


def test_sums_over_many_rows():
    m = 2**15
    query, grad = torch.randn(1, m, 64), torch.rand(1, m, 64)
    key, value = (torch.randn(1, 32, 64, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(qkv.attention(query, key, value), (key, value), grad)
    exact = [x.detach().double().requires_grad_() for x in (key, value)]
    out = definition.attention_at_once(query.double(), *exact)[0]
    expected = torch.autograd.grad(out, exact, grad.double())
    for name, f, e in zip(("key", "value"), found, expected):
        assert_near(f"gradient of {name}", f, e, TOLERANCE[torch.float32])
