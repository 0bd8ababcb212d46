"""What goes through the doors: the columns of the table in test_doors.py.

An `Operator` is a function of all the tensors that it takes, by name, with every other option on;
what it should give comes from the definition. Internal operators have no definition of their own
(autograd through the definition is what they compute, see test_gradients.py); they are compared
with themselves, undone.
"""

from typing import Any, Callable

import definition
import torch
from torch import Tensor

import qkv

BATCH, HEADS, KV_HEADS, M, N, D, DV = 2, 4, 2, 3, 5, 2, 3
GROUP = HEADS // KV_HEADS
OPTIONS = {"is_causal": True, "scale": 0.8, "enable_gqa": True, "window": (3, 0), "query_offset": 2,
           "softcap": 2.0}  # fmt: skip
PUBLIC_TENSORS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "key_mask")

#: Options one by one, for doors that might lose one: other options, and tensors given.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "causal": ({"is_causal": True}, ()),
    "scale": ({"scale": 0.8}, ()),
    "window": ({"window": (1, 2)}, ()),
    "query_offset": ({"window": (2, 0), "query_offset": 2}, ()),
    "softcap": ({"softcap": 2.0}, ()),
    "attn_mask": ({}, ("attn_mask",)),
    "alibi_slopes": ({}, ("alibi_slopes",)),
    "sinks": ({}, ("sinks",)),
    "key_mask": ({}, ("key_mask",)),
    "dropout": ({"dropout_p": 0.4}, ()),
    "everything": ({**OPTIONS, "dropout_p": 0.4}, PUBLIC_TENSORS[3:]),
}

Tensors = dict[str, Tensor]


def together(door):
    """Marks a door that takes all columns of its row at once, as setting it up takes long."""
    door.together = True
    return door


def as_tuple(results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def scalar(results: tuple[Tensor, ...]) -> Tensor:
    """A function of all results whose derivatives of any order depend on each of their elements."""
    return sum(x.sin().sum() for x in as_tuple(results))


def assert_close(actual, expected, **tolerances) -> None:
    for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(a, e, **tolerances)


def public_tensors(batch=(BATCH,), seed=0, dtype=torch.float64, sizes=None) -> Tensors:
    """One of each kind; attn_mask is shared by the batch, sinks by batch and rows."""
    heads, kv_heads, m, n, d, dv = sizes or (HEADS, KV_HEADS, M, N, D, DV)
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return {
        "query": normal(*batch, heads, m, d),
        "key": normal(*batch, kv_heads, n, d),
        "value": normal(*batch, kv_heads, n, dv),
        "attn_mask": normal(heads, m, n),
        "alibi_slopes": normal(*batch, heads).abs(),
        "sinks": normal(heads),
        "key_mask": torch.rand(*batch, n, generator=g) < 0.7,
    }


class Operator:
    """One of torch.ops.qkv, called with tensors by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.op = getattr(torch.ops.qkv, name).default
        self.arguments = self.op._schema.arguments
        self.options: dict[str, Any] = OPTIONS
        self.batch: tuple[int, ...] = (BATCH,)

    @property
    def differentiable(self) -> list[str]:
        return [n for n, x in self.tensors().items() if x.is_floating_point()]

    def tensors(self, seed: int = 0, **how) -> Tensors:
        """Arguments of one call. Of the same shapes for every seed."""
        given = public_tensors(**{"batch": self.batch, "seed": seed, **how})
        return {a.name: given[a.name] for a in self.arguments if a.name in given}

    def __call__(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.op(**tensors, **self.options))

    def of(self, *names: str) -> Callable[..., tuple[Tensor, ...]]:
        """As a function of the named tensors, in that order."""
        others = {n: x for n, x in self.tensors().items() if n not in names}
        return lambda *tensors: self(**others, **dict(zip(names, tensors, strict=True)))

    def expected(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        """By the definition."""
        value = tensors.pop("value", tensors["key"])
        out, lse, weights = definition.attention(value=value, **tensors, **self.options)
        return {"attention": (out,), "attention_with_lse": (out, lse)}.get(self.name, (weights,))

    def expected_of(self, *names: str) -> Callable[..., tuple[Tensor, ...]]:
        others = {n: x for n, x in self.tensors().items() if n not in names}
        return lambda *tensors: self.expected(**others, **dict(zip(names, tensors, strict=True)))

    def with_batch(self, *batch: int) -> "Operator":
        other = type(self)(self.name)
        other.options, other.batch = self.options, batch
        return other

    def with_options(self, options: dict[str, Any]) -> "Operator":
        other = type(self)(self.name)
        known = {a.name for a in self.arguments}
        other.options = {n: x for n, x in options.items() if n in known}
        return other


class InternalOperator(Operator):
    """One whose name begins with an underscore. Its arguments are found by the schema's names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.options = {"scale": 0.8, "softcap": 2.0, "dropout_p": 0.25, "band": [3, 0, 2]}
        if "weights" in name:  # of values without columns, without dropout
            self.options |= {"dropout_p": 0.0, "dropout_seed": None}
        for a in self.arguments:
            if a.name == "needs":
                self.options["needs"] = [True] * a.N

    def tensors(self, seed: int = 0, **how) -> Tensors:
        g = torch.Generator().manual_seed(seed)
        given = public_tensors(**{"batch": self.batch, "seed": seed, **how})
        batch = given["query"].shape[:-3]
        given["dropout_seed"] = torch.randint(2**63 - 1, batch, generator=g)
        if self.options["dropout_p"] == 0.0:
            given["value"] = given["value"][..., :0]
            del given["dropout_seed"]
        forward = torch.ops.qkv._attention_forward
        operands = {a.name: given[a.name] for a in forward.default._schema.arguments
                    if a.name in given}  # fmt: skip
        scalars = {n: x for n, x in self.options.items() if n != "needs"}
        results = forward(**operands, **scalars)
        names = ("output", "logsumexp", "output_rest", "logsumexp_rest")
        given.update(zip(names, results, strict=True))

        def like(x: Tensor) -> Tensor:
            return torch.randn(x.shape, generator=g, dtype=x.dtype)

        for name in ("output", "logsumexp"):
            given["grad_" + name] = like(given[name])
        given["grad_weights"] = like(given["query"] @ given["key"].repeat_interleave(GROUP, -3).mT)
        for name in PUBLIC_TENSORS[:6]:
            given[name + "_t"] = like(given[name])
            given["grad_grad_" + name] = like(given[name])
        return {a.name: given[a.name] for a in self.arguments if a.name in given}

    def expected(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return self(**tensors)


class Module:
    """A module of qkv.nn with an input."""

    def __init__(self, make: Callable[[], torch.nn.Module], *shape: int) -> None:
        torch.manual_seed(0)
        self.module = make()
        self.input = torch.randn(*shape)

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def gradients(self, f: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
        """Of scalar(f(input)), f being the module or made of it: for the input and its parameters."""
        leaf = self.input.clone().requires_grad_()
        return torch.autograd.grad(scalar(f(leaf)), (leaf, *self.module.parameters()))


MODULES: dict[str, Callable[[], Module]] = {
    "ScaledDotProductAttention": lambda: Module(
        lambda: qkv.nn.ScaledDotProductAttention(causal=True), 2, 3, 5, 4
    ),
    "SelfAttention": lambda: Module(lambda: qkv.nn.SelfAttention(6, 4, causal=True), 2, 5, 6),
    "MultiheadAttention": lambda: Module(
        lambda: qkv.nn.MultiheadAttention(8, 4, num_kv_heads=2, causal=True, window=(3, 0)), 2, 5, 8
    ),
}


def column(name: str) -> Any:
    if name in MODULES:
        return MODULES[name]()
    if name == "KVCache":
        return name
    return InternalOperator(name) if name.startswith("_") else Operator(name)
