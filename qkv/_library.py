"""Finds libqkv.so and loads it, which registers the operators and the KVCache class."""

import ctypes
import json
import os
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


def cmake_prefix_path(path: Path) -> Path:
    is_installed = path.parent.name == "lib"
    return path.parent.parent if is_installed else path.parent


def version(path: Path) -> str:
    return _build(path)["version"]


def _is_loaded(path: Path) -> bool:
    """This very file, by whatever name."""
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def load() -> Path:
    """Loads the library and returns where it is.

    Raises:
        ImportError: if it is not built, was built for another torch than this one, or if another
            copy of it is loaded.
    """
    path = _find()
    built_for = _build(path)["torch"]
    if _major_minor(built_for) != _major_minor(torch.__version__):
        raise ImportError(
            f"qkv: {path} was built for torch {built_for}, but this is torch {torch.__version__}; "
            "LibTorch's C++ interface changes between minor versions, so qkv must be built again."
        )
    # LibTorch would end the process.
    if torch._C._jit_get_schemas_for_operator("qkv::attention") and not _is_loaded(path):
        raise ImportError(
            f"qkv: a process can load one copy of libqkv only, but before {path} another library "
            f"has registered qkv::attention; loaded are {sorted(torch.ops.loaded_libraries)}"
        )
    torch.ops.load_library(str(path))
    return path
