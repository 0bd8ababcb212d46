"""The table of samples (tests/samples.json) as tensors: one table for all tests, C++ ones too."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

TABLE = json.loads((Path(__file__).parent.parent / "samples.json").read_text())
DEFAULTS = {"batch": [2], "heads": 3, "queries": 5, "keys": 7, "head_dim": 4, "value_dim": None}
SCALARS = "is_causal scale enable_gqa window query_offset softcap dropout_p".split()


@dataclass
class Sample:
    """Arguments of a call of qkv.attention."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The floating-point tensors by name."""
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        for name, x in self.kwargs.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                tensors[name] = x
        return tensors

    def replaced(self, tensors: dict[str, Tensor]) -> "Sample":
        positional = {n: tensors.get(n, getattr(self, n)) for n in ("query", "key", "value")}
        kwargs = {n: tensors.get(n, x) for n, x in self.kwargs.items()}
        return Sample(self.name, **positional, kwargs=kwargs)

    def to(self, dtype: torch.dtype) -> "Sample":
        return self.replaced({n: x.detach().to(dtype) for n, x in self.differentiable.items()})

    def requires_grad(self) -> "Sample":
        """With leaves: gradients of expanded or strided tensors arrive at their storage's owner."""
        return self.replaced(
            {n: x.detach().clone().requires_grad_() for n, x in self.differentiable.items()}
        )

    def call(self, op):
        if self.kwargs.get("dropout_p"):
            torch.manual_seed(1)  # what dropout drops is then a function of the sample
        return op(self.query, self.key, self.value, **self.kwargs)


def entries(**conditions: Any) -> list[dict]:
    """Entries of the table: large=False, say, leaves out those that have "large": true."""
    return [e for e in TABLE if all(bool(e.get(n)) == c for n, c in conditions.items())]


def entry(name: str) -> dict:
    (found,) = (e for e in TABLE if e["name"] == name)
    return found


def parametrize(**conditions: Any):
    chosen = entries(**conditions)
    return pytest.mark.parametrize("entry", chosen, ids=[e["name"] for e in chosen])


def generator(seed: int) -> torch.Generator:
    """Of the device that tests run on (see conftest.py)."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def _laid_out(x: Tensor, layout: Optional[str], role: str) -> Tensor:
    if layout == "rows_heads":  # (B, M, H, D) in memory, as projections leave it
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "columns_rows":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "strided_columns":
        return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
    if layout == "expanded_keys" and role != "query":
        return x[:1].expand(x.shape)
    return x


def make(entry: dict, dtype: torch.dtype = torch.float64, seed: int = 0) -> Sample:
    d = {**DEFAULTS, **entry}
    g = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    heads, kv_heads = d["heads"], d.get("kv_heads", d["heads"])
    value_dim = d["head_dim"] if d["value_dim"] is None else d["value_dim"]
    if d["batch"] is None:
        front = kv_front = []
    else:
        front = [*d["batch"], heads]
        kv_front = [*d.get("kv_batch", d["batch"]), kv_heads]
    layout = d.get("layout")
    query = _laid_out(normal(*front, d["queries"], d["head_dim"]), layout, "query")
    key = _laid_out(normal(*kv_front, d["keys"], d["head_dim"]), layout, "key")
    value = _laid_out(normal(*kv_front, d["keys"], value_dim), layout, "value")

    kwargs = {name: d[name] for name in SCALARS if name in d}
    for name in ("attn_mask", "key_mask"):
        if name in d:
            kwargs[name] = _mask(d[name], g)
    for name in ("alibi_slopes", "sinks"):
        if name in d:
            kwargs[name] = torch.rand(d[name]["shape"], generator=g, dtype=torch.float64)
    sample = Sample(entry["name"], query, key, value, kwargs)
    if dtype != torch.float64:
        sample = sample.to(dtype)
    if d.get("float32_extras"):  # what comes with query, key and value may be of either dtype
        floats = {n: x for n, x in kwargs.items() if n in sample.differentiable}
        sample = sample.replaced({n: x.float() for n, x in floats.items()})
    return sample


def _mask(spec: dict, g: torch.Generator) -> Tensor:
    shape = spec["shape"]
    keep = torch.rand(shape, generator=g) < 0.7
    if "empty_rows" in spec:  # rows of the mask: keys are its last dimension
        keep.view(-1, *shape[-1:])[spec["empty_rows"]] = False
    mask = keep
    if spec.get("dtype", "bool") != "bool":
        mask = torch.randn(shape, generator=g, dtype=torch.float64)
        if spec.get("minus_inf"):
            mask.masked_fill_(~keep, float("-inf"))
    return _laid_out(mask, spec.get("layout"), "mask")
