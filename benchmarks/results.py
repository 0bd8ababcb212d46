"""From the times of one point to what is said of it: ratios to PyTorch, the share of the limit, and
what second order costs beside first order."""

import statistics
from dataclasses import dataclass, field
from typing import Optional

MULTIPLY_ADDS = 2**24  # of one call, by each thread; limits.h
# What an exponential takes from the pipes that multiply and add: a polynomial of degree 5 in six
# operations, the rest of it (rounding, scaling) goes elsewhere.
OPERATIONS_OF_EXP = 6
# What is computed for each (query, key): products as wide as the key, as wide as the value, and
# exponentials. A double backward is a jvp (5 products) and what follows it (10, three of which our
# kernel for CPUs keeps from the jvp); a call with tangents is a forward and a jvp.
WORK = {
    "forward": (1, 1, 1),
    "backward": (3, 2, 1),
    "double_backward": (10, 5, 2),
    "jvp": (4, 3, 2),
    "jvp_query": (3, 2, 2),
}
# Of second order, at 8 heads of 64 with 2048 or 4096 causal queries: properties of Result.
GOALS = {
    "double_backward": {
        "over_first_order": ("≤", 3.7),
        "share": ("≥", 0.75),
        "speedup": ("≥", 8.0),
        "megabytes": ("≤", 100.0),
    },
    "jvp": {"over_first_order": ("≤", 2.8), "megabytes": ("≤", 100.0)},
    "jvp_query": {"over_first_order": ("≤", 1.8), "megabytes": ("≤", 100.0)},
}


def met(value: float, side: str, bound: float) -> bool:
    return value <= bound if side == "≤" else value >= bound


@dataclass
class Result:
    point: dict
    seconds: dict[str, list[float]]  # of each turn, by system
    bytes: dict[str, int] = field(default_factory=dict)  # added by one call, of second order

    @property
    def name(self) -> str:
        return self.point["name"]

    def best(self, system: str) -> Optional[float]:
        return min(self.seconds[system], default=None) if system in self.seconds else None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds["qkv"])

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of our times."""
        return (max(self.seconds["qkv"]) - min(self.seconds["qkv"])) / self.median

    def ratio(self, system: str) -> Optional[float]:
        """The median of its times over the median of ours: above 1, ours is faster."""
        if system not in self.seconds:
            return None
        return statistics.median(self.seconds[system]) / self.median

    @property
    def speedup(self) -> Optional[float]:
        """Over PyTorch's better path."""
        return min((r for r in (self.ratio("sdpa"), self.ratio("math")) if r), default=None)

    @property
    def cost(self) -> Optional[float]:
        """Our time over our time without the point's options."""
        plain = self.ratio("plain")
        return None if plain is None else 1 / plain

    @property
    def over_first_order(self) -> Optional[float]:
        """Our time over that of our backward; for a jvp, what tangents add over our forward."""
        first = self.ratio("first_order")
        if first is None:
            return None
        return 1 / first - (0 if self.point["pass"] == "double_backward" else 1)

    @property
    def megabytes(self) -> Optional[float]:
        """What our call adds to the process at its peak, above its results."""
        p = self.point
        if "qkv" not in self.bytes:
            return None
        out = p["queries"] * p.get("value_dim", p["head_dim"])
        results = 2 * p["heads"] * out  # of a jvp: the output and its tangent
        if p["pass"] == "double_backward":  # and gradients of two orders
            key_rows = p["keys"] * p.get("kv_heads", p["heads"])
            widths = p["head_dim"] + p.get("value_dim", p["head_dim"])
            results += 2 * (p["heads"] * p["queries"] * p["head_dim"] + key_rows * widths)
        number = {"float64": 8, "float32": 4}.get(p["dtype"], 2)
        return (self.bytes["qkv"] - p["batch"] * results * number) / 1e6

    def meets(self, what: str) -> Optional[bool]:
        """A goal of this point; None if it has none, or if it is not known."""
        side, goal = GOALS.get(self.point["pass"], {}).get(what, (None, None))
        value = getattr(self, what)
        if side is None or value is None:
            return None
        return met(value, side, goal)

    @property
    def pairs(self) -> int:
        """(query, key) that the band keeps, over all heads."""
        m, n = self.point["queries"], self.point["keys"]
        left, right = self.point.get("window", (-1, -1))
        if self.point.get("causal"):
            right = 0
        kept = 0
        for i in range(m):
            first = 0 if left < 0 else max(0, i - left)
            end = n if right < 0 else min(n, i + right + 1)
            kept += max(0, end - first)
        return kept * self.point["batch"] * self.point["heads"]

    @property
    def limit(self) -> Optional[float]:
        """Seconds that the machine needs at least: for the products and exponentials at the rates
        of this run's multiply-adds, or to read key and value, whichever is more."""
        p, threads = self.point, self.point["threads"]
        float32 = self.best("multiply_add_float32")
        if float32 is None or p["dtype"] == "float64":
            return None
        # Where the processor multiplies 16 bits at less than float32's rate, nobody need use that.
        products = min(self.best(f"multiply_add_{p['dtype']}") or float32, float32)
        key_wide, value_wide, exponentials = WORK[p["pass"]]
        width = key_wide * p["head_dim"] + value_wide * p.get("value_dim", p["head_dim"])
        terms, operations = self.pairs * width, self.pairs * exponentials * OPERATIONS_OF_EXP
        each = threads * MULTIPLY_ADDS
        arithmetic = terms / each * products + operations / each * float32
        return max(arithmetic, self.best("read")) if p["queries"] <= 4 else arithmetic

    @property
    def share(self) -> Optional[float]:
        """Of the limit that our best turn reaches."""
        return None if self.limit is None else self.limit / self.best("qkv")
