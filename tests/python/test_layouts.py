"""Which dimensions operands have, and where they and results lie in memory."""

import pytest
import torch

import qkv


def test_dimensions_of_size_1_are_not_counted():
    q = torch.randn(*[2, 1] * 5, 1, 3, 4)
    flat = q.flatten(0, 9)
    assert torch.equal(qkv.attention(q, q, q), qkv.attention(flat, flat, flat).view(q.shape))


def test_a_value_with_heads_of_its_own():
    q, v = torch.randn(5, 4), torch.randn(3, 5, 4)
    expected = torch.stack([qkv.attention(q, q, x) for x in v])
    assert torch.equal(qkv.attention(q, q, v), expected)
    assert torch.equal(qkv.attention(q, q, v[:1]), expected[:1])


def test_results_lie_as_their_inputs():
    q = torch.randn(1, 2, 5, 4).expand(3, 2, 5, 4)
    k = torch.randn(3, 2, 7, 4)
    assert qkv.attention(q, k, k).is_contiguous()
    inputs = [
        torch.randn(2, 3, 5, 4),
        torch.randn(2, 7, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 7).mT,
        torch.randn(7, 5).t(),
    ]
    inputs = [x.requires_grad_() for x in inputs]
    out = qkv.attention(*inputs)
    # (create_graph: else autograd copies what it hands out.)
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs, create_graph=True)):
        assert gradient.stride() == x.stride()
    matrices = [torch.randn(4, n).t().requires_grad_() for n in (5, 7, 7)]
    out = qkv.attention(*matrices)
    for x, gradient in zip(matrices, torch.autograd.grad(out.sum(), matrices, create_graph=True)):
        assert gradient.stride() == x.stride()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("permutation", ["bhdn", "bndh", "dnbh"])
def test_results_of_columns_are_those_of_rows(dtype, permutation):
    """To the bit, with all derivatives; (B, H, D, N) is how convolutions have them."""

    def lying(rows, columns, heads=2):
        sizes = {"b": 3, "h": heads, "n": rows, "d": columns}
        x = torch.randn([sizes[d] for d in permutation], dtype=dtype)
        return x.permute([permutation.index(d) for d in "bhnd"])

    def derivatives(mask, grad, *tensors):
        q, k, v, *along = tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, v, mask, grad)]
        out, lse = qkv.attention_with_lse(*leaves[:4], enable_gqa=True)
        first = torch.autograd.grad(out, leaves[:4], leaves[4], create_graph=True)
        second = torch.autograd.grad(first[:3], leaves, along)
        _, tangent = torch.func.jvp(
            lambda *x: qkv.attention(*x, mask, enable_gqa=True), (q, k, v), tuple(along)
        )
        return out, lse, *first, *second, tangent

    for m, n, d, dv in ((5, 7, 4, 9), (33, 70, 24, 16), (70, 530, 33, 40)):
        tensors = [lying(m, d, 4), lying(n, d), lying(n, dv)]
        tensors += [lying(m, d, 4), lying(n, d), lying(n, dv)]
        others = [torch.randn(n, m, dtype=dtype).t(), lying(m, dv, 4)]
        expected = derivatives(*(x.contiguous() for x in (*others, *tensors)))
        for actual, e in zip(derivatives(*others, *tensors), expected, strict=True):
            assert torch.equal(actual, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_batch_dimensions_and_directions_that_lie_otherwise(dtype):
    query = torch.randn(*[2] * 9, 1, 2, 2, dtype=dtype, requires_grad=True)
    bias = torch.randn(*[2] * 9, 1, 2, 2, requires_grad=True)

    def reversed_batch(like):
        x = torch.randn_like(like).permute(*reversed(range(9)), 9, 10, 11)
        return x.detach().requires_grad_()

    def attend(x, bias):
        return qkv.attention(x, x, x, attn_mask=bias)

    def derivatives(grad, *along):
        _, tangent = torch.func.jvp(attend, (query, bias), along)
        out = attend(query, bias)
        first = torch.autograd.grad(out, (query, bias), grad, create_graph=True)
        return tangent, *first, *torch.autograd.grad(first, (query, bias, grad), along)

    directions = [reversed_batch(x) for x in (query, query, bias)]
    expected = derivatives(*(x.contiguous() for x in directions))
    for actual, e in zip(derivatives(*directions), expected, strict=True):
        assert torch.equal(actual, e)


def test_tangents_of_many_dimensions_that_lie_otherwise():
    q = torch.randn(*[2] * 9, 1, 2, 2)
    tangent = torch.randn_like(q).permute(*reversed(range(9)), 9, 10, 11)
    operands = [q, q, q, *[None] * 6, 0.0, 0.0, [-1, -1, 0]]
    results = torch.ops.qkv._attention_forward(*operands)
    moved = [
        torch.ops.qkv._attention_jvp(*operands, *results, t, *[None] * 5)[0]
        for t in (tangent, tangent.contiguous())
    ]
    assert torch.equal(*moved)


def test_directions_of_a_key_that_has_some_of_many_dimensions():
    """It merges in eight ways as it lies: what is copied beside it has to as well."""
    q = torch.randn(*[2] * 9, 1, 1, 1, requires_grad=True)
    v = torch.randn(*[2] * 9, 1, 2, 1, requires_grad=True)
    has = [2, 1, 2, 2, 1, 2, 2, 2, 1]
    k = torch.randn([has[d] for d in (0, 6, 2, 3, 4, 5, 1, 7, 8)] + [1, 2, 1])
    k = k.transpose(1, 6).requires_grad_()

    def second(q, k, v):
        out = qkv.attention(q, k, v)
        first = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(first, (q, k, v), [x.detach().cos() for x in (q, k, v)])

    merged = [x.detach().expand(*[2] * 9, *x.shape[9:]).flatten(0, 8) for x in (q, k, v)]
    expected = second(*(x.requires_grad_() for x in merged))
    for actual, e in zip(second(q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, e.view(*[2] * 9, *e.shape[1:]).sum_to_size(actual.shape))
