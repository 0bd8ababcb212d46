"""The fused attention as a module without parameters."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from qkv.functional import check_mask
from qkv.nn.arguments import checked_dropout, checked_scale, key_mask_of

# In a symbolic trace, which knows no sizes, they are nodes.
torch.fx.wrap("key_mask_of")


class ScaledDotProductAttention(torch.nn.Module):
    """``softmax(scale * Q K^T) V`` without parameters.

    Args:
        scale: 1/sqrt(D) by default. 1 is plain dot-product attention.
        dropout: probability of dropping a weight in training.
        causal: query i attends to keys j <= i only.
    """

    scale: Optional[float]

    def __init__(
        self, scale: Optional[float] = None, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.scale = checked_scale("qkv.nn.ScaledDotProductAttention", scale)
        self.dropout = checked_dropout("qkv.nn.ScaledDotProductAttention", dropout)
        self.causal = bool(causal)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
    ) -> Tensor:
        """
        Args:
            query: (B.., H, M, D), (H, M, D) or (M, D).
            key: (B.., H, N, D); the query by default.
            value: (B.., H, N, Dv); the key by default.

        Returns:
            (B.., H, M, Dv).
        """
        check_mask("qkv.nn.ScaledDotProductAttention", attn_mask)
        key_mask = self._key_mask(query if key is None else key, key_padding_mask)
        return self._attend(query, key, value, attn_mask, key_mask)

    @torch.jit.export
    def forward_with_weights(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """The output and the weights (B.., H, M, N), before dropout."""
        check_mask("qkv.nn.ScaledDotProductAttention", attn_mask)
        key_mask = self._key_mask(query if key is None else key, key_padding_mask)
        weights = torch.ops.qkv.attention_weights(
            query,
            query if key is None else key,
            attn_mask,
            self.causal,
            scale=self.scale,
            key_mask=key_mask,
        )
        return self._attend(query, key, value, attn_mask, key_mask), weights

    def _key_mask(self, keys: Tensor, key_padding_mask: Optional[Tensor]) -> Optional[Tensor]:
        return key_mask_of("qkv.nn.ScaledDotProductAttention", key_padding_mask, keys)

    # For both of what is exported: torch.jit.trace cannot do with one that calls forward.
    def _attend(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        attn_mask: Optional[Tensor],
        key_mask: Optional[Tensor],
    ) -> Tensor:
        if key is None:
            key = query
        if value is None:
            value = key
        return torch.ops.qkv.attention(
            query,
            key,
            value,
            attn_mask,
            self.dropout if self.training else 0.0,
            self.causal,
            scale=self.scale,
            key_mask=key_mask,
        )

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f"scale={self.scale}, "
        return f"{scale}dropout={self.dropout}, causal={self.causal}"
