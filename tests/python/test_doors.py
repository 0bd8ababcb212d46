"""Every door that PyTorch has, times everything that goes through it: one table.

A row is a door, a column an operator or a module, and a cross is a test: the function of the row's
name in doors_transforms.py, doors_graphs.py or doors_modes.py, called with the column. What comes
out is compared with the definition in float64, with plain PyTorch, or to the bit with the call
outside the door. vmap that loops and first derivatives that are not fused are errors.

A dot: nothing goes through. `explain` gives text; internal operators are reached through public
ones; modules are made of operators.
"""

import math
import os
import subprocess
import sys

import doors_graphs
import doors_modes
import doors_transforms
import pytest
import samples
import torch
from doors_columns import column

import qkv

OPS = torch.ops.qkv

COLUMNS = {
    "op": "attention",
    "lse": "attention_with_lse",
    "wts": "attention_weights",
    "why": "explain",
    "fwd": "_attention_forward",
    "bwd": "_attention_backward",
    "wfwd": "_attention_weights",
    "wbwd": "_attention_weights_backward",
    "jvp": "_attention_jvp",
    "bwd2": "_attention_backward_backward",
    "sdpa": "ScaledDotProductAttention",
    "self": "SelfAttention",
    "mha": "MultiheadAttention",
    "cache": "KVCache",
}

TABLE = """
door                             op   lse  wts  why     fwd  bwd  wfwd wbwd jvp  bwd2    sdpa self mha  cache
-------------------------------------------------------------------------------------------------------------
torch.func
  grad                           x    x    x    .       .    .    .    .    .    .       .    .    .    .
  vjp                            x    x    x    .       .    .    .    .    .    .       .    .    .    .
  jvp                            x    x    x    .       .    .    .    .    .    .       .    .    .    .
  jacfwd                         x    x    x    .       .    .    .    .    .    .       .    .    .    .
  jacrev                         x    x    x    .       .    .    .    .    .    .       .    .    .    .
  hessian                        x    x    x    .       .    .    .    .    .    .       .    .    .    .
  hessian_vector_product         x    x    x    .       .    .    .    .    .    .       .    .    .    .
  vmap                           x    x    x    .       x    x    x    x    x    x       .    .    .    .
  vmap_of_vmap                   x    x    x    .       x    x    x    x    x    x       .    .    .    .
  vmap_of_grad                   x    x    x    .       .    .    .    .    .    .       x    x    x    .
  grad_of_vmap                   x    x    x    .       .    .    .    .    .    .       .    .    .    .
  vmap_of_grad_of_vmap           x    x    x    .       .    .    .    .    .    .       .    .    .    .
  vmap_randomness_error          x    x    .    .       .    .    .    .    .    .       .    .    .    .
  vmap_randomness_same           x    x    .    .       .    .    .    .    .    .       .    .    .    .
  vmap_randomness_different      x    x    .    .       .    .    .    .    .    .       .    .    .    .
graphs
  opcheck                        x    x    x    .       x    x    x    x    x    x       .    .    .    .
  compile_aot_eager              x    x    x    .       .    .    .    .    .    .       x    x    x    .
  compile_inductor               x    x    x    .       .    .    .    .    .    .       x    x    x    .
  compile_draws_dropout_anew     x    x    .    .       .    .    .    .    .    .       .    .    .    .
  compiled_double_backward       -    -    -    .       .    .    .    .    .    .       .    .    .    .
  compiled_autograd              x    x    x    .       .    .    .    .    .    .       x    x    x    .
  dynamic_shapes                 x    x    x    .       .    .    .    .    .    .       x    x    x    .
  sizes_of_data                  x    x    x    .       .    .    .    .    .    .       .    .    .    .
  symbolic_window_and_offset     x    x    x    .       .    .    .    .    .    .       .    .    .    .
  export                         x    x    x    .       .    .    .    .    .    .       x    x    x    .
  aotinductor_in_cpp             x    x    x    .       .    .    .    .    .    .       .    .    .    .
  torchscript                    x    x    x    x       .    .    .    .    .    .       x    x    x    x
  torchscript_draws_dropout_anew x    x    .    .       .    .    .    .    .    .       .    .    .    .
  torchscript_in_cpp             x    .    .    .       .    .    .    .    .    .       .    .    .    .
modes
  autocast_cpu                   x    x    x    x       .    .    .    .    .    .       x    x    x    .
  autocast_cuda                  x    x    x    x       .    .    .    .    .    .       .    .    .    .
  checkpoint                     x    x    x    .       .    .    .    .    .    .       x    x    x    .
  checkpoint_reentrant           x    x    x    .       .    .    .    .    .    .       x    x    x    .
  inference_mode                 x    x    x    .       .    .    .    .    .    .       x    x    x    x
copies
  deepcopy                       .    .    .    .       .    .    .    .    .    .       x    x    x    x
  pickled                        .    .    .    .       .    .    .    .    .    .       x    x    x    x
  saved                          .    .    .    .       .    .    .    .    .    .       x    x    x    x
several at once
  python_threads                 x    x    x    .       .    .    .    .    .    .       x    x    x    .
  threads_in_cpp                 .    x    .    .       .    .    .    .    .    .       .    .    x    .
  fork                           x    x    x    .       .    .    .    .    .    .       x    x    x    .
  spawn                          x    x    x    .       .    .    .    .    .    .       x    x    x    .
"""  # - : PyTorch itself refuses, and says so


def door(name: str):
    (found,) = (getattr(m, name) for m in (doors_transforms, doors_graphs, doors_modes)
                if hasattr(m, name) and getattr(m, name).__module__ == m.__name__)  # fmt: skip
    return found


def cells():
    """One test for each cross; one for a whole row whose door takes all of its columns at once."""
    header, _, *rows = TABLE.strip().splitlines()
    for row in rows:
        name, *marks = row.split()
        if not row.startswith(" "):
            continue
        assert len(marks) == len(COLUMNS)
        crossed = [c for c, mark in zip(header.split()[1:], marks, strict=True) if mark in "x-"]
        if getattr(door(name), "together", False):
            yield pytest.param(name, crossed, id=name)
        else:
            for c in crossed:
                yield pytest.param(name, [c], id=f"{name}-{c}")


@pytest.mark.parametrize(("name", "through"), cells())
def test_door(name, through):
    door(name)(*(column(COLUMNS[c]) for c in through))


def test_first_derivatives_are_fused_behind_every_transform():
    """In a process of its own, in which a fallback is an error."""
    names = ["grad", "vjp", "vmap", "vmap_of_grad", "grad_of_vmap", "vmap_randomness_same"]
    code = (
        "import doors_transforms as doors, doors_columns as columns\n"
        f"for name in {names}: getattr(doors, name)(columns.column('attention_with_lse'))"
    )
    env = {**os.environ, "QKV_STRICT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=env)


def test_a_loop_of_vmap_is_an_error():
    """The net in which the tests above would catch one."""
    x = torch.randn(3, 4)
    with doors_transforms.no_loops(), pytest.raises(RuntimeError, match="vmap fallback"):
        torch.func.vmap(lambda x: torch.ops.aten._sparse_semi_structured_tile(x))(x)


@pytest.mark.parametrize("name", ["plain", "batch_broadcast", "no_head", "float_mask"])
def test_opcheck_of_other_shapes(name):
    sample = samples.make(samples.entry(name), torch.float32).requires_grad()
    args = (sample.query, sample.key, sample.value)
    torch.library.opcheck(OPS.attention_with_lse.default, args, sample.kwargs)


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
        o.get("scale"),
        o.get("softcap", 0.0),
        o.get("dropout_p", 0.0),
        band,
    )


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


def test_what_is_computed_from_sizes_is_a_constant_of_a_trace_which_warns():
    def f(q, k):
        offset = k.shape[-2] - q.shape[-2]
        scale = q.shape[-1] ** -0.5
        return qkv.attention(q, k, k, window=(offset, 0), query_offset=offset, scale=scale)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    with pytest.warns(torch.jit.TracerWarning) as warnings:
        traced = torch.jit.trace(f, (q, k))
    assert sum("Converting a tensor to a Python" in str(w.message) for w in warnings) >= 3
    assert torch.equal(traced(q, k), f(q, k))


def test_graphs_take_positions_in_tensors():
    class Attend(torch.nn.Module):
        def forward(self, q, k, at):
            window = (at + 1, 0)
            return qkv.attention(q, k, k, is_causal=True, window=window, query_offset=at)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    attend = Attend()
    compiled = torch.compile(attend, backend="aot_eager")
    exported = torch.export.export(attend, (q, k, torch.tensor(2))).module()
    for at in (2, 4):
        expected = qkv.attention(q, k, k, is_causal=True, window=(at + 1, 0), query_offset=at)
        for graph in (attend, compiled, exported):
            assert torch.equal(graph(q, k, torch.tensor(at)), expected)


def test_torchscript_makes_two_numbers_of_one():
    @torch.jit.script
    def f(q):
        return torch.ops.qkv.attention(q, q, q, window=2)

    q = torch.randn(1, 2, 9, 4)
    assert torch.equal(f(q), qkv.attention(q, q, q, window=(2, 2)))
