"""Random samples against the definition: every option with every other, in every dtype.

QKV_FUZZ=20000 runs so many, other ones each time, and says how many; otherwise it is always the same
few hundred. What fails is printed as a line for tests/samples.json.

For bfloat16 and float16 the bound on gradients is that of FlashAttention's tests, at most twice the
error of PyTorch operations in the same dtype, both against float64; nothing is nearer than one
rounding, and float32's tolerance comes on top, for when PyTorch is exact by luck. Outputs must be
within one rounding and that tolerance.
"""

import definition
from random_samples import check_random_samples, largest_score
from test_definition import TOLERANCE, check_values_and_gradients


def test_random_samples():
    checked = 0

    def check(entry, dtype):
        nonlocal checked
        tolerance = TOLERANCE[dtype] * max(1.0, largest_score(entry) / 16)
        check_values_and_gradients(entry, dtype, tolerance, definition.attention_at_once)
        checked += 1
        if checked % 1000 == 0:
            print(f"{checked} samples checked", flush=True)

    check_random_samples(500, check)
    print(f"{checked} samples checked")
