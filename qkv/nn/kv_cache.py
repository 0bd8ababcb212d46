"""The cache of generating token by token, which ``help(qkv.nn)`` describes."""

import torch

KVCache = torch.classes.qkv.KVCache
