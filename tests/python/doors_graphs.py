"""Graphs: a function for each row of the table in test_doors.py that traces, compiles, exports or
scripts. Whoever compiles sees what `_attention_forward` and its relatives have to say of shapes,
and must come to the numbers of the definition."""

import io
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Tuple

import pytest
import torch
import torch._dynamo.testing
from doors_columns import (
    VARIANTS,
    Module,
    Operator,
    Tensors,
    as_tuple,
    assert_close,
    column,
    public_tensors,
    scalar,
    together,
)
from doors_transforms import fused
from torch import Tensor

import qkv

BUILD = Path(__file__).parents[2] / "build"


def opcheck(x: Operator) -> None:
    """PyTorch's own checks of an operator: schema, autograd registration, fake tensors, tracing
    with dynamic shapes."""
    tensors = x.tensors(dtype=torch.float32)
    leaves = {n: t.requires_grad_() if n in x.differentiable and not x.name.startswith("_") else t
              for n, t in tensors.items()}  # fmt: skip
    torch.library.opcheck(x.op, (), {**leaves, **x.options})


def _leaves(tensors: Tensors) -> Tensors:
    return {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in tensors.items()}


def _results_and_gradients(f, tensors: Tensors) -> tuple[Tensor, ...]:
    """Backward with gradients from outside, so that the graph has nothing but the operator."""
    leaves = _leaves(tensors)
    torch.manual_seed(1)
    results = f(**leaves)
    g = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(r.shape, generator=g, dtype=r.dtype) for r in results]
    of = [x for x in leaves.values() if x.requires_grad]
    return (*results, *torch.autograd.grad(results, of, cotangents))


def _with_variants(x: Operator, names):
    """One function that calls x, or its definition, with each of the options in turn."""
    calls = []
    for name in names:
        options, given = VARIANTS[name]
        variant = x.with_options({"enable_gqa": True, **options})
        calls.append((variant, [n for n in x.tensors() if n in ("query", "key", "value", *given)]))

    def call(**tensors):
        return [r for v, given in calls for r in v(**{n: tensors[n] for n in given})]

    def expected(**tensors):
        return [r for v, given in calls for r in v.expected(**{n: tensors[n] for n in given})]

    return call, expected


def _compile(x, backend: str) -> None:
    torch._dynamo.reset()
    compiled = lambda f: torch.compile(f, backend=backend, fullgraph=True)
    with fused():
        if isinstance(x, Module):
            parameters = {n: p.detach() for n, p in x.module.named_parameters()}
            tensors = {**parameters, "input": x.input}

            def f(input, **parameters):
                return [torch.func.functional_call(x.module, parameters, (input,))]

            expected = _results_and_gradients(f, tensors)
            found = _results_and_gradients(compiled(f), tensors)
        else:
            f, by_definition = _with_variants(x, VARIANTS)
            expected = _results_and_gradients(by_definition, x.tensors())
            found = _results_and_gradients(compiled(f), x.tensors())
    assert_close(found, expected)


def compile_aot_eager(x) -> None:
    _compile(x, "aot_eager")


def compile_inductor(x) -> None:
    # Dropout's seeds from the generator that eager mode has.
    with torch._inductor.config.patch(fallback_random=True):
        _compile(x, "inductor")


def compile_draws_dropout_anew(x) -> None:
    torch._dynamo.reset()
    x = x.with_options({**x.options, "dropout_p": 0.5})
    f = torch.compile(x.of("query"), backend="aot_eager", fullgraph=True)
    query = x.tensors()["query"]
    assert not torch.equal(f(query)[0], f(query)[0])


def _one_graph_for(f, calls) -> None:
    """Compiles f for the first of the calls, (arguments, expected results), and never again."""
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=count, fullgraph=True, dynamic=True)
    # Floats are constants, or dynamo traces twice.
    with torch._dynamo.config.patch(specialize_float=True):
        for arguments, expected in calls:
            assert_close(compiled(*arguments), expected)
    assert count.frame_count == 1


#: batch, query heads, key/value heads, M, N, D, Dv. First all different, as PyTorch takes equal
#: numbers for the same number. (For sizes 0 and 1 it always compiles anew.)
SIZES = [(5, 6, 3, 7, 9, 4, 2), (2, 4, 2, 3, 5, 2, 3), (3, 9, 3, 8, 4, 8, 2), (4, 8, 2, 9, 9, 5, 5)]


def dynamic_shapes(x) -> None:
    """One graph for all sizes, the head dim and what the scale is by default included."""
    if isinstance(x, Module):
        *front, _, width = x.input.shape[1:]
        inputs = [torch.randn(b, *front, length, width) for b, length in ((7, 9), (3, 5), (2, 11))]
        _one_graph_for(lambda t: x.module(t), [((t,), x.module(t)) for t in inputs])
        return
    x = x.with_options({n: o for n, o in x.options.items() if n != "scale"})
    calls = [x.tensors(batch=(batch,), sizes=sizes) for batch, *sizes in SIZES]
    _one_graph_for(lambda tensors: x(**tensors), [((t,), x.expected(**t)) for t in calls])


WITH_HEADS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
#: Which dimension is selected from, of batch elements, of heads, of rows and of keys.
SELECTED = [
    {"query": 0, "key": 0, "value": 0, "alibi_slopes": 0, "key_mask": 0},
    {"query": 0, "alibi_slopes": 0, "key_mask": 0},  # by a batch that shares key and value
    {n: -1 if n in ("alibi_slopes", "sinks") else -3 for n in WITH_HEADS},
    {"query": -2, "attn_mask": -2},
    {"key": -2, "value": -2, "attn_mask": -1, "key_mask": -1},
]


def _select(kept: Tensor, dims: dict[str, int], tensors: Tensors) -> Tensors:
    index = kept.nonzero().squeeze(-1)
    return {n: x.index_select(dims[n], index) if n in dims else x for n, x in tensors.items()}


def _one_graph_for_all_selected(x: Operator, dims: dict[str, int], tensors: Tensors) -> None:
    """Selected within the graph, or before it, whose inputs it is told not to look at the sizes of."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = lambda kept, **tensors: x(**_select(kept, dims, tensors))
    compiled = torch.compile(f, backend=count, fullgraph=True)
    of_selected = torch.compile(x, backend=count, fullgraph=True)

    def select_before(kept, **tensors):
        selected = _select(kept, dims, tensors)
        for n, d in dims.items():
            torch._dynamo.decorators.mark_unbacked(selected[n], d % selected[n].dim())
        return of_selected(**selected)

    size = next(tensors[n].size(d) for n, d in dims.items())
    expected = lambda kept, **tensors: x.expected(**_select(kept, dims, tensors))
    for step in (2, 3):
        kept = torch.arange(size) % step == 0
        wanted = _results_and_gradients(partial(expected, kept), tensors)
        for call in (compiled, select_before):
            assert_close(_results_and_gradients(partial(call, kept), tensors), wanted)
    assert count.frame_count == 2


def sizes_of_data(x: Operator) -> None:
    """As many batch elements, heads, rows or keys as a mask selects, which no graph knows before it runs."""
    for dims in SELECTED:
        dims = {n: d for n, d in dims.items() if n in x.tensors()}
        kv_heads = 4 if "sinks" in dims else 2  # of one number if they are selected
        tensors = x.tensors(batch=(6,), sizes=(4, kv_heads, 7, 5, 2, 3))
        if "key" not in dims and dims["query"] == 0:
            tensors |= {n: tensors[n][:1] for n in ("key", "value") if n in tensors}
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            _one_graph_for_all_selected(x, dims, tensors)


def symbolic_window_and_offset(x: Operator) -> None:
    """One graph for all values, and for a position that is an element of a tensor."""
    op, tensors = x.op, x.tensors()
    others = {
        n: o for n, o in x.options.items() if n not in ("is_causal", "window", "query_offset")
    }

    def attend(left: int, right: int, offset: int):
        return as_tuple(op(**tensors, **others, window=(left, right), query_offset=offset))

    def attend_at(position: Tensor):
        at = position.item()
        return as_tuple(op(**tensors, **others, window=(at, 0), query_offset=at))

    def expected(window: tuple[int, int], offset: int):
        options = {**others, "window": window, "query_offset": offset}
        return x.with_options(options).expected(**tensors)

    values = ((2, 3, 4), (3, 2, 2), (7, 9, -2))
    _one_graph_for(attend, [((w, r, o), expected((w, r), o)) for w, r, o in values])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        positions = [((torch.tensor(at),), expected((at, 0), at)) for at in (0, 1, 4)]
        _one_graph_for(attend_at, positions)


class _Attend(torch.nn.Module):
    """Operators as a module: what torch.export takes."""

    def __init__(self, *operators: Operator) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, query, key, value, attn_mask, alibi_slopes, sinks, key_mask):
        tensors = dict(query=query, key=key, value=value, attn_mask=attn_mask,
                       alibi_slopes=alibi_slopes, sinks=sinks, key_mask=key_mask)  # fmt: skip
        results = []
        for x in self.operators:
            names = {a.name for a in x.arguments}
            results += x(**{n: t for n, t in tensors.items() if n in names})
        return tuple(results)


def _exported(*operators: Operator) -> torch.export.ExportedProgram:
    dim = torch.export.Dim
    b, kv, m, n, d, dv = (dim(s) for s in ("batch", "kv_heads", "m", "n", "d", "dv"))
    heads = 2 * kv
    shapes = {"query": (b, heads, m, d), "key": (b, kv, n, d), "value": (b, kv, n, dv),
              "attn_mask": (heads, m, n), "alibi_slopes": (b, heads), "sinks": (heads,),
              "key_mask": (b, n)}  # fmt: skip
    tensors = public_tensors()
    return torch.export.export(
        _Attend(*operators), (), tensors, dynamic_shapes={k: dict(enumerate(s)) for k, s in shapes.items()}
    )  # fmt: skip


def export(x) -> None:
    """With every size dynamic; what is decomposed has the fused operator in it."""
    if isinstance(x, Module):
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        rank = x.input.dim()
        program = torch.export.export(
            x.module, (x.input,), dynamic_shapes=({0: batch, rank - 2: length},)
        )
        input = torch.randn(5, *x.input.shape[1:-2], 9, x.input.shape[-1])
        for p in (program, program.run_decompositions()):
            torch.testing.assert_close(p.module()(input), x.module(input))
        return
    x = x.with_options({n: o for n, o in x.options.items() if n != "scale"})
    program = _exported(x)
    assert any(node.target is x.op for node in program.graph.nodes)
    decomposed = program.run_decompositions()
    fused_op = "_attention_weights" if x.name == "attention_weights" else "_attention_forward"
    fused_op = getattr(torch.ops.qkv, fused_op).default
    assert any(node.target is fused_op for node in decomposed.graph.nodes)
    for batch, *sizes in ((3, 6, 3, 7, 4, 8, 2), (5, 8, 4, 3, 9, 5, 5)):
        given = public_tensors(batch=(batch,), sizes=sizes)
        expected = x.expected(**x.tensors(batch=(batch,), sizes=sizes))
        for p in (program, decomposed):
            assert_close(p.module()(**given), expected)


@together
def aotinductor_in_cpp(*operators: Operator) -> None:
    """One package of all of them, run at other sizes by a program without Python."""
    operators = [x.with_options({n: o for n, o in x.options.items() if n != "scale"})
                 for x in operators]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        package, inputs, outputs = (f"{directory}/{n}" for n in ("p.pt2", "inputs", "outputs"))
        torch._inductor.aoti_compile_and_package(
            _exported(*operators),
            package_path=package,
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # compiles faster
        )
        for batch, *sizes in ((3, 6, 3, 7, 4, 8, 2), (5, 8, 4, 3, 9, 5, 5)):
            given = public_tensors(batch=(batch,), sizes=sizes)
            torch.save(list(given.values()), inputs)
            subprocess.run([BUILD / "tests" / "run_package", package, inputs, outputs], check=True)
            expected = [
                e for x in operators for e in x.expected(**x.tensors(batch=(batch,), sizes=sizes))
            ]
            assert_close(tuple(torch.load(outputs, weights_only=False)), tuple(expected))


def compiled_autograd(x) -> None:
    """The backward, hooks into nodes written by hand included, traced at run time."""

    def gradients():
        torch.manual_seed(1)
        if isinstance(x, Module):
            x.module.zero_grad()
            leaves = {
                **dict(x.module.named_parameters()),
                "input": x.input.clone().requires_grad_(),
            }
            results = x.module(leaves["input"])
        else:
            leaves = _leaves(x.tensors())
            results = dropped(**leaves)
        scalar(results).backward()
        return tuple(p.grad.clone() for p in leaves.values() if p.requires_grad)

    dropped = x
    if isinstance(x, Operator):
        dropped = x.with_options({**x.options, "dropout_p": 0.4})
    expected = gradients()
    torch._dynamo.reset()
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with fused(), torch._dynamo.compiled_autograd._enable(compiler):
        found = gradients()
        assert_close(found, expected)
        if isinstance(x, Module):
            return
        for number in ("scale", "softcap", "dropout_p"):  # of other graphs
            if number in x.options:
                dropped = x.with_options({**dropped.options, number: 0.75})
                found = gradients()
                with torch._dynamo.compiled_autograd._disable():
                    assert_close(found, gradients())


def compiled_double_backward(x: Operator) -> None:
    """The one empty cell: AOTAutograd refuses, and says so."""
    torch._dynamo.reset()
    leaves = _leaves(x.tensors())
    f = torch.compile(lambda t: x(**t), backend="aot_eager", fullgraph=True)
    (first,) = torch.autograd.grad(scalar(f(leaves)), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(first.sum(), leaves["key"])


def _script(x: Operator) -> torch.jit.ScriptModule:
    """Written to a file and read again."""
    tensors = ", ".join(f"{n}: Tensor" for n in x.tensors())
    given = ", ".join(f"{n}={n}" for n in x.tensors())
    options = ", ".join(
        f"{n}={list(o) if isinstance(o, tuple) else o}" for n, o in x.options.items()
    )
    # A class of its own, as a class of TorchScript has one forward.
    module = type(f"Calls_{x.name}", (torch.jit.ScriptModule,), {})()
    module.define(
        f"def forward(self, {tensors}):\n  return torch.ops.qkv.{x.name}({given}, {options})\n"
    )
    return _read_again(module)


class _Generates(torch.nn.Module):
    """Makes a KVCache of its own in each call, and has one as an attribute."""

    def __init__(self, module: torch.nn.Module, cache: torch.classes.qkv.KVCache) -> None:
        super().__init__()
        self.module = module
        self.cache = cache

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        cache = torch.classes.qkv.KVCache(9)
        first = self.module(x[:, :3], cache=cache)
        own = torch.cat([first, self.module(x[:, 3:], cache=cache)], 1)
        return own, self.module(x[:, 3:], cache=self.cache)


def _scripted_cache() -> None:
    x = column("MultiheadAttention")
    cache = qkv.nn.KVCache(9)
    with torch.no_grad():
        x.module(x.input[:, :3], cache=cache)
        script = _read_again(torch.jit.script(_Generates(x.module, cache)))
        own, continued = script(x.input)
        torch.testing.assert_close(own, x.module(x.input))
        assert torch.equal(continued, own[:, 3:]) and script.cache.length() == 5


def _read_again(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


class _CallsTwice(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.query = torch.nn.Parameter(torch.randn(1, 4, 8))
        self.with_lse = op == "attention_with_lse"

    def forward(self) -> Tuple[Tensor, Tensor]:
        x = self.query
        if self.with_lse:
            a, _ = torch.ops.qkv.attention_with_lse(x, x, x, dropout_p=0.5)
            b, _ = torch.ops.qkv.attention_with_lse(x, x, x, dropout_p=0.5)
        else:
            a = torch.ops.qkv.attention(x, x, x, dropout_p=0.5)
            b = torch.ops.qkv.attention(x, x, x, dropout_p=0.5)
        return a, b


def torchscript_draws_dropout_anew(x: Operator) -> None:
    """Equal calls are not merged, nor those of a frozen module's constants computed once."""
    script = torch.jit.script(_CallsTwice(x.name).eval())
    for f in (script, torch.jit.freeze(script)):
        results = [y for _ in range(3) for y in f()]
        assert len({tuple(y.flatten().tolist()) for y in results}) == len(results)


def torchscript(x) -> None:
    """Results, gradients and second derivatives of a saved script."""
    if x == "KVCache":
        return _scripted_cache()
    if isinstance(x, Module):
        script = _read_again(torch.jit.script(x.module))
        torch.testing.assert_close(script(x.input), x.module(x.input))
        leaf = x.input.clone().requires_grad_()
        found = torch.autograd.grad(scalar(script(leaf)), (leaf, *script.parameters()))
        assert_close(found, x.gradients(x.module))
        return
    script = _script(x)
    if x.name == "explain":
        assert script(**x.tensors()) == x.op(**x.tensors(), **x.options)
        return

    def first_and_second(f):
        leaves = _leaves(x.tensors())
        of = [leaves[n] for n in x.differentiable]
        results = as_tuple(f(**leaves))
        first = torch.autograd.grad(scalar(results), of, create_graph=True)
        return (*results, *first, *torch.autograd.grad(scalar(first), of))

    assert_close(first_and_second(script), first_and_second(x.expected))
