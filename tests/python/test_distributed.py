"""Two processes that share a batch have the gradients of one that has all of it: data parallel,
where each holds every parameter, and fully sharded (FSDP2), where each holds half of each."""

import datetime
import os

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qkv

PROCESSES = 2
BATCH, ROWS, WIDTH = 4, 5, 8  # BATCH: a multiple of PROCESSES, so that means of means are means


class Block(torch.nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = qkv.nn.MultiheadAttention(WIDTH, 4, num_kv_heads=2, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        f = lambda x: x + self.attention(self.norm(x))
        return checkpoint(f, x, use_reentrant=False) if self.recompute else f(x)


class Model(torch.nn.Module):
    """Energies, and forces of the inputs if asked for, as trained potentials have them."""

    def __init__(self, forces: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.forces = forces
        self.blocks = torch.nn.ModuleList([Block(recompute) for _ in range(2)])
        self.head = qkv.nn.SelfAttention(WIDTH, 6, d_v=3, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.forces:
            x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        energies = self.head(y).sin().sum((1, 2))
        if not self.forces:
            return energies
        (gradient,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        return energies + gradient.square().sum((1, 2))


def data_parallel(model: Model) -> torch.nn.Module:
    return DistributedDataParallel(model)


def fully_sharded(model: Model) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.blocks:  # gathered one by one, forward and again backward
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


WAYS = {
    "data_parallel": (data_parallel, {}),
    "data_parallel_forces": (data_parallel, {"forces": True}),
    "fully_sharded": (fully_sharded, {}),
    "fully_sharded_checkpoint": (fully_sharded, {"recompute": True}),
}


def model_and_batch(options: dict) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(**options).double(), torch.randn(BATCH, ROWS, WIDTH, dtype=torch.float64)


def process(rank: int, folder: str) -> None:
    """One of PROCESSES: takes its part of the batch every way, and writes the gradients down."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=120),
    )
    for way, (wrap, options) in WAYS.items():
        model, batch = model_and_batch(options)
        wrapped = wrap(model)  # a name: gradients are exchanged only while this lives
        wrapped(batch.chunk(PROCESSES)[rank]).mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        if wrap is fully_sharded:
            assert all(g.to_local().numel() < g.numel() for g in gradients.values())
            gradients = {n: g.full_tensor() for n, g in gradients.items()}
        torch.save(gradients, f"{folder}/{way}_{rank}.pt")
    distributed.destroy_process_group()
    # Gloo's threads may still hold tensors, and abort where the interpreter has gone by then.
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the gradients of every way: processes take longer to start than to run."""
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(process, (str(folder),), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(way, folder):
    model, batch = model_and_batch(WAYS[way][1])
    model(batch).mean().backward()
    for rank in range(PROCESSES):
        found = torch.load(folder / f"{way}_{rank}.pt")
        for name, p in model.named_parameters():
            torch.testing.assert_close(found.pop(name), p.grad, rtol=1e-12, atol=1e-14)
        assert not found
