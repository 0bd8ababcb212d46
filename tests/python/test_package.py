"""The library as a file and as a package: what is in it, how it is chosen, how it is installed."""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qkv

ROOT = Path(__file__).parents[2]


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)


# What is below the kernels for GPUs: CUDA, or its emulation.
CUDA_LAYER = ("device.cuh", "tensor_cores.cuh")


def test_kernels_include_no_torch():
    for path in (ROOT / "csrc" / "kernels").rglob("*.*"):
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                allowed = r'#include ("kernels/|<(stdint|string|immintrin|arm_neon)\.h>)'
                if path.name == "has_amx.h":  # asks the processor, and Linux
                    allowed = r"#include <(cpuid|sys/syscall|unistd)\.h>"
                if path.name in CUDA_LAYER:
                    allowed = (
                        r'#include ("(kernels/|cuda_emulation/(device|tensor_cores)\.h")'
                        r"|<(stdint|cuda_runtime_api)\.h>)"
                    )
                assert re.match(allowed, line), f"{path}: {line}"


def test_kernels_of_a_gpu_use_its_layer():
    """What CUDA gives is used through its layer, which the emulated device has as well."""
    for path in (ROOT / "csrc" / "kernels" / "cuda").rglob("*.cu*"):
        if path.name in CUDA_LAYER:
            continue
        found = re.findall(
            r"threadIdx|blockIdx|__sync\w*|__shfl\w*|__shared__|asm\b|<<<", path.read_text()
        )
        assert not found, f"{path}: {found}"


def test_instruction_sets_share_no_code():
    """What each set's object file defines is in the namespace of its name, so that the linker has
    nothing to merge: AVX-512 code in the generic path would crash older processors."""
    objects = list((ROOT / "build" / "csrc").rglob("isa_*.cpp.o"))
    assert len(objects) == (6 if platform.machine() == "x86_64" else 2)
    for path in objects:
        isa = re.search(r"isa_(\w+)\.cpp", path.name).group(1)
        symbols = subprocess.run(
            ["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True
        )
        for line in symbols.stdout.splitlines():
            _, kind, name = line.split(maxsplit=2)
            if kind in "tr":  # local to the file
                continue
            assert f"qkv::kernels::{isa}::" in name, f"{path.name} defines {name}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about registers of x86")
def test_instructions_stay_in_their_own_files():
    """Disassembled: no AVX register outside the files of the AVX sets, no AVX-512 one in AVX2's."""
    avx, avx512 = re.compile(r"%[yz]mm"), re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b")
    build = ROOT / "build" / "csrc"
    # Of a file, or of a folder that is compiled as one.
    objects = [*build.rglob("*.cpp.o"), *build.rglob("*.cxx.o")]
    names = {path.name for path in objects}
    assert "isa_generic.cpp.o" in names
    assert not names.isdisjoint({"unity_qkv_cpu_cxx.cxx.o", "attention_forward.cpp.o"})
    uses = {}
    for path in objects:
        code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True).stdout
        uses[path.name] = (bool(avx.search(code)), bool(avx512.search(code)))
    isas = ("avx2", "avx512", "avx512_bf16", "avx512_amx", "avx512_amx_fp16")
    sets = {f"isa_{isa}.cpp.o" for isa in isas}
    assert {name for name, (any_avx, _) in uses.items() if any_avx} == sets
    assert {name for name, (_, wide) in uses.items() if wide} == sets - {"isa_avx2.cpp.o"}


def test_library_knows_no_python():
    linked = subprocess.run(["ldd", qkv.library_path], capture_output=True, text=True).stdout
    assert "libpython" not in linked and "libtorch_cpu" in linked
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", qkv.library_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PyInit" not in symbols.stdout


@pytest.mark.parametrize(
    "isa", ["generic", "avx2", "avx512", "avx512_bf16", "avx512_amx", "avx512_amx_fp16"]
)
def test_isa_can_be_chosen(isa):
    program = """
import torch, qkv
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 3, 150, 24, dtype=torch.float64).requires_grad_()
print(qkv.explain(q, k, v).splitlines()[1])
out = qkv.attention(q, k, v, is_causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected)
for a, e in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected))):
    torch.testing.assert_close(a, e)
for dtype in (torch.bfloat16, torch.float16):
    half = [x.detach().to(dtype) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in half))
    torch.testing.assert_close(qkv.attention(*half).double(), exact, atol=1e-2, rtol=1e-2)
"""
    done = python(program, QKV_CPU_ISA=isa)
    if "this processor does not have it" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stderr
    assert f"fused cpu float64 {isa}" in done.stdout


def is_zen4() -> bool:
    """The one processor of AMD's family 25 with AVX-512."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return bool(re.search(r"AuthenticAMD.*?cpu family\s*: 25\n.*?\bavx512f\b", text, re.DOTALL))


def test_half_vectors_for_rows_that_fill_them():
    """Zen 4 takes as long for one vector of AVX-512 as for two of AVX2, if nobody asks for either."""
    program = """
import torch, qkv
for dtype in (torch.float32, torch.float16, torch.float64):
    for rows in (24, 32):
        x = torch.randn(1, 2, rows, 16, dtype=dtype)
        print(qkv.explain(x, x, x).splitlines()[1].split()[-1])
"""

    def chosen(**environment) -> list[str]:
        done = python(program, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    few, others, few_halves, other_halves, *of_double = chosen(QKV_CPU_ISA="")
    assert few == ("avx2" if is_zen4() else others)
    assert (few_halves, other_halves) == (few, others)
    assert of_double == [others, others]
    assert chosen(QKV_CPU_ISA=others) == [others] * 6


@pytest.mark.parametrize("rows", [6, 24])
def test_derivatives_and_forward_of_half_vectors_compute_one_score(rows):
    """To the bit: else weights would not add up to 1 where scores are 1e6 and more."""
    torch.manual_seed(0)
    query, key = 2e3 * torch.randn(2, 2, 3, rows, 16)
    value, along = torch.randn(2, 2, 3, rows, 16)
    value.requires_grad_()
    out = qkv.attention(query, key, value)
    (grad_value,) = torch.autograd.grad(out, value, along)
    torch.testing.assert_close(grad_value.sum(-2), along.sum(-2), atol=1e-4, rtol=1e-4)
    ones = torch.ones_like(value)
    attend = functools.partial(qkv.attention, query, key)
    moved = torch.func.jvp(attend, (value.detach(),), (ones,))[1]
    torch.testing.assert_close(moved, ones)


def test_unknown_isa():
    done = python(
        "import torch, qkv; q = torch.ones(2, 2); qkv.attention(q, q, q)", QKV_CPU_ISA="mmx"
    )
    assert (
        "ValueError: qkv: QKV_CPU_ISA=mmx is not one of"
        " avx512_amx_fp16, avx512_amx, avx512_bf16, avx512, avx2, generic" in done.stderr
    )


def test_fallback_is_said_once_for_each_reason():
    program = """
import torch, qkv
from torch.func import grad, hessian, jacfwd, jacrev, jvp
q = torch.randn(1, 2, 3, 4)
attend = lambda q: qkv.attention(q, q, q).sum()
for _ in range(3):
    jvp(attend, (q,), (q,))
    hessian(attend)(q)
    jacrev(jacfwd(attend))(q)
    jacrev(jacrev(attend))(q)
    if THIRD:
        jacfwd(jacfwd(attend))(q)
        grad(lambda q: grad(lambda q: grad(attend)(q).sum())(q).sum())(q)
        jvp(lambda q: grad(lambda q: grad(attend)(q).sum())(q), (q,), (q,))
"""
    done = python(program.replace("THIRD", "False"), QKV_STRICT="1")
    assert done.returncode == 0 and done.stderr == ""
    done = python(program.replace("THIRD", "True"), QKV_STRICT="0")
    assert done.returncode == 0
    assert done.stderr.count("running unfused") == 2
    assert "because third derivatives have no fused kernel" in done.stderr
    assert "because forward mode of forward mode has no fused kernel" in done.stderr
    strict = python(program.replace("THIRD", "True"), QKV_STRICT="1")
    assert (
        "RuntimeError: qkv::attention: QKV_STRICT is set and this would run unfused: forward mode"
        in strict.stderr
    )


def test_verbose():
    program = (
        "import torch, qkv; q = torch.ones(1, 2, 3, 4); qkv.attention(q, q, q, is_causal=True)"
    )
    assert python(program).stderr == ""
    said = python(program, QKV_VERBOSE="1").stderr
    assert "qkv::attention\n  forward, backward  fused cpu float32" in said
    assert "right 0, query_offset 0" in said


def test_another_torch_is_refused(monkeypatch):
    from qkv import _library

    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with pytest.raises(ImportError, match=r"was built for torch .*, but this is torch 2\.99\.1"):
        _library.load()


def test_the_library_may_be_loaded_before_but_not_a_copy(tmp_path):
    link, copy = tmp_path / "link.so", tmp_path / "libqkv.so"
    link.symlink_to(qkv.library_path)
    shutil.copy(qkv.library_path, copy)
    program = "import torch; torch.ops.load_library('{}'); import qkv; print(qkv.library_path)"
    for same in (qkv.library_path, link):
        done = python(program.format(same))
        assert done.stdout == f"{qkv.library_path}\n", done.stderr
    done = python(program.format(copy))
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ImportError: qkv: a process can load one copy of libqkv only, but before "
        f"{qkv.library_path} another library has registered qkv::attention; loaded are ['{copy}']\n"
    )


def test_version():
    header = (ROOT / "include/qkv/version.h").read_text()
    assert f'#define QKV_VERSION "{qkv.__version__}"' in header


def fake_libtorch(site):
    """The files of a LibTorch that CMake looks at; of version 99.99.99."""
    torch_dir = site / "torch"
    for folder in ("lib", "include/ATen", "include/torch/headeronly", "share/cmake/Torch"):
        (torch_dir / folder).mkdir(parents=True)
    for file in (torch_dir / "lib/libtorch_cpu.so", torch_dir / "__init__.py"):
        file.touch()
    (torch_dir / "include/torch/headeronly/version.h").write_text(
        "".join(f"#define TORCH_VERSION_{x} 99\n" for x in ("MAJOR", "MINOR", "PATCH"))
    )
    return torch_dir


def configure(source, build, *options, **environment):
    """What CMake says of a project without languages."""
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [shutil.which("cmake", path=beside), "-S", source, "-B", build]
        + [f"-DPython3_EXECUTABLE={sys.executable}", *options],
        capture_output=True,
        text=True,
        cwd=source,
        env={"PATH": beside, **environment},
    )


def project(folder, *lines):
    folder.mkdir()
    text = "\n".join(["cmake_minimum_required(VERSION 3.22)", "project(finds NONE)", *lines])
    (folder / "CMakeLists.txt").write_text(text + "\n")
    return folder


FINDS_LIBTORCH = f"include({ROOT}/cmake/LibTorch.cmake)"


@pytest.mark.parametrize(
    "name, leads_to",
    [
        ("QKV_TORCH_DIR", "torch"),
        ("Torch_DIR", "torch/share/cmake/Torch"),
        ("Torch_ROOT", "torch"),
        ("CMAKE_PREFIX_PATH", "torch"),
        ("CMAKE_PREFIX_PATH", "torch/share/cmake"),
        ("PYTHONPATH", "."),
    ],
)
def test_cmake_finds_libtorch(name, leads_to, tmp_path):
    """In a variable and in the environment; a torch/ where CMake is run is no package of Python's."""
    torch_dir = fake_libtorch(tmp_path / "site")
    here = project(tmp_path / "here", FINDS_LIBTORCH)
    (here / "torch").mkdir()
    (here / "torch" / "__init__.py").touch()
    value = tmp_path / "site" / leads_to
    ways = [([f"-D{name}={tmp_path};{value}"], {}), ([], {name: f"{tmp_path}:{value}"})]
    if not name.endswith("PATH"):  # one folder, not several
        ways = [([f"-D{name}={value}"], {}), ([], {name: str(value)})]
    if name == "QKV_TORCH_DIR":
        ways.pop()
    elif name == "PYTHONPATH":
        ways.pop(0)
    for number, (options, environment) in enumerate(ways):
        done = configure(here, tmp_path / str(number), *options, **environment)
        assert f"-- qkv: torch 99.99.99 in {torch_dir}\n" in done.stdout, done.stderr


def test_cmake_looks_for_libtorch_again(tmp_path):
    """In a folder that was configured before; but what somebody set stays."""
    first, second = (fake_libtorch(tmp_path / name) for name in ("first", "second"))
    here = project(tmp_path / "here", FINDS_LIBTORCH)
    build = tmp_path / "build"
    for torch_dir in (first, second):
        done = configure(here, build, f"-DCMAKE_PREFIX_PATH={torch_dir}")
        assert f"-- qkv: torch 99.99.99 in {torch_dir}\n" in done.stdout, done.stderr
    configure(here, build, f"-DQKV_TORCH_DIR={first}")
    done = configure(here, build, f"-DCMAKE_PREFIX_PATH={second}")
    assert f"-- qkv: torch 99.99.99 in {first}\n" in done.stdout, done.stderr
    assert f"-- qkv: not the torch in {second}, as QKV_TORCH_DIR is set" in done.stdout


@pytest.mark.parametrize("version", [None, 1, 99])
def test_cmake_package_without_its_libtorch(version, tmp_path):
    """find_package(qkv QUIET) goes on without, and find_package(qkv REQUIRED) says why."""
    torch_dir = tmp_path / "torch"
    if version is not None:
        fake_libtorch(tmp_path)
        header = torch_dir / "include/torch/headeronly/version.h"
        header.write_text(header.read_text().replace("99", str(version)))
    package = qkv.cmake_prefix_path  # or in an installed tree:
    if not (package / "qkvConfig.cmake").exists():
        package = package / "lib/cmake/qkv"
    shutil.copy(package / "qkvConfig.cmake", tmp_path)
    shutil.copy(ROOT / "cmake/LibTorch.cmake", tmp_path)
    here = project(
        tmp_path / "here",
        "find_package(qkv QUIET)",
        'message(STATUS "found: ${qkv_FOUND}")',
        "find_package(qkv REQUIRED)",
    )
    done = configure(
        here, tmp_path / "build", f"-Dqkv_DIR={tmp_path}", f"-DQKV_TORCH_DIR={torch_dir}"
    )
    assert done.returncode != 0
    assert "-- found: FALSE\n" in done.stdout or "-- found: 0\n" in done.stdout
    reason = "this qkv was built for torch" if version == 99 else "needs LibTorch 2.11 or later"
    assert reason in " ".join(done.stderr.split())


def test_cmake_package_knows_its_libtorch(tmp_path):
    """Where nothing else names one."""
    here = project(tmp_path / "here", "find_package(qkv)")
    done = configure(
        here,
        tmp_path / "build",
        f"-Dqkv_ROOT={qkv.cmake_prefix_path}",
        "-DPython3_EXECUTABLE=false",
    )
    assert f"-- qkv: torch {torch.__version__.split('+')[0]} in " in done.stdout, done.stderr


@pytest.mark.parametrize(
    "architectures, built_for",
    [("90;80;90", "sm_80, sm_90"), ("100;75", "sm_75, sm_100"), ("90a", None), ("80,90", None)],
)
def test_cuda_architectures(architectures, built_for, tmp_path):
    """The kernels' CMakeLists takes the first for the oldest."""
    torch_dir = fake_libtorch(tmp_path)
    (torch_dir / "lib/libc10_cuda.so").touch()
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "CheckLanguage.cmake").write_text("macro(check_language language)\nendmacro()\n")
    (modules / "FindCUDAToolkit.cmake").write_text("set(CUDAToolkit_FOUND ON)\n")
    here = project(
        tmp_path / "here",
        f"list(PREPEND CMAKE_MODULE_PATH {modules})",
        "macro(enable_language language)\nendmacro()",
        f"set(QKV_TORCH_DIR {torch_dir})",
        f"include({ROOT}/cmake/Cuda.cmake)",
    )
    done = configure(here, tmp_path / "build", "-DCMAKE_CUDA_COMPILER=nvcc",
                     f"-DQKV_CUDA_ARCHITECTURES={architectures}")  # fmt: skip
    if built_for is None:
        assert "QKV_CUDA_ARCHITECTURES must be numbers" in " ".join(done.stderr.split())
    else:
        assert f"kernels for {built_for} and later" in done.stdout, done.stderr


def test_pip_install(tmp_path):
    """pip install --no-build-isolation . in an environment that sees this one's torch."""
    target = tmp_path / "installed"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--quiet"]
        + ["--target", target, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    program = """
import torch, qkv
print(qkv.__file__, qkv.library_path)
assert (qkv.cmake_prefix_path / "lib/cmake/qkv/qkvConfig.cmake").exists()
assert (qkv.cmake_prefix_path / "include/qkv/qkv.h").exists()
q = torch.randn(1, 2, 3, 4)
torch.testing.assert_close(qkv.attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
"""
    # From elsewhere, so that the source tree is not found first.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(target)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(target / "qkv/__init__.py"),
        str(target / "qkv/lib/libqkv.so"),
    ]
