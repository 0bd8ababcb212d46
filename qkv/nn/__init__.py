"""Attention modules: the twins of ``qkv::nn`` in C++, with the same parameter names and numbers.

Everywhere:

- The batch comes first, and there may be any number of batch dimensions, or none.
- A bool ``attn_mask`` means True = may attend; it broadcasts to (B.., H, M, N), or (B.., T, T) of
  a module with one head. A float one is added to the scores.
- ``key_padding_mask`` (B.., N) means True = padding, that is, may not be attended to.
- Masks and causal compose: what is kept is their intersection, in training as in evaluation.
- ``forward`` returns the output; ``forward_with_weights`` also the attention weights, with the
  output still from the fused path.

``KVCache(max_length)`` holds the keys and values of the tokens so far, for generating one by one:
pass the same object to each call of a ``MultiheadAttention``. One C++ class for Python, C++ and
TorchScript, with ``append(key, value)``, ``cached()``, ``truncate(length)``, ``length()``,
``max_length()``; ``extended(key, value)`` and ``advance(count)`` are the halves of ``append``.
``copy.deepcopy`` makes another one to go on from the same keys. An empty one is false, as a list
is: ask whether it ``is None``.

All modules can be scripted (``torch.jit.script``), exported and compiled; with a ``KVCache``, which
is a TorchScript object, scripted, and compiled with breaks in the graph.
"""

from qkv.nn.kv_cache import KVCache
from qkv.nn.multihead_attention import MultiheadAttention
from qkv.nn.scaled_dot_product_attention import ScaledDotProductAttention
from qkv.nn.self_attention import SelfAttention
from qkv.nn.state_dict import load_state_dict, save_state_dict

__all__ = [
    "KVCache",
    "MultiheadAttention",
    "ScaledDotProductAttention",
    "SelfAttention",
    "load_state_dict",
    "save_state_dict",
]
