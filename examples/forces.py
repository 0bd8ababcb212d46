"""A learned potential: energies by attention between atoms, trained on forces.

    python examples/forces.py

Forces are -dE/dx, so the gradient of a loss on forces is a second derivative of the energy: the
backward of attention is differentiated. Here distances between atoms enter as a bias of the scores
(`attn_mask`), and how much a head sees (the logsumexp) is a feature, so that second derivatives of
both are needed. qkv has them fused; PyTorch's fused attention has no second derivatives, and takes
no bias that wants a gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Linear

import qkv


class Layer(torch.nn.Module):
    """Atoms look at their neighbours; each head learns how far."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.w_qkv = Linear(width, 3 * width)
        self.w_o = torch.nn.Sequential(
            Linear(width + heads, 2 * width), torch.nn.SiLU(), Linear(2 * width, width)
        )
        self.log_rates = torch.nn.Parameter(torch.linspace(-2.0, 1.5, heads))

    def forward(self, h: Tensor, squared_distances: Tensor) -> Tensor:
        heads = self.log_rates.numel()
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(-3, -2)  # (B, heads, atoms, ..)
                   for x in self.w_qkv(h).chunk(3, -1))  # fmt: skip
        bias = -self.log_rates.exp()[:, None, None] * squared_distances.unsqueeze(-3)
        out, lse = qkv.attention_with_lse(q, k, v, attn_mask=bias)
        return h + self.w_o(torch.cat([out.transpose(-3, -2).flatten(-2), lse.mT], -1))


class Potential(torch.nn.Module):
    """Energies (B) of positions (B, atoms, 3): the same wherever the atoms are moved or turned
    together, and in whatever order those of a kind are numbered."""

    def __init__(self, kinds: int = 2, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(kinds, width)
        self.layers = torch.nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.energy = Linear(width, 1)

    def forward(self, positions: Tensor, kinds: Tensor) -> Tensor:
        squared = (positions.unsqueeze(-2) - positions.unsqueeze(-3)).square().sum(-1)
        h = self.embedding(kinds).expand(*positions.shape[:-1], -1)
        for layer in self.layers:
            h = layer(h, squared)
        return self.energy(h).sum((-2, -1))


def forces(energy, positions: Tensor, kinds: Tensor) -> Tensor:
    """-dE/dx, itself differentiable by whatever the energy depends on."""
    x = positions.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(x, kinds).sum(), x, create_graph=True)
    return -gradient


def morse(positions: Tensor, kinds: Tensor) -> Tensor:
    """What is learned: pairs of atoms in a well, at a distance that depends on their kinds."""
    i, j = torch.triu_indices(positions.size(-2), positions.size(-2), 1)
    distances = (positions[:, i] - positions[:, j]).norm(dim=-1)
    rest = 1.0 + 0.25 * (kinds[i] + kinds[j])
    return (1 - torch.exp(rest - distances)).square().sum(-1)


def clusters(count: int, atoms: int) -> Tensor:
    """Random ones: near corners of a cube."""
    corners = torch.cartesian_prod(*3 * [torch.tensor([0.0, 1.2])])[:atoms]
    return corners + 0.15 * torch.randn(count, atoms, 3)


def force_error(model: Potential, x: Tensor, kinds: Tensor, step: float = 1e-5) -> float:
    """Largest difference of the forces on one cluster (1, atoms, 3) from finite differences of the
    energy, relative to the largest force. For float64."""
    moves = step * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape[1:])
    with torch.no_grad():
        expected = (model(x - moves, kinds) - model(x + moves, kinds)) / (2 * step)
    found = forces(model, x, kinds).flatten()
    return ((found - expected).abs().max() / found.abs().max()).item()


@dataclass
class Result:
    losses: list[float]  # share of the forces that is not explained, of each step
    force_error: float


def main(steps: int = 150, batch: int = 16, atoms: int = 8) -> Result:
    torch.manual_seed(0)
    model, kinds = Potential(), torch.arange(atoms) % 2
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        x = clusters(batch, atoms)
        target = forces(morse, x, kinds).detach()
        loss = (forces(model, x, kinds) - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()  # through the backward of attention
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3}: share of the forces that is not explained {losses[-1]:.4f}")
    error = force_error(model.double(), clusters(1, atoms).double(), kinds)
    print(f"forces beside finite differences of the energy, in float64: {error:.1e}")
    return Result(losses, error)


if __name__ == "__main__":
    main()
