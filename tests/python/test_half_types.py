"""bfloat16 and float16: sums in float32 throughout, one rounding at the end.

The bound is FlashAttention's: at most twice the error of the same computation in PyTorch operations
of the same dtype, both against the definition in float64.
"""

import os
import subprocess
import sys

import definition
import pytest
import samples
import torch
from test_definition import AGAIN, DEFINITION, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

import qkv

BATCH = {"batch": [2], "heads": 2, "queries": 70, "keys": 301, "head_dim": 24, "value_dim": 33}
MANY_KEYS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 231},
    "window": {"window": [40, 3], "query_offset": 100},
    "grouped": {"heads": 6, "kv_heads": 2, "enable_gqa": True, "queries": 40},
    "scores": {"softcap": 5.0, "alibi_slopes": {"shape": [2]}, "sinks": {"shape": [2]}},
    "masks": {
        "attn_mask": {"dtype": "float", "shape": [2, 70, 301], "minus_inf": True},
        "key_mask": {"shape": [2, 301]},
    },
    "dropout": {"dropout_p": 0.3},
    "one_tile": {"queries": 20, "keys": 2100, "is_causal": True, "query_offset": 1000},
    "decoding": {"heads": 16, "kv_heads": 1, "enable_gqa": True, "queries": 4, "keys": 2101},
}

half_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@half_types
@samples.parametrize(empty=False)
def test_at_most_twice_the_error_of_pytorch(entry, dtype):
    check(entry, dtype)


@half_types
@pytest.mark.parametrize("name", MANY_KEYS)
def test_many_keys(name, dtype):
    """With AVX512-BF16 or AMX, those of bfloat16 are multiplied in bfloat16; with AMX-FP16, those of
    float16 in float16."""
    check({"name": name, **BATCH, **MANY_KEYS[name]}, dtype)


@pytest.mark.parametrize("isa", ["avx512_bf16", "avx512_amx", "avx512_amx_fp16"])
def test_products_in_16_bits(isa):
    """The same where they are not this processor's choice."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_many_keys"],
        env={**os.environ, AGAIN: "1", "QKV_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "this processor does not have it" in done.stdout + done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stdout + done.stderr


def check(entry, dtype):
    sample = samples.make(entry, dtype).requires_grad()
    exact = sample.to(torch.float64).requires_grad()
    actual = results(qkv.attention_with_lse, sample, dtype)
    same_dtype = results(DEFINITION, sample, dtype)
    assert actual["output"].dtype == dtype and actual["logsumexp"].dtype == torch.float32
    for name, expected in results(DEFINITION, exact, dtype).items():
        infinite = expected.isinf()
        assert torch.equal(actual[name][infinite].double(), expected[infinite]), name
        error, of_same_dtype, of_rounding = (
            (x.double() - expected).masked_fill(infinite, 0.0).abs().max().item()
            for x in (actual[name], same_dtype[name], expected.to(dtype))
        )
        # PyTorch may by luck be exact; nothing is nearer than one rounding.
        assert error <= max(2 * of_same_dtype, of_rounding) + 1e-6, name


@half_types
@pytest.mark.parametrize("mask_dtype", ["half", "float32"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_masks_slopes_and_sinks_of_either_dtype(dtype, mask_dtype, rows):
    """Few rows and many take different kernels, and read keys and masks of 16 bits in place."""
    keys, extra = 2100, dtype if mask_dtype == "half" else torch.float32
    q = torch.randn(2, 2, rows, 24, dtype=dtype)
    k, v = (torch.randn(2, 1, keys, 24, dtype=dtype) for _ in range(2))
    kwargs = {
        "attn_mask": torch.randn(2, 1, 1, keys).to(extra),
        "alibi_slopes": torch.rand(2).to(extra) / 100,
        "sinks": torch.randn(2).to(extra),
        "is_causal": True,
        "query_offset": keys - rows,
    }
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    expected, lse, _ = definition.attention(q.double(), k.double(), v.double(), **exact)
    out, actual_lse = qkv.attention_with_lse(q, k, v, **kwargs)
    rounding = torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=rounding)
    torch.testing.assert_close(actual_lse.double(), lse, rtol=1e-6, atol=0)


@half_types
def test_subnormals_and_extremes(dtype):
    """What is read in 16 bits is every number that there is."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    numbers = numbers[numbers.isfinite()]
    # One key each, read as value by the kernel for few rows, and in the mask by both.
    q, k = torch.zeros(numbers.numel(), 1, 1, 1, dtype=dtype), torch.zeros(1, 1, 1, 1, dtype=dtype)
    value = numbers.view(-1, 1, 1, 1)
    assert torch.equal(qkv.attention(q, k, value), value)
    mask = numbers.view(-1, 1, 1, 1)
    for rows in (1, 50):
        q = torch.zeros(numbers.numel(), 1, rows, 1, dtype=dtype)
        lse = qkv.attention_with_lse(q, k, value, mask)[1]
        assert torch.equal(lse, numbers.float().view(-1, 1, 1).expand_as(lse))


@half_types
@pytest.mark.parametrize("size", [-1e3, -3e4, -1e9, -1e10, "lowest"])
def test_rows_of_scores_far_from_zero(size, dtype):
    """They have their weights, the rows between them the bits that they would have without them."""
    size = torch.finfo(dtype).min if size == "lowest" else max(size, torch.finfo(dtype).min)
    q, k, v = (torch.randn(2, 200, 64).to(dtype) for _ in range(3))
    far = torch.arange(200) % 3 == 1
    mask = torch.zeros(200, 200, dtype=dtype)
    mask[far] = size
    out, lse = qkv.attention_with_lse(q, k, v, mask)
    others, lse_of_others = qkv.attention_with_lse(q, k, v, torch.zeros_like(mask))
    assert torch.equal(out[:, ~far], others[:, ~far])
    assert torch.equal(lse[:, ~far], lse_of_others[:, ~far])
    q, k, v = q.double(), k.double(), v.double()
    scores = ((q @ k.mT / 8).float() + mask.float()).double()  # as float32 has them
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v, rtol=0, atol=8e-3)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=2e-7, atol=1e-5)


@half_types
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-40, 1e31])
def test_scales_of_any_sign_and_size(scale, dtype):
    """One that is positive, and not too large, is multiplied with log2 e; others are not."""
    q, k, v = (torch.randn(2, 300, 64).to(dtype) for _ in range(3))
    out, lse = qkv.attention_with_lse(q, k, v, is_causal=True, scale=scale)
    expected, expected_lse, _ = definition.attention(
        q.double(), k.double(), v.double(), is_causal=True, scale=scale
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    bound = 1e-6 * max(10.0, expected_lse.abs().max().item())
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=bound)


@half_types
def test_gradients_that_are_exactly_zero(dtype):
    """With one key each weight is 1, whatever the query: delta must not see the output's rounding."""
    q, k, v = (torch.randn(1, 1, n, 16, dtype=dtype, requires_grad=True) for n in (49, 1, 1))
    slopes = torch.rand(1, dtype=dtype, requires_grad=True)
    out = qkv.attention(q, k, v, alibi_slopes=slopes, dropout_p=0.9)
    grads = torch.autograd.grad(out, (q, k, slopes), torch.randn_like(out))
    # That of the slopes is a sum over 49 rows of terms up to 48 times as large.
    for grad, bound in zip(grads, (1e-3, 1e-3, 2e-2), strict=True):
        assert grad.abs().max() < bound


@half_types
@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
def test_weights_of_derivatives_add_up(size, dtype):
    """The backward's scores are the forward's, whose lse it takes, rounded like them: scores of 1e6
    are 1/16 apart, and a scale of 128^-1/2 rounds them."""
    query, key = ((torch.randn(2, rows, 128) * size**0.5).to(dtype) for rows in (40, 200))
    value = torch.zeros(2, 200, 3, dtype=dtype, requires_grad=True)
    incoming = torch.ones(2, 40, 3, dtype=dtype)
    (grad,) = torch.autograd.grad(qkv.attention(query, key, value), value, incoming)
    total = grad.float().sum(1)
    torch.testing.assert_close(total, torch.full_like(total, 40.0), rtol=5e-3, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_long_sequences_are_rounded_once(is_causal):
    """Relative L2 error under 2.2e-3 at N = 8192, where a rounding to bfloat16 is 1.7e-3."""
    n, d = 8192, 64
    q, k, v, grad_out = (torch.randn(1, 1, n, d, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    actual = torch.autograd.grad(qkv.attention(*leaves, is_causal=is_causal), leaves, grad_out)

    q, k, v, grad_out = (x.detach().double()[0, 0] for x in (q, k, v, grad_out))
    expected = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in torch.arange(n).split(1024):
        keep = (torch.arange(n) <= rows.unsqueeze(1)) | (not is_causal)
        p = (q[rows] @ k.T / d**0.5).masked_fill(~keep, float("-inf")).softmax(-1)
        dp = grad_out[rows] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / d**0.5
        expected[0][rows] = ds @ k
        expected[1] += ds.T @ q[rows]
        expected[2] += p.T @ grad_out[rows]
    for name, a, e in zip("qkv", actual, expected, strict=True):
        assert (a[0, 0].double() - e).norm() / e.norm() < 2.2e-3, name


@half_types
def test_masked_nan_leaves_every_bit(dtype):
    """Of so many rows and keys that products are in bfloat16 where they may be."""
    keep = torch.rand(60, 300) < 0.9
    keys, rows = [5, 150, 299], [3, 40]
    keep[:, keys] = keep[rows] = False
    query, grad_out = (torch.randn(1, 2, 60, 32).to(dtype) for _ in range(2))
    key, value = (torch.randn(1, 2, 300, 32).to(dtype) for _ in range(2))

    def run(fill):
        for x in (key, value):
            x[:, :, keys] = fill
        for x in (query, grad_out):
            x[:, :, rows] = fill
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = qkv.attention(*leaves, keep)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    for a, b in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(a, b)


@half_types
def test_derivatives_of_heads_apart_or_together(dtype):
    """Copies in float32 are made of a few heads at a time when these are long: of one, of all, as
    there are threads to occupy. Either way the same bits, and the same weights dropped."""
    heads, rows, keys, width = 4, 5, 8192, 128
    make = samples.generator(0)
    shapes = {
        "query": (1, 2 * heads, rows, width),
        "key": (1, heads, keys, width),
        "value": (1, heads, keys, width),
        "attn_mask": (2 * heads, 1, keys),
        "alibi_slopes": (2 * heads,),
        "sinks": (2 * heads,),
    }

    def numbers():
        return [torch.randn(s, generator=make).div(4).to(dtype) for s in shapes.values()]

    primals, tangents, cotangents = numbers(), numbers(), numbers()
    incoming = torch.randn(shapes["query"], generator=make).to(dtype)

    def attend(query, key, value, attn_mask, alibi_slopes, sinks):
        torch.manual_seed(1)
        return qkv.attention(
            *(query, key, value, attn_mask),
            enable_gqa=True,
            softcap=3.0,
            dropout_p=0.25,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )

    def derivatives(threads):
        torch.set_num_threads(threads)
        inputs = [x.clone().requires_grad_() for x in (*primals, incoming)]
        first = torch.autograd.grad(
            attend(*inputs[:-1]), inputs[:-1], inputs[-1], create_graph=True
        )
        second = torch.autograd.grad(first, inputs, cotangents)
        with forward_ad.dual_level():
            dual = attend(*map(forward_ad.make_dual, primals, tangents))
            moved = forward_ad.unpack_dual(dual).tangent
        return [*first, *second, moved]

    threads = torch.get_num_threads()
    try:
        for apart, together in zip(derivatives(1), derivatives(2 * heads)):
            assert torch.equal(apart, together) and apart.abs().sum() > 0
    finally:
        torch.set_num_threads(threads)


def test_results_of_heads_a_few_at_a_time():
    """As above: with a batch, of which they are no view, and a mask of all heads."""
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(shape).div(4).bfloat16()
    primals = normal(2, 4, 5, 128), normal(2, 4, 4096, 128), normal(2, 4, 4096, 128)
    tangents = tuple(torch.randn(x.shape).bfloat16() for x in primals)
    mask = normal(5, 4096)

    def lse_t(primals, tangents):
        lse = lambda *x: qkv.attention_with_lse(*x)[1]
        return torch.func.jvp(lse, tuple(primals), tuple(tangents))[1].double()

    def second_gradient_of_the_mask(primals, tangents):
        real = torch.float64 if primals[0].dtype == torch.float64 else torch.float32
        q, m = primals[0].clone().requires_grad_(), mask.to(real).requires_grad_()
        out = qkv.attention(q, *primals[1:], m)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        return torch.autograd.grad(first, m, tangents[0])[0].double()

    for f in (lse_t, second_gradient_of_the_mask):
        found = f(primals, tangents)
        exact = f([x.double() for x in primals], [x.double() for x in tangents])
        assert (found - exact).norm() < 0.05 * exact.norm()


def test_common_part_of_values_moves_nothing():
    """Whatever the rounding of weights: they still add up to a constant.

    To within a few 2^-16 at most, which AMX loses where it cuts each of them into two bfloat16
    numbers, not the 2^-9 of one.
    """
    torch.manual_seed(0)
    query, key, query_t, key_t = (torch.randn(1, 2, 300, 16).bfloat16() for _ in range(4))
    value = torch.full_like(key, 64.0)

    def attend(query, key):
        return qkv.attention(query, key, value, is_causal=True)

    out_t = torch.func.jvp(attend, (query, key), (query_t, key_t))[1]
    assert out_t.abs().max() < 64 * 2**-14


@half_types
def test_explain_where_only_the_keys_are_a_symbol(dtype):
    query, key = (torch.randn(1, 2, rows, 16).to(dtype) for rows in (24, 300))

    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    query = mode.from_tensor(query, static_shapes=True)
    key = mode.from_tensor(key, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    assert "M=24 N=s" in qkv.explain(query, key, key)


@half_types
def test_explain_of_no_heads(dtype):
    query, key = (torch.empty(1, 0, rows, 8, dtype=dtype) for rows in (24, 200))
    assert "Hq=0 Hkv=0 M=24 N=200" in qkv.explain(query, key, key)


@half_types
@pytest.mark.parametrize("length", [24, 300])
def test_explain_says_whether_tensor_cores_run(length, dtype):
    with FakeTensorMode():  # needs no GPU, but a library with its kernels
        query = torch.empty(1, 2, length, 16, dtype=dtype, device="cuda")
        text = qkv.explain(query, query, query)
    on_tensor_cores = (
        length >= 128 and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    )
    fused = "fused cuda" in text
    assert ("float32, without tensor cores" in text) == (fused and not on_tensor_cores)
    assert ("sm80" in text) == (fused and on_tensor_cores)


@half_types
@pytest.mark.parametrize("queries", [1, 4, 100])
def test_rows_an_odd_number_apart(queries, dtype):
    """Pairs of numbers do not begin at the same places in all rows then."""
    query = torch.randn(1, 2, queries, 64).to(dtype)
    key, value = (torch.randn(1, 2, 300, 65).to(dtype)[..., :64] for _ in range(2))
    apart = qkv.attention(query, key, value)
    assert torch.equal(apart, qkv.attention(query, key.contiguous(), value.contiguous()))


@half_types
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(1, 40, 16), (2, 3000, 16), (5, 1100, 7), (40, 70, 24), (200, 200, 33)],
)
def test_what_rounding_takes_changes_no_output(queries, keys, width, dtype):
    """Few rows, keys in ranges that are merged, tiles; rows of the output as the query's: one after
    the other, or with their columns apart."""
    query = torch.randn(2, 2, queries, width).to(dtype)
    key, value = (torch.randn(2, 2, keys, width).to(dtype) for _ in range(2))
    for q in (query, query.mT.contiguous().mT):
        operands = (q, key, value, *[None] * 5, None, 0.0, 0.0, [-1, -1, 0])
        with_rest = torch.ops.qkv._attention_forward(*operands)
        without = torch.ops.qkv._attention_forward(*operands, needs_rest=False)
        assert with_rest[2].shape == q.shape and with_rest[2].float().abs().sum() > 0
        assert without[2].shape == (*q.shape[:-1], 0)
        for i in (0, 1, 3):
            assert torch.equal(with_rest[i], without[i])
        assert torch.equal(with_rest[0], qkv.attention(q, key, value))


class Rests(TorchDispatchMode):
    """Whether calls asked for what rounding takes from the output."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.qkv._attention_forward.default:
            names = [a.name for a in op._schema.arguments]
            given = {**dict(zip(names, args)), **(kwargs or {})}
            self.asked.append(given.get("needs_rest", True))
        return op(*args, **(kwargs or {}))


def test_what_rounding_takes_is_computed_where_a_derivative_follows():
    x = torch.randn(1, 2, 5, 8).bfloat16()
    leaf = x.clone().requires_grad_()

    def asked(call):
        with Rests() as rests:
            call()
        return rests.asked

    def attend(x):
        return qkv.attention(x, x, x)

    def square(x):
        return attend(x).float().square().sum()

    def in_forward_mode():
        with forward_ad.dual_level():
            attend(forward_ad.make_dual(x, x))

    assert asked(lambda: attend(x)) == [False]
    with torch.no_grad():
        assert asked(lambda: attend(leaf)) == [False]
    assert asked(lambda: torch.func.vmap(attend)(x)) == [False]
    assert asked(lambda: attend(leaf)) == [True]
    assert asked(lambda: qkv.attention(x, x, leaf)) == [True]
    assert asked(in_forward_mode) == [True]
    assert asked(lambda: torch.func.grad(square)(x)) == [True]
    assert asked(lambda: torch.func.jvp(attend, (x,), (x,))) == [True]
    assert asked(lambda: torch.func.vmap(torch.func.grad(square))(x)) == [True]
    assert asked(lambda: torch.func.grad(lambda x: torch.func.vmap(attend)(x).sum())(x)) == [True]
