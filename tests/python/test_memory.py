"""Peak memory of forward, backward, double backward and forward mode grows linearly with the length;
keys that a batch shares are not repeated."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import ctypes, re, torch, qkv
from torch.autograd import forward_ad

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\s+(\d+) kB", file.read()).group(1)) / 1024

def run(n):
    inputs = [torch.randn(1, 2, n, {width}, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(n, requires_grad=True))  # a mask of keys, broadcast over all rows
    attend = lambda *x: qkv.attention(*x, is_causal=True)
    if "{what}" == "backward":
        attend(*inputs).sum().backward()
    elif "{what}" == "double_backward":
        grads = torch.autograd.grad(attend(*inputs).sum(), inputs, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
    else:
        with forward_ad.dual_level(), torch.no_grad():
            attend(*(forward_ad.make_dual(x, torch.randn_like(x)) for x in inputs))

run(256)  # what the first call loads
ctypes.CDLL(None).malloc_trim(0)  # or what was freed so far is used anew, and not counted
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM, the peak, starts anew
before = status("VmRSS")
run({n})
print(status("VmHWM") - before)
"""


def peak(what: str, n: int, width: int) -> float:
    """MiB that a call adds to a process."""
    program = PROGRAM.replace("{what}", what).replace("{n}", str(n)).replace("{width}", str(width))
    # What is freed goes back to the system. Else glibc keeps more of it the larger the blocks are
    # that it has seen freed, and the peak depends on where the next ones happen to fit.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize(
    ("what", "width"), [("backward", 64), ("double_backward", 24), ("forward_mode", 64)]
)
def test_linear_in_the_length(what, width):
    # The scores alone would be 2 * n * n floats: 128 MiB at 4096, 2 GiB at 16384.
    few, many = peak(what, 4096, width), peak(what, 16384, width)
    print(f"{what}: {few:.0f} MiB at N = 4096, {many:.0f} MiB at N = 16384")
    assert 2 < few and many < 4.5 * few


SHARED = r"""
import torch, qkv
from torch.profiler import profile

key, value = (torch.randn(2, 64, 2048).transpose(-2, -1) for _ in range(2))  # 1 MiB each
query = torch.randn(128, 2, 1, 64)
with profile(profile_memory=True) as of_call:
    qkv.attention(query, key, value)
print(sum(max(x.self_cpu_memory_usage, 0) for x in of_call.key_averages()) / 2**20)
"""


def test_strided_keys_of_a_whole_batch_are_copied_once():
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 2 <= float(done.stdout) < 10  # MiB; for each batch element: 256


REPEATED = r"""
import torch, qkv
from torch.profiler import profile

def allocated(call, *arguments):
    call(*arguments)
    with profile(profile_memory=True) as of_call:
        call(*arguments)
    return sum(max(x.self_cpu_memory_usage, 0) for x in of_call.key_averages()) / 2**20

q, mask = torch.randn(8, 8, 512, 8), torch.randn(512, 512)
print(allocated(qkv.attention, q, q, q, mask.t().expand(8, 8, 512, 512)))

q, mask = q.bfloat16(), mask.bfloat16().expand(8, 8, 512, 512)
operands = q, q, q, mask, *[None] * 5, 0.0, 0.0, [-1, -1, 0]
tangents = None, None, None, mask, None, None
results = torch.ops.qkv._attention_forward(*operands)
print(allocated(torch.ops.qkv._attention_jvp, *operands, *results, *tangents))
"""


def test_expanded_masks_are_copied_once():
    """One whose keys lie apart, and the tangent of one, which becomes float32."""
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for mebibytes in done.stdout.split():
        assert 1 <= float(mebibytes) < 16  # for each head: 64


PAGES = r"""
import resource, torch, qkv

query, key, value = (torch.randn(1, 1, 64, 512, requires_grad=True) for _ in range(3))
out = qkv.attention(query, key, value)

def backward():
    torch.autograd.grad(out, (query, key, value), out, retain_graph=True)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(5):
    backward()
before = faults()
for _ in range(20):
    backward()
print((faults() - before) / 20)
"""


def test_scratch_stays_from_call_to_call():
    """A call works in a mebibyte or two, which is more than these gradients: 128 KiB each."""
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20  # pages of 4 KiB: else some 400
