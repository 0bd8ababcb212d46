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
