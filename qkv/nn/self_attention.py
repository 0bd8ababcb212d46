"""One head with learned W_Q, W_K, W_V."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.nn import Linear

from qkv.nn.arguments import (
    check_rows,
    checked_dropout,
    checked_scale,
    checked_size,
    key_mask_of,
    mask_of_one_head,
)

# In a symbolic trace, which knows no sizes, they are nodes.
torch.fx.wrap("check_rows")
torch.fx.wrap("key_mask_of")
torch.fx.wrap("mask_of_one_head")


class SelfAttention(torch.nn.Module):
    """One head of self-attention with learned W_Q, W_K, W_V and no output projection.

    Args:
        d_in: width of the input.
        d_out: width of queries and keys, and of values unless ``d_v`` is given.
        d_v: width of values, hence of the output.
        bias: whether the three projections have one.
        causal: query i attends to keys j <= i only.
        dropout: probability of dropping a weight in training.
        scale: 1/sqrt(d_out) by default.
    """

    scale: Optional[float]

    def __init__(
        self,
        d_in: int,
        d_out: int,
        d_v: Optional[int] = None,
        bias: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        scale: Optional[float] = None,
        device: Optional[torch.device] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        name = "qkv.nn.SelfAttention"
        d_in = checked_size(name, "d_in", d_in)
        d_out = checked_size(name, "d_out", d_out)
        d_v = d_out if d_v is None else checked_size(name, "d_v", d_v)
        self.d_in = d_in
        self.causal = bool(causal)
        self.dropout = checked_dropout(name, dropout)
        self.scale = checked_scale(name, scale)
        self.w_q = Linear(d_in, d_out, bias, device, dtype)
        self.w_k = Linear(d_in, d_out, bias, device, dtype)
        self.w_v = Linear(d_in, d_v, bias, device, dtype)

    def forward(
        self,
        input: Tensor,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
    ) -> Tensor:
        """
        Args:
            input: (T, d_in) or (B.., T, d_in).
            attn_mask: broadcasts to (B.., T, T): there is one head.

        Returns:
            (B.., T, d_v).
        """
        mask, key_mask = self._checked(input, attn_mask, key_padding_mask)
        q, k, v = self._project(input)
        return self._attend(q, k, v, mask, key_mask)

    @torch.jit.export
    def forward_with_weights(
        self,
        input: Tensor,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        """The output and the weights (B.., T, T), before dropout."""
        mask, key_mask = self._checked(input, attn_mask, key_padding_mask)
        q, k, v = self._project(input)
        weights = torch.ops.qkv.attention_weights(
            q, k, mask, self.causal, scale=self.scale, key_mask=key_mask
        )
        return self._attend(q, k, v, mask, key_mask), weights.squeeze(-3)

    def _project(self, input: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """The operator has heads in dimension -3: here it is one."""
        return (
            self.w_q(input).unsqueeze(-3),
            self.w_k(input).unsqueeze(-3),
            self.w_v(input).unsqueeze(-3),
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Optional[Tensor],
        key_mask: Optional[Tensor],
    ) -> Tensor:
        return torch.ops.qkv.attention(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            self.causal,
            scale=self.scale,
            key_mask=key_mask,
        ).squeeze(-3)

    def _checked(
        self, input: Tensor, attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor]
    ) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        """The operator's attn_mask and key_mask; before any work, as all checks are."""
        name = "qkv.nn.SelfAttention"
        check_rows(name, "input", input, "d_in", self.d_in)
        mask = mask_of_one_head(name, attn_mask, input)
        return mask, key_mask_of(name, key_padding_mask, input)

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f"scale={self.scale}, "
        return f"{scale}causal={self.causal}, dropout={self.dropout}"
