"""Speed beside PyTorch's own attention: same tensors, one run, taking turns.

python examples/speed.py
"""

import statistics
from dataclasses import dataclass

import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import qkv

# Name, batch, heads, queries, keys, head dim, causal, with backward.
CASES = [
    ("forward", 1, 8, 2048, 2048, 64, False, False),
    ("forward, causal", 1, 8, 2048, 2048, 64, True, False),
    ("forward and backward, causal", 1, 8, 1024, 1024, 64, True, True),
    ("training shape of the model", 4, 4, 128, 128, 32, True, True),
]


@dataclass
class Comparison:
    name: str
    shape: str
    kernel: str
    milliseconds: float  # median, ours
    speedup: float  # median over pairs of PyTorch's time / ours
    slowest: float
    fastest: float
    difference: float  # largest, of the outputs

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.shape}): {self.milliseconds:.2f} ms, {self.speedup:.2f} times "
            f"PyTorch's speed ({self.slowest:.2f} to {self.fastest:.2f}); {self.kernel}"
        )


def compare(case, rounds: int = 7) -> Comparison:
    name, batch, heads, m, n, d, causal, backward = case
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, rows, d, requires_grad=backward) for rows in (m, n, n))
    grad = torch.randn(batch, heads, m, d)
    statement = "f(q, k, v, is_causal=causal)"
    if backward:
        statement = f"torch.autograd.grad({statement}, (q, k, v), grad)"

    def timer(f) -> Timer:
        names = {"f": f, "q": q, "k": k, "v": v, "grad": grad, "causal": causal, "torch": torch}
        return Timer(statement, globals=names, num_threads=torch.get_num_threads())

    ours, theirs = timer(qkv.attention), timer(scaled_dot_product_attention)
    number = max(1, int(0.05 / ours.timeit(2).median))
    times = []
    for _ in range(rounds):
        times.append((ours.timeit(number).median, theirs.timeit(number).median))
    ratios = sorted(b / a for a, b in times)
    with torch.no_grad():
        difference = qkv.attention(q, k, v, is_causal=causal) - scaled_dot_product_attention(
            q, k, v, is_causal=causal
        )
    kernel = qkv.explain(q, k, v, is_causal=causal).splitlines()[1].split("backward")[1].strip()
    return Comparison(
        name,
        f"B{batch} H{heads} M{m} N{n} D{d} float32",
        kernel,
        1e3 * statistics.median(a for a, _ in times),
        statistics.median(ratios),
        ratios[0],
        ratios[-1],
        difference.abs().max().item(),
    )


def main(console: Console) -> list[Comparison]:
    found = []
    for case in CASES:
        found.append(compare(case))
        console.print(str(found[-1]), highlight=False)
    return found


if __name__ == "__main__":
    main(Console())
