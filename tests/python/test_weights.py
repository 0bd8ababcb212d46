"""Weights and their derivatives, for which a CPU has kernels, against the definition in float64."""

import random

import definition
import pytest
import torch
from random_samples import DTYPES, check_random_samples, largest_score
from samples import generator, make
from test_definition import TOLERANCE, assert_near
from test_poison import copied, kept_pairs, poison_problem

import qkv

in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
NAN, INF = float("nan"), float("inf")


def gradients_of_weights(weights, sample, dtype):
    """By name, of numbers of `dtype` that come for the weights."""
    grad = torch.randn(weights.shape, generator=generator(2), dtype=torch.float64).to(dtype)
    leaves = {n: x for n, x in sample.differentiable.items() if n != "value"}
    if not weights.requires_grad:  # nothing attends
        return {n: torch.zeros_like(x) for n, x in leaves.items()}
    grads = torch.autograd.grad(
        weights, list(leaves.values()), grad.to(weights.dtype), materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def test_random_samples():
    """Gradients of 16 bits are within twice the error of the definition in the same dtype."""

    def check(entry, dtype):
        tolerance = TOLERANCE[dtype] * max(1.0, largest_score(entry) / 16)
        sample = make(entry, dtype)
        sample.kwargs.pop("dropout_p", None)
        sample = sample.requires_grad()
        exact = sample.to(torch.float64).requires_grad()
        expected = exact.call(definition.attention_at_once)[2]
        found = qkv.attention_weights(sample.query, sample.key, **sample.kwargs)
        assert_near("weights", found.detach(), expected.detach(), tolerance)

        expected = gradients_of_weights(expected, exact, dtype)
        allowed = dict.fromkeys(expected, 0.0)
        if dtype.itemsize == 2:
            in_same_dtype = sample.call(definition.attention_at_once)[2]
            for name, grad in gradients_of_weights(in_same_dtype, sample, dtype).items():
                if grad.numel() > 0:
                    allowed[name] = 2 * (grad.double() - expected[name]).abs().max().item()
                # Of what the batch shares PyTorch sums gradients that are rounded.
                rounding = torch.finfo(dtype).eps * expected[name].abs().max().item()
                allowed[name] = max(allowed[name], 4 * rounding)
        for name, grad in gradients_of_weights(found, sample, dtype).items():
            assert_near(name, grad, expected[name], 10 * tolerance, allowed[name])

    check_random_samples(400, check)


def is_bfloat16(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


@pytest.mark.parametrize("seed", range(60))
def test_poison_reaches_only_who_keeps_it(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    query, key, _, _, kwargs = poison_problem(rng)
    if query.dtype == torch.bfloat16 and rng.random() < 0.5:
        query, key = query.half(), copied(key).half()
        kwargs |= {n: x.half() for n, x in kwargs.items() if is_bfloat16(x)}
    keep = kept_pairs(query, key, kwargs)
    (batch, heads, m, _), (kv_heads, n) = query.shape, key.shape[1:3]
    group = heads // kv_heads
    grad = torch.randn(batch, heads, m, n).to(query.dtype)
    poison = rng.choice([NAN, INF, -INF])
    bad_query, bad_key = copied(query), copied(key)
    q_bad = torch.rand(bad_query.shape[:-1]) < rng.choice([0, 1 / m])
    k_bad = torch.rand(bad_key.shape[:-1]) < rng.choice([0, 2 / n])
    g_bad = torch.rand(grad.shape) < rng.choice([0, 1 / n])
    for x, bad in ((bad_query, q_bad), (bad_key, k_bad)):
        x[..., 0] = x[..., 0].masked_fill(bad, poison)
    bad_grad = grad.masked_fill(g_bad, poison).masked_fill(~keep, poison)

    def run(query, key, grad):
        leaves = [copied(x).requires_grad_() for x in (query, key)]
        weights = qkv.attention_weights(*leaves, **kwargs)
        grads = torch.autograd.grad(weights, leaves, grad, create_graph=graph)
        return weights.detach(), *(x.detach() for x in grads)

    graph = rng.random() < 0.3

    weights, dq, dk = run(query, key, grad)
    p_weights, p_dq, p_dk = run(bad_query, bad_key, bad_grad)
    bad_scores = q_bad | (keep & k_bad.repeat_interleave(group, 1).unsqueeze(-2)).any(-1)
    bad_row = (bad_scores | (keep & g_bad).any(-1)) & keep.any(-1)
    bad_keys = (keep & bad_row.unsqueeze(-1)).view(batch, kv_heads, group, m, n).any(3).any(2)
    assert torch.equal(weights[~bad_scores], p_weights[~bad_scores])
    assert (p_weights[~keep] == 0).all()
    assert torch.equal(dq[~bad_row], p_dq[~bad_row])
    assert torch.equal(dk[~bad_keys], p_dk[~bad_keys])
    if poison != poison:
        assert p_weights[keep & bad_scores.unsqueeze(-1)].isnan().all()


@in_every_dtype
@pytest.mark.parametrize("rows", [1, 40])
def test_what_becomes_of_the_weights_is_their_callers_business(rows, dtype):
    """They may be changed in place: the backward computes them again. And they follow no layout."""
    query = torch.randn(2, rows, 3, 8).to(dtype).transpose(1, 2).requires_grad_()
    key = torch.randn(2, 3, 50, 8).to(dtype).requires_grad_()
    weights = qkv.attention_weights(query, key)
    assert weights.is_contiguous()
    expected = torch.autograd.grad((weights * 2).sin().sum(), (query, key), retain_graph=True)
    changed = weights.mul_(2)
    found = torch.autograd.grad(changed.sin().sum(), (query, key))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e)
    # What comes for them may have any strides.
    again = qkv.attention_weights(query, key)
    by_numbers = torch.autograd.grad(again, key, torch.ones_like(again) * 3, retain_graph=True)
    expanded = torch.autograd.grad(again, key, torch.full((), 3.0).to(dtype).expand(again.shape))
    assert torch.equal(*by_numbers, *expanded)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_contiguous_whatever_the_mask_is(device):
    x = torch.randn(2, 3, 5, 8, device=device)
    mask = torch.zeros(5, 5, device=device).t()
    assert qkv.attention_weights(x, x, mask).is_contiguous()


@pytest.mark.parametrize("rows", [1, 4, 70])
@pytest.mark.parametrize("mask", [None, "bool", "float", "float32"])
def test_second_order_and_forward_mode(rows, mask, monkeypatch):
    """Nothing is said of second order's formulas: M x N numbers are what the caller asked for."""
    monkeypatch.setenv("QKV_STRICT", "1")
    dtype = torch.float32 if mask == "float32" else torch.float64
    query, key = torch.randn(2, 4, rows, 8).to(dtype), torch.randn(2, 2, 130, 8).to(dtype)
    options = {"enable_gqa": True, "window": (100, 0), "query_offset": 90, "softcap": 2.0}
    if mask is not None:
        options["attn_mask"] = torch.rand(rows, 1) < 0.8 if mask == "bool" else torch.randn(1, 130)
        if mask == "float":
            options["attn_mask"] = options["attn_mask"].to(dtype)

    def derivatives(f, query, key):
        along = torch.randn(query.shape, generator=generator(1)).to(query.dtype)
        x = query.requires_grad_()
        weights = f(x, key)
        (grad,) = torch.autograd.grad(weights.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad * along).sum(), x)
        _, tangent = torch.func.jvp(lambda q: f(q, key), (query.detach(),), (along,))
        vectors = torch.stack([along, -2 * along])
        _, vjp = torch.func.vjp(lambda q: f(q, key), query.detach())
        mapped = torch.func.vmap(
            lambda a: torch.func.jvp(lambda q: f(q, key), (query.detach(),), (a,))[1]
        )
        return grad.detach(), second, tangent, vjp(weights.detach())[0], mapped(vectors)

    found = derivatives(lambda q, k: qkv.attention_weights(q, k, **options), query.clone(), key)

    def by_definition(q, k):
        mask = options.get("attn_mask")
        mask = mask.double() if mask is not None and mask.is_floating_point() else mask
        return definition.attention_at_once(q, k, k, **{**options, "attn_mask": mask})[2]

    expected = derivatives(by_definition, query.double(), key.double())
    for f, e in zip(found, expected, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(f, e.to(dtype), rtol=tolerance, atol=tolerance)


@in_every_dtype
@pytest.mark.parametrize("rows", [1, 40])
def test_gradients_do_not_depend_on_what_may_follow(rows, dtype):
    """Whether there is a graph of them or not, here or under torch.func, they have the same bits."""
    query, key = torch.randn(2, 3, rows, 8).to(dtype), torch.randn(2, 3, 150, 8).to(dtype) + 3
    mask, grad = torch.randn(3, 1, 150).to(dtype), torch.randn(2, 3, rows, 150).to(dtype)
    leaves = [x.requires_grad_() for x in (query, key, mask)]
    expected = torch.autograd.grad(qkv.attention_weights(*leaves), leaves, grad)
    found = torch.autograd.grad(qkv.attention_weights(*leaves), leaves, grad, create_graph=True)
    leaves = tuple(x.detach() for x in leaves)
    by_func = torch.func.vjp(qkv.attention_weights, *leaves)[1](grad)
    for f, g, e in zip(found, by_func, expected, strict=True):
        assert f.requires_grad and torch.equal(f, e) and torch.equal(g, e)


@in_every_dtype
@pytest.mark.parametrize("rows", [3, 20, 130])
@pytest.mark.parametrize("causal", [False, True])
def test_one_gradient_alone(causal, rows, dtype):
    """Each has the same bits whether others are asked for or not."""
    leaves = {
        "query": torch.randn(2, 4, rows, 12).to(dtype),
        "key": torch.randn(2, 2, 210, 12).to(dtype),
        "attn_mask": torch.randn(4, 1, 210).to(dtype),
        "alibi_slopes": torch.rand(4).to(dtype),
        "sinks": torch.randn(4).to(dtype),
    }
    for x in leaves.values():
        x.requires_grad_()
    weights = qkv.attention_weights(**leaves, is_causal=causal, enable_gqa=True)
    grad = torch.randn(weights.shape).to(dtype)
    together = torch.autograd.grad(weights, list(leaves.values()), grad, retain_graph=True)
    for (name, x), expected in zip(leaves.items(), together, strict=True):
        (alone,) = torch.autograd.grad(weights, x, grad, retain_graph=True)
        assert torch.equal(alone, expected), name


@in_every_dtype
@pytest.mark.parametrize("shape", [(5, 9), (9,), (5, 1), (3, 1, 1), (2, 3, 5, 9), (1, 3, 5, 9)])
def test_gradients_of_masks_of_every_shape(shape, dtype):
    query, key = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 9, 8).to(dtype)
    mask, grad = torch.randn(shape).to(dtype), torch.randn(2, 3, 5, 9).to(dtype)
    leaves = [x.detach().double().requires_grad_() for x in (query, key, mask)]
    exact = definition.attention_at_once(*leaves[:2], key.double(), attn_mask=leaves[2])[2]
    expected = torch.autograd.grad(exact, leaves, grad.double())
    leaves = [x.requires_grad_() for x in (query, key, mask)]
    found = torch.autograd.grad(qkv.attention_weights(query, key, mask), leaves, grad)
    for name, f, e in zip(("query", "key", "mask"), found, expected, strict=True):
        assert_near(name, f, e, 10 * TOLERANCE[dtype])
