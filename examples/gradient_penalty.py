"""A critic with attention, held to slope 1 by a gradient penalty (WGAN-GP, arXiv:1704.00028).

    python examples/gradient_penalty.py

The Wasserstein distance between two sets of samples is the most by which a function that is nowhere
steeper than 1 can tell their means apart. To keep the critic that flat its loss has the length of
its own gradient in it, so that training takes the backward of attention's backward.

Samples are sequences of points: real ones run around a circle from anywhere, the others are such
points shuffled. Point by point they look alike; only attention between points tells them apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import qkv


class Critic(torch.nn.Module):
    """One number for each sequence (B, T, 2)."""

    def __init__(self, length: int, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, width)
        self.positions = torch.nn.Parameter(torch.randn(length, width))
        self.attention = qkv.nn.MultiheadAttention(width, 4)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 64), torch.nn.Softplus(), torch.nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.positions
        return self.mlp(h + self.attention(h)).sum((-2, -1))


def samples(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Real ones and others, (batch, length, 2) each."""
    turns = torch.rand(2, batch, 1) + torch.arange(length) / length
    real, other = torch.stack([turns.mul(2 * torch.pi).cos(), turns.mul(2 * torch.pi).sin()], -1)
    order = torch.rand(batch, length).argsort(-1)
    return real, other.take_along_dim(order.unsqueeze(-1), 1)


def slopes(critic: Critic, real: Tensor, other: Tensor) -> Tensor:
    """How steep the critic is at random places between samples, (batch,); differentiable."""
    x = torch.lerp(real, other, torch.rand(len(real), 1, 1).to(real)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return gradient.flatten(1).norm(dim=1)


def critic_step(critic, optimizer, real: Tensor, other: Tensor, weight: float) -> float:
    """One step of training. Returns by how much the critic tells the two apart."""
    distance = critic(real).mean() - critic(other).mean()
    penalty = (slopes(critic, real, other) - 1).square().mean()
    optimizer.zero_grad()
    (weight * penalty - distance).backward()
    optimizer.step()
    return distance.item()


@dataclass
class Result:
    distances: list[float]  # of each step
    slope: float  # mean, after training


def train(weight: float, steps: int = 150, batch: int = 32, length: int = 8) -> Result:
    torch.manual_seed(0)
    critic = Critic(length)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.0, 0.9))
    distances = [
        critic_step(critic, optimizer, *samples(batch, length), weight) for _ in range(steps)
    ]
    return Result(distances, slopes(critic, *samples(512, length)).mean().item())


def main(**sizes: int) -> tuple[Result, Result]:
    """With the penalty and without."""
    found = train(10.0, **sizes), train(0.0, **sizes)
    for what, result in zip(("with the penalty:", "without:"), found):
        distance = sum(result.distances[-20:]) / len(result.distances[-20:])
        print(f"{what:18} slope {result.slope:9.2f}, distance {distance:9.2f}")
    print("The first distance is an estimate of Wasserstein's; the second grows for ever.")
    return found


if __name__ == "__main__":
    main()
