"""Speed beside PyTorch's own attention: same tensors, one run, taking turns.

python examples/speed.py
"""

import statistics
from dataclasses import dataclass
from typing import Optional

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import qkv


@dataclass
class Case:
    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    backward: bool = False
    kv_heads: Optional[int] = None  # fewer than heads: grouped
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> str:
        heads = self.heads if self.kv_heads is None else f"{self.heads}:{self.kv_heads}"
        return f"B{self.batch} H{heads} M{self.queries} N{self.keys} D{self.head_dim}"

    @property
    def tolerance(self) -> float:
        """How far two right answers may be apart."""
        return 1e-4 if self.dtype == torch.float32 else 2e-2

    @property
    def options(self) -> dict[str, bool]:
        return {"is_causal": self.causal, "enable_gqa": self.kv_heads is not None}

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(0)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        sizes = ((self.heads, self.queries), (kv_heads, self.keys), (kv_heads, self.keys))
        kwargs = {"dtype": self.dtype, "requires_grad": self.backward}
        return [torch.randn(self.batch, h, n, self.head_dim, **kwargs) for h, n in sizes]


CASES = [
    Case("forward", 1, 8, 2048, 2048, 64),
    Case("forward, causal", 1, 8, 2048, 2048, 64, causal=True),
    Case("forward, causal, short", 1, 8, 512, 512, 64, causal=True),
    Case("forward, wide heads", 1, 8, 2048, 2048, 128),
    Case("forward + backward", 1, 8, 2048, 2048, 64, backward=True),
    Case("forward + backward, causal", 1, 8, 2048, 2048, 64, causal=True, backward=True),
    Case("the same, one head", 1, 1, 2048, 2048, 64, causal=True, backward=True),
    Case("the same, the demo's model", 4, 4, 128, 128, 32, causal=True, backward=True),
    Case("forward + backward, many tiny", 2048, 4, 24, 24, 16, backward=True),
    Case("decoding", 1, 8, 1, 4096, 64),
    Case("decoding, grouped heads", 1, 32, 1, 32768, 64, kv_heads=8),
    Case("decoding, bfloat16", 1, 8, 1, 32768, 64, dtype=torch.bfloat16),
]


@dataclass
class Comparison:
    case: Case
    explanation: str  # what qkv.explain says
    milliseconds: float  # median, ours
    speedups: list[float]  # PyTorch's time / ours, of each pair, sorted
    difference: float  # largest, of the outputs

    @property
    def speedup(self) -> float:
        return statistics.median(self.speedups)

    def __str__(self) -> str:
        return (
            f"{self.speedup:.2f} times PyTorch's speed "
            f"({self.speedups[0]:.2f} to {self.speedups[-1]:.2f})"
        )


def compare(case: Case, rounds: int = 7) -> Comparison:
    q, k, v = case.tensors()
    grad = torch.randn(case.batch, case.heads, case.queries, case.head_dim, dtype=case.dtype)
    statement = "f(q, k, v, **options)"
    if case.backward:
        statement = f"torch.autograd.grad({statement}, (q, k, v), grad)"

    def timer(f) -> Timer:
        names = {"f": f, "q": q, "k": k, "v": v, "grad": grad, "options": case.options}
        return Timer(
            statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads()
        )

    ours, theirs = timer(qkv.attention), timer(scaled_dot_product_attention)
    number = max(1, int(0.05 / ours.timeit(2).median))  # 50 ms a turn
    pairs = [(ours.timeit(number).median, theirs.timeit(number).median) for _ in range(rounds)]
    with torch.no_grad():
        found = qkv.attention(q, k, v, **case.options)
        expected = scaled_dot_product_attention(q, k, v, **case.options)
    return Comparison(
        case,
        qkv.explain(q, k, v, **case.options),
        1e3 * statistics.median(a for a, _ in pairs),
        sorted(b / a for a, b in pairs),
        (found - expected).abs().max().item(),
    )


def main(console: Console) -> list[Comparison]:
    """Compares all cases and prints a line for each."""
    found = [compare(case) for case in CASES]
    kernel = found[0].explanation.splitlines()[1].split("backward")[1].strip()
    table = Table(title=f"{kernel}; {torch.get_num_threads()} threads", title_justify="left")
    for column in ("", "shape", "ms", "x PyTorch's speed", "(spread)"):
        table.add_column(column, justify="left" if column in ("", "shape") else "right")
    for c in found:
        spread = f"{c.speedups[0]:.2f} to {c.speedups[-1]:.2f}"
        table.add_row(
            c.case.name, c.case.shape, f"{c.milliseconds:.2f}", f"{c.speedup:.2f}", spread
        )
    console.print(table)
    return found


if __name__ == "__main__":
    main(Console())
