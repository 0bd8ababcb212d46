"""Finds libqkv.so and loads it, which registers the operators and the KVCache class."""

import json
import re
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent


def _find() -> Path:
    # In an installed package, in a source tree.
    for path in (_HERE / "lib" / "libqkv.so", _HERE.parent / "build" / "libqkv.so"):
        if path.exists():
            return path
    raise ImportError(
        "qkv: libqkv.so is not built. In a source tree run scripts/build.sh, or install the "
        "package with: pip install --no-build-isolation ."
    )


def _major_minor(version: str) -> str:
    return ".".join(re.match(r"(\d+)\.(\d+)", version).groups())


def _build(path: Path) -> dict[str, str]:
    """What CMake wrote beside the library: its version and the torch it was built for."""
    return json.loads(path.with_suffix(".json").read_text())


def version(path: Path) -> str:
    return _build(path)["version"]


def load() -> Path:
    """Loads the library and returns where it is.

    Raises:
        ImportError: if it is not built, or was built for another torch than this one.
    """
    path = _find()
    built_for = _build(path)["torch"]
    if _major_minor(built_for) != _major_minor(torch.__version__):
        raise ImportError(
            f"qkv: {path} was built for torch {built_for}, but this is torch {torch.__version__}; "
            "LibTorch's C++ interface changes between minor versions, so qkv must be built again."
        )
    torch.ops.load_library(str(path))
    return path
