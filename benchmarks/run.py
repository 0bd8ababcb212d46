"""Times the operator beside PyTorch's and beside the machine's limits: see scripts/bench.sh."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import grid
import torch
from report import plot, tables
from results import Result
from rich.console import Console
from rich.progress import track

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu"])
    parser.add_argument("--quick", action="store_true", help="a small grid, under 3 minutes")
    parser.add_argument("--filter", default="", help="only points with this in their name")
    parser.add_argument("--turns", type=int, default=7, help="of each system at each point")
    parser.add_argument("--seconds", type=float, default=0.01, help="of a turn, at least")
    parser.add_argument("--read", type=Path, help="a cpu.json to report on instead of timing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks" / "results")
    arguments = parser.parse_args()

    if arguments.read:
        run = json.loads(arguments.read.read_text())
    else:
        points = grid.quick() if arguments.quick else grid.full()
        points = [p for p in points if arguments.filter in p["name"]]
        if not points:
            parser.error(f"no point has {arguments.filter!r} in its name")
        results = measure(points, arguments.turns, arguments.seconds)
        run = {"processor": processor(), "torch": torch.__version__}
        run["results"] = [
            {"point": r.point, "seconds": r.seconds, "bytes": r.bytes} for r in results
        ]

    results = [Result(**r) for r in run["results"]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    of_run = f"{run['processor']}; torch {run['torch']}"
    console.print(of_run)
    for table in tables(results):
        table.print(console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "cpu.json").write_text(json.dumps(run, indent=1))
    texts = [f"# {of_run}\n", *(t.markdown() for t in tables(results))]
    (arguments.output / "cpu.md").write_text("\n".join(texts))
    plot(results).savefig(arguments.output / "cpu.png")
    console.print(f"written: {arguments.output}/cpu.json, cpu.md and cpu.png")


if __name__ == "__main__":
    main()
