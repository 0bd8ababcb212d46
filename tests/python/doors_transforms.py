"""torch.func: a function for each row of the table in test_doors.py that is a transform."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from doors_columns import Module, Operator, as_tuple, assert_close, scalar
from torch import Tensor
from torch.autograd import functional as plain


@contextmanager
def no_loops():
    """vmap raises where it would call an operator once for each sample."""
    before = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(batching rule|performance drop).*")
        try:
            yield
        finally:
            torch._C._functorch._set_vmap_fallback_enabled(before)


@contextmanager
def fused():
    """Falling back to formulas is an error. (Only the first time in a process: whatever else runs
    unfused has another reason, and the warning is given once for each.)"""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*running unfused.*")
        yield


def gradients(f, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of scalar(f), by plain autograd."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in tensors)
    return torch.autograd.grad(scalar(f(*leaves)), leaves)


def everything(x: Operator, seed: int = 0):
    """x and its definition as functions of all differentiable tensors, those, and others to serve
    as tangents."""
    names = x.differentiable
    inputs, others = x.tensors(seed), x.tensors(seed + 1)
    return (x.of(*names), x.expected_of(*names), tuple(inputs[n] for n in names),
            tuple(others[n] for n in names))  # fmt: skip


def grad(x: Operator) -> None:
    f, expected, inputs, _ = everything(x)
    every = tuple(range(len(inputs)))
    with fused():
        found = torch.func.grad(lambda *t: scalar(f(*t)), every)(*inputs)
    assert_close(found, gradients(expected, inputs))


def vjp(x: Operator) -> None:
    f, expected, inputs, _ = everything(x)
    with fused():
        results, pullback = torch.func.vjp(f, *inputs)
        cotangents = tuple(r.cos() for r in results)
        found = pullback(cotangents)
    assert_close(results, expected(*inputs))
    assert_close(found, plain.vjp(expected, inputs, cotangents)[1])


def jvp(x: Operator) -> None:
    f, expected, inputs, tangents = everything(x)
    results, found = torch.func.jvp(f, inputs, tangents)
    assert_close(results, expected(*inputs))
    assert_close(found, as_tuple(plain.jvp(expected, inputs, tangents)[1]))


def _jacobian(x: Operator, transform, **how) -> None:
    x = x.with_batch(1)
    names = x.differentiable
    inputs = tuple(x.tensors()[n] for n in names)
    with no_loops():
        found = transform(x.of(*names), tuple(range(len(names))))(*inputs)
    for f, e in zip(found, plain.jacobian(x.expected_of(*names), inputs), strict=True):
        assert_close(f, e)


def jacfwd(x: Operator) -> None:
    _jacobian(x, torch.func.jacfwd)


def jacrev(x: Operator) -> None:
    with fused():
        _jacobian(x, torch.func.jacrev)


def hessian(x: Operator) -> None:
    """With the mixed blocks of query and key."""
    x = x.with_batch(1)
    names = ("query", "key")
    inputs = tuple(x.tensors()[n] for n in names)
    f, definition = x.of(*names), x.expected_of(*names)
    expected = plain.hessian(lambda *t: scalar(definition(*t)), inputs)
    forward_over_reverse = torch.func.hessian
    for transform in (forward_over_reverse, _reverse_over_reverse):
        with no_loops():
            found = transform(lambda *t: scalar(f(*t)), (0, 1))(*inputs)
        for row, e in zip(found, expected, strict=True):
            assert_close(row, e)


def _reverse_over_reverse(f, argnums):
    return torch.func.jacrev(torch.func.jacrev(f, argnums), argnums)


def hessian_vector_product(x: Operator) -> None:
    f, expected, inputs, tangents = everything(x)
    every = tuple(range(len(inputs)))
    gradient = torch.func.grad(lambda *t: scalar(f(*t)), every)
    _, of_definition = plain.vhp(lambda *t: scalar(expected(*t)), inputs, tangents)
    assert_close(torch.func.jvp(gradient, inputs, tangents)[1], of_definition)
    assert_close(torch.func.vjp(gradient, *inputs)[1](tangents), of_definition)


SAMPLES = 3


def _samples(x: Operator) -> list[dict[str, Tensor]]:
    return [x.tensors(seed) for seed in range(SAMPLES)]


def _mapped(samples: list[dict[str, Tensor]], in_dims: dict[str, int]):
    """Arguments of which those in in_dims have one more dimension there, and each sample's."""
    one = {n: t for n, t in samples[0].items() if n not in in_dims}
    mapped = {n: torch.stack([s[n] for s in samples], d) for n, d in in_dims.items()}
    return {**one, **mapped}, [{**s, **one} for s in samples]


def _vmap_by_name(f, in_dims: dict[str, int], tensors: dict[str, Tensor], **how):
    names = list(tensors)
    dims = tuple(in_dims.get(n) for n in names)
    mapped = torch.func.vmap(lambda *t: f(**dict(zip(names, t))), dims, **how)
    return mapped(*tensors.values())


def vmap(x: Operator) -> None:
    """Of every tensor alone, and of all together, each along another dimension."""
    samples = _samples(x)
    dims = {n: i % (t.dim() + 1) for i, (n, t) in enumerate(samples[0].items())}
    for in_dims in (*({n: d} for n, d in dims.items()), dims):
        tensors, each = _mapped(samples, in_dims)
        with no_loops():
            found = _vmap_by_name(x, in_dims, tensors)
        for i, sample in enumerate(each):
            for f, e in zip(found, x.expected(**sample), strict=True):
                torch.testing.assert_close(f[i], e, msg=lambda m, d=in_dims: f"{d}: {m}")


def vmap_of_vmap(x: Operator) -> None:
    """A different half of the tensors mapped by each."""
    names = list(x.tensors())
    outer, inner = names[::2], names[1::2]
    tensors, samples = _mapped(_samples(x), dict.fromkeys(names, 0))
    with no_loops():
        found = _vmap_by_name(
            lambda **o: _vmap_by_name(x, dict.fromkeys(inner, 0), o), dict.fromkeys(outer, 0), tensors
        )  # fmt: skip
    for i in range(SAMPLES):
        for j in range(SAMPLES):
            one = {n: samples[i][n] if n in outer else samples[j][n] for n in names}
            for f, e in zip(found, x.expected(**one), strict=True):
                torch.testing.assert_close(f[i, j], e)


def vmap_of_grad(x) -> None:
    """Per-sample gradients: of tensors that have samples and of those that all samples share."""
    if isinstance(x, Module):
        return _per_sample_gradients(x)
    names = x.differentiable
    mapped = dict.fromkeys(names[::2], 0)
    tensors, samples = _mapped(_samples(x), mapped)
    others = {n: t for n, t in tensors.items() if n not in names}
    every = tuple(range(len(names)))
    gradient = torch.func.grad(
        lambda *t: scalar(x(**others, **dict(zip(names, t)))), every
    )  # fmt: skip
    with no_loops(), fused():
        found = torch.func.vmap(gradient, tuple(mapped.get(n) for n in names))(
            *(tensors[n] for n in names)
        )
    for i, sample in enumerate(samples):
        expected = gradients(x.expected_of(*names), tuple(sample[n] for n in names))
        assert_close(tuple(f[i] for f in found), expected)


def _per_sample_gradients(x: Module) -> None:
    parameters = {n: p.detach() for n, p in x.module.named_parameters()}

    def loss(parameters, input):
        return scalar(torch.func.functional_call(x.module, parameters, (input,)))

    with no_loops(), fused():
        of_parameters, of_input = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(
            parameters, x.input
        )
    for i in range(len(x.input)):
        found = (of_input[i], *(p[i] for p in of_parameters.values()))
        expected = x.gradients(lambda t, i=i: x.module(t[i]))
        assert_close(found, (expected[0][i], *expected[1:]))


def grad_of_vmap(x: Operator) -> None:
    names = x.differentiable
    mapped = dict.fromkeys(names[1::2], 0)
    tensors, samples = _mapped(_samples(x), mapped)
    others = {n: t for n, t in tensors.items() if n not in names}
    dims = tuple(mapped.get(n) for n in names)

    def total(*t):
        f = torch.func.vmap(lambda *t: x(**others, **dict(zip(names, t))), dims)
        return scalar(f(*t))

    def expected(*t):
        one = [[s if d is None else s[i] for s, d in zip(t, dims)] for i in range(SAMPLES)]
        return sum(scalar(x.expected_of(*names)(*s)) for s in one).reshape(1)

    inputs = tuple(tensors[n] for n in names)
    with no_loops(), fused():
        found = torch.func.grad(total, tuple(range(len(names))))(*inputs)
    assert_close(found, plain.vjp(expected, inputs, torch.ones(1, dtype=torch.float64))[1])


def vmap_of_grad_of_vmap(x: Operator) -> None:
    """A mask shared by the inner samples, with a gradient for each outer one."""
    samples = [[x.tensors(SAMPLES * i + j) for j in range(SAMPLES)] for i in range(2)]
    query = torch.stack([torch.stack([s["query"] for s in row]) for row in samples])
    mask = x.tensors()["attn_mask"]
    f, expected = x.of("query", "attn_mask"), x.expected_of("query", "attn_mask")

    def total(query, mask):
        return scalar(torch.func.vmap(f, (0, None))(query, mask))

    with no_loops(), fused():
        found = torch.func.vmap(torch.func.grad(total, (0, 1)), (0, None))(query, mask)
    for i in range(2):
        sum_of = lambda *t: as_tuple(sum(scalar(expected(q, t[-1])) for q in t[:-1]).reshape(1))
        inputs = (*query[i], mask)
        of_queries = plain.vjp(sum_of, inputs, torch.ones(1, dtype=torch.float64))[1]
        assert_close((*found[0][i], found[1][i]), of_queries)


def _dropout(x: Operator):
    """With gradients of the value, in which the output is linear: they tell what was dropped."""
    x = x.with_options({**x.options, "dropout_p": 0.4})

    def outputs_and_gradients(f):
        def both(query, value):
            results, pullback = torch.func.vjp(lambda v: f(query, v), value)
            return (*results, *pullback(tuple(torch.ones_like(r) for r in results)))

        return both

    of_query_and_value = ("query", "value")
    query = torch.stack([x.tensors(seed)["query"] for seed in range(SAMPLES)])
    return x, outputs_and_gradients(x.of(*of_query_and_value)), query, x.tensors()["value"]


def vmap_randomness_error(x: Operator) -> None:
    x, f, query, value = _dropout(x)
    for function in (x.of("query"), lambda q: f(q, value)):
        with no_loops(), pytest.raises(RuntimeError, match="random"):
            torch.func.vmap(function)(query)


def vmap_randomness_same(x: Operator) -> None:
    """Each sample drops what one call would."""
    x, f, query, value = _dropout(x)
    torch.manual_seed(1)
    with no_loops(), fused():
        found = torch.func.vmap(f, (0, None), randomness="same")(query, value)
    for i, q in enumerate(query):
        torch.manual_seed(1)
        leaf = value.clone().requires_grad_()
        expected = x.expected_of("query", "value")(q, leaf)
        (of_value,) = torch.autograd.grad(sum(e.sum() for e in expected), leaf)
        assert_close(tuple(r[i] for r in found), (*expected, of_value))


def vmap_randomness_different(x: Operator) -> None:
    """All samples together drop what one call with one more batch dimension would."""
    x, f, query, value = _dropout(x)
    torch.manual_seed(1)
    with no_loops(), fused():
        found = torch.func.vmap(f, (0, None), randomness="different")(query, value)
    torch.manual_seed(1)
    leaf = value.expand(SAMPLES, *value.shape).clone().requires_grad_()
    expected = x.expected_of("query", "value")(query, leaf)
    (of_value,) = torch.autograd.grad(sum(e.sum() for e in expected), leaf)
    assert_close(found, (*expected, of_value))
