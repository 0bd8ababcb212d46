"""Derivatives of every kind in float64, numerically checked, for every small sample and for random
ones: always the same few, or QKV_GRADCHECKS=200 others each time."""

import os

import pytest
import samples
import torch
from hypothesis import HealthCheck, given, settings
from random_samples import small_entries

import qkv


def differentiable_call(sample):
    """A function of the sample's floating-point tensors, and those tensors."""
    names = list(sample.differentiable)

    def call(*tensors):
        out, lse = sample.replaced(dict(zip(names, tensors))).call(qkv.attention_with_lse)
        # -inf, the logsumexp of an empty row, is constant and would spoil numerical differences.
        return out, lse.masked_fill(lse.isinf(), 0.0)

    return call, tuple(sample.requires_grad().differentiable.values())


small = samples.parametrize(large=False, empty=False)


def can_be_batched(entry):
    """vmap over gradients, which may not fall back to a loop; of dropout it is an error."""
    return entry.get("dropout_p", 0.0) == 0.0


@small
def test_first_order(entry):
    call, inputs = differentiable_call(samples.make(entry))
    batched = can_be_batched(entry)
    assert torch.autograd.gradcheck(
        call,
        inputs,
        check_forward_ad=True,
        check_batched_grad=batched,
        check_batched_forward_grad=batched,
    )


@small
def test_second_order(entry):
    call, inputs = differentiable_call(samples.make(entry))
    assert torch.autograd.gradgradcheck(
        call, inputs, check_fwd_over_rev=True, check_batched_grad=can_be_batched(entry)
    )


def test_random_samples():
    """Every option with every other, first and second order, in reverse and forward mode."""
    checked = 0

    @settings(
        max_examples=int(os.environ.get("QKV_GRADCHECKS", 50)),
        deadline=None,
        derandomize="QKV_GRADCHECKS" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(small_entries())
    def check(entry):
        nonlocal checked
        call, inputs = differentiable_call(samples.make(entry))
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)
        checked += 1

    check()
    print(f"{checked} samples checked")


@pytest.mark.unfused
def test_third_order():
    q, k, v = (torch.randn(1, 1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def second(q, k, v):
        out = qkv.attention(q, k, v, is_causal=True)
        (g,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        return torch.autograd.grad(g.cos().sum(), (q, k, v), create_graph=True)

    assert torch.autograd.gradcheck(second, (q, k, v))


@pytest.mark.parametrize("needed", ["query", "key", "value", "attn_mask"])
def test_only_what_is_needed(needed):
    """A gradient does not depend on which others are computed with it."""
    entry = {"name": "m", "attn_mask": {"dtype": "float", "shape": [5, 7]}, "is_causal": True}
    every = samples.make(entry).requires_grad()
    one = every.replaced({n: x.detach() for n, x in every.differentiable.items() if n != needed})
    grad_out = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    all_grads = torch.autograd.grad(
        every.call(qkv.attention), list(every.differentiable.values()), grad_out
    )
    (grad,) = torch.autograd.grad(one.call(qkv.attention), one.differentiable[needed], grad_out)
    assert torch.equal(grad, all_grads[list(every.differentiable).index(needed)])


@pytest.mark.parametrize("order", [1, 2])
def test_logsumexp_alone(order):
    """The gradient of a function of the logsumexp only."""
    sample = samples.make({"name": "lse", "is_causal": True, "query_offset": 2})

    def lse(query, key):
        return qkv.attention_with_lse(query, key, sample.value, **sample.kwargs)[1]

    inputs = (sample.query.requires_grad_(), sample.key.requires_grad_())
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(lse, inputs)
