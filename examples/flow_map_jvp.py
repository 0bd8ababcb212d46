"""A generator in one step: MeanFlow (arXiv:2505.13447) with attention, whose loss needs a JVP.

    python examples/flow_map_jvp.py

Data flow into noise along z_t = (1 - t) data + t noise. A flow map u(z, r, t) is the mean velocity
between the times r and t, so that noise becomes data in one step: z_0 = z_1 - u(z_1, 0, 1). It
obeys u = v - (t - r) du/dt, where v = noise - data and du/dt is taken along the flow: a derivative
in forward mode along (v, 0, 1), through the network and the attention in it. Through PyTorch's
fused attention that is an error.

The data are squares, turned anyhow: where each of the four points belongs, the others tell.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn import LayerNorm, Linear, Sequential, SiLU

import qkv


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = qkv.nn.MultiheadAttention(width, 4)
        self.mlp = Sequential(
            LayerNorm(width), Linear(width, 2 * width), SiLU(), Linear(2 * width, width)
        )

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h)
        return h + self.mlp(h)


class FlowMap(torch.nn.Module):
    """u(z, r, t) of points z (B, 4, 2) and times r, t (B)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = Linear(4, width)
        self.positions = torch.nn.Parameter(torch.randn(4, width))
        self.rest = Sequential(Block(width), Block(width), Linear(width, 2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = torch.stack([r, t], -1).unsqueeze(1).expand(-1, 4, -1)
        return self.rest(self.embed(torch.cat([z, times], -1)) + self.positions)


def squares(count: int) -> Tensor:
    """Their corners one after the other, (count, 4, 2)."""
    angles = 2 * torch.pi * (torch.rand(count, 1) + torch.arange(4) / 4)
    return torch.stack([angles.cos(), angles.sin()], -1)


def along_the_flow(model, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """u, and du/dt as z moves with the velocity v: one pass for both."""
    return jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))


def loss_of(model: FlowMap, data: Tensor, with_jvp: bool = True) -> Tensor:
    noise = torch.randn_like(data)
    r, t = torch.rand(2, len(data)).sort(0).values
    v = noise - data
    u, du_dt = along_the_flow(model, torch.lerp(data, noise, t.view(-1, 1, 1)), r, t, v)
    target = v - (t - r).view(-1, 1, 1) * du_dt if with_jvp else v
    return (u - target.detach()).square().mean()


def distance_from_squares(x: Tensor) -> float:
    """Root mean square, over points, from the square of this size that is nearest to each four."""
    z = torch.view_as_complex(x)
    turned = torch.fft.fft(z)[:, 1:2].sgn()  # the part of z that goes around once says how far
    return (z - turned * 1j ** torch.arange(4)).abs().square().mean().sqrt().item()


def jvp_error(model: FlowMap, step: float = 1e-5) -> float:
    """Largest difference of du/dt from finite differences, relative; for float64."""
    (z, v), (r, t) = torch.randn(2, 3, 4, 2).double(), torch.rand(2, 3).double()
    _, found = along_the_flow(model, z, r, t, v)
    expected = (model(z + step * v, r, t + step) - model(z - step * v, r, t - step)) / (2 * step)
    return ((found - expected).abs().max() / found.abs().max()).item()


@dataclass
class Result:
    distance: float  # from squares, of what one step makes of noise
    of_noise: float
    jvp_error: float


def train(with_jvp: bool, steps: int = 200, batch: int = 64) -> Result:
    torch.manual_seed(0)
    model = FlowMap()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, squares(batch), with_jvp).backward()
        optimizer.step()
    noise, zeros = torch.randn(1000, 4, 2), torch.zeros(1000)
    with torch.no_grad():
        made = noise - model(noise, zeros, zeros + 1)
    of_noise = distance_from_squares(noise)
    return Result(distance_from_squares(made), of_noise, jvp_error(model.double()))


def main(**sizes: int) -> tuple[Result, Result]:
    """With the JVP, and without it, when u learns the velocity at t and no more."""
    found = with_jvp, without = train(True, **sizes), train(False, **sizes)
    print(f"distance from squares, of noise: {with_jvp.of_noise:.3f}")
    print(f"one step from it, trained with the JVP: {with_jvp.distance:.3f}")
    print(f"trained without, which leads to the mean of all data: {without.distance:.3f}")
    print(f"du/dt beside finite differences, in float64: {with_jvp.jvp_error:.1e}")
    return found


if __name__ == "__main__":
    main()
