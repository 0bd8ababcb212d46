"""From the times of one point to what is said of it: ratios to PyTorch, the share of the limit."""

import statistics
from dataclasses import dataclass
from typing import Optional

MULTIPLY_ADDS = 2**24  # of one call, by each thread; limits.h
# What an exponential takes from the pipes that multiply and add: a polynomial of degree 5 in six
# operations, the rest of it (rounding, scaling) goes elsewhere.
OPERATIONS_OF_EXP = 6
PRODUCTS = {"forward": 2, "backward": 5}


@dataclass
class Result:
    point: dict
    seconds: dict[str, list[float]]  # of each turn, by system

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
        in_bfloat16 = p["dtype"] == "bfloat16" and "multiply_add_bfloat16" in self.seconds
        products = self.best("multiply_add_bfloat16") if in_bfloat16 else float32
        widths = p["head_dim"] + p.get("value_dim", p["head_dim"])
        # Backward: S and dK, dQ are as wide as the key, dP and dV as the value.
        extra = p["head_dim"] if p["pass"] == "backward" else 0
        terms = self.pairs * (widths * (PRODUCTS[p["pass"]] // 2) + extra)
        each = threads * MULTIPLY_ADDS
        arithmetic = terms / each * products + self.pairs * OPERATIONS_OF_EXP / each * float32
        return max(arithmetic, self.best("read")) if p["queries"] <= 4 else arithmetic

    @property
    def share(self) -> Optional[float]:
        """Of the limit that our best turn reaches."""
        return None if self.limit is None else self.limit / self.best("qkv")
