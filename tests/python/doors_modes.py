"""Ways to run: a function for each row of the table in test_doors.py that is a mode, a copy, a
thread or a process."""

import copy
import io
import itertools
import multiprocessing
import os
import pickle
import subprocess
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from doors_columns import MODULES, VARIANTS, Module, Operator, column, scalar, together
from torch import Tensor

import qkv

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _autocast(x, device: str, tensors) -> None:
    """All mixtures of dtypes give what casting by hand gives; masks and numbers stay as they are."""
    cast = [n for n in ("query", "key", "value") if n in tensors]
    for types in itertools.product(TYPES, repeat=len(cast)):
        mixed = {**tensors, **{n: tensors[n].to(t) for n, t in zip(cast, types)}}
        for to in (torch.bfloat16, torch.float16):
            by_hand = {**mixed, **{n: mixed[n].to(to) for n in cast}}
            with torch.autocast(device, dtype=to):
                found = x(**mixed)
                with torch.autocast(device, enabled=False):
                    disabled = x(**by_hand)
                    if len(set(types)) > 1:
                        with pytest.raises(TypeError, match="one dtype"):
                            x(**mixed)
            expected = x(**by_hand)
            for f, d, e in zip(found, disabled, expected, strict=True):
                assert f.dtype == e.dtype and f.device == e.device
                if device == "cpu":
                    assert torch.equal(f, e) and torch.equal(d, e)


def autocast_cpu(x) -> None:
    if isinstance(x, Module):  # of float32, and so are its gradients
        x.module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = x.module(x.input)
            assert x.module(x.input.bfloat16()).dtype == torch.bfloat16
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), x.module(x.input), rtol=0.05, atol=0.05)
        if list(x.module.parameters()):
            found.float().pow(2).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in x.module.parameters())
    elif x.name == "explain":
        tensors = x.tensors(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "bfloat16" in x.op(**tensors, **x.options)
    else:
        _autocast(x, "cpu", x.tensors(dtype=torch.float32))
        _gradients_keep_their_dtypes(x)
        _autocast_under_vmap(x)


def _autocast_under_vmap(x: Operator) -> None:
    """vmap's kernels come before autocast's."""
    tensors = {**x.tensors(dtype=torch.float32)}
    tensors["key"] = tensors["key"].bfloat16()
    mapped = {n: torch.stack([t, t]) for n, t in tensors.items()}
    attend = torch.vmap(lambda tensors: x(**tensors), randomness="same")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found, alone in zip(attend(mapped), x(**tensors), strict=True):
            assert found.dtype == alone.dtype
            torch.testing.assert_close(found[1], alone)
        with torch.autocast("cpu", enabled=False), pytest.raises(TypeError, match="one dtype"):
            attend(mapped)


def _gradients_keep_their_dtypes(x: Operator) -> None:
    tensors = x.tensors(dtype=torch.float32)
    tensors["key"] = tensors["key"].bfloat16()
    leaves = {n: tensors[n].requires_grad_() for n in x.differentiable}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = x(**tensors)
    found = torch.autograd.grad(sum(r.float().sum() for r in results), list(leaves.values()))
    assert [g.dtype for g in found] == [t.dtype for t in leaves.values()]


def autocast_cuda(x: Operator) -> None:
    """Without a GPU: tensors that pretend to be on one reach the same kernel of AutocastCUDA."""
    name = f"qkv::{x.name}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    if x.name == "explain":
        return
    with torch._subclasses.FakeTensorMode():
        tensors = {n: torch.empty(t.shape, dtype=t.dtype, device="cuda")
                   for n, t in x.tensors(dtype=torch.float32).items()}  # fmt: skip
        before = torch.is_autocast_enabled("cuda")
        for to in (torch.bfloat16, torch.float16):
            mixed = {**tensors, "query": tensors["query"].bfloat16()}
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", to)
            try:
                assert x(**mixed)[0].dtype == to
            finally:
                torch.set_autocast_enabled("cuda", before)
                torch.set_autocast_dtype("cuda", torch.float16)
            with pytest.raises(TypeError, match="one dtype"):
                x(**mixed)


def _checkpoint(x, use_reentrant: bool) -> None:
    """With dropout: what is computed again drops the same weights."""
    if isinstance(x, Module):
        x.module.dropout = 0.4
        inputs = (x.input.clone().requires_grad_(), *x.module.parameters())
        f = lambda input, *_: x.module(input)
    else:
        x = x.with_options({**x.options, "dropout_p": 0.4})
        inputs = tuple(x.tensors()[n].requires_grad_() for n in x.differentiable)
        f = lambda *tensors: scalar(x.of(*x.differentiable)(*tensors))

    def gradients(call):
        for t in inputs:
            t.grad = None
        torch.manual_seed(5)
        scalar(call(*inputs)).backward()
        return [t.grad for t in inputs]

    again = lambda *t: torch.utils.checkpoint.checkpoint(f, *t, use_reentrant=use_reentrant)
    for found, expected in zip(gradients(again), gradients(f), strict=True):
        assert torch.equal(found, expected)


def checkpoint(x) -> None:
    _checkpoint(x, use_reentrant=False)


def checkpoint_reentrant(x) -> None:
    _checkpoint(x, use_reentrant=True)


def inference_mode(x) -> None:
    """Tensors of inference mode give the same, inside it and outside; who wants gradients of them
    hears PyTorch's own error."""
    if x == "KVCache":
        return _cache_in_inference_mode()
    if isinstance(x, Module):
        expected = x.module(x.input)
        with torch.inference_mode():
            input = x.input.clone()
            assert torch.equal(x.module(input), expected) and x.module(input).is_inference()
        return
    expected = x(**x.tensors())
    with torch.inference_mode():
        tensors = {n: t.clone() for n, t in x.tensors().items()}
        inside = x(**tensors)
    for found in (inside, x(**tensors)):
        for f, e in zip(found, expected, strict=True):
            assert torch.equal(f, e)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        x(**{**tensors, "query": x.tensors()["query"].requires_grad_()})


def _filled_cache():
    m = MODULES["MultiheadAttention"]()
    cache = qkv.nn.KVCache(7)
    with torch.no_grad():
        m.module(m.input[:, :3], cache=cache)
    return m, cache


def _cache_in_inference_mode() -> None:
    m = MODULES["MultiheadAttention"]()
    with torch.inference_mode():
        cache = qkv.nn.KVCache(7)
        parts = [m.module(x, cache=cache) for x in m.input.split([3, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), m.module(m.input))


def _copies(x, copy_of) -> None:
    if x == "KVCache":
        m, cache = _filled_cache()
        other = copy_of(cache)
        assert (other.length(), other.max_length()) == (3, 7)
        with torch.no_grad():  # each goes on by itself
            found = [m.module(m.input[:, 3:], cache=c) for c in (other, cache)]
        assert torch.equal(*found) and other.length() == cache.length() == 5
        return
    other = copy_of(x.module)
    assert str(other) == str(x.module)
    assert torch.equal(other(x.input), x.module(x.input))
    for a, b in zip(other.parameters(), x.module.parameters(), strict=True):
        assert torch.equal(a, b) and a is not b and a.data_ptr() != b.data_ptr()


def deepcopy(x) -> None:
    _copies(x, copy.deepcopy)
    if isinstance(x, Module):
        script = copy.deepcopy(torch.jit.script(x.module))
        assert torch.equal(script(x.input), x.module(x.input))


def pickled(x) -> None:
    _copies(x, lambda o: pickle.loads(pickle.dumps(o)))


def saved(x) -> None:
    """torch.save, and torch.jit.save of what is scripted."""

    def through(save, load, o):
        buffer = io.BytesIO()
        save(o, buffer)
        buffer.seek(0)
        return load(buffer)

    _copies(x, lambda o: through(torch.save, lambda f: torch.load(f, weights_only=False), o))
    if isinstance(x, Module):
        script = through(torch.jit.save, torch.jit.load, torch.jit.script(x.module))
        assert torch.equal(script(x.input), x.module(x.input))


def _forward_and_backward(x, variant: str) -> list[Tensor]:
    """Without dropout, whose generator threads would share."""
    if isinstance(x, Module):
        return [x.module(x.input).detach(), *x.gradients(x.module)]
    options, given = VARIANTS[variant]
    x = x.with_options({"enable_gqa": True, **options, "dropout_p": 0.0})
    names = [n for n in x.tensors() if n in ("query", "key", "value", *given)]
    tensors = {n: x.tensors()[n] for n in names}
    leaves = [tensors[n].requires_grad_() for n in names if n in x.differentiable]
    results = x(**tensors)
    return [*(r.detach() for r in results), *torch.autograd.grad(scalar(results), leaves)]


def python_threads(x) -> None:
    """Calls with other options at the same time: the bits of one after the other."""
    variants = 4 * list(VARIANTS)
    expected = [_forward_and_backward(x, v) for v in variants]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda v: _forward_and_backward(x, v), variants)
    for a, b in zip(found, expected, strict=True):
        for f, e in zip(a, b, strict=True):
            assert torch.equal(f, e)


def _in_child(names: list[str]) -> list[list]:
    """As DataLoader's workers do it: OpenMP's threads do not survive a fork, so that a child that
    wants several would wait for them forever, in any of PyTorch's operators."""
    torch.set_num_threads(1)
    # Not tensors, which would come back through shared memory.
    return [[t.tolist() for t in _forward_and_backward(column(n), v)]
            for n in names for v in VARIANTS]  # fmt: skip


def _process(columns, start: str) -> None:
    expected = [_forward_and_backward(x, v) for x in columns for v in VARIANTS]
    names = [x.name for x in columns]
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as pool:
        found = pool.submit(_in_child, names).result(timeout=300)
    assert found == [[t.tolist() for t in r] for r in expected]


@together
def fork(*columns) -> None:
    """After the parent has used the operators, with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _process(columns, "fork")
    finally:
        torch.set_num_threads(before)


@together
def spawn(*columns) -> None:
    _process(columns, "spawn")


BUILD = Path(__file__).parents[2] / "build"


@together
def threads_in_cpp(*_) -> None:
    in_cpp("Threads.*")


@together
def torchscript_in_cpp(*_) -> None:
    """Second derivatives among them."""
    in_cpp("TorchScript.*")


def in_cpp(tests: str) -> None:
    """GoogleTests, in a process without Python."""
    done = subprocess.run(
        [BUILD / "tests" / "test_qkv", f"--gtest_filter={tests}"],
        capture_output=True, text=True, env={**os.environ, "GTEST_BRIEF": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "[  PASSED  ]" in done.stdout, done.stdout + done.stderr
    assert "PASSED  ] 0 tests" not in done.stdout
