"""Learning to learn with attention inside: MAML (arXiv:1703.03400) by torch.func.

    python examples/maml.py

A task is a sine of unknown height and phase, given by a few of its points. The model takes a few
steps of gradient descent on these (the inner loop); what is trained is where it starts from (the
outer loop). That derivative goes through the inner gradients, so through the backward of attention,
here for all tasks at once by vmap: the parameters of each task differ after its first step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import qkv

Parameters = dict[str, Tensor]
Points = tuple[Tensor, Tensor]  # x, y: (points, 1) each


class Regressor(torch.nn.Module):
    """Looks a number up in a learned memory: queries from x, keys and values are parameters."""

    def __init__(self, width: int = 32, slots: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Sequential(
            torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, width)
        )
        self.memory = torch.nn.Parameter(torch.randn(slots, width))
        self.attention = qkv.nn.MultiheadAttention(width, heads)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(h + self.attention(h, self.memory, self.memory))


def tasks(count: int, points: int) -> tuple[Points, Points]:
    """Points to learn from and points to be judged by, (count, points, 1) each."""
    height, phase = 0.5 + 2 * torch.rand(count, 1, 1), torch.pi * torch.rand(count, 1, 1)
    x = 10 * torch.rand(2, count, points, 1) - 5
    y = height * (x + phase).sin()
    return (x[0], y[0]), (x[1], y[1])


def loss_after(model, start: Parameters, known: Points, asked: Points, steps: int) -> Tensor:
    """Of one task: after so many steps of gradient descent on the known points."""

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, parameters, (x,)) - y).square().mean()

    parameters = start
    for _ in range(steps):
        gradients = grad(loss)(parameters, *known)
        parameters = {n: p - 0.05 * gradients[n] for n, p in parameters.items()}
    return loss(parameters, *asked)


def mean_loss(model, parameters: Parameters, problems: tuple[Points, Points], steps: int) -> Tensor:
    of_each = lambda known, asked: loss_after(model, parameters, known, asked, steps)
    return vmap(of_each)(*problems).mean()


def derivative_error(model: Regressor, step: float = 1e-5) -> float:
    """Of the outer gradient along a random direction, beside finite differences; for float64."""
    start = dict(model.named_parameters())
    problems = tuple((x.double(), y.double()) for x, y in tasks(3, 5))
    along = {n: torch.randn_like(p) for n, p in start.items()}
    loss = lambda p: mean_loss(model, p, problems, 2)
    gradients = grad(loss)(start)
    found = sum((gradients[n] * along[n]).sum() for n in along)
    ahead, behind = (loss({n: p + h * along[n] for n, p in start.items()}) for h in (step, -step))
    return (found * 2 * step / (ahead - behind) - 1).abs().item()


@dataclass
class Result:
    before: list[float]  # losses on new tasks after 0, 1, .. inner steps, before training
    after: list[float]
    derivative_error: float


def main(steps: int = 150, batch: int = 16, points: int = 10, inner: int = 3) -> Result:
    torch.manual_seed(0)
    model, new_tasks = Regressor(), tasks(200, points)
    start = dict(model.named_parameters())
    judge = lambda: [mean_loss(model, start, new_tasks, n).item() for n in range(inner + 1)]
    before = judge()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_loss(model, start, tasks(batch, points), inner).backward()
        optimizer.step()
    after = judge()
    for n, (a, b) in enumerate(zip(before, after)):
        print(f"loss on new tasks after {n} steps: untrained {a:.3f}, trained {b:.3f}")
    error = derivative_error(model.double())
    print(f"outer gradient beside finite differences, in float64: {error:.1e}")
    return Result(before, after, error)


if __name__ == "__main__":
    main()
