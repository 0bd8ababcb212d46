"""The tables and the plot of a run."""

from dataclasses import dataclass, field
from typing import Optional

from goals import goals
from matplotlib.figure import Figure
from results import GOALS, WORK, Result
from rich.console import Console
from rich.table import Table as RichTable


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        if self.note:
            console.print(self.note)

    def markdown(self) -> str:
        head = "|" + "|".join(["---", *["--:"] * (len(self.columns) - 1)]) + "|"
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, *self.rows)]
        note = [self.note, ""] if self.note else []
        return "\n".join([f"## {self.title}", "", lines[0], head, *lines[1:], "", *note])


def number(x: Optional[float]) -> str:
    return "" if x is None else f"{x:.2f}"


def tables(results: list[Result]) -> list[Table]:
    found = [of_goals(results), of_second_order(results), of_points(results)]
    return [t for t in found if t.rows]


def of_goals(results: list[Result]) -> Table:
    table = Table("Goals of first order", ["", "goal", "worst", "points that meet it"])
    for g in goals(results):
        bound = f"{g.side} {g.bound:g}"
        table.rows.append([g.what, bound, f"{g.worst:.3f}" if g.bound < 0.1 else number(g.worst)])
        table.rows[-1].append(g.points)
    return table


def of_second_order(results: list[Result]) -> Table:
    """What it costs beside first order in the same run, with its goals."""
    columns = {
        "over_first_order": "x first order",
        "share": "of the limit",
        "speedup": "x PyTorch",
        "megabytes": "MB above results",
    }
    table = Table("Goals of second order", ["", *columns.values(), "PyTorch's MB"])
    table.note = (
        "x first order: a double backward over our backward; of a call with tangents (jvp), what "
        "these add, over our forward."
    )
    for r in (r for r in results if r.point["pass"] in GOALS):
        row = [r.name]
        for what in columns:
            side, goal = GOALS[r.point["pass"]].get(what, ("", ""))
            mark = {True: "✓", False: "✗", None: ""}[r.meets(what)]
            row.append(f"{number(getattr(r, what))} {side} {goal} {mark}".rstrip())
        math_bytes = r.bytes.get("math")
        row.append("" if math_bytes is None else f"{math_bytes / 1e6:.0f}")
        table.rows.append(row)
    return table


def of_points(results: list[Result]) -> Table:
    columns = ["ms, best", "median", "spread", "x PyTorch", "of the limit", "x plain"]
    table = Table("Every point", ["", *columns])
    table.note = (
        "x PyTorch: its better path's median over ours. Spread: (largest - smallest) / median. x "
        "plain: over the same call without its options."
    )
    for r in results:
        times = [f"{1e3 * r.best('qkv'):.3f}", f"{1e3 * r.median:.3f}", f"{r.spread:.0%}"]
        ratios = [number(r.speedup), number(r.share), number(r.cost)]
        table.rows.append([r.name, *times, *ratios])
    return table


COLOURS = {"float32": "C0", "bfloat16": "C1", "float16": "C2", "float64": "C3"}
MARKERS = {"forward": "o", "backward": "s", "double_backward": "^", "jvp": "v", "jvp_query": "x"}


def plot(results: list[Result]) -> Figure:
    """Speed and share of the limit against N, of the square problems with D = 64 on all threads: a
    colour for each dtype, a marker for each pass, dashed if causal."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    speed, share = figure.subplots(1, 2)
    threads = max(r.point["threads"] for r in results)
    lines: dict[tuple[str, str, bool], list[Result]] = {}
    for r in results:
        p = r.point
        plain = r.cost is None and p["queries"] == p["keys"] and p["head_dim"] == 64
        dense = p["batch"] == 1 and "value_dim" not in p and "heads_last" not in p
        if not plain or not dense or p["threads"] != threads:
            continue
        lines.setdefault((p["pass"], p["dtype"], bool(p.get("causal"))), []).append(r)
    for (name, dtype, causal), points in lines.items():
        points.sort(key=lambda r: r.point["keys"])
        keys = [r.point["keys"] for r in points]
        products = sum(WORK[points[0].point["pass"]][:2])
        rates = [2 * products * r.pairs * 64 / r.median / 1e9 for r in points]
        style = {"color": COLOURS[dtype], "marker": MARKERS[name], "markersize": 4}
        style["linestyle"] = "--" if causal else "-"
        speed.plot(keys, rates, label=f"{name} {dtype}{' causal' * causal}", **style)
        if all(r.share is not None for r in points):
            share.plot(keys, [r.share for r in points], **style)
    speed.set_ylabel(f"GFLOP/s, {threads} threads")
    share.set_ylabel("share of the limit")
    share.set_ylim(bottom=0)
    share.axhline(1, color="black", linewidth=0.8)
    for axis in (speed, share):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("N (8 heads, D 64)")
        axis.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure
