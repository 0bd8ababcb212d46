"""Drives CMake, which is the one build, and puts what it installs into the Python package.

    pip install --no-build-isolation .

The wheel holds qkv/**/*.py, qkv/lib/libqkv.so (no Python in it), qkv/include and a CMake package.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:  # with no isolation, pip does not look
    raise SystemExit(
        f"qkv: setuptools {setuptools.__version__} is too old to build with; "
        "pip install 'setuptools>=77' cmake ninja"
    )
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent


def torch_dir() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise SystemExit(
            "qkv: torch is not installed here. Install it first, then build against it with: "
            "pip install --no-build-isolation ."
        )
    return spec.submodule_search_locations[0]


def cmake() -> str:
    # The one beside this Python (PyPI's), else the system's.
    found = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if found is None:
        raise SystemExit("qkv: cmake is missing; pip install cmake ninja")
    return found


class BuildWithCMake(build_py):
    def run(self) -> None:
        package = Path(self.build_lib).resolve() / "qkv"
        if not self.editable_mode:  # or files of an earlier build that are gone would be in it
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        build = ROOT / "build"
        configure = [cmake(), "-S", ROOT, "-B", build, f"-DQKV_TORCH_DIR={torch_dir()}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which(
            "ninja"
        )
        if ninja and not (build / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("QKV_JOBS", str(os.cpu_count()))
        subprocess.run(
            [cmake(), "--build", build, "--target", "qkv", "--parallel", jobs], check=True
        )
        subprocess.run([cmake(), "--install", build, "--prefix", package], check=True)


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The library knows nothing of Python: one wheel for all versions of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


version = re.search(r'QKV_VERSION "(.*)"', (ROOT / "include/qkv/version.h").read_text()).group(1)

setup(
    version=version,
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildWithCMake, "bdist_wheel": PlatformWheel},
)
