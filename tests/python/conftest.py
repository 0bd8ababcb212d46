"""Tests are written once for all devices: --device cuda has every tensor made on a GPU, unless it
says otherwise. What is about the CPU itself is left out there.

QKV_STRICT=1 makes an error of every fallback to the unfused reference. Tests of what has no fused
kernel say so: they are marked `unfused`, and may."""

from importlib.util import find_spec

import pytest
import torch

# About threads, processes, instruction sets, exported programs, or what is independent of devices.
OF_THE_CPU = {
    "test_doors",
    "test_distributed",
    "test_examples",
    "test_language_model",
    "test_memory",
    "test_onnx",
    "test_package",
    "test_readme",
    "test_worked_examples",
}

# What a machine without hypothesis cannot run.
LACKING = {"test_fuzz", "test_gradients"} if find_spec("hypothesis") is None else set()


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", help="where tensors are made: cpu, cuda, cuda:1, .."
    )


def pytest_configure(config):
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))


def pytest_terminal_summary(terminalreporter):
    """(A header is not shown with -q.)"""
    if LACKING:
        terminalreporter.line(f"for lack of hypothesis, not run: {', '.join(sorted(LACKING))}")


def pytest_ignore_collect(collection_path, config):
    """Not even imported: a machine with a GPU may have no more than pytest and torch."""
    of_the_cpu = collection_path.stem in OF_THE_CPU and config.getoption("--device") != "cpu"
    return True if of_the_cpu or collection_path.stem in LACKING else None


@pytest.fixture(autouse=True)
def _unfused_is_allowed(request, monkeypatch):
    if request.node.get_closest_marker("unfused"):
        monkeypatch.delenv("QKV_STRICT", raising=False)
