"""The examples of second derivatives and forward mode: each is run, smaller than by itself, and does
what it says. That second derivatives are right, test_second_order.py says."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest
import torch

import qkv

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch):
    """A function that imports one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_gradient_penalty(example):
    held, free = example("gradient_penalty").main(steps=100, batch=16)
    assert abs(held.slope - 1) < 0.5 and free.slope > 10
    # How far apart the two kinds of samples are on average bounds the distance, and is at most 4:
    # the root of 8 points times their mean squared distance of 2.
    late = held.distances[-20:]
    assert held.distances[0] < 0.5 < sum(late) / len(late) < 4 * held.slope


def test_gradient_of_the_penalty(example):
    """Along random directions of the parameters, beside finite differences."""
    penalty = example("gradient_penalty")
    torch.manual_seed(0)
    critic = penalty.Critic(3, width=4).double()
    real, other = (x.double() for x in penalty.samples(2, 3))

    def f(*parameters):
        torch.manual_seed(1)  # the same places between samples
        return penalty.slopes(critic, real, other)

    assert torch.autograd.gradcheck(f, tuple(critic.parameters()), fast_mode=True)


def test_forces(example):
    forces = example("forces")
    found = forces.main(steps=60, batch=8)
    assert found.force_error < 1e-7
    late = found.losses[-10:]
    assert found.losses[0] > 0.5 and sum(late) / len(late) < 0.1


def test_potential_does_not_see_how_it_is_turned(example):
    forces = example("forces")
    torch.manual_seed(0)
    potential, kinds = forces.Potential().double(), torch.arange(8) % 2
    x = forces.clusters(3, 8).double()
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    found = forces.forces(potential, x @ turn + 1.0, kinds)
    torch.testing.assert_close(found, forces.forces(potential, x, kinds) @ turn)
    order = torch.tensor([2, 5, 0, 7, 4, 1, 6, 3])  # of the same kinds
    torch.testing.assert_close(potential(x[:, order], kinds), potential(x, kinds))


def test_maml(example):
    found = example("maml").main(steps=80, batch=8)
    assert found.derivative_error < 1e-6
    # Trained to be good after 3 steps, not before the first.
    assert found.after[3] < 0.9 * found.before[3] and found.after[3] < 0.9 * found.after[0]


def test_hessian_vector_product(example):
    found = example("hessian_vector_product").main(long=64)
    assert found.product_error < 1e-12
    by_products, exact = found.eigenvalues
    assert by_products == pytest.approx(exact, rel=1e-4)


def test_flow_map_jvp(example):
    with_jvp, without = example("flow_map_jvp").main(steps=150, batch=32)
    assert with_jvp.jvp_error < 1e-7 and without.jvp_error < 1e-7
    assert with_jvp.distance < 0.8 * without.distance < 0.8 * without.of_noise


def forces_in_cpp(*options) -> dict:
    command = [ROOT / "build" / "examples" / "forces", "--json", "--batch", "8", *options]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory) -> tuple[Path, dict]:
    """Where the weights are, and what the program found."""
    output = tmp_path_factory.mktemp("forces")
    return output, forces_in_cpp("--steps", 60, "--output", output)


def test_forces_in_cpp(in_cpp):
    _, found = in_cpp
    assert found["force_error"] < 1e-7
    late = found["losses"][-10:]
    assert found["losses"][0] > 0.5 and sum(late) / len(late) < 0.1


def test_forces_in_cpp_are_those_of_python(in_cpp, example):
    output, found = in_cpp
    forces = example("forces")
    potential = forces.Potential()
    qkv.nn.load_state_dict(potential, output / "forces.pt")
    positions, expected = (
        torch.tensor(found[name], dtype=torch.float64).view(1, 8, 3)
        for name in ("positions", "forces")
    )
    by_python = forces.forces(potential.double(), positions, torch.arange(8) % 2)
    torch.testing.assert_close(by_python.detach(), expected, rtol=1e-10, atol=1e-10)


def test_checkpointing_in_cpp(in_cpp):
    _, without = in_cpp
    changed = without["checkpoint"]
    assert changed["difference"] < 1e-5 and without["dropout_difference"] == 0
    assert changed["bytes_kept"] < 0.25 * changed["bytes_kept_without"]
    few = forces_in_cpp("--steps", 5, "--checkpoint")
    assert few["losses"] == pytest.approx(without["losses"][:5], rel=1e-3)
    assert few["force_error"] < 1e-7
