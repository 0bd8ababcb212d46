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
