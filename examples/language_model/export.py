"""Writes the trained language model as TorchScript and as an AOTInductor package.

    python examples/language_model/export.py DIR

reads DIR/weights.pt, which the C++ program wrote, and writes DIR/model.ts and DIR/model.pt2.
"""

import sys
import warnings
from pathlib import Path

import torch
from model import LanguageModel

import qkv


def export(directory: Path, context: int = 128) -> tuple[Path, Path]:
    model = LanguageModel(context=context).eval()
    qkv.nn.load_state_dict(model, directory / "weights.pt")
    script, package = directory / "model.ts", directory / "model.pt2"
    tokens = torch.randint(256, (2, 32))
    dynamic = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("time", max=context)}
    with warnings.catch_warnings(), torch.no_grad():
        # TorchScript is deprecated, but it is what C++ programs can train without Python.
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        warnings.filterwarnings("ignore", message=".*treespec.*")  # inside torch.export
        torch.jit.script(model).save(str(script))
        program = torch.export.export(model, (tokens,), dynamic_shapes=(dynamic,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    return script, package


if __name__ == "__main__":
    for path in export(Path(sys.argv[1])):
        print(path)
