"""Double backward and forward mode against the definition in float64, for problems of many tiles and
for every dtype. (test_gradients.py checks both by numerical differences, on small problems.)"""

import math
import time
import warnings
import weakref

import definition
import pytest
import samples
import torch
from test_definition import TOLERANCE, assert_near
from test_doors import internal_operands
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

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
    g = samples.generator(seed)
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


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "everything",
        "float_mask_two_batch_dims",
        "batch_broadcast",
        "heads_inside_rows",
        "dropout_softcap_alibi_sinks",
        "no_queries",
        "sinks_no_keys",
    ],
)
def test_opcheck(name):
    sample = samples.make(samples.entry(name), torch.float32)
    operands = internal_operands(sample)
    results = torch.ops.qkv._attention_forward(*operands)
    needs = [x is not None and x.is_floating_point() for x in operands[:6]]
    along = [torch.randn_like(x) if n else None for x, n in zip(operands, needs)]
    for t in (along, [None, *along[1:]]):
        torch.library.opcheck(torch.ops.qkv._attention_jvp.default, (*operands, *results, *t))
    incoming = torch.randn_like(results[0]), torch.randn_like(results[1])
    args = (*operands, *incoming, *results, *along, [True, True, *needs])
    torch.library.opcheck(torch.ops.qkv._attention_backward_backward.default, args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(0, 8), (8, 0), (0, 0)])
def test_without_columns(head_dim, value_dim, dtype):
    widths = {"head_dim": head_dim, "value_dim": value_dim, "scale": 1.0}
    entry = {"batch": [1], "heads": 2, "queries": 50, "keys": 100, "is_causal": True, **widths}
    check({"name": "no columns", **entry}, dtype, TOLERANCE.get(dtype, 0.02))


@pytest.mark.unfused  # forward over forward
def test_every_order_of_modes():
    """The Hessian with respect to all inputs, mapped over its rows, by all ways to it."""
    sample = samples.make(
        {
            "name": "all options",
            "batch": [],
            "heads": 2,
            "kv_heads": 1,
            "queries": 2,
            "keys": 3,
            "head_dim": 2,
            "softcap": 2.0,
            "alibi_slopes": {"shape": [2]},
            "sinks": {"shape": [2]},
            "attn_mask": {"dtype": "float", "shape": [2, 3]},
            "is_causal": True,
            "query_offset": 1,
        }
    )
    names = list(sample.differentiable)

    def f(*tensors):
        out, lse = sample.replaced(dict(zip(names, tensors))).call(qkv.attention_with_lse)
        return out.sin().sum() + lse.cos().sum()

    inputs = tuple(sample.differentiable.values())
    every = tuple(range(len(inputs)))
    expected = torch.autograd.functional.hessian(f, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither a fallback nor a loop
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch.func imports at first
        found = {
            "forward over reverse": hessian(f, every)(*inputs),
            "reverse over reverse": jacrev(jacrev(f, every), every)(*inputs),
            "reverse over forward": jacrev(jacfwd(f, every), every)(*inputs),
        }
    found["forward over forward"] = jacfwd(jacfwd(f, every), every)(*inputs)
    for way, h in found.items():
        for i in every:
            for j in every:
                assert torch.allclose(h[i][j], expected[i][j]), (way, i, j)


def test_vmap_over_second_order():
    """Mapped problems, one mask for all of them."""
    q, k, v, mask = (torch.randn(*s, dtype=torch.float64) for s in [(3, 2, 3, 2)] * 3 + [(3, 3)])

    def second(q, k, v, mask):
        g = grad(lambda mask: qkv.attention(q, k, v, mask).sin().sum())
        return grad(lambda mask: g(mask).cos().sum())(mask)

    mapped = vmap(second, (0, 0, 0, None))(q, k, v, mask)
    for b in range(3):
        torch.testing.assert_close(mapped[b], second(q[b], k[b], v[b], mask))


@pytest.mark.parametrize("derivative", ["grad", "jvp"])
def test_vmap_within_a_derivative_that_maps_no_operand(derivative):
    """Nor does the derivative wrap all operands: one comes from a vmap around it."""
    x, y = torch.randn(2, 3, 2, 4, 5, dtype=torch.float64)
    weights = torch.randn(4, dtype=torch.float64)

    def of_sample(attend):
        def f(x, y):
            def total(x):
                return vmap(lambda w: (attend(x, y, x) * w).sin().sum())(weights).sum()

            return grad(total)(x) if derivative == "grad" else jvp(total, (x,), (y,))[1]

        return f

    found, wanted = (vmap(of_sample(f))(x, y) for f in (qkv.attention, plain_attention))
    torch.testing.assert_close(found, wanted)


def plain_attention(q, k, v, is_causal=False, sinks=None, attn_mask=0.0, key_mask=None):
    scores = q @ k.mT * q.shape[-1] ** -0.5 + attn_mask
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask, -math.inf)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ v
    sinks = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ v


@pytest.mark.parametrize(
    ("operand", "shape"),
    [("attn_mask", s) for s in ((), (4,), (3, 4), (2, 3, 4))]
    + [("alibi_slopes", (2,)), ("sinks", (2,))],
    ids=str,
)
def test_reverse_over_mapped_tangents_of_what_is_computed(operand, shape):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 4, 2, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)

    def f(x):
        return qkv.attention(q, k, k, **{operand: x.sin()}).sin().sum()

    expected = torch.func.jacrev(torch.func.jacrev(f))(x)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(f))(x), expected)
    directions = torch.randn(3, *x.shape, dtype=torch.float64)
    found = grad(lambda d: vmap(lambda t: jvp(f, (x,), (t,))[1])(d).sum())(directions)
    torch.testing.assert_close(found, grad(f)(x).expand(directions.shape))
    one = directions[0]
    found = grad(lambda t: vmap(lambda x: jvp(f, (x,), (t,))[1])(directions).sum())(one)
    torch.testing.assert_close(found, vmap(grad(f))(directions).sum(0))


@pytest.mark.parametrize("sink", [8.0, 20.0, 40.0])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_sink_leaves_of_the_keys(dtype, rows, sink):
    """Scores move by 200, but their weights together are e^-sink: what is left is a small number,
    not the difference of two large ones."""
    q, k = torch.zeros(1, rows, 8, dtype=dtype), torch.randn(1, 40, 8).to(dtype)
    k[..., 0] = 200 * 8**0.5
    direction = torch.zeros_like(q)
    direction[..., 0] = 1
    moved = k[0, 0, 0].item() * 8**-0.5
    of_keys = 40 / (40 + math.exp(sink))

    def lse(q, sinks):
        return qkv.attention_with_lse(q, k, k, sinks=sinks)[1]

    sinks = torch.full((1,), sink)
    _, lse_t = jvp(lambda q: lse(q, sinks), (q,), (direction,))
    assert_relative(lse_t, torch.full_like(lse_t, moved * of_keys), 1e-3)
    of_sinks = grad(lambda s: jvp(lambda q: lse(q, s), (q,), (direction,))[1].sum())(sinks)
    of_sinks_too = grad(lambda s: (grad(lambda q: lse(q, s).sum())(q) * direction).sum())(sinks)
    expected = torch.full((1,), -rows * moved * of_keys * (1 - of_keys))
    assert_relative(of_sinks, expected, 1e-3)
    assert_relative(of_sinks_too, expected, 1e-3)


def assert_relative(actual, expected, bound):
    torch.testing.assert_close(actual, expected, rtol=bound, atol=0.0)


def test_nothing_holds_itself():
    """Tangents whose graph has the output, and an output that has those tangents, would."""
    q = torch.randn(1, 2, 2, requires_grad=True)
    with forward_ad.dual_level():
        out = qkv.attention(forward_ad.make_dual(q, torch.randn_like(q, requires_grad=True)), q, q)
        moved = forward_ad.unpack_dual(out).tangent
        torch.autograd.grad(moved.sum(), q, create_graph=True)
    gone = weakref.ref(q)
    del q, out, moved
    deadline = time.monotonic() + 10  # a GPU's backward runs in a thread that may let go later
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


def test_tiles_in_bfloat16():
    """Relative L2 error under 2.6e-3, where a rounding to bfloat16 is 1.7e-3: with AVX512-BF16 the
    tiles that are multiplied are rounded too."""
    entry = {"name": "bfloat16", "batch": [1], "heads": 2, "queries": 512, "keys": 512}
    entry |= {"head_dim": 64, "value_dim": 64, "is_causal": True}
    sample, exact, incoming, along = problem(entry, torch.bfloat16)
    expected = double_backward(definition.attention, exact, incoming, along)
    actual = double_backward(qkv.attention_with_lse, sample, incoming, along)
    actual["grad_output_t"], _ = forward_mode(sample, along)
    for name, a in actual.items():
        e = expected[name.removesuffix("_t")]
        assert (a.double() - e).norm() / e.norm() < 2.6e-3, name


def derivatives_of_the_query(attend, q, k, v, along, grad_out):
    """A Hessian-vector product and a tangent of the output, in float64."""
    query = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(attend(query, k, v), query, grad_out, create_graph=True)
    (second,) = torch.autograd.grad(first, query, along)
    return second.double(), jvp(lambda q: attend(q, k, v), (q,), (along,))[1].double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [6, 128, 300])
def test_keys_with_much_in_common(rows, is_causal, has_sinks, dtype):
    """It moves all scores of a row alike, which moves nothing: what weights lose by rounding, in the
    forward as well, must not be multiplied by it."""
    g = samples.generator(6)
    q, x, grad_out = (torch.randn(1, 2, rows, 64, generator=g).to(dtype) for _ in range(3))
    k, v = (torch.randn(1, 2, 300, 64, generator=g) for _ in range(2))
    k, v = (k + 10).to(dtype), v.to(dtype)
    sinks = torch.randn(2, generator=g).to(dtype) if has_sinks else None

    def plain(q, k, v):
        return plain_attention(q, k, v, is_causal, sinks if sinks is None else sinks.to(q.dtype))

    def fused(q, k, v):
        return qkv.attention(q, k, v, is_causal=is_causal, sinks=sinks)

    found, same_dtype, exact = (
        derivatives_of_the_query(attend, *(y.to(to) for y in (q, k, v, x, grad_out)))
        for attend, to in ((fused, dtype), (plain, dtype), (plain, torch.float64))
    )
    for a, e, s in zip(found, exact, same_dtype, strict=True):
        assert (a - e).norm() <= 2 * (s - e).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [5, 700])
def test_slopes_that_move(rows, dtype):
    """Far keys, which a row hardly sees, say nothing of how the scores move that it is made of."""
    g = samples.generator(7)
    slopes = torch.tensor([0.5, 0.125])
    q, grad_out = (torch.randn(1, 2, rows, 64, generator=g).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, 700, 64, generator=g).to(dtype) for _ in range(2))
    offset = 700 - rows

    def plain(q, k, v, slopes):
        distance = (torch.arange(rows)[:, None] + offset - torch.arange(700)).to(q.dtype)
        scores = q @ k.mT / 8 - slopes.to(q.dtype)[:, None, None] * distance.abs()
        return scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v

    def fused(q, k, v, slopes):
        return qkv.attention(q, k, v, is_causal=True, query_offset=offset, alibi_slopes=slopes)

    def derivatives(attend, dtype):
        of_slopes = lambda s: attend(*(x.to(dtype) for x in (q, k, v)), s)  # noqa: E731
        moving = slopes.to(torch.promote_types(dtype, torch.float32))
        moved = jvp(of_slopes, (moving,), (torch.ones_like(moving),))[1]
        moving.requires_grad_()
        incoming = grad_out.to(dtype).requires_grad_()
        (grad_slopes,) = torch.autograd.grad(of_slopes(moving), moving, incoming, create_graph=True)
        return moved.double(), torch.autograd.grad(grad_slopes.sum(), incoming)[0].double()

    exact, same_dtype = derivatives(plain, torch.float64), derivatives(plain, dtype)
    for a, e, s in zip(derivatives(fused, dtype), exact, same_dtype, strict=True):
        assert (a - e).norm() <= 2 * (s - e).norm()


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 100])
def test_keys_with_much_in_common_in_float32(rows):
    """The output of few rows is of other sums than the scores of second order and forward mode."""
    g = samples.generator(8)
    q, x, grad_out = (torch.randn(1, 2, rows, 128, generator=g) for _ in range(3))
    k, v = torch.randn(1, 2, 512, 128, generator=g) + 30, torch.randn(1, 2, 512, 128, generator=g)

    found, same_dtype, exact = (
        derivatives_of_the_query(attend, *(y.to(to) for y in (q, k, v, x, grad_out)))
        for attend, to in (
            (qkv.attention, torch.float32),
            (plain_attention, torch.float32),
            (plain_attention, torch.float64),
        )
    )
    for a, e, s in zip(found, exact, same_dtype, strict=True):
        assert (a - e).norm().item() <= 8 * (s - e).norm().item()


@pytest.mark.parametrize("mean", [0, 30])
@pytest.mark.parametrize("rows, keys", [(1, 300), (40, 257), (200, 1000)])
def test_forward_mode_of_keys_and_values_with_a_mean(rows, keys, mean):
    """What all scores and all values have in common moves an output by twice a large number that
    should cancel."""
    g = samples.generator(9)
    operands = [torch.randn(1, 2, n, 64, generator=g) for n in (rows, keys, keys)]
    along = [torch.randn(x.shape, generator=g) for x in operands[:2]]
    operands = [operands[0], *(x + mean for x in operands[1:])]

    def moved(attend, dtype):
        q, k, v, *tangents = (x.to(dtype) for x in (*operands, *along))
        return jvp(lambda q, k: attend(q, k, v), (q, k), tuple(tangents))[1]

    exact = moved(plain_attention, torch.float64)
    error = moved(qkv.attention, torch.float32) - exact
    same_dtype = moved(plain_attention, torch.float32) - exact
    assert error.norm().item() <= 2 * same_dtype.norm().item()


@pytest.mark.parametrize("order", [1, 2])
def test_a_graph_is_gone_after_its_backward(order):
    x = torch.randn(2, 5, 8, requires_grad=True)
    result = qkv.attention(x, x, x)
    if order == 2:
        (result,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        result.sum().backward()


def test_strict_knows_forward_mode_without_a_kernel(monkeypatch):
    monkeypatch.setenv("QKV_STRICT", "1")
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    attend = lambda x: qkv.attention(x, x, x)
    second = grad(lambda x: grad(lambda x: attend(x).sin().sum())(x).sin().sum())
    with pytest.raises(RuntimeError, match="third derivatives have no fused kernel"):
        jvp(second, (x,), (x,))
    with pytest.raises(RuntimeError, match="forward mode of forward mode"):
        jvp(lambda x: jvp(attend, (x,), (x,))[1], (x,), (x,))


def test_hessian_of_logsumexp_alone():
    q, k, dq, dk = torch.randn(4, 2, 5, 4, dtype=torch.float64)

    def loss(q, k):
        return qkv.attention_with_lse(q, k, k)[1].sin().sum()

    gradient = grad(loss, (0, 1))
    reverse_over_reverse = torch.func.vjp(gradient, q, k)[1]((dq, dk))
    forward_over_reverse = jvp(gradient, (q, k), (dq, dk))[1]
    reverse_over_forward = grad(lambda q, k: jvp(loss, (q, k), (dq, dk))[1], (0, 1))(q, k)
    torch.testing.assert_close(forward_over_reverse, reverse_over_reverse)
    torch.testing.assert_close(reverse_over_forward, reverse_over_reverse)
