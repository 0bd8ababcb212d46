"""The library at work, end to end: what scripts/demo.sh runs after building. See --help."""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "language_model")]

# Says on import that there is no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

import export  # noqa: E402
import speed  # noqa: E402
import worked_examples  # noqa: E402

PROGRAMS = HERE.parent / "build" / "examples"
console = Console()
if not console.is_terminal:  # a log: no window to fit into
    console = Console(width=120)


class Failure(Exception):
    """A step that did not do what it should; the message says what."""


def run(*command: object) -> str:
    """Standard output of a program, or its error message as a Failure."""
    # What a model of bytes writes need not be UTF-8.
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise Failure(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def default_text() -> list[Path]:
    """C++ that is on every machine this runs on: headers of LibTorch itself."""
    include = Path(torch.__file__).parent / "include"
    folders = [include / "c10", include / "torch/csrc/api", include / "torch/csrc/autograd"]
    return sorted(path for folder in folders for path in folder.rglob("*.h"))


def show_examples(output: Path) -> str:
    found = worked_examples.main(output, console)
    for r in found:
        if not r.error < 1e-9:  # NaN neither
            raise Failure(f"{r.example}: {r.quantity} is off by {r.error:.1e}")
    worst = max(found, key=lambda r: r.error)
    return f"{len(found)} matrices, largest difference {worst.error:.0e}; 2 heat maps"


def events(command: list[object]) -> Iterator[dict]:
    """The JSON objects that a program prints, as they come."""
    command = [str(c) for c in command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
        error = process.stderr.read()
    if process.returncode != 0:
        raise Failure(error.strip())


def train(text: list[Path], minutes: float, output: Path) -> str:
    history: list[dict] = []
    reports = events(
        [PROGRAMS / "language_model", "train", "--json", "--minutes", minutes, "--output", output]
        + ["--text", *text]
    )
    about = next(reports)
    console.print(
        f"{about['parameters']:,} parameters, {about['training_bytes']:,} bytes of text; a bigram "
        f"model's loss is {about['bigram_loss']:.3f} nats a byte",
        highlight=False,
    )
    columns = (
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:3.0f} %  {task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=1.0)
        for now in reports:
            history.append(now)
            description = f"loss {now['loss']:.3f}  {now['tokens_per_second']:,.0f} tokens/s"
            bar.update(task, completed=now["done"], description=description)
    last = history[-1]
    draw_loss(history, about["bigram_loss"], output / "loss.png")
    sample = run(PROGRAMS / "language_model", "sample", "--output", output, "--length", 400)
    console.print(f"[dim]{'-' * 20} a sample {'-' * 20}[/dim]")
    console.print(sample, markup=False, highlight=False)
    if not last["validation_loss"] < 0.9 * about["bigram_loss"]:
        raise Failure(
            f"validation loss {last['validation_loss']:.3f} is not clearly under the bigram "
            f"model's {about['bigram_loss']:.3f} after {last['step']} steps; try more --minutes"
        )
    return (
        f"validation loss {last['validation_loss']:.3f}, bigram {about['bigram_loss']:.3f} nats a "
        f"byte, {last['step']} steps, {last['tokens_per_second']:,.0f} tokens/s"
    )


def draw_loss(history: list[dict], bigram_loss: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
    axis = figure.subplots()
    steps = [h["step"] for h in history]
    axis.plot(steps, [h["loss"] for h in history], color="#3b528b", label="training (smoothed)")
    measured = [
        h for before, h in pairwise(history) if h["validation_loss"] != before["validation_loss"]
    ]
    axis.plot(
        [h["step"] for h in measured],
        [h["validation_loss"] for h in measured],
        "o-",
        color="#d1495b",
        markersize=3,
        label="validation",
    )
    axis.axhline(bigram_loss, color="grey", linestyle="--", linewidth=1)
    axis.text(steps[-1], bigram_loss, "bigram model", ha="right", va="bottom", color="grey")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats a byte)")
    axis.set_title("Causal language model on qkv::nn::MultiheadAttention, trained in C++")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)


def load_exported(output: Path) -> str:
    console.print("exporting as TorchScript and compiling with AOTInductor (about a minute)")
    export.export(output)
    found = json.loads(run(PROGRAMS / "run_exported", output))
    for name, difference in found.items():
        if difference is None or not difference < 1e-3:  # null is NaN
            raise Failure(f"{name} differs from the C++ module by {difference}")
        console.print(f"  {name}: largest difference to the C++ module {difference:.1e}")
    worst = max(found, key=found.get)
    return f"both load without Python; largest difference of logits {found[worst]:.0e}"


def compare_speed() -> str:
    found = speed.main(console)
    for comparison in found:
        if "fused cpu" not in comparison.explanation:
            raise Failure(f"{comparison.case.name}: {comparison.explanation}")
        if not comparison.difference < comparison.case.tolerance:
            raise Failure(
                f"{comparison.case.name}: differs from PyTorch by {comparison.difference:.1e}"
            )
    first, slowest = found[0], min(found, key=lambda c: c.speedup)
    return (
        f"{first.case.shape} {first.case.name}: {first}; slowest of {len(found)}: "
        f"{slowest.case.name}, {slowest.speedup:.2f}"
    )


@dataclass
class Outcome:
    step: str
    passed: bool
    detail: str
    seconds: float


def perform(step: str, work: Callable[[], str]) -> Outcome:
    console.rule(f"[bold]{step}")
    start = time.monotonic()
    try:
        passed, detail = True, work()
    except Failure as failure:
        passed, detail = False, str(failure)
        console.print(f"[red]{detail}", highlight=False)
    return Outcome(step, passed, detail, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/demo.sh")
    parser.add_argument("--text", type=Path, nargs="+", help="train on these files "
                        "(default: headers of LibTorch)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=2.0, help="of training (default: 2)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo_output")
    arguments = parser.parse_args()
    text = arguments.text or default_text()
    output = arguments.output
    try:
        run(PROGRAMS / "language_model", "check", "--text", *text)
        output.mkdir(parents=True, exist_ok=True)
    except (Failure, OSError) as error:
        console.print(f"[red]{error}", highlight=False)
        return 1

    outcomes = [
        perform("1. Worked examples", lambda: show_examples(output)),
        perform("2. A language model, in C++", lambda: train(text, arguments.minutes, output)),
        perform("3. The same weights, exported", lambda: load_exported(output)),
        perform("4. Speed beside PyTorch", compare_speed),
    ]

    console.rule("[bold]Summary")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for o in outcomes:
        mark = "[green]PASS" if o.passed else "[red]FAIL"
        table.add_row(mark, o.step, f"{o.detail} [dim]({o.seconds:.0f} s)")
    console.print(table, highlight=False)
    console.print(f"Pictures, weights and exported models: {output}", highlight=False)
    return 0 if all(o.passed for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
