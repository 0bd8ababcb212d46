"""Fused scaled dot-product attention for LibTorch.

``qkv.attention`` and its companions call the operators ``torch.ops.qkv.*``, which are written in
C++; ``qkv.nn`` has the modules. See ``help(qkv.attention)``.
"""

from qkv import _library

library_path = _library.load()  # of libqkv.so, e.g. for a C++ program that loads it by name

from qkv import nn  # noqa: E402  (needs the library)
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
    "explain",
    "library_path",
    "nn",
]
