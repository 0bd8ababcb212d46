"""Random samples against the definition: every option with every other.

QKV_FUZZ=20000 runs so many, other ones each time; otherwise it is always the same few hundred. What
fails is printed as a line for tests/samples.json.
"""

import os

import samples
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_definition import TOLERANCE, check_values_and_gradients

EXAMPLES = int(os.environ.get("QKV_FUZZ", 300))


@st.composite
def entries(draw):
    def sometimes(strategy):
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else None

    def broadcast(shape):
        """`shape`, some of it 1, some of its first dimensions left out."""
        shape = [draw(st.sampled_from([n, n, 1])) for n in shape]
        return shape[draw(st.integers(0, len(shape))) :]

    length = st.sampled_from([1, 2, 3, 4, 5, 7, 9, 17, 40, 130])
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, queries, keys = kv_heads * group, draw(length), draw(length)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    entry = {
        "name": "fuzz",
        "batch": batch,
        "kv_batch": [draw(st.sampled_from([n, 1])) for n in batch],
        "heads": heads,
        "kv_heads": kv_heads,
        "enable_gqa": True,
        "queries": queries,
        "keys": keys,
        "head_dim": draw(st.sampled_from([1, 2, 5, 8, 16, 19])),
        "value_dim": draw(st.sampled_from([1, 3, 8, 17, 64])),
        "is_causal": draw(st.booleans()),
        "window": sometimes(st.tuples(st.integers(-1, 40), st.integers(-1, 40))),
        "query_offset": sometimes(st.integers(-queries - 2, keys + 2)),
        "scale": sometimes(st.floats(-2, 2)),
        "softcap": sometimes(st.floats(0.05, 20)),
        "dropout_p": sometimes(st.floats(0, 1)),
        "layout": sometimes(st.sampled_from(["rows_heads", "columns_rows", "strided_columns"])),
    }
    mask = [*broadcast([*batch, heads]), draw(st.sampled_from([queries, 1])), keys]
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["bool", "float"]))
        rows = st.integers(0, torch.Size(mask[:-1]).numel() - 1)
        entry["attn_mask"] = {"dtype": kind, "shape": mask, "minus_inf": draw(st.booleans())}
        entry["attn_mask"]["empty_rows"] = draw(st.lists(rows, max_size=2))
    if draw(st.booleans()):
        entry["key_mask"] = {"shape": [*broadcast(batch), keys]}
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
    return abs(o.get("scale", width**-0.5)) * norms + slopes * positions


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="QKV_FUZZ" not in os.environ,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(entry=entries(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_random_samples(entry, dtype):
    tolerance = TOLERANCE[dtype] * max(1.0, largest_score(entry) / 16)
    check_values_and_gradients(entry, dtype, tolerance)
