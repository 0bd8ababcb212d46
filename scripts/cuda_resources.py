"""Writes the table of the CUDA kernels' registers and spills into docs/benchmarks/sm_90.md.

    .venv/bin/python scripts/cuda_resources.py [--architecture 90] [--check]

Takes the PTX out of build/libqkv.so (cuobjdump, which torch's triton brings along) and has ptxas
say what it makes of it. --check changes nothing and fails if the table would change.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ROOT / "docs" / "benchmarks"
HEADER = "| kernel | registers | spilled bytes | stack |\n"
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def cuobjdump() -> str:
    import triton

    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(beside) if beside.exists() else shutil.which("cuobjdump")
    return found or sys.exit("cuobjdump was found neither in triton nor on PATH")


def ptxas() -> str:
    found = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    return found or sys.exit("ptxas was not found on PATH")


def demangled(name: str) -> str:
    done = subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=True)
    return done.stdout.strip().replace("qkv::kernels::", "")


def table(architecture: str) -> str:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        library = ROOT / "build" / "libqkv.so"
        subprocess.run(
            [cuobjdump(), "-xptx", "all", library],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for ptx in sorted(Path(folder).glob("*.ptx")):
            command = [ptxas(), "-v", f"-arch=sm_{architecture}", ptx, "-o", f"{folder}/cubin"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for m in ENTRY.finditer(done.stderr):
                spills = int(m["stores"]) + int(m["loads"])
                lines.append(
                    f"| `{demangled(m['name'])}` | {m['registers']} | {spills} | {m['stack']} |"
                )
    return "\n".join([HEADER + "|---|---|---|---|", *sorted(lines)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="90")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    document = DOCUMENTS / f"sm_{args.architecture}.md"
    text = document.read_text()
    new = text.split(HEADER)[0] + table(args.architecture)
    if args.check:
        sys.exit(f"{document} is out of date" if new != text else 0)
    document.write_text(new)


if __name__ == "__main__":
    main()
