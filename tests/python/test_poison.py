"""NaN and inf at random places of random problems: nobody sees them but who keeps them.

Every problem runs twice, with and without poison. Rows and keys that the poison cannot reach by the
mask contract must have the same bits, outputs and gradients alike; rows that keep a NaN must show it.
"""

import math
import random

import definition
import pytest
import samples
import torch
import torch.autograd.forward_ad as forward_ad

import qkv

NAN, INF = float("nan"), float("inf")


def poison_problem(rng):
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 1, 2, 3])
    batch, heads = rng.choice([1, 2]), kv_heads * group
    # Few rows, a tile and more; one range of keys and several.
    m, n = rng.choice([1, 2, 4, 5, 17, 50]), rng.choice([1, 2, 7, 31, 97, 131, 200, 2100])
    if batch * heads * m * n > 100_000:
        return poison_problem(rng)
    d, dv = rng.choice([1, 3, 18]), rng.choice([1, 3, 16])  # even: products in bfloat16
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16])
    kwargs = {"enable_gqa": True, "is_causal": rng.random() < 0.4}
    kwargs["query_offset"] = rng.choice([0, n - m, -3, 5, n // 2])
    if rng.random() < 0.3:
        kwargs["window"] = (rng.choice([-1, 0, 3, 20]), rng.choice([-1, 0, 3, 20]))
    if rng.random() < 0.3:
        kwargs["softcap"] = 2.0
    if rng.random() < 0.6:
        shape = (rng.choice([batch, 1]), rng.choice([heads, 1]), m, n)
        keep = (torch.rand(shape) < 0.5) & (torch.rand(n) < 0.7) & (torch.rand(m, 1) < 0.8)
        if rng.random() < 0.5:
            kwargs["attn_mask"] = keep
        else:
            kwargs["attn_mask"] = torch.randn(shape).to(dtype).masked_fill(~keep, -INF)
    if rng.random() < 0.3:
        kwargs["key_mask"] = torch.rand(batch, n) < 0.8
    for name in ("alibi_slopes", "sinks"):
        if rng.random() < 0.3:
            kwargs[name] = torch.rand(heads) / 30
    query = torch.randn(batch, heads, m, d).to(dtype)
    key = torch.randn(batch, kv_heads, n, d).to(dtype)
    value, grad = torch.randn(batch, kv_heads, n, dv), torch.randn(batch, heads, m, dv)
    key, value = laid_out(rng, key), laid_out(rng, value.to(dtype))
    return query, key, value, grad.to(dtype), kwargs


def laid_out(rng, x):
    """Perhaps with rows 1024 bytes apart, which kernels copy, and NaN in between."""
    if rng.random() < 0.6:
        return x
    wide = x.new_full((*x.shape[:-1], 1024 // x.element_size()), NAN)
    return wide[..., : x.shape[-1]].copy_(x)


def copied(x):
    """With the strides of x; clone() drops gaps."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def kept_pairs(query, key, kwargs):
    (batch, heads, m, _), n = query.shape, key.shape[-2]
    mask, key_mask = kwargs.get("attn_mask"), kwargs.get("key_mask")
    mask = None if mask is None else mask.expand(batch, heads, m, n)
    options = (kwargs["is_causal"], kwargs.get("window"), kwargs["query_offset"])

    def of_head(b, h):
        return definition.kept_pairs(
            m,
            n,
            *options,
            None if mask is None else mask[b, h],
            None if key_mask is None else key_mask[b],
        )

    return torch.stack([torch.stack([of_head(b, h) for h in range(heads)]) for b in range(batch)])


def run(query, key, value, grad, kwargs):
    leaves = [copied(x).requires_grad_() for x in (query, key, value)]
    extras = {
        n: x.clone().requires_grad_()
        for n, x in kwargs.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    out, lse = qkv.attention_with_lse(*leaves, **{**kwargs, **extras})
    grads = torch.autograd.grad(out, [*leaves, *extras.values()], grad)
    return out.detach(), lse.detach(), *grads[:3], dict(zip(extras, grads[3:]))


@pytest.mark.parametrize("seed", range(60))
def test_poison_reaches_only_who_keeps_it(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    query, key, value, grad, kwargs = poison_problem(rng)
    keep = kept_pairs(query, key, kwargs)
    (batch, heads, m, _), (kv_heads, n) = query.shape, key.shape[1:3]
    group = heads // kv_heads

    poison = rng.choice([NAN, INF, -INF])
    bad_query, bad_key, bad_value, bad_grad = (copied(x) for x in (query, key, value, grad))

    def poisoned(x, probability):
        """Marks some rows of x, and poisons one number of each."""
        marked = torch.rand(x.shape[:-1]) < probability * (rng.random() < 0.6)
        x[..., 0] = x[..., 0].masked_fill(marked, poison)
        return marked

    q_bad, g_bad = poisoned(bad_query, 1 / m), poisoned(bad_grad, 1 / m)
    k_bad, v_bad = poisoned(bad_key, 2 / n), poisoned(bad_value, 2 / n)

    out, lse, dq, dk, dv, extras = run(query, key, value, grad, kwargs)
    p_out, p_lse, p_dq, p_dk, p_dv, p_extras = run(bad_query, bad_key, bad_value, bad_grad, kwargs)

    def for_rows(keys):
        return (keep & keys.repeat_interleave(group, 1).unsqueeze(-2)).any(-1)

    nonempty = keep.any(-1)
    bad_scores = (q_bad & nonempty) | for_rows(k_bad)
    bad_output = bad_scores | for_rows(v_bad)
    bad_row = bad_output | (g_bad & nonempty)
    bad_pairs = keep & bad_row.unsqueeze(-1)
    bad_keys = bad_pairs.view(batch, kv_heads, group, m, n).any(3).any(2)

    assert torch.equal(lse[~bad_scores], p_lse[~bad_scores])
    assert torch.equal(out[~bad_output], p_out[~bad_output])
    assert torch.equal(out[..., 1:][~bad_scores], p_out[..., 1:][~bad_scores])
    assert torch.equal(dq[~bad_row], p_dq[~bad_row])
    assert torch.equal(dk[~bad_keys], p_dk[~bad_keys])
    assert torch.equal(dv[~bad_keys], p_dv[~bad_keys])
    if "attn_mask" in extras:
        reached = bad_pairs.sum_to_size(extras["attn_mask"].shape).bool()
        assert torch.equal(extras["attn_mask"][~reached], p_extras["attn_mask"][~reached])
    for name in ("alibi_slopes", "sinks"):
        if name in extras:
            reached = bad_row.any(2).any(0)
            assert torch.equal(extras[name][~reached], p_extras[name][~reached])
    if poison != poison:
        assert p_out[bad_scores].isnan().all() and p_lse[bad_scores].isnan().all()
        assert p_out[for_rows(v_bad)][..., 0].isnan().all()


def run_second(query, key, value, grad, kwargs, along):
    """Of <gradients, along>: the gradients of the incoming ones (which are what forward mode gives),
    then as run."""
    leaves = [copied(x).requires_grad_() for x in (query, key, value)]
    extras = {
        n: x.clone().requires_grad_()
        for n, x in kwargs.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    out, lse = qkv.attention_with_lse(*leaves, **{**kwargs, **extras})
    incoming = [grad.clone().requires_grad_(), torch.ones_like(lse, requires_grad=True)]
    inputs = [*leaves, *extras.values()]
    grads = torch.autograd.grad((out, lse), inputs, incoming, create_graph=True)
    out_t, lse_t, *found = torch.autograd.grad(grads, [*incoming, *inputs], along)
    return out_t, lse_t, *found[:3], dict(zip(extras, found[3:]))


@pytest.mark.parametrize("seed", range(40))
def test_poison_in_second_order(seed):
    """In the problem and in the directions that it is differentiated along."""
    rng = random.Random(1000 + seed)
    torch.manual_seed(seed)
    query, key, value, grad, kwargs = poison_problem(rng)
    keep = kept_pairs(query, key, kwargs)
    (batch, heads, m, _), (kv_heads, n) = query.shape, key.shape[1:3]
    group = heads // kv_heads
    extras = {n: x for n, x in kwargs.items() if torch.is_tensor(x) and x.is_floating_point()}
    along = [torch.randn_like(x) for x in (query, key, value, *extras.values())]
    along[1:3] = (laid_out(rng, x) for x in along[1:3])

    poison = rng.choice([NAN, INF, -INF])

    def poisoned(x, probability):
        marked = torch.rand(x.shape[:-1]) < probability * (rng.random() < 0.4)
        bad = copied(x)
        bad[..., 0] = bad[..., 0].masked_fill(marked, poison)
        return bad, marked

    (bad_query, q_bad), (bad_grad, g_bad) = poisoned(query, 1 / m), poisoned(grad, 1 / m)
    (bad_key, k_bad), (bad_value, v_bad) = poisoned(key, 2 / n), poisoned(value, 2 / n)
    (q_t, q_t_bad), (k_t, k_t_bad) = poisoned(along[0], 1 / m), poisoned(along[1], 2 / n)
    v_t, v_t_bad = poisoned(along[2], 2 / n)
    bad_along = [q_t, k_t, v_t, *along[3:]]
    if "attn_mask" in extras:  # where a mask is -inf, how it moves cannot matter
        bad_along[3] = along[3].masked_fill(extras["attn_mask"] == -INF, poison)

    clean = run_second(query, key, value, grad, kwargs, along)
    bad = run_second(bad_query, bad_key, bad_value, bad_grad, kwargs, bad_along)

    def for_rows(keys):
        return (keep & keys.repeat_interleave(group, 1).unsqueeze(-2)).any(-1)

    nonempty = keep.any(-1)
    bad_scores = ((q_bad | q_t_bad) & nonempty) | for_rows(k_bad | k_t_bad)
    bad_output = bad_scores | for_rows(v_bad | v_t_bad)
    bad_row = bad_output | (g_bad & nonempty)
    bad_pairs = keep & bad_row.unsqueeze(-1)
    bad_keys = bad_pairs.view(batch, kv_heads, group, m, n).any(3).any(2)

    places = (bad_output, bad_scores, bad_row, bad_keys, bad_keys)
    for name, expected, found, reached in zip("o l q k v".split(), clean, bad, places):
        assert torch.equal(expected[~reached], found[~reached]), name
        assert not expected.isnan().any(), name
    assert torch.equal(clean[0][..., 1:][~bad_scores], bad[0][..., 1:][~bad_scores])
    for name, expected in clean[5].items():
        if name == "attn_mask":
            reached = bad_pairs.sum_to_size(expected.shape).bool()
        else:
            reached = bad_row.any(2).any(0)
        assert torch.equal(expected[~reached], bad[5][name][~reached]), name
    if poison != poison:
        assert bad[0][bad_scores].isnan().all() and bad[1][bad_scores].isnan().all()
        assert bad[0][for_rows(v_bad | v_t_bad)][..., 0].isnan().all()


@pytest.mark.parametrize("sink", [0.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_of_zeros_are_not_rows_without_keys(dtype, sink):
    """Of the incoming gradients only that of the row without keys does not matter. (A sink of 40
    leaves keys a weight that rounding takes from the sum.)"""
    query, key = torch.randn(2, 1, 2, 3, 4).to(dtype)
    value, sinks = torch.zeros(1, 2, 3, 4).to(dtype), torch.full((2,), sink, requires_grad=True)
    keep = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    for row, reaches in enumerate(keep.any(-1).tolist()):
        grad = torch.zeros(1, 2, 3, 4).to(dtype)
        grad[0, 0, row] = NAN
        out = qkv.attention(query, key, value, keep, sinks=sinks)
        (first,) = torch.autograd.grad(out, sinks, grad)
        assert first.isnan().tolist() == [reaches, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_of_zeros_below_a_large_sink_are_not_rows_without_keys(dtype):
    """The keys have so little of the weight that the sink's rounds to 1."""
    size = {torch.float32: 20.0, torch.float64: 40.0}[dtype]
    torch.manual_seed(0)
    query, key, value_t, grad = torch.randn(4, 1, 2, 3, 4, dtype=dtype)

    def second_order(op, dtype):
        value = torch.zeros(1, 2, 3, 4, dtype=dtype, requires_grad=True)
        sinks = torch.full((2,), size, dtype=dtype, requires_grad=True)
        out = op(query.to(dtype), key.to(dtype), value, sinks=sinks)
        out = out if isinstance(out, torch.Tensor) else out[0]
        (first,) = torch.autograd.grad(out, value, grad.to(dtype), create_graph=True)
        return torch.autograd.grad((first * value_t.to(dtype)).sum(), sinks)[0]

    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    found, exact = (
        second_order(qkv.attention, dtype),
        second_order(definition.attention, torch.float64),
    )
    torch.testing.assert_close(found, exact.to(dtype), rtol=tolerance, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sink_of_nan_does_not_reach_rows_without_keys(dtype, rows):
    query, key, value = torch.randn(3, 1, 2, rows, 4).to(dtype)
    keep = torch.ones(rows, rows, dtype=torch.bool)
    keep[-1] = False
    sinks = torch.tensor([NAN, 0.0])
    attend = lambda sinks: qkv.attention_with_lse(query, key, value, keep, sinks=sinks)  # noqa: E731
    (out, lse), (out_t, lse_t) = torch.func.jvp(attend, (sinks,), (torch.ones(2),))
    assert lse[:, 0].isnan().all()
    for x in (out, out_t):
        assert (x[:, :, -1] == 0).all()
        assert x[:, 0, :-1].isnan().all()
        assert x[:, 1].isfinite().all()
    assert (lse_t[:, :, -1] == 1).all()  # its logsumexp is its sink
    assert lse_t[:, 0, :-1].isnan().all()
    moved = attend(sinks.requires_grad_())[1][:, :, -1].sum()
    assert torch.autograd.grad(moved, sinks)[0][1] == 1
    still = torch.func.jvp(lambda s: attend(s)[0], (torch.zeros(2),), (sinks.detach(),))[1]
    assert (still[:, :, -1] == 0).all() and still[:, 0, :-1].isnan().all()


@pytest.mark.parametrize("rows, keys", [(1, 3), (20, 70), (3, 2100)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_nan_is_seen_though_its_weights_are_dropped(dtype, rows, keys):
    """The NaN is in what its weights are divided by: no row without keys, with a sink or without."""
    query, (key, value) = torch.randn(1, 2, rows, 4), torch.randn(2, 1, 2, keys, 4)
    query[0, 0, 0] = NAN
    operands = [x.to(dtype) for x in (query, key, value)]
    for kwargs in ({}, {"sinks": torch.zeros(2)}):
        out = qkv.attention(*operands, dropout_p=0.999, **kwargs)
        assert out[0, 0, 0].isnan().all()
        assert out[0, 0, 1:].isfinite().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 9])
def test_an_infinite_key_that_few_rows_keep(rows, softcap, dtype):
    """Rows that a kernel adds to have as many as it multiplies are zeros, and 0 times it is NaN."""
    g = samples.generator(rows)
    query = torch.rand(1, rows, 32, generator=g).to(dtype)
    key, value = (torch.randn(1, 50, 32, generator=g).to(dtype) for _ in range(2))
    key[0, 7, 1] = -math.inf

    def gradients(attention, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*inputs, softcap=softcap)
        return torch.autograd.grad(out.sin().sum(), inputs)

    def defined(*tensors, **options):
        return definition.attention_at_once(*tensors, **options)[0]

    expected = gradients(defined, torch.float64)
    for found, right in zip(gradients(qkv.attention, dtype), expected, strict=True):
        torch.testing.assert_close(found, right.to(dtype), equal_nan=True)


@pytest.mark.parametrize("seed", range(40))
def test_poison_in_forward_mode(seed):
    """Rows that keep no poison have the same bits, whatever lies in keys that they do not keep."""
    rng = random.Random(2000 + seed)
    torch.manual_seed(seed)
    query, key, value, _, kwargs = poison_problem(rng)
    keep = kept_pairs(query, key, kwargs)
    heads, (kv_heads, n) = query.shape[1], key.shape[1:3]
    along = [laid_out(rng, torch.randn_like(x)) for x in (query, key, value)]
    key_is_bad = torch.rand(*key.shape[:2], n) < 2 / n
    poison = rng.choice([NAN, INF, -INF])

    def moved(*tensors):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors[:3], tensors[3:])]
            out = qkv.attention(*duals, **kwargs)
            return forward_ad.unpack_dual(out).tangent

    def poisoned(x):
        bad = copied(x)
        bad[..., 0] = bad[..., 0].masked_fill(key_is_bad, poison)
        return bad

    clean = moved(query, key, value, *along)
    bad = moved(query, poisoned(key), poisoned(value), along[0], *map(poisoned, along[1:]))
    of_rows = key_is_bad.repeat_interleave(heads // kv_heads, 1).unsqueeze(-2)
    unreached = ~(keep & of_rows).any(-1)
    assert torch.equal(clean[unreached], bad[unreached])
    assert clean.isfinite().all()
