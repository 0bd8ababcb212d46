"""The mask contract: what is masked out cannot matter, whatever is in it; finite scores of any size
never give NaN."""

import math

import definition
import pytest
import samples
import torch

import qkv

INF, NAN = float("inf"), float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)

# Ways to mask key 2 of 6 (and more) for queries 0 and 1 of 5, with a kept key for each of them.
MASKINGS = {
    "causal": {"is_causal": True},
    "window": {"window": (1, 0)},
    "bool_mask": {"attn_mask": torch.tensor([[True, True] + 4 * [False]] * 2 + [[True] * 6] * 3)},
    "float_mask": {
        "attn_mask": torch.tensor([[0.5, -0.5] + 4 * [-INF]] * 2 + [[0.1] * 6] * 3).double()
    },
    "key_mask": {"key_mask": torch.tensor([True, True, False, True, False, True])},
    "query_offset": {"is_causal": True, "query_offset": -1},
}


def tensors(dtype, requires_grad=False):
    g = samples.generator(1)
    return [
        torch.randn(2, 5 if i == 0 else 6, 4, generator=g, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for i in range(3)
    ]


def options(masking, dtype):
    kwargs = dict(MASKINGS[masking])
    if masking == "float_mask":
        kwargs["attn_mask"] = kwargs["attn_mask"].to(dtype)
    return kwargs


def _layouts(m, n, heads, kind):
    """Masks of (heads, m, n) that are read in a way of their own."""
    g = samples.generator(7)

    def mask(*shape):
        x = torch.randn(shape, generator=g)
        return x > -1 if kind is bool else x.masked_fill(x < -1.5, -INF).to(kind)

    return {
        "a number for a row": mask(heads, m, 1),
        "a number for a head": mask(heads, 1, 1),
        "transposed": mask(heads, n, m).mT,
        "heads innermost": mask(m, n, heads).permute(2, 0, 1),
        "transposed, of all heads": mask(n, m).mT,
        "every other key": mask(heads, m, 2 * n)[..., ::2],
    }


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, bool], ids=str)
def test_bits_do_not_depend_on_where_a_mask_lies(kind, rows):
    g = samples.generator(3)
    dtype = torch.float32 if kind is bool else kind
    query, key, value = (
        torch.randn(2, 3, n, 8, generator=g).to(dtype).requires_grad_() for n in (rows, 200, 200)
    )

    def results(mask):
        out = qkv.attention(query, key, value, mask)
        grads = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
        return out, *grads, *torch.autograd.grad(grads[0].square().sum(), (query, key, value))

    for name, mask in _layouts(rows, 200, 3, kind).items():
        whole = mask.expand(3, rows, 200).contiguous()
        for found, expected in zip(results(mask), results(whole), strict=True):
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("value_dim", [1, 3, 9, 19])
@pytest.mark.parametrize("rows", [1, 2, 4])
@EVERY_DTYPE
def test_poison_in_a_masked_value_of_few_rows(dtype, rows, value_dim):
    """Sums that leave a value out are rounded as those with its weight of 0."""
    keep = torch.arange(17) != 3
    for seed in range(20):
        g = samples.generator(seed)
        query, key, value = (
            torch.randn(shape, generator=g).to(dtype)
            for shape in ((1, rows, 8), (1, 17, 8), (1, 17, value_dim))
        )
        clean = qkv.attention(query, key, value, keep)
        value[0, 3] = NAN
        assert torch.equal(clean, qkv.attention(query, key, value, keep))


@DTYPES
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("masking", MASKINGS)
def test_poison_in_masked_keys_and_values(masking, poison, dtype):
    """Rows that do not keep key 2 give the same bits, forward and backward, as without poison."""
    kwargs = options(masking, dtype)
    keep = definition.kept_pairs(
        5,
        6,
        kwargs.get("is_causal", False),
        kwargs.get("window"),
        kwargs.get("query_offset", 0),
        kwargs.get("attn_mask"),
        kwargs.get("key_mask"),
    )
    rows = ~keep[:, 2]  # these do not keep key 2
    assert rows.any()
    query, key, value = tensors(dtype)
    grad = torch.randn(2, 5, 4, dtype=dtype)
    # Only gradients of the rows that are clean: those of the others may well be NaN.
    grad = grad * rows[:, None]

    def run(key, value):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out, lse = qkv.attention_with_lse(*leaves, **kwargs)
        return (out, lse, *torch.autograd.grad(out, leaves, grad))

    clean = run(key, value)
    bad_key, bad_value = key.clone(), value.clone()
    bad_key[:, 2], bad_value[:, 2] = poison, poison
    poisoned = run(bad_key, bad_value)
    for c, p in zip(clean[:3], poisoned[:3], strict=True):
        assert torch.equal(c[:, rows], p[:, rows])
    if rows.all():
        for c, p in zip(clean[3:], poisoned[3:], strict=True):
            assert torch.equal(c, p)


@DTYPES
def test_poison_in_a_masked_mask_entry(dtype):
    """An entry of a float mask that causal masks out may be NaN."""
    query, key, value = tensors(dtype)
    mask = torch.randn(5, 6, dtype=dtype)
    clean = qkv.attention(query, key, value, mask, is_causal=True)
    mask[torch.ones(5, 6).triu(1).bool()] = NAN
    assert torch.equal(qkv.attention(query, key, value, mask, is_causal=True), clean)


@DTYPES
def test_poison_in_a_row_that_keeps_nothing(dtype):
    """NaN in the query and in the incoming gradient of an empty row reaches nobody."""
    query, key, value = tensors(dtype)
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[3] = False
    grad = torch.randn(2, 5, 4, dtype=dtype)

    def run(query, grad):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = qkv.attention(*leaves, keep)
        return (out, *torch.autograd.grad(out, leaves, grad))

    clean = run(query, grad)
    bad_query, bad_grad = query.clone(), grad.clone()
    bad_query[:, 3], bad_grad[:, 3] = NAN, NAN
    for c, p in zip(clean, run(bad_query, bad_grad), strict=True):
        assert torch.equal(c, p)


@DTYPES
@pytest.mark.parametrize("poison", [NAN, INF])
def test_poison_in_queries_reaches_kept_keys_only(poison, dtype):
    """A NaN query row spoils the gradients of the keys it keeps, and of no others."""
    query, key, value = tensors(dtype)
    bad = query.clone()
    bad[:, 1] = poison  # causal: keeps keys 0 and 1

    def grads(query):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = qkv.attention(*leaves, is_causal=True)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    clean, poisoned = grads(query), grads(bad)
    for c, p in zip(clean[1:], poisoned[1:], strict=True):
        assert torch.equal(c[:, 2:], p[:, 2:])
        assert p[:, :2].isnan().any()


@DTYPES
def test_a_kept_nan_is_seen_in_its_own_column(dtype):
    query, key, value = tensors(dtype)
    clean = qkv.attention(query, key, value, is_causal=True)
    value[0, 2, 1] = NAN
    out = qkv.attention(query, key, value, is_causal=True)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, 2:, 1] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(out[~expected], clean[~expected])


@DTYPES
def test_a_kept_nan_key_is_seen_in_its_rows(dtype):
    query, key, value = tensors(dtype)
    key[0, 2, 1] = NAN
    out, lse = qkv.attention_with_lse(query, key, value, is_causal=True)
    assert out[0, 2:].isnan().all() and lse[0, 2:].isnan().all()
    assert not out[0, :2].isnan().any() and not out[1].isnan().any()


@DTYPES
def test_masks_compose(dtype):
    """What is kept is the intersection, the same whichever argument says so."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 9, 4, dtype=dtype)
    keep, key_mask = torch.rand(2, 1, 9, 9) < 0.7, torch.rand(2, 9) < 0.8
    band = definition.kept_pairs(9, 9, True, (4, 2), 1, None, None)
    together = qkv.attention(
        query, key, value, keep, is_causal=True, window=(4, 2), query_offset=1, key_mask=key_mask
    )
    intersection = keep & key_mask[:, None, None, :] & band
    as_bool = qkv.attention(query, key, value, intersection)
    as_float = qkv.attention(
        query,
        key,
        value,
        torch.zeros_like(intersection, dtype=dtype).masked_fill(~intersection, -INF),
    )
    torch.testing.assert_close(together, as_bool)
    torch.testing.assert_close(together, as_float)


@DTYPES
def test_empty_rows(dtype):
    query, key, value = tensors(dtype, requires_grad=True)
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[2] = False
    for kwargs in (
        {"attn_mask": keep},
        {"attn_mask": torch.zeros(5, 6, dtype=dtype).masked_fill(~keep, -INF)},
        {"is_causal": True, "query_offset": -3},
        {"window": (0, 0), "query_offset": 4},
        {"key_mask": torch.zeros(6, dtype=torch.bool)},
    ):
        out, lse = qkv.attention_with_lse(query, key, value, **kwargs)
        empty = lse.isinf()
        assert empty.any() and (lse[empty] == -INF).all()
        assert (out[empty] == 0).all()
        grads = torch.autograd.grad((out.sum(), lse[~empty].sum()), (query, key, value))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][empty] == 0).all()


@DTYPES
def test_the_most_negative_mask_on_every_key_gives_the_mean(dtype):
    query, key, value = tensors(dtype, requires_grad=True)
    mask = torch.full((5, 6), torch.finfo(dtype).min, dtype=dtype)
    out = qkv.attention(query, key, value, mask)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(g.isfinite().all() for g in grads)


@DTYPES
@pytest.mark.parametrize("size", [1e4, 1e8, 1e30])
def test_scores_of_any_size(size, dtype):
    if size > 1e20 and dtype == torch.float32:
        size = 1e17  # scores of 1e34: larger ones are infinite
    query, key, value = tensors(dtype)
    query, key = query * size**0.5, key * size**0.5
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = qkv.attention_with_lse(*leaves)
    assert out.isfinite().all() and lse.isfinite().all()
    # One key has all the weight.
    best = (query @ key.transpose(-2, -1)).argmax(-1)
    torch.testing.assert_close(out, value.gather(-2, best.unsqueeze(-1).expand_as(out)))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + lse.sum(), leaves))


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
def test_weights_of_derivatives_add_up(size, rows, dtype):
    """Few rows take a kernel that sums scores in another order, and those of 1e6 are 1/16 apart."""
    query = torch.randn(2, rows, 64, dtype=dtype) * size**0.5
    key = torch.randn(2, 200, 64, dtype=dtype) * size**0.5
    value = torch.zeros(2, 200, 3, dtype=dtype, requires_grad=True)
    incoming = torch.ones(2, rows, 3, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(
        qkv.attention(query, key, value), value, incoming, create_graph=True
    )
    torch.testing.assert_close(grad.sum(1), incoming.sum(1))
    (of_incoming,) = torch.autograd.grad(grad.sum(), incoming)
    torch.testing.assert_close(of_incoming, torch.ones_like(incoming))
    _, along = torch.func.jvp(
        lambda v: qkv.attention(query, key, v), (value.detach(),), (torch.ones_like(value),)
    )
    torch.testing.assert_close(along, torch.ones_like(along))


def test_large_masks_keep_their_order():
    """-3e38 is more than -3.4e38, although both are far out and times log2(e) infinite."""
    query = key = torch.zeros(1, 2, 4)
    value = torch.tensor([[[1.0], [2.0]]])
    mask = torch.tensor([[-3.4e38, -3.0e38], [3.4e38, 3.0e38]])
    assert qkv.attention(query, key, value, mask).flatten().tolist() == [2.0, 1.0]


@pytest.mark.parametrize("rows", [1, 4, 30, 300])
@pytest.mark.parametrize("keys", [1000, 2100])
def test_a_kept_nan_is_seen_among_weights_of_zero(rows, keys):
    """Of a range of keys all of whose scores are -inf, without being masked out."""
    query, key, value = torch.full((rows, 1), 1e20), torch.zeros(keys, 1), torch.zeros(keys, 1)
    key[300:] = -1e20
    value[-1] = NAN
    assert qkv.attention(query, key, value, scale=1.0).isnan().all()


ALL_FORMULAS = {
    "weights": lambda q, k, v, **options: qkv.attention_weights(q, k, **options),
    "gradient_of_weights": lambda q, k, v, **options: gradient(
        lambda q: qkv.attention_weights(q, k, **options), q
    ),
    "third_order": lambda q, k, v, **options: gradient(
        lambda q: gradient(lambda q: gradient(lambda q: qkv.attention(q, k, v, **options), q), q), q
    ),
    "jvp_of_jvp": lambda q, k, v, **options: along(
        lambda q: along(lambda q: qkv.attention(q, k, v, **options), q), q
    ),
}
UNFUSED = {"third_order", "jvp_of_jvp"}


def gradient(f, x):
    return torch.func.grad(lambda x: f(x).sin().sum())(x)


def along(f, x):
    return torch.func.jvp(f, (x,), (x,))[1]


@pytest.mark.parametrize(
    "formulas",
    [pytest.param(f, marks=[pytest.mark.unfused] * (f in UNFUSED)) for f in ALL_FORMULAS],
)
@pytest.mark.filterwarnings("ignore:qkv")
@pytest.mark.parametrize(
    "options",
    [{"sinks": torch.tensor([math.inf, 0.0])}, {"softcap": 1e39}, {"softcap": 1e300}],
    ids=["infinite_sink", "1e39", "1e300"],
)
def test_formulas_of_options_beyond_float32(options, formulas):
    """What has no fused kernel takes them as kernels do."""
    q, k, v = torch.randn(3, 2, 5, 4)
    found = ALL_FORMULAS[formulas](q, k, v, **options)
    assert found.isfinite().all()
    if "sinks" in options:
        assert (found[0] == 0).all() and (found[1] != 0).any()
        _, lse = qkv.attention_with_lse(q, k, v, **options)
        assert (lse[0] == math.inf).all()


def test_gradient_of_weights_with_a_softcap_below_float32():
    q, k = torch.randn(2, 2, 5, 4)
    found = gradient(lambda q: qkv.attention_weights(q, k, softcap=1e-46), q)
    assert found.isfinite().all()


def test_results_of_two_dimensions_may_be_changed_in_place():
    q, parameter = torch.randn(5, 4), torch.ones(5, 4, requires_grad=True)
    with torch.no_grad():
        out = qkv.attention(q, q, q)
    out += parameter
    out.sum().backward()
    assert (parameter.grad == 1).all()


@pytest.mark.parametrize(
    "gradient",
    [
        lambda f, x: torch.autograd.grad(f(x), x),
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
        lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(x[None]),
    ],
    ids=["autograd", "grad", "vmap(grad)", "grad(vmap)"],
)
@pytest.mark.parametrize("result", ["attention", "output", "logsumexp"])
def test_results_changed_in_place_are_noticed(result, gradient):
    """The derivative needs them as they were."""

    def f(x):
        if result == "attention":
            y = qkv.attention(x, x, x)
        else:
            y = qkv.attention_with_lse(x, x, x)[result == "logsumexp"]
        return y.mul_(2).square().sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(f, torch.randn(5, 8, requires_grad=True))


def test_window_far_beyond_the_keys():
    query, key, value = tensors(torch.float32)
    everything = qkv.attention(query, key, value)
    far = 2**62
    assert torch.equal(qkv.attention(query, key, value, window=(far, far)), everything)
    assert torch.equal(
        qkv.attention(query, key, value, is_causal=True, query_offset=far), everything
    )
    assert (qkv.attention(query, key, value, is_causal=True, query_offset=-far) == 0).all()


@pytest.mark.parametrize("far", [2**60, 2**61, 2**62, 2**63 - 1])
def test_a_window_may_make_up_for_a_far_offset(far):
    """The kept keys are those of the window beside them, for kernels and for formulas."""
    query, key, value = tensors(torch.float32)
    for window, query_offset, near in (
        ((far, 0), far, (0, -1)),
        ((far, -1), far - 2, (2, -1)),
        ((-1, far), -far, (-1, 0)),
        ((far, far), -far, (-1, 0)),
        ((far, 0), far // 2, (-1, -1)),
    ):
        options = {"window": window, "query_offset": query_offset}
        found = qkv.attention(query, key, value, **options)
        assert torch.equal(found, qkv.attention(query, key, value, window=near))
        found = qkv.attention_weights(query, key, **options)
        assert torch.equal(found, qkv.attention_weights(query, key, window=near))


@DTYPES
@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("keys", [8, 2100])
def test_a_kept_nan_is_seen_by_every_kernel(rows, keys, dtype):
    """Few rows and many keys take other kernels, whose parts are merged."""
    query, key = torch.randn(rows, 4, dtype=dtype), torch.randn(keys, 4, dtype=dtype)
    key[-1] = NAN
    for q, k in ((query, key), (torch.full_like(query, NAN), key.nan_to_num())):
        out, lse = qkv.attention_with_lse(q, k, torch.ones(keys, 4, dtype=dtype))
        assert out.isnan().all() and lse.isnan().all()


@DTYPES
def test_poison_in_a_key_that_no_row_keeps(dtype):
    """Nor do the empty lanes of a tile keep it."""
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[:, 2], keep[1, 3:] = False, False
    query, key, value = tensors(dtype)
    key[:, 2], query[:, 1] = NAN, NAN
    leaves = [x.requires_grad_() for x in (query, key, value)]
    grads = torch.autograd.grad(qkv.attention(*leaves, keep).sum(), leaves)
    assert all((g[:, 2] == 0).all() for g in grads[1:])


@DTYPES
def test_poison_in_the_gradient_of_an_empty_row_and_its_sink(dtype):
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[1] = False
    sinks = torch.zeros(2, dtype=dtype, requires_grad=True)
    grad = torch.ones(2, 5, 4, dtype=dtype)
    (clean,) = torch.autograd.grad(qkv.attention(*tensors(dtype), keep, sinks=sinks), sinks, grad)
    grad[:, 1] = NAN
    (dirty,) = torch.autograd.grad(qkv.attention(*tensors(dtype), keep, sinks=sinks), sinks, grad)
    assert torch.equal(clean, dirty)


def test_scores_that_overflow_to_minus_infinity():
    """A row of them is like an empty one, also in its gradients."""
    query, key, value = (torch.full((1, 5, 1), x) for x in (1e17, -1e17, 1.0))
    mask = torch.full((5, 5), torch.finfo(torch.float32).min)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = qkv.attention(*leaves, mask, scale=1.0)
    for g in torch.autograd.grad(out.sum(), leaves):
        assert g.isfinite().all()


@pytest.mark.parametrize("softcap", [1e-300, 1e20, 1e39, 1e300])
def test_a_softcap_that_does_not_fit_into_float32(softcap):
    x = torch.randn(3, 4)
    out = qkv.attention(x, x, x, softcap=softcap)
    expected = x.mean(0).expand(3, 4) if softcap < 1 else qkv.attention(x, x, x)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 0.026, 0.042])
@pytest.mark.parametrize("size", [(5, 6), (70, 200)], ids=["few", "tiles"])
@EVERY_DTYPE
def test_scores_far_beyond_the_softcap_do_not_move(dtype, size, softcap):
    """All derivatives with respect to queries and keys are 0: not nearly 0, as a second one is the
    first one's factor divided by the softcap."""
    g = samples.generator(0)
    query, key, value = (torch.randn(2, n, 8, generator=g) for n in (*size, size[1]))
    for x in (query, key):  # scores of nearly 1 or -1
        x *= 0.02
        x[..., 0] = torch.where(x[..., 0] < 0, -1.0, 1.0)
    query, key, value = (x.to(dtype).requires_grad_() for x in (query, key, value))

    def call(query, key):
        return qkv.attention_with_lse(query, key, value, scale=1.0, softcap=softcap)

    out, lse = call(query, key)
    of_value = torch.randn(out.shape, generator=g).to(dtype)
    grads = torch.autograd.grad((out, lse), (query, key), (of_value, lse), create_graph=True)
    for grad in grads:
        assert (grad == 0).all()
    along = [torch.randn(x.shape, generator=g).to(dtype) for x in grads]
    for second in torch.autograd.grad(grads, (query, key, value), along):
        assert (second == 0).all()
    _, tangents = torch.func.jvp(call, (query.detach(), key.detach()), tuple(along))
    for tangent in tangents:
        assert (tangent == 0).all()


@DTYPES
def test_weights_of_a_row_sum_to_one_however_large_its_scores_are(dtype):
    query, key, _ = tensors(dtype)
    mask = torch.full((5, 6), torch.finfo(dtype).min, dtype=dtype)
    weights = qkv.attention_weights(query, key, mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, dtype=dtype))


def test_a_key_mask_without_dimensions():
    x = torch.randn(3, 4, dtype=torch.float64)
    everything = qkv.attention_weights(x, x)
    assert torch.equal(qkv.attention_weights(x, x, key_mask=torch.tensor(True)), everything)
    assert qkv.attention_weights(x, x, key_mask=torch.tensor(False)).abs().max() == 0


@pytest.mark.parametrize("offset", [-(2**63), 2**63 - 1])
def test_an_offset_at_the_end_of_the_integers(offset):
    x = torch.randn(3, 4, dtype=torch.float64)
    weights = qkv.attention_weights(x, x, is_causal=True, query_offset=offset)
    expected = qkv.attention_weights(x, x) * (offset > 0)
    assert torch.equal(weights, expected)
    out = qkv.attention(x, x, x, is_causal=True, query_offset=offset)
    torch.testing.assert_close(out, expected @ x)


@DTYPES
@pytest.mark.parametrize("size", [-1e4, -1e9, 1e7, "lowest"])
@pytest.mark.parametrize("rows", [2, 5])
def test_gradients_of_rows_with_large_scores(size, rows, dtype):
    """The logsumexp is rounded, by more than 1 if it is large; the weights must not be."""
    _, key, value = tensors(dtype)
    size = torch.finfo(dtype).min if size == "lowest" else size
    mask = torch.full((rows, 6), size, dtype=dtype)
    query = torch.zeros(2, rows, 4, dtype=dtype)
    sinks = torch.full((2,), size, dtype=dtype)
    for kwargs, kept in (({}, 6), ({"sinks": sinks}, 7)):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = qkv.attention(*leaves, mask, **kwargs)
        torch.testing.assert_close(out, (value.sum(1, keepdim=True) / kept).expand_as(out))
        (grad,) = torch.autograd.grad(out.sum(), leaves[2])
        torch.testing.assert_close(grad, torch.full_like(grad, rows / kept))


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_a_key_mask_that_is_strided(rows):
    q, k = torch.randn(2, 3, rows, 4), torch.randn(2, 3, 7, 4)
    for mask in ((torch.rand(2, 14) < 0.6)[:, ::2], torch.tensor([[True], [False]]).expand(2, 7)):
        expected = qkv.attention(q, k, k, key_mask=mask.contiguous())
        assert torch.equal(qkv.attention(q, k, k, key_mask=mask), expected)


@pytest.mark.parametrize("rows", [1, 70])
def test_a_bool_of_any_byte_is_true(rows):
    q, k = torch.randn(3, rows, 8), torch.randn(3, 100, 8)
    bytes = torch.randint(256, (rows, 100), dtype=torch.uint8)
    bytes[torch.rand(rows, 100) < 0.5] = 0
    for name, mask in (("attn_mask", bytes), ("key_mask", bytes[0])):
        found = qkv.attention(q, k, k, **{name: mask.view(torch.bool)})
        assert torch.equal(found, qkv.attention(q, k, k, **{name: mask != 0}))


def test_nan_for_the_logsumexp_of_a_row_that_keeps_nothing():
    """It is the sink itself, whose second derivative is 0."""
    query, key, value = (torch.randn(1, n, 4, requires_grad=True) for n in (3, 2, 2))
    sinks = torch.zeros(1, requires_grad=True)
    out, lse = qkv.attention_with_lse(query, key, value, window=(0, 0), sinks=sinks)

    def second(of_row_without_keys):
        incoming = torch.ones_like(out), torch.tensor([[1.0, 1.0, of_row_without_keys]])
        (first,) = torch.autograd.grad((out, lse), query, incoming, create_graph=True)
        return torch.autograd.grad(first.sum(), (sinks, key, value))

    for found, expected in zip(second(math.nan), second(1.0), strict=True):
        assert torch.equal(found, expected)
