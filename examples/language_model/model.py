"""The language model of model.h in Python: same names, same numbers, for export."""

import torch
from torch import Tensor

import qkv


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = torch.nn.LayerNorm(width)
        self.attention = qkv.nn.MultiheadAttention(width, heads, causal=True)
        self.norm_mlp = torch.nn.LayerNorm(width)
        self.widen = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.norm_mlp(x))))


class LanguageModel(torch.nn.Module):
    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
    ) -> None:
        super().__init__()
        self.token_embedding = torch.nn.Embedding(vocabulary, width)
        self.position_embedding = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocabulary) of the tokens that follow tokens (B, T)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(self.norm(x), self.token_embedding.weight)
