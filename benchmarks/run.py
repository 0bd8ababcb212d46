"""Times the operator beside PyTorch's and beside the machine's limits: see scripts/bench.sh."""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

import grid
import torch
from matplotlib.figure import Figure
from results import GOALS, WORK, Result
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build" / "benchmarks" / "attention_benchmark"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def measure(points: list[dict], turns: int, seconds: float) -> list[Result]:
    """One process for all; lines come as points are done."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(points, file)
        file.flush()
        command = [PROGRAM, file.name, f"--benchmark_repetitions={turns}"]
        command += [f"--benchmark_min_time={seconds}"]
        command += ["--benchmark_enable_random_interleaving=true"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = track(process.stdout, "timing", total=len(points))
            objects = (json.loads(line) for line in lines)
            found = [Result(p, o["seconds"], o.get("bytes", {})) for p, o in zip(points, objects)]
        if process.returncode != 0:
            sys.exit(f"{PROGRAM.name} ended with {process.returncode}")
    return found


def number(x: Optional[float]) -> str:
    return "" if x is None else f"{x:.2f}"


def print_table(results: list[Result], console: Console) -> None:
    table = Table()
    table.add_column("")
    for column in ("ms, best", "median", "spread", "x PyTorch", "of the limit", "x plain"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r.name,
            f"{1e3 * r.best('qkv'):.3f}",
            f"{1e3 * r.median:.3f}",
            f"{r.spread:.0%}",
            number(r.speedup),
            number(r.share),
            number(r.cost),
        )
    console.print(table)
    # Of first order: of second order PyTorch has one path, and that is a table of its own.
    speedups = [r.speedup for r in results if r.speedup and r.point["pass"] not in GOALS]
    if speedups:
        mean = math.exp(statistics.mean(map(math.log, speedups)))
        slower = sum(s < 1 for s in speedups)
        console.print(
            f"beside PyTorch's better path: geometric mean {mean:.2f}, slowest "
            f"{min(speedups):.2f}, {slower} of {len(speedups)} points slower"
        )


def print_second_order(results: list[Result], console: Console) -> None:
    """What it costs beside first order in the same run, with its goals."""
    results = [r for r in results if r.point["pass"] in GOALS]
    if not results:
        return
    table = Table(title="second order, and its goals at N 2048 and 4096", title_justify="left")
    table.add_column("")
    columns = {
        "over_first_order": "x first order",
        "share": "of the limit",
        "speedup": "x PyTorch",
        "megabytes": "MB above results",
    }
    for column in (*columns.values(), "PyTorch's MB"):
        table.add_column(column, justify="right")
    for r in results:
        cells = []
        for what in columns:
            side, goal = GOALS[r.point["pass"]].get(what, ("", ""))
            style = {True: "green", False: "red", None: "default"}[r.meets(what)]
            cells.append(f"[{style}]{number(getattr(r, what))}[/] {side} {goal}".rstrip())
        math_bytes = r.bytes.get("math")
        table.add_row(r.name, *cells, "" if math_bytes is None else f"{math_bytes / 1e6:.0f}")
    console.print(table)
    met = [r.meets(what) for r in results for what in GOALS[r.point["pass"]]]
    console.print(
        "x first order: a double backward over our backward; of a call with tangents (jvp), what "
        f"these add, over our forward. {met.count(True)} of {len(met)} goals met"
    )


def plot(results: list[Result]) -> Figure:
    """Speed and share of the limit against N, of the square problems with D = 64 on all threads."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    speed, share = figure.subplots(1, 2)
    threads = max(r.point["threads"] for r in results)
    lines: dict[str, list[Result]] = {}
    for r in results:
        p = r.point
        plain = r.cost is None and p["queries"] == p["keys"] and p["head_dim"] == 64
        if not plain or p["threads"] != threads or p["batch"] > 1 or "value_dim" in p:
            continue
        causal = " causal" if p.get("causal") else ""
        lines.setdefault(f"{p['pass']} {p['dtype']}{causal}", []).append(r)
    for label, points in lines.items():
        points.sort(key=lambda r: r.point["keys"])
        keys = [r.point["keys"] for r in points]
        products = sum(WORK[points[0].point["pass"]][:2])
        rates = [2 * products * r.pairs * 64 / r.median / 1e9 for r in points]
        style = "--" if "causal" in label else "-"
        (line,) = speed.plot(keys, rates, style, marker="o", markersize=3, label=label)
        if all(r.share is not None for r in points):
            shares = [r.share for r in points]
            share.plot(keys, shares, style, marker="o", markersize=3, color=line.get_color())
    speed.set_ylabel(f"GFLOP/s, {threads} threads")
    share.set_ylabel("share of the limit")
    share.set_ylim(0, 1)
    for axis in (speed, share):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("N (8 heads, D 64)")
        axis.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu"])
    parser.add_argument("--quick", action="store_true", help="a small grid, under 3 minutes")
    parser.add_argument("--filter", default="", help="only points with this in their name")
    parser.add_argument("--turns", type=int, default=7, help="of each system at each point")
    parser.add_argument("--seconds", type=float, default=0.01, help="of a turn, at least")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks" / "results")
    arguments = parser.parse_args()

    points = grid.quick() if arguments.quick else grid.full()
    points = [p for p in points if arguments.filter in p["name"]]
    if not points:
        parser.error(f"no point has {arguments.filter!r} in its name")
    results = measure(points, arguments.turns, arguments.seconds)

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{processor()}; torch {torch.__version__}")
    print_table(results, console)
    print_second_order(results, console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "cpu.json").write_text(
        json.dumps(
            {
                "processor": processor(),
                "torch": torch.__version__,
                "results": [
                    {"point": r.point, "seconds": r.seconds, "bytes": r.bytes} for r in results
                ],
            },
            indent=1,
        )
    )
    plot(results).savefig(arguments.output / "cpu.png")
    console.print(f"written: {arguments.output}/cpu.json and cpu.png")


if __name__ == "__main__":
    main()
