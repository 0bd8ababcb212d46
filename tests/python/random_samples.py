"""Entries as those of tests/samples.json, drawn by hypothesis: every option with every other."""

import math
import os
from typing import Callable

import samples
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# The kernels' tiles and what is next to them; ranges of keys that are split; more queries than go
# through the kernel for few rows.
LENGTHS = [1, 2, 3, 4, 5, 7, 9, 17, 40, 130]
MANY_KEYS = [600, 1100, 2100]
HEAD_DIMS = [1, 2, 5, 8, 16, 19]
VALUE_DIMS = [1, 3, 8, 17, 64]


def check_random_samples(examples: int, check: Callable[[dict, torch.dtype], None]) -> None:
    """check(entry, dtype) of so many, always the same ones; or QKV_FUZZ others, each time others."""

    @settings(
        max_examples=int(os.environ.get("QKV_FUZZ", examples)),
        deadline=None,
        derandomize="QKV_FUZZ" not in os.environ,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(entry=entries(), dtype=st.sampled_from(DTYPES), float32_extras=st.booleans())
    def each(entry, dtype, float32_extras):
        if float32_extras and dtype != torch.float64:
            entry["float32_extras"] = True
        check(entry, dtype)

    each()


@st.composite
def entries(draw, max_pairs=200_000):
    """Problems of every kind with at most about `max_pairs` scores."""

    def sometimes(strategy):
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else None

    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(st.sampled_from(LENGTHS + MANY_KEYS))
    rows = max(1, max_pairs // (keys * kv_heads * group * math.prod(batch)))
    queries = min(draw(st.sampled_from(LENGTHS)), rows)
    return _with_options(
        draw,
        {
            "name": "fuzz",
            "batch": batch,
            "kv_batch": [draw(st.sampled_from([n, 1])) for n in batch],
            "heads": kv_heads * group,
            "kv_heads": kv_heads,
            "enable_gqa": True,
            "queries": queries,
            "keys": keys,
            "head_dim": draw(st.sampled_from(HEAD_DIMS)),
            "value_dim": draw(st.sampled_from(VALUE_DIMS)),
            "layout": sometimes(st.sampled_from(["rows_heads", "columns_rows", "strided_columns"])),
        },
    )


@st.composite
def small_entries(draw):
    """Problems small enough for every element of every Jacobian."""
    lengths, widths = st.integers(1, 5), st.integers(1, 3)
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    batch = draw(st.sampled_from([[], [1]] if kv_heads * group == 4 else [[], [1], [2], [2, 1]]))
    return _with_options(
        draw,
        {
            "name": "small",
            "batch": batch,
            "kv_batch": [draw(st.sampled_from([n, 1])) for n in batch],
            "heads": kv_heads * group,
            "kv_heads": kv_heads,
            "enable_gqa": True,
            "queries": draw(lengths),
            "keys": draw(lengths),
            "head_dim": draw(widths),
            "value_dim": draw(widths),
        },
    )


def _with_options(draw, entry):
    def sometimes(strategy):
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else None

    def broadcast(shape):
        """`shape`, some of it 1, some of its first dimensions left out."""
        shape = [draw(st.sampled_from([n, n, 1])) for n in shape]
        return shape[draw(st.integers(0, len(shape))) :]

    batch, heads = entry["batch"], entry["heads"]
    queries, keys = entry["queries"], entry["keys"]
    reach = min(keys, 40)
    entry |= {
        "is_causal": draw(st.booleans()),
        "window": sometimes(st.tuples(st.integers(-1, reach), st.integers(-1, reach))),
        "query_offset": sometimes(st.integers(-queries - 2, keys + 2)),
        "scale": sometimes(st.floats(-2, 2)),
        "softcap": sometimes(st.floats(0.05, 20)),
        "dropout_p": sometimes(st.floats(0, 1)),
    }
    if draw(st.booleans()):
        shape = broadcast([*batch, heads, queries, draw(st.sampled_from([keys, keys, 1]))])
        rows = st.integers(0, math.prod(shape[:-1]) - 1)
        layouts = ["columns_rows", "strided_columns"] if len(shape) > 1 else ["strided_columns"]
        entry["attn_mask"] = {
            "dtype": draw(st.sampled_from(["bool", "float"])),
            "shape": shape,
            "minus_inf": draw(st.booleans()),
            "empty_rows": draw(st.lists(rows, max_size=2)),
            "layout": sometimes(st.sampled_from(layouts)),
        }
    if draw(st.booleans()):
        layout = sometimes(st.just("strided_columns"))
        entry["key_mask"] = {"shape": [*broadcast(batch), keys], "layout": layout}
    for name in ("alibi_slopes", "sinks"):
        if draw(st.booleans()):
            entry[name] = {"shape": [*broadcast(batch), heads]}
    return {n: x for n, x in entry.items() if x is not None}


def largest_score(entry):
    """A bound on it. A rounding of a score is an error in the exponent of a weight."""
    sample = samples.make(entry)
    o, width = sample.kwargs, sample.query.shape[-1]
    positions = sample.query.shape[-2] + sample.key.shape[-2] + abs(o.get("query_offset", 0))
    norms = sample.query.norm(dim=-1).max() * sample.key.norm(dim=-1).max()
    slopes = o["alibi_slopes"].max() if "alibi_slopes" in o else 0.0
    return float(abs(o.get("scale", width**-0.5)) * norms + slopes * positions)
