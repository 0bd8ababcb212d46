"""Third and fourth order, by formulas of ATen operations."""

import math

import pytest
import torch
from test_second_order import plain_attention
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import qkv

pytestmark = pytest.mark.unfused


def test_third_order_in_both_modes():
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    second = grad(lambda x: grad(lambda x: qkv.attention(x, x, x).sin().sum())(x).sin().sum())
    t = torch.randn_like(x)
    _, forward = jvp(second, (x,), (t,))
    h = 1e-5
    torch.testing.assert_close(forward, (second(x + h * t) - second(x - h * t)) / (2 * h))
    reverse = grad(lambda x: (second(x) * t).sum())(x)
    other = torch.randn_like(x)
    # Both are the same third derivative along t and another direction, as it is symmetric.
    torch.testing.assert_close((reverse * other).sum(), (jvp(second, (x,), (other,))[1] * t).sum())


@pytest.mark.parametrize("operand", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("last", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("second", ["jacrev", "jacfwd"])
def test_third_order_of_torch_func(second, last, operand):
    """jacrev runs a backward after its level has ended, when operands are constants to the others."""
    x = [torch.randn(1, n, 2, dtype=torch.float64) for n in (3, 4, 4)]

    def third(attention):
        def f(t):
            return attention(*x[:operand], t, *x[operand + 1 :]).sin().sum()

        of_second = getattr(torch.func, second)(torch.func.jacrev(f))
        return getattr(torch.func, last)(of_second)(x[operand])

    found = third(qkv.attention)
    torch.testing.assert_close(found, third(plain_attention))
    assert not found.requires_grad


@pytest.mark.parametrize("operand", ["q", "k", "v", "attn_mask", "sinks"])
def test_third_order_of_torch_func_under_vmap(operand):
    """When jacrev's backward runs, the only level that is left is one of vmap, which records
    nothing."""
    torch.manual_seed(0)
    shapes = {"q": (2, 3, 2), "k": (2, 4, 2), "v": (2, 4, 1), "attn_mask": (3, 4), "sinks": (2,)}
    key_mask = torch.tensor([True, True, True, False])
    x = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    samples = torch.randn(2, 3, *shapes[operand], dtype=torch.float64)

    def third(attend):
        def f(t):
            q, k, v, mask, sinks = (x | {operand: t}).values()
            return attend(q, k, v, attn_mask=mask, sinks=sinks, key_mask=key_mask).sin().sum()

        return vmap(vmap(torch.func.jacrev(torch.func.hessian(f))))(samples)

    torch.testing.assert_close(third(qkv.attention), third(plain_attention))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("operand", ["key", "value"])
def test_what_is_masked_does_not_reach_third_derivatives(operand, poison):
    x = {n: torch.randn(1, 4, 2, dtype=torch.float64) for n in ("query", "key", "value")}
    keep = torch.tensor([True, True, True, False])

    def third(**changes):
        leaves = {n: t.clone().requires_grad_() for n, t in (x | changes).items()}
        found = qkv.attention(**leaves, key_mask=keep)
        for _ in range(3):
            names = list(leaves)
            grads = torch.autograd.grad(found.sin().sum(), leaves.values(), create_graph=True)
            found = sum((g if n == "query" else g[:, :3]).sum() for n, g in zip(names, grads))
        return found.detach()

    poisoned = x[operand].clone()
    poisoned[0, 3, 0] = poison
    torch.testing.assert_close(third(**{operand: poisoned}), third())


@pytest.mark.parametrize("last", ["operand", "incoming gradient"])
def test_fourth_order(last):
    x = torch.randn(1, 3, 2, dtype=torch.float64)

    def fourth(attend):
        q, factor = x.clone().requires_grad_(), torch.ones_like(x).requires_grad_()
        found = (attend(q, x, x) * factor).sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found, q, create_graph=True)
            found = (found * (1 + x.cos())).sum()
        return torch.autograd.grad(found, q if last == "operand" else factor, create_graph=True)[0]

    torch.testing.assert_close(fourth(qkv.attention), fourth(plain_attention))


def test_third_order_where_a_second_gradient_does_not_vary():
    x = torch.randn(1, 3, 2, dtype=torch.float64)
    operands = [x, x, x, *[None] * 6, 0.0, 0.0, [-1, -1, 0]]
    results = torch.ops.qkv._attention_forward(*operands)
    incoming = torch.randn_like(x).requires_grad_()

    def of_incoming_and_query():
        needs = [True, False, True] + [False] * 5
        op = torch.ops.qkv._attention_backward_backward
        return op(*operands, incoming, None, *results, x, *[None] * 5, needs)[:3:2]

    (both,) = torch.autograd.grad(of_incoming_and_query(), incoming, [x, x])
    (of_query,) = torch.autograd.grad(of_incoming_and_query()[1], incoming, x)
    torch.testing.assert_close(both, of_query)


def third_derivative(attend, x):
    y = x.clone().requires_grad_()
    found = attend(y)
    for _ in range(3):
        (found,) = torch.autograd.grad(found.sin().sum(), y, create_graph=True)
    return found.detach()


def test_third_order_of_what_is_all_dropped():
    x = torch.randn(1, 3, 2, dtype=torch.float64)
    found = third_derivative(lambda y: y + qkv.attention(y, y, y, dropout_p=1.0), x)
    torch.testing.assert_close(found, third_derivative(lambda y: y + 0.0 * y, x))


def test_third_order_of_a_masked_key_with_a_softcap():
    x = torch.randn(1, 4, 2, dtype=torch.float64)
    keep = torch.tensor([True, True, True, False])
    poisoned = x.clone()
    poisoned[0, 3, 0] = torch.nan

    def of(key):
        return third_derivative(lambda q: qkv.attention(q, key, x, key_mask=keep, softcap=2.0), x)

    assert torch.equal(of(poisoned), of(x))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_third_order_of_all_that_scores_are_made_of(softcap):
    torch.manual_seed(0)
    shapes = (1, 3, 2), (1,), (1,), (3, 3)
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]

    def second(x, sinks, slopes, mask):
        options = {"sinks": sinks, "alibi_slopes": slopes, "softcap": softcap}
        out, lse = qkv.attention_with_lse(x, x, x, mask, **options)
        of = (x, sinks, slopes, mask)
        first = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), of, create_graph=True)
        return torch.autograd.grad(sum(t.sin().sum() for t in first), of, create_graph=True)

    assert torch.autograd.gradcheck(second, leaves, fast_mode=True)


@pytest.mark.parametrize("op", [qkv.attention, qkv.attention_weights])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_formulas_are_not_computed_in_the_dtype_of_autocast(op, mode):
    """For operands that have it, too, they are computed in float32. (Of weights already second
    order is by formulas.)"""
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn(4, 1, 2, 16, 64, generator=generator) * 3).bfloat16()
    order, others = (3, x[1:3]) if op is qkv.attention else (2, x[1:2])

    def f(q):
        return op(q, *others).double().square().sum()

    def derivative():
        q = x[0].clone().requires_grad_()
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(q, x[3]) if mode == "forward" else q)
            for _ in range(order - 1):
                (gradient,) = torch.autograd.grad(y, q, create_graph=True)
                y = (gradient.double() * x[3]).sum()
            if mode == "forward":
                return forward_ad.unpack_dual(gradient).tangent
            return torch.autograd.grad(y, q)[0]

    expected = derivative()
    assert expected.abs().max() > 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        found = derivative()
    assert torch.equal(found, expected)
