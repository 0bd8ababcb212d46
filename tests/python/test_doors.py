"""The ways into the operator that PyTorch has: opcheck, compile, export, torch.func, vmap, autocast,
TorchScript. A warning of vmap's slow fallback is an error here."""

import copy
import io
import math
import warnings

import pytest
import samples
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import qkv

OPS = torch.ops.qkv
CAUSAL = {"is_causal": True}


def normal(*shape, dtype=torch.float64, requires_grad=False):
    return torch.randn(*shape, dtype=dtype, requires_grad=requires_grad)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "everything",
        "float_mask",
        "batch_broadcast",
        "no_head",
        "dropout_softcap_alibi_sinks",
    ],
)
def test_opcheck_public(name):
    """Of each kind one: opcheck traces the whole graph, which for the reference takes seconds."""
    sample = samples.make(samples.entry(name), torch.float32).requires_grad()
    args = (sample.query, sample.key, sample.value)
    torch.library.opcheck(OPS.attention.default, args, sample.kwargs)
    torch.library.opcheck(OPS.attention_with_lse.default, args, sample.kwargs)
    options = {n: x for n, x in sample.kwargs.items() if n != "dropout_p"}
    torch.library.opcheck(OPS.attention_weights.default, args[:2], options)


@samples.parametrize(large=False)
def test_opcheck_internal(entry):
    sample = samples.make(entry, torch.float32)
    operands = internal_operands(sample)
    torch.library.opcheck(OPS._attention_forward.default, operands)
    out, lse, *rests = OPS._attention_forward(*operands)
    needs = [x is not None and x.is_floating_point() for x in operands[:6]]
    for grad_lse in (None, torch.randn_like(lse)):
        args = (*operands, torch.randn_like(out), grad_lse, out, lse, *rests, needs)
        torch.library.opcheck(OPS._attention_backward.default, args)


def internal_operands(sample):
    """As checked_call in C++ makes them."""
    q, k, v = (
        x.unsqueeze(0) if x.dim() == 2 else x for x in (sample.query, sample.key, sample.value)
    )
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    kv_heads = k.shape[-3]
    heads = kv_heads if q.shape[-3] == 1 else q.shape[-3]
    o = sample.kwargs
    left, right = o.get("window") or (-1, -1)
    band = [left, 0 if o.get("is_causal") else right, o.get("query_offset", 0)]
    return (
        q.expand(*batch, heads, *q.shape[-2:]),
        k.expand(*batch, kv_heads, *k.shape[-2:]),
        v.expand(*batch, kv_heads, *v.shape[-2:]),
        o.get("attn_mask"),
        o.get("alibi_slopes"),
        o.get("sinks"),
        o.get("key_mask"),
        torch.arange(math.prod(batch)).view(batch) if "dropout_p" in o else None,
        o.get("scale", 0.5),
        o.get("softcap", 0.0),
        o.get("dropout_p", 0.0),
        band,
    )


@samples.parametrize()
def test_meta_has_the_strides_of_the_real_kernel(entry):
    sample = samples.make(entry, torch.float32)
    real = OPS._attention_forward(*internal_operands(sample))
    moved = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in internal_operands(sample)]
    # .to("meta") makes expanded tensors dense: give them their strides back.
    for i, x in enumerate(internal_operands(sample)):
        if isinstance(x, torch.Tensor):
            moved[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    for r, m in zip(real, OPS._attention_forward(*moved), strict=True):
        assert r.shape == m.shape and r.stride() == m.stride() and r.dtype == m.dtype


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    mask = normal(5, 5, dtype=torch.float32, requires_grad=True)
    q, k, v = (normal(2, 3, 5, 4, dtype=torch.float32, requires_grad=True) for _ in range(3))

    def f(q, k, v, mask):
        out, lse = OPS.attention_with_lse(q.sin(), k, v, mask, window=(3, 0), query_offset=1)
        return out.transpose(1, 2).reshape(2, 5, 12).cos(), lse * 2

    expected = f(q, k, v, mask)
    actual = torch.compile(f, backend=backend, fullgraph=True)(q, k, v, mask)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    inputs = (q, k, v, mask)
    total = lambda results: sum(x.sum() for x in results)
    for a, e in zip(
        torch.autograd.grad(total(actual), inputs),
        torch.autograd.grad(total(expected), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


def test_compile_with_dynamic_lengths():
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(
        lambda q, k: OPS.attention(q, k, k, is_causal=True),
        backend=count,
        fullgraph=True,
        dynamic=True,
    )
    for m, n in ((5, 9), (7, 9), (8, 30), (30, 8)):
        q, k = normal(2, 3, m, 4), normal(2, 3, n, 4)
        torch.testing.assert_close(f(q, k), OPS.attention(q, k, k, is_causal=True))
    assert count.frame_count == 1


def test_compile_draws_dropout_anew():
    q = normal(1, 2, 16, 4, dtype=torch.float32)
    f = torch.compile(
        lambda q: OPS.attention(q, q, q, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(f(q), f(q))


def test_compiled_autograd():
    q, k, v = (normal(2, 3, 5, 4, requires_grad=True) for _ in range(3))

    def grads():
        out, lse = qkv.attention_with_lse(q, k, v, **CAUSAL)
        for x in (q, k, v):
            x.grad = None
        (out.sin().sum() + lse.sum()).backward()
        return [x.grad.clone() for x in (q, k, v)]

    expected = grads()
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = grads()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_export():
    class Attend(torch.nn.Module):
        def forward(self, q, k, keep):
            return OPS.attention(q, k, k, keep, is_causal=True)

    q, k, keep = normal(2, 3, 5, 4), normal(2, 3, 7, 4), torch.rand(5, 7) < 0.7
    m, n = torch.export.Dim("m", min=2), torch.export.Dim("n", min=2)
    program = torch.export.export(
        Attend(), (q, k, keep), dynamic_shapes=({2: m}, {2: n}, {0: m, 1: n})
    )
    assert any(node.target is OPS.attention.default for node in program.graph.nodes)
    decomposed = program.run_decompositions()
    assert any(node.target is OPS._attention_forward.default for node in decomposed.graph.nodes)
    q, k, keep = normal(2, 3, 11, 4), normal(2, 3, 3, 4), torch.rand(11, 3) < 0.7
    for p in (program, decomposed):
        torch.testing.assert_close(p.module()(q, k, keep), Attend()(q, k, keep))


@pytest.fixture
def vmap_must_not_loop():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.usefixtures("vmap_must_not_loop")
class TestFunc:
    def attend(self, q, k, v):
        return qkv.attention(q, k, v, window=(2, 1)).sin().sum()

    def inputs(self):
        return normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 4)

    def test_grad_and_vjp(self):
        q, k, v = self.inputs()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(self.attend(*leaves), leaves)
        _, pullback = vjp(self.attend, q, k, v)
        for results in (grad(self.attend, (0, 1, 2))(q, k, v), pullback(torch.ones(()).double())):
            for a, e in zip(results, expected, strict=True):
                torch.testing.assert_close(a, e)

    def test_jvp(self):
        inputs, tangents = self.inputs(), self.inputs()
        _, directional = jvp(self.attend, inputs, tangents)
        expected = sum(
            (g * t).sum() for g, t in zip(grad(self.attend, (0, 1, 2))(*inputs), tangents)
        )
        torch.testing.assert_close(directional, expected)

    def test_jacobians(self):
        q, k, v = self.inputs()
        f = lambda q: qkv.attention(q, k, v, window=(2, 1))
        torch.testing.assert_close(jacfwd(f)(q), jacrev(f)(q))

    def test_hessian(self):
        q, k, v = self.inputs()
        f = lambda q: self.attend(q, k, v)
        expected = torch.autograd.functional.hessian(f, q)
        torch.testing.assert_close(hessian(f)(q), expected)
        torch.testing.assert_close(jacrev(jacrev(f))(q), expected)

    def test_hessian_vector_product(self):
        inputs, tangents = self.inputs(), self.inputs()
        f = grad(self.attend, (0, 1, 2))
        _, forward_over_reverse = jvp(f, inputs, tangents)
        _, pullback = vjp(f, *inputs)
        for a, e in zip(forward_over_reverse, pullback(tangents), strict=True):
            torch.testing.assert_close(a, e)

    def test_per_sample_gradients(self):
        q, k, v = normal(6, 2, 3, 4), normal(6, 2, 5, 4), normal(6, 2, 5, 4)
        mapped = vmap(grad(self.attend, (0, 1, 2)))(q, k, v)
        for b in range(6):
            for m, e in zip(mapped, grad(self.attend, (0, 1, 2))(q[b], k[b], v[b]), strict=True):
                torch.testing.assert_close(m[b], e)


@pytest.mark.usefixtures("vmap_must_not_loop")
@pytest.mark.parametrize(
    "in_dims",
    [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, 1, 2, None, None), (1, 0, 3, 0, 1),
     (None, None, None, 0, None), (None, None, None, None, 0)],
)  # fmt: skip
def test_vmap(in_dims):
    """Any of query, key, value, attn_mask and key_mask may be mapped, along any dimension."""
    shapes = [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), (3, 5, 7), (2, 7)]
    full = [normal(*shape[: d or 0], *([6] if d is not None else []), *shape[d or 0 :])
            for shape, d in zip(shapes, in_dims)]  # fmt: skip
    full[4] = full[4] > -1.0

    def f(q, k, v, mask, key_mask):
        out, lse = qkv.attention_with_lse(q, k, v, mask, key_mask=key_mask, window=(3, 2))
        return out, lse, qkv.attention_weights(q, k, mask, key_mask=key_mask)

    mapped = vmap(f, in_dims)(*full)
    for i in range(6):
        one = [x if d is None else x.select(d, i) for x, d in zip(full, in_dims)]
        for m, e in zip(mapped, f(*one), strict=True):
            torch.testing.assert_close(m[i], e)


@pytest.mark.usefixtures("vmap_must_not_loop")
def test_vmap_twice_and_over_gradients_of_a_shared_mask():
    q, mask = normal(3, 2, 2, 5, 4), normal(5, 5)
    f = lambda q, mask: qkv.attention(q, q, q, mask).sin().sum()
    mapped = vmap(vmap(grad(f, 1), (0, None)), (0, None))(q, mask)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(mapped[i, j], grad(f, 1)(q[i, j], mask))


@pytest.mark.usefixtures("vmap_must_not_loop")
def test_vmap_randomness():
    q = normal(1, 2, 16, 4, dtype=torch.float32).expand(3, 2, 16, 4)
    f = lambda q: qkv.attention(q, q, q, dropout_p=0.5)
    different = vmap(f, randomness="different")(q)
    assert not torch.equal(different[0], different[1])
    same = vmap(f, randomness="same")(q)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="random"):
        vmap(f)(q)


@pytest.mark.parametrize(
    "dtypes", [("f32", "f32", "f32"), ("bf16", "f32", "f32"), ("f32", "bf16", "f32")]
)
def test_autocast(dtypes):
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    q, k, v = (normal(2, 3, 5, 4).to(types[t]) for t in dtypes)
    mask = normal(5, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = qkv.attention(q, k, v, mask)
        weights = qkv.attention_weights(q, k, mask)
        assert "bfloat16" in qkv.explain(q, k, v, mask)
    assert out.dtype == weights.dtype == torch.bfloat16
    expected = qkv.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask)
    torch.testing.assert_close(out, expected)
    if len(set(dtypes)) > 1:
        with pytest.raises(TypeError, match="one dtype"):
            qkv.attention(q, k, v, mask)


def test_autocast_trains_float32_parameters():
    module = qkv.nn.MultiheadAttention(8, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(torch.randn(2, 5, 8)).float().pow(2).sum()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_torchscript():
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, offset: int):
            out, lse = torch.ops.qkv.attention_with_lse(
                q, q, q, is_causal=True, window=[3, 0], query_offset=offset
            )
            return out, lse, torch.ops.qkv.explain(q, q, q)

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Attend()), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    q = normal(2, 3, 5, 4, requires_grad=True)
    out, lse, text = loaded(q, 1)
    expected = qkv.attention_with_lse(q, q, q, window=(3, 0), query_offset=1)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert text == qkv.explain(q, q, q)
    for a, e in zip(
        torch.autograd.grad(out.sum(), q, create_graph=True),
        torch.autograd.grad(expected[0].sum(), q, create_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


def test_torchscript_makes_two_numbers_of_one():
    @torch.jit.script
    def f(q):
        return torch.ops.qkv.attention(q, q, q, window=2)

    q = normal(1, 2, 9, 4)
    assert torch.equal(f(q), qkv.attention(q, q, q, window=(2, 2)))


def test_inference_mode_and_deepcopy():
    module = qkv.nn.MultiheadAttention(8, 2, causal=True)
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        out = module(x)
    torch.testing.assert_close(out, copy.deepcopy(module)(x))


def test_checkpoint_repeats_dropout():
    q = normal(1, 2, 8, 4, requires_grad=True)
    f = lambda q: qkv.attention(q, q, q, dropout_p=0.5).sin().sum()
    torch.manual_seed(5)
    (plain,) = torch.autograd.grad(f(q), q)
    torch.manual_seed(5)
    (recomputed,) = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(f, q, use_reentrant=False), q
    )
    torch.testing.assert_close(plain, recomputed)
