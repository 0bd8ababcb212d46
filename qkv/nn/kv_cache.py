"""The cache of generating token by token."""

import torch

#: Keys and values of the tokens so far, for generating one by one: ``KVCache(max_length)``. Pass
#: the same object to each call of :class:`qkv.nn.MultiheadAttention`. One C++ class for Python, C++
#: and TorchScript, with ``append(key, value)``, ``cached()``, ``truncate(length)``, ``length()``,
#: ``max_length()``; ``extended(key, value)`` and ``advance(count)`` are the halves of ``append``.
#: ``copy.deepcopy`` makes another one to go on from the same keys. An empty one is false, as a list
#: is: ask whether it ``is None``.
KVCache = torch.classes.qkv.KVCache
