"""Tests are written once for all devices: --device cuda has every tensor made on a GPU, unless it
says otherwise. What is about the CPU itself is left out there.

QKV_STRICT=1 makes an error of every fallback to the unfused reference. Tests of what has no fused
kernel say so: they are marked `unfused`, and may."""

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


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", help="where tensors are made: cpu, cuda, cuda:1, .."
    )


def pytest_configure(config):
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        if item.path.stem in OF_THE_CPU:
            item.add_marker(pytest.mark.skip(reason="about the CPU, or about no device"))


@pytest.fixture(autouse=True)
def _unfused_is_allowed(request, monkeypatch):
    if request.node.get_closest_marker("unfused"):
        monkeypatch.delenv("QKV_STRICT", raising=False)
