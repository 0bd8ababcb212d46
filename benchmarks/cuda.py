"""Times the operator on a GPU beside PyTorch's and beside the device's limits.

    scripts/bench.sh cuda [--quick] [--output DIR] [--rounds N] [--filter WORDS]

Measured is the device's time for a call, all its kernels one after the other, without what Python
and the dispatcher take to launch them: the device sleeps while enough calls to last some
milliseconds are put into its queue, with CUDA events around them. All systems take turns in one
run, in random order. Limits are what the run itself measures: of a matrix product of the same dtype
(without TF32), and of a copy. Needs nothing but torch: machines with GPUs may have no network.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
TARGET_MS = 5.0
MOST_CALLS = 50  # a queue holds about a thousand kernels
CYCLES = 2e9  # of a device in a second, about
# Of one pass; a jvp is a forward with tangents. A double backward is a jvp and ten more.
PRODUCTS = {"forward": 2, "backward": 5, "double_backward": 15, "jvp": 7}


@dataclass
class Point:
    name: str
    dtype: str
    direction: str  # one of PRODUCTS
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    queries: int = 4096
    keys: int = 4096
    head_dim: int = 64
    causal: bool = False

    @property
    def multiply_adds(self) -> float:
        """Of all products, half of them if causal."""
        pairs = self.batch * self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return pairs * self.head_dim * PRODUCTS[self.direction]

    @property
    def bytes_read(self) -> float:
        size = torch.finfo(DTYPES[self.dtype]).bits // 8
        return 2 * self.batch * self.kv_heads * self.keys * self.head_dim * size

    @property
    def is_decode(self) -> bool:
        return self.queries <= 4


def grid() -> list[Point]:
    points = []
    for dtype in ("fp32", "bf16", "fp16"):
        for direction in ("forward", "backward"):
            for keys in (512, 2048, 4096):
                for head_dim in (64, 128):
                    for causal in (False, True):
                        name = f"{dtype} {direction} N{keys} D{head_dim}" + " causal" * causal
                        p = Point(name, dtype, direction, 1, 16, 16, keys, keys, head_dim, causal)
                        points.append(p)
        for batch, kv_heads in ((1, 32), (1, 8), (16, 32), (16, 8)):
            name = f"{dtype} decode B{batch} H32:{kv_heads} N32768 D128"
            points.append(Point(name, dtype, "forward", batch, 32, kv_heads, 1, 32768, 128))
    for dtype in ("fp32", "bf16"):
        for direction in ("double_backward", "jvp"):
            for keys in (2048, 4096):
                name = f"{dtype} {direction} N{keys} D64 causal"
                points.append(Point(name, dtype, direction, 1, 8, 8, keys, keys, 64, True))
    points.append(Point("fp64 forward N2048 D64", "fp64", "forward", queries=2048, keys=2048))
    points.append(Point("fp64 backward N2048 D64", "fp64", "backward", queries=2048, keys=2048))
    return points


def is_quick(p: Point) -> bool:
    if p.is_decode:
        return p.batch == 1 and p.kv_heads == 8
    return p.keys == 2048 and p.head_dim == 64 and p.causal


def systems(p: Point) -> dict[str, Callable[[], object]]:
    """What is timed at a point, by name; each a call without arguments."""
    options = {"device": "cuda", "dtype": DTYPES[p.dtype]}
    has_graph = p.direction in ("backward", "double_backward")

    def leaf(heads: int, rows: int) -> torch.Tensor:
        x = torch.randn(p.batch, heads, rows, p.head_dim, **options)
        return x.requires_grad_(has_graph)

    inputs = leaf(p.heads, p.queries), leaf(p.kv_heads, p.keys), leaf(p.kv_heads, p.keys)
    along = [torch.randn_like(x) for x in inputs]  # tangents, or cotangents of gradients

    def timed(attention: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def attend(*x: torch.Tensor) -> torch.Tensor:
            return attention(*x, is_causal=p.causal, enable_gqa=p.heads != p.kv_heads)

        if p.direction == "forward":
            return lambda: attend(*inputs)
        if p.direction == "jvp":
            return lambda: torch.func.jvp(attend, inputs, tuple(along))
        out = attend(*inputs)
        grad = torch.randn_like(out).requires_grad_()
        if p.direction == "backward":
            return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        first = torch.autograd.grad(out, inputs, grad, create_graph=True)
        return lambda: torch.autograd.grad(first, (*inputs, grad), along, retain_graph=True)

    def of_backend(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def attention(*args, **kwargs):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*args, **kwargs)

        return attention

    if p.direction in ("double_backward", "jvp"):  # PyTorch's only way
        return {"qkv": timed(qkv.attention), "math": timed(of_backend(SDPBackend.MATH))}
    found = {"qkv": timed(qkv.attention), "sdpa": timed(F.scaled_dot_product_attention)}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            found[name] = timed(of_backend(backend))
            found[name]()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it does not take this
            found.pop(name, None)
    return found


def launch_seconds(call: Callable[[], object]) -> float:
    """What the host is busy for with a call, about."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def milliseconds(call: Callable[[], object], calls: int, launch: float) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * calls * launch * CYCLES))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    counts, launches = {}, {}
    for name, call in calls.items():
        call()  # whatever is done once
        launches[name] = launch = launch_seconds(call)
        one = max(milliseconds(call, 2, launch), 1e-3)
        counts[name] = max(1, min(MOST_CALLS, round(TARGET_MS / one)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(milliseconds(calls[name], counts[name], launches[name]))
    return times


def limits(dtype: str, rounds: int) -> dict[str, float]:
    """Multiply-adds a second of a matrix product, and bytes a second of a copy, both ways."""
    size = 4096 if dtype == "fp64" else 8192
    a = torch.randn(size, size, device="cuda", dtype=DTYPES[dtype])
    b = torch.randn_like(a)
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    to = torch.empty_like(source)
    times = measure({"product": lambda: a @ b, "copy": lambda: to.copy_(source)}, rounds)
    return {
        "multiply_adds": size**3 / min(times["product"]) * 1e3,
        "bytes": 2 * source.numel() / min(times["copy"]) * 1e3,
    }


def row(p: Point, times: dict[str, list[float]], limit: dict[str, float]) -> str:
    ours = statistics.median(times["qkv"])
    spread = (max(times["qkv"]) - min(times["qkv"])) / ours
    others = [
        f"{statistics.median(t) / ours:.2f}" if (t := times.get(name)) else ""
        for name in ("sdpa", "flash", "efficient", "cudnn", "math")
    ]
    if p.is_decode:
        share = p.bytes_read / (min(times["qkv"]) * 1e-3) / limit["bytes"]
    else:
        share = p.multiply_adds / (min(times["qkv"]) * 1e-3) / limit["multiply_adds"]
    cells = [p.name, f"{ours:.3f}", f"{spread:.0%}", f"{share:.2f}", *others]
    return "| " + " | ".join(cells) + " |"


def main(argv: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parents[1] / "build" / "benchmarks"
    )
    parser.add_argument("--quick", action="store_true", help="a few points")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--filter", default="", help="words that a point's name contains")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    torch.backends.cuda.matmul.allow_tf32 = False
    points = [p for p in grid() if all(word in p.name for word in args.filter.split())]
    points = [p for p in points if is_quick(p) or not args.quick]
    of_dtype = {d: limits(d, args.rounds) for d in sorted({p.dtype for p in points})}
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; x: PyTorch's time over ours",
        "",
        "| | ms | spread | of the limit | x sdpa | x flash | x efficient | x cudnn | x math |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {**device, "limits": of_dtype, "results": []}
    args.output.mkdir(parents=True, exist_ok=True)
    for p in points:
        try:
            times = measure(systems(p), args.rounds)
            report["results"].append({"point": asdict(p), "milliseconds": times})
            lines.append(row(p, times, of_dtype[p.dtype]))
        except torch.OutOfMemoryError:
            lines.append(f"| {p.name} | out of memory |" + 7 * " |")
        torch.cuda.empty_cache()  # what a point had that ran out of memory is free by now
        print(lines[-1], flush=True)
        # After each point: a run may be cut short.
        (args.output / "cuda.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.output / "cuda.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
