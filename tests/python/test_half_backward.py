"""The backward of half types: read, and rounded once, by the kernels themselves.

bfloat16 has kernels of its own where the processor has AMX, which work on squares of 32 keys and
32 rows: sizes here are just under, at and over multiples.
"""

import definition
import pytest
import samples
import torch

import qkv

NAN = float("nan")

half_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def numbers(shape, seed, dtype):
    return torch.randn(shape, generator=samples.generator(seed)).to(dtype)


def problem(batch, heads, kv_heads, m, n, d, dv, dtype):
    return (
        numbers((batch, heads, m, d), 1, dtype),
        numbers((batch, kv_heads, n, d), 2, dtype),
        numbers((batch, kv_heads, n, dv), 3, dtype),
        numbers((batch, heads, m, dv), 4, dtype),
    )


def gradients(query, key, value, grad, **kwargs):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = qkv.attention(*leaves, enable_gqa=True, **kwargs)
    return torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("m, n", [(16, 32), (33, 97), (128, 127), (129, 160), (300, 1100)])
@pytest.mark.parametrize("d, dv", [(1, 16), (2, 16), (17, 33), (32, 32), (64, 5), (80, 64)])
@pytest.mark.parametrize("options", ["none", "causal", "window", "scores"])
@half_types
def test_rounded_once(m, n, d, dv, options, dtype):
    """In L2 little more is lost than by one rounding of what is exact."""
    query, key, value, grad = problem(1, 2, 1, m, n, d, dv, dtype)
    kwargs = {
        "none": {},
        "causal": {"is_causal": True, "query_offset": n // 2},
        "window": {"window": (20, 30), "query_offset": n // 3},
        "scores": {"softcap": 3.0, "alibi_slopes": torch.tensor([0.01, 0.2])},
    }[options]
    actual = gradients(query, key, value, grad, **kwargs)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    wide = {n: x.double() if torch.is_tensor(x) else x for n, x in kwargs.items()}
    out, _, _ = definition.attention(*leaves, enable_gqa=True, **wide)
    for name, a, e in zip("qkv", actual, torch.autograd.grad(out, leaves, grad.double())):
        rounding = (e.to(dtype).double() - e).norm()
        assert (a.double() - e).norm() < 1.25 * rounding + 1e-6, name


@half_types
def test_heads_apart_or_together(dtype):
    query, key, value, grad = problem(3, 4, 2, 150, 1300, 40, 24, dtype)
    kwargs = {"is_causal": True, "query_offset": 1150}
    together = gradients(query, key, value, grad, **kwargs)
    for b in range(3):
        for h in range(2):
            alone = gradients(
                query[b : b + 1, 2 * h : 2 * h + 2],
                key[b : b + 1, h : h + 1],
                value[b : b + 1, h : h + 1],
                grad[b : b + 1, 2 * h : 2 * h + 2],
                **kwargs,
            )
            assert torch.equal(alone[0], together[0][b : b + 1, 2 * h : 2 * h + 2])
            assert torch.equal(alone[1], together[1][b : b + 1, h : h + 1])
            assert torch.equal(alone[2], together[2][b : b + 1, h : h + 1])


@half_types
def test_one_gradient_or_all(dtype):
    """The bits of one do not depend on which others are asked for."""
    query, key, value, grad = problem(1, 2, 2, 100, 700, 32, 32, dtype)
    extras = {"attn_mask": numbers((100, 700), 5, dtype), "sinks": numbers((2,), 6, dtype)}
    extras["alibi_slopes"] = numbers((2,), 7, dtype).abs() / 16
    inputs = {"query": query, "key": key, "value": value, **extras}

    def asked_for(names):
        given = {n: x.detach().requires_grad_(n in names) for n, x in inputs.items()}
        out = qkv.attention(**given)
        return dict(zip(names, torch.autograd.grad(out, [given[n] for n in names], grad)))

    together = asked_for(list(inputs))
    for name in inputs:
        assert torch.equal(asked_for([name])[name], together[name]), name


@half_types
def test_strides(dtype):
    """Rows that lie apart, at odd distances, backwards in memory order; a key that is broadcast."""
    shapes = problem(2, 2, 2, 70, 140, 24, 20, dtype)
    contiguous = gradients(*shapes)
    apart = []
    for x in shapes:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
        apart.append(wide[..., 1 : 1 + x.shape[-1]].copy_(x))
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shapes]
    columns = [x.mT.contiguous().mT for x in shapes]
    for other in (apart, across, columns):
        for expected, actual in zip(contiguous, gradients(*other)):
            assert torch.equal(expected, actual)
    query, key, value, grad = shapes
    one = key[:1]
    expected = gradients(query, one.repeat(2, 1, 1, 1), value, grad)
    actual = gradients(query, one.expand(2, -1, -1, -1), value, grad)
    for e, a in zip(expected, actual):
        assert torch.equal(e, a)


@half_types
@pytest.mark.parametrize("where", ["key", "value", "query", "grad"])
def test_what_is_not_kept_may_be_nan(where, dtype):
    """Whole tiles and parts of them; the last rows and keys lie beside lanes that are empty."""
    m, n = 110, 333
    query, key, value, grad = problem(1, 2, 1, m, n, 18, 34, dtype)
    keep = torch.rand(m, n, generator=samples.generator(8)) < 0.7
    if where in ("key", "value"):
        lost = [0, 31, 32, 100, n - 1]
        keep[:, lost] = False
    else:
        lost = [0, 15, 32, 60, m - 1]
        keep[lost] = False
    clean = gradients(query, key, value, grad, attn_mask=keep)
    {"key": key, "value": value, "query": query, "grad": grad}[where][..., lost, :] = NAN
    for c, p in zip(clean, gradients(query, key, value, grad, attn_mask=keep)):
        assert torch.equal(c, p)


@half_types
def test_what_is_not_kept_may_be_large(dtype):
    """It leaves every bit: nothing is measured by it."""
    query, key, value, grad = problem(1, 2, 1, 110, 333, 18, 34, dtype)
    keep = torch.rand(110, 333, generator=samples.generator(8)) < 0.7
    lost_keys, lost_rows = [0, 31, 32, 100, 332], [0, 15, 32, 60, 109]
    keep[:, lost_keys] = keep[lost_rows] = False
    clean = gradients(query, key, value, grad, attn_mask=keep)
    for x, lost in ((key, lost_keys), (value, lost_keys), (query, lost_rows), (grad, lost_rows)):
        x[..., lost, :] = torch.finfo(dtype).max
    for c, p in zip(clean, gradients(query, key, value, grad, attn_mask=keep)):
        assert torch.equal(c, p)


@half_types
@pytest.mark.parametrize("where", ["key", "value", "query", "grad"])
def test_what_is_kept_shows_its_nan(where, dtype):
    """Without a mask, where a causal one ends, and in no other row or key."""
    m = n = 100
    query, key, value, grad = problem(1, 1, 1, m, n, 32, 32, dtype)
    clean = gradients(query, key, value, grad, is_causal=True)
    at = 57
    {"key": key, "value": value, "query": query, "grad": grad}[where][..., at, 3] = NAN
    dq, dk, dv = gradients(query, key, value, grad, is_causal=True)
    if where in ("key", "value"):
        assert torch.equal(dq[..., :at, :], clean[0][..., :at, :])
        assert dq[..., at:, :].isnan().all()
    else:
        assert dq[..., at, :].isnan().all()
        rest = [i for i in range(m) if i != at]
        assert torch.equal(dq[..., rest, :], clean[0][..., rest, :])
        assert torch.equal(dk[..., at + 1 :, :], clean[1][..., at + 1 :, :])
        assert torch.equal(dv[..., at + 1 :, :], clean[2][..., at + 1 :, :])
        assert dk[..., : at + 1, :].isnan().all() and dv[..., : at + 1, 3].isnan().all()


@half_types
def test_nan_of_one_column(dtype):
    """Of what came in for the output: in the values' gradient it stays in its column."""
    query, key, value, grad = problem(1, 1, 1, 100, 100, 32, 32, dtype)
    clean = gradients(query, key, value, grad, is_causal=True)[2]
    grad[..., 57, 3] = NAN
    poisoned = gradients(query, key, value, grad, is_causal=True)[2]
    seen = torch.zeros_like(clean, dtype=torch.bool)
    seen[..., :58, 3] = True
    assert poisoned[seen].isnan().all()
    torch.testing.assert_close(poisoned[~seen], clean[~seen])


@half_types
def test_rows_of_any_size(dtype):
    """What is large in one row is no measure for another: each row of a gradient is as exact."""
    m, n, d = 200, 300, 32
    query, key, value, grad = problem(1, 1, 1, m, n, d, d, dtype)
    smallest = -60 if dtype == torch.bfloat16 else -8
    powers = lambda rows: 2.0 ** torch.arange(smallest, 0).repeat(rows)[:rows].view(-1, 1)
    # Each value's gradient is that of one row, or of all in the other half.
    keep = torch.zeros(m, n, dtype=torch.bool)
    keep[torch.arange(m // 2), torch.arange(m // 2)] = True
    keep[m // 2 :, m // 2 :] = True
    grad[..., : m // 2, :] *= powers(m // 2).to(dtype)
    key[..., m // 2 :, :] *= powers(n - m // 2).to(dtype)
    actual = gradients(query, key, value, grad, attn_mask=keep)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    out, _, _ = definition.attention(*leaves, attn_mask=keep)
    for name, a, e in zip("qkv", actual, torch.autograd.grad(out, leaves, grad.double())):
        error, size = (a.double() - e).norm(dim=-1), e.norm(dim=-1)
        tiny = torch.finfo(dtype).tiny if dtype == torch.float16 else 1e-6
        assert (error <= 2.0**-8 * size + tiny).all(), name


@half_types
def test_columns_of_any_size(dtype):
    """Each column of a gradient is as exact, whatever the others: some of Q and K are often large."""
    m, n, d = 200, 300, 48
    query, key, value, grad = problem(1, 1, 1, m, n, d, d, dtype)
    powers = 4.0 ** (torch.arange(d) % 5 - 4)
    grad, query = (x.mul(powers).to(dtype) for x in (grad, query))
    key[..., 24:] = key[..., 24:].mul(powers.flip(0)[24:]).to(dtype)
    actual = gradients(query, key, value, grad)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    out, _, _ = definition.attention(*leaves)
    for name, a, e in zip("qkv", actual, torch.autograd.grad(out, leaves, grad.double())):
        error, size = (a.double() - e).norm(dim=-2), e.norm(dim=-2)
        assert (error <= 2.0**-8 * size).all(), name


@half_types
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e-34, 1e-30, 1e-12, 1.0, 1e30])
def test_gradients_of_any_size(size, is_causal, dtype):
    """They are proportional to what comes in, as far as the dtype reaches."""
    if dtype == torch.float16:
        size = size ** (1 / 10)
    query, key, value, grad = problem(1, 1, 1, 100, 200, 64, 64, dtype)
    grad = (grad.double() * size).to(dtype)
    actual = gradients(query, key, value, grad, is_causal=is_causal, query_offset=100)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    out, _, _ = definition.attention(*leaves, is_causal=is_causal, query_offset=100)
    for name, a, e in zip("qkv", actual, torch.autograd.grad(out, leaves, grad.double())):
        assert (a.double() - e).norm() < 2.0**-8 * e.norm(), name


@half_types
@pytest.mark.parametrize("rows", [96, 200])
def test_sums_of_the_largest(rows, dtype):
    """All numbers of one size and all terms of one sign: no sum could be larger for its terms."""
    n, d = 192, 128
    largest = 1.9921875  # the largest with 8 bits below 2
    sign = torch.ones(n)
    sign[::2] = -1.0
    query = torch.zeros(1, 1, rows, d)
    # dP is the sign of the key, so that dS is positive where the key is, and P the same for all.
    value, grad = torch.zeros(1, 1, n, d), torch.zeros(1, 1, rows, d)
    value[..., 0] = sign
    grad[..., 0] = 1.0
    grad[..., 1:] = largest
    key = torch.zeros(1, 1, n, d)
    key[..., : d // 2] = sign.view(-1, 1) * largest
    query[..., d // 2 :] = largest  # orthogonal to all keys
    query, key, value, grad = (x.to(dtype) for x in (query, key, value, grad))
    actual = gradients(query, key, value, grad)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    out, _, _ = definition.attention(*leaves)
    for name, a, e in zip("qkv", actual, torch.autograd.grad(out, leaves, grad.double())):
        assert (a.double() - e).norm() < 2.0**-8 * e.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_heads_between_the_rows(heads, dtype):
    """Views of (B, N, H, D): some rows are so far apart that kernels copy them."""
    shapes = problem(1, heads, heads, 130, 300, 64, 64, dtype)
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shapes]
    for expected, actual in zip(gradients(*shapes), gradients(*across)):
        assert torch.equal(expected, actual)
    assert torch.equal(qkv.attention(*shapes[:3]), qkv.attention(*across[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_second_order_of_heads_between_the_rows(dtype):
    """With a learned mask, and along the query or the values alone."""
    together = problem(1, 4, 4, 130, 300, 64, 64, dtype)
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in together]
    mask, along = numbers((130, 300), 5, dtype), problem(1, 4, 4, 130, 300, 64, 64, dtype)

    def results(query, key, value, grad):
        leaves = [x.detach().requires_grad_() for x in (query, key, value, mask)]
        incoming = grad.detach().requires_grad_()
        out = qkv.attention(*leaves, is_causal=True, query_offset=170)
        first = torch.autograd.grad(out, leaves, incoming, create_graph=True)
        second = torch.autograd.grad(first[:3], [*leaves, incoming], along[:3])
        moved = [
            torch.func.jvp(lambda x: qkv.attention(x, key, value), (query,), (along[0],))[1],
            torch.func.jvp(lambda x: qkv.attention(query, key, x), (value,), (along[2],))[1],
        ]
        return [*first, *second, *moved]

    for expected, actual in zip(results(*together), results(*across)):
        assert torch.equal(expected, actual) and expected.abs().sum() > 0
