"""Peak memory of forward and backward grows linearly with the length."""

import subprocess
import sys

PROGRAM = r"""
import re, torch, qkv

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\s+(\d+) kB", file.read()).group(1)) / 1024

def run(n):
    q, k, v = (torch.randn(1, 2, n, 64, requires_grad=True) for _ in range(3))
    mask = torch.randn(n, requires_grad=True)  # of keys, broadcast over all rows
    qkv.attention(q, k, v, mask, is_causal=True).sum().backward()

run(256)  # what the first call loads
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM, the peak, starts anew
before = status("VmRSS")
run({n})
print(status("VmHWM") - before)
"""


def peak(n: int) -> float:
    """MiB that a call adds to a process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{n}", str(n))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_linear_in_the_length():
    # The scores alone would be 2 * n * n floats: 128 MiB at 4096, 2 GiB at 16384.
    short, long = peak(4096), peak(16384)
    print(f"{short:.0f} MiB at N = 4096, {long:.0f} MiB at N = 16384")
    assert 8 < short and long < 4.5 * short
