"""Fused scaled dot-product attention for LibTorch.

``qkv.attention`` and its companions call the operators ``torch.ops.qkv.*``, which are written in
C++; ``qkv.nn`` has the modules. See ``help(qkv.attention)``.
"""

from qkv import _library

#: Where libqkv.so is, for programs that load it by name.
library_path = _library.load()
#: For CMake, in an installed package: ``-DCMAKE_PREFIX_PATH=...`` finds ``find_package(qkv)``.
cmake_prefix_path = library_path.parent.parent

from qkv import flops, nn, onnx, plots  # noqa: E402  (nn needs the library)
from qkv.functional import (  # noqa: E402
    attention,
    attention_weights,
    attention_with_lse,
    explain,
)

__version__ = _library.version(library_path)

__all__ = [
    "attention",
    "attention_weights",
    "attention_with_lse",
    "cmake_prefix_path",
    "explain",
    "flops",
    "library_path",
    "nn",
    "onnx",
    "plots",
]
