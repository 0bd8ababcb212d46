"""What is asked of the CPU kernels of first order, and how many points of a run meet it."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from results import GOALS, Result, met


@dataclass
class Goal:
    what: str
    side: str  # ≤ or ≥
    bound: float
    values: list[float]  # of the points it is about

    @property
    def points(self) -> str:
        return f"{sum(met(x, self.side, self.bound) for x in self.values)} of {len(self.values)}"

    @property
    def worst(self) -> float:
        return min(self.values) if self.side == "≥" else max(self.values)


def goals(results: list[Result]) -> list[Goal]:
    """Those that the run has points for."""
    results = [r for r in results if r.point["pass"] not in GOALS]

    def values(
        of: Callable[[Result], Optional[float]], where: Callable[[dict], bool]
    ) -> list[float]:
        found = (of(r) for r in results if where(r.point))
        return [x for x in found if x is not None]

    def share(p: str, dtype: str, at_512: Optional[float], from_2048: float) -> list[Goal]:
        def square(n: Callable[[int], bool]) -> Callable[[dict], bool]:
            return lambda x: (
                (x["pass"], x["dtype"]) == (p, dtype)
                and x["queries"] == x["keys"]
                and x["head_dim"] in (64, 128)
                and "window" not in x
                and n(x["keys"])
                and "beside_plain" not in x
            )

        found = []
        if at_512 is not None:
            at = values(lambda r: r.share, square(lambda n: n == 512))
            found.append(Goal(f"{p} {dtype} N 512, of the limit", "≥", at_512, at))
        beyond = values(lambda r: r.share, square(lambda n: n >= 2048))
        found.append(Goal(f"{p} {dtype} N ≥ 2048, of the limit", "≥", from_2048, beyond))
        return found

    def cost(what: str, bound: float, where: Callable[[dict], bool]) -> Goal:
        return Goal(f"{what}, against plain", "≤", bound, values(lambda r: r.cost, where))

    def of_float32(result: Result) -> Optional[float]:
        """The time of a float16 point over that of the same in float32."""
        other = {**result.point, "dtype": "float32", "name": None}
        same = [r for r in results if {**r.point, "name": None} == other]
        return result.median / same[0].median if same else None

    def option(name: str, dtype: str = "float32") -> Callable[[dict], bool]:
        return lambda p: name in p and p["dtype"] == dtype

    def mask(dtype: str, learned: bool = False) -> Callable[[dict], bool]:
        return lambda p: (
            p.get("mask", {}).get("dtype") == dtype
            and bool(p["mask"].get("requires_grad")) == learned
        )

    found = share("forward", "float32", 0.85, 0.93) + share("forward", "bfloat16", 0.80, 0.88)
    found += share("backward", "float32", None, 0.92) + share("backward", "bfloat16", None, 0.85)
    for dtype in ("float32", "bfloat16", "float16"):
        decoding = values(
            lambda r: r.share,
            lambda p, t=dtype: p["queries"] == 1 and p["keys"] == 32768 and p["dtype"] == t,
        )
        found.append(Goal(f"decode {dtype} N 32768, of the read bandwidth", "≥", 0.80, decoding))
    for p in ("forward", "backward"):
        over = values(
            of_float32,
            lambda x, p=p: x["pass"] == p and x["dtype"] == "float16" and x["queries"] > 4,
        )
        found.append(Goal(f"{p} float16, against float32", "≤", 1.15, over))
    found += [
        cost("dropout float32", 1.25, option("dropout")),
        cost("dropout bfloat16", 1.6, option("dropout", "bfloat16")),
        cost("bool mask", 1.10, mask("bool")),
        cost("additive mask", 1.20, mask("float")),
        cost("ALiBi", 1.10, option("alibi")),
        cost("softcap", 1.2, option("softcap")),
        cost("window (255, 0) of 8192", 0.055, option("window")),
        cost("learned mask, backward", 1.5, mask("float", learned=True)),
    ]
    tiny = [r for r in results if r.point["batch"] > 1]
    if tiny:
        ours = sum(r.median for r in tiny)
        theirs = sum(r.speedup * r.median for r in tiny)
        found.append(Goal("many tiny, both passes, x PyTorch", "≥", 2.0, [theirs / ours]))
    speedups = values(lambda r: r.speedup, lambda p: True)
    found.append(Goal("every point, x PyTorch", "≥", 1.0, speedups))
    if speedups:
        mean = math.exp(statistics.mean(map(math.log, speedups)))
        found.append(Goal("geometric mean, x PyTorch", "≥", 2.5, [mean]))
    return [g for g in found if g.values]
