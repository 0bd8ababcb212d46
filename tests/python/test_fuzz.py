"""Random samples against the definition: every option with every other, in every dtype.

QKV_FUZZ=20000 runs so many, other ones each time, and says how many; otherwise it is always the same
few hundred. What fails is printed as a line for tests/samples.json.

For bfloat16 and float16 the bound on gradients is that of FlashAttention's tests, at most twice the
error of PyTorch operations in the same dtype, both against float64; nothing is nearer than one
rounding, and float32's tolerance comes on top, for when PyTorch is exact by luck. Outputs must be
within one rounding and that tolerance.
"""

import os

import definition
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_samples import entries, largest_score
from test_definition import TOLERANCE, check_values_and_gradients

EXAMPLES = int(os.environ.get("QKV_FUZZ", 500))


def test_random_samples():
    checked = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="QKV_FUZZ" not in os.environ,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(entry=entries(), dtype=st.sampled_from(list(TOLERANCE)), float32_extras=st.booleans())
    def check(entry, dtype, float32_extras):
        nonlocal checked
        if float32_extras and dtype != torch.float64:
            entry["float32_extras"] = True
        tolerance = TOLERANCE[dtype] * max(1.0, largest_score(entry) / 16)
        check_values_and_gradients(entry, dtype, tolerance, definition.attention_at_once)
        checked += 1
        if checked % 1000 == 0:
            print(f"{checked} samples checked", flush=True)

    check()
    print(f"{checked} samples checked")
