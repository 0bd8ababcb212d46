"""Fused scaled dot-product attention for LibTorch.

``qkv.attention`` and its companions call the operators ``torch.ops.qkv.*``, which are written in
C++; ``qkv.nn`` has the modules. See ``help(qkv.attention)``.
"""

from qkv import _library

#: Where libqkv.so is, for programs that load it by name.
library_path = _library.load()
#: For CMake: with ``-DCMAKE_PREFIX_PATH=...`` it finds ``find_package(qkv)``. In a source tree the
#: build folder.
cmake_prefix_path = _library.cmake_prefix_path(library_path)

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
