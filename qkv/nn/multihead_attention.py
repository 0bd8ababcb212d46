"""Heads with learned W_Q, W_K, W_V, W_O."""

import math
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import Linear

from qkv.functional import check_mask
from qkv.nn.arguments import (
    check_rows,
    checked_dropout,
    checked_size,
    checked_window,
    key_mask_of,
    length_of,
)

# In a symbolic trace, which knows no sizes, they are nodes.
torch.fx.wrap("check_rows")
torch.fx.wrap("key_mask_of")
torch.fx.wrap("length_of")


class MultiheadAttention(torch.nn.Module):
    """Multi-head attention with learned W_Q, W_K, W_V and W_O (arXiv:1706.03762, section 3.2.2).

    Initialised as ``torch.nn.MultiheadAttention`` is.

    Args:
        embed_dim: width of the query and of the output.
        num_heads: query heads.
        kdim, vdim: widths of key and value; ``embed_dim`` by default.
        num_kv_heads: key/value heads (grouped-query attention): a divisor of ``num_heads``, which
            is the default.
        head_dim: width of a head; ``embed_dim // num_heads`` by default.
        bias: whether the four projections have one.
        dropout: probability of dropping a weight in training.
        causal: query i attends to keys j <= i only.
        window: (left, right): a query attends to that many keys before and after it only;
            -1 = unbounded.
    """

    window: Optional[List[int]]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
        num_kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        window: Optional[Tuple[int, int]] = None,
        device: Optional[torch.device] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        name = "qkv.nn.MultiheadAttention"
        embed_dim = checked_size(name, "embed_dim", embed_dim)
        num_heads = checked_size(name, "num_heads", num_heads)
        kdim = embed_dim if kdim is None else checked_size(name, "kdim", kdim)
        vdim = embed_dim if vdim is None else checked_size(name, "vdim", vdim)
        if num_kv_heads is None:
            num_kv_heads = num_heads
        num_kv_heads = checked_size(name, "num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"{name}: num_kv_heads must divide num_heads, but num_heads={num_heads} and "
                f"num_kv_heads={num_kv_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"{name}: embed_dim must be divisible by num_heads unless head_dim is given, "
                    f"but embed_dim={embed_dim} and num_heads={num_heads}"
                )
            head_dim = embed_dim // num_heads
        head_dim = checked_size(name, "head_dim", head_dim)
        if num_heads * head_dim >= 2**63:
            raise ValueError(
                f"{name}: num_heads * head_dim must be less than 2^63, but num_heads={num_heads} "
                f"and head_dim={head_dim}"
            )
        self.embed_dim = embed_dim
        self.kdim = kdim
        self.vdim = vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dropout = checked_dropout(name, dropout)
        self.causal = bool(causal)
        self.window = checked_window(name, window)
        self.w_q = Linear(embed_dim, num_heads * head_dim, bias, device, dtype)
        self.w_k = Linear(kdim, num_kv_heads * head_dim, bias, device, dtype)
        self.w_v = Linear(vdim, num_kv_heads * head_dim, bias, device, dtype)
        self.w_o = Linear(num_heads * head_dim, embed_dim, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew, as ``torch.nn.MultiheadAttention`` does. Where those of the
        projections are called too, as for a module made on the meta device, call it after them."""
        projections = [self.w_q, self.w_k, self.w_v]
        # torch.nn.MultiheadAttention keeps three equal projections in one (3 * E, E) matrix,
        # which is what Glorot's bound then counts.
        one_matrix = all(p.weight.shape == self.w_q.weight.shape for p in projections)
        for projection in projections:
            if one_matrix:
                d_out, d_in = projection.weight.shape
                bound = math.sqrt(6.0 / (d_in + 3 * d_out))
                torch.nn.init.uniform_(projection.weight, -bound, bound)
            else:
                torch.nn.init.xavier_uniform_(projection.weight)
        self.w_o.reset_parameters()
        for projection in [*projections, self.w_o]:
            if projection.bias is not None:
                torch.nn.init.zeros_(projection.bias)

    @classmethod
    def from_torch(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        causal: bool = False,
        window: Optional[Tuple[int, int]] = None,
    ) -> "MultiheadAttention":
        """A module with the weights of a ``torch.nn.MultiheadAttention``.

        The inputs of the new one have the batch first, and its bool ``attn_mask`` means True = may
        attend, where the old one's means True = may not. Parameters that are frozen stay so.

        Args:
            causal, window: as of the constructor.

        Raises:
            TypeError: if it is none, or a quantizable one, whose weights are elsewhere.
            ValueError: if it has add_bias_kv or add_zero_attn.
        """
        is_quantizable = hasattr(module, "linear_Q")  # of torch.ao.nn, a subclass
        if not isinstance(module, torch.nn.MultiheadAttention) or is_quantizable:
            raise TypeError(
                "qkv.nn.MultiheadAttention: from_torch takes a torch.nn.MultiheadAttention, but "
                f"got a {type(module).__module__}.{type(module).__qualname__}"
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "qkv.nn.MultiheadAttention: add_bias_kv and add_zero_attn have no counterpart"
            )
        ours = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
            causal=causal,
            window=window,
        )

        def take(ours: torch.nn.Parameter, theirs: Tensor, part: Tensor) -> None:
            with torch.no_grad():
                ours.copy_(part)
            ours.requires_grad_(theirs.requires_grad)

        projections = (ours.w_q, ours.w_k, ours.w_v)
        if module.in_proj_weight is not None:
            for linear, part in zip(projections, module.in_proj_weight.chunk(3)):
                take(linear.weight, module.in_proj_weight, part)
        else:
            apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            for linear, weight in zip(projections, apart):
                take(linear.weight, weight, weight)
        take(ours.w_o.weight, module.out_proj.weight, module.out_proj.weight)
        if module.in_proj_bias is not None:
            for linear, part in zip(projections, module.in_proj_bias.chunk(3)):
                take(linear.bias, module.in_proj_bias, part)
            take(ours.w_o.bias, module.out_proj.bias, module.out_proj.bias)
        return ours.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        cache: Optional[torch.classes.qkv.KVCache] = None,
    ) -> Tensor:
        """Self-attention if only the query is given, cross-attention if the key is too.

        Args:
            query: (M, embed_dim) or (B.., M, embed_dim).
            key: (B.., N, kdim); the query by default.
            value: (B.., N, vdim); the key by default.
            attn_mask: broadcasts to (B.., num_heads, M, N).
            key_padding_mask: (B.., N), with a cache of all its keys.
            cache: keys and values of earlier calls, which this call's are appended to; the
                queries then stand after all cached keys.

        Returns:
            (B.., M, embed_dim).
        """
        check_mask("qkv.nn.MultiheadAttention", attn_mask)
        q, k, v, key_mask, query_offset = self._project(query, key, value, key_padding_mask, cache)
        out = self._attend(q, k, v, attn_mask, key_mask, query_offset)
        if cache is not None and query_offset is not None:  # nothing is cached if the call fails
            cache.advance(k.size(-2) - query_offset)
        return out

    @torch.jit.export
    def forward_with_weights(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        cache: Optional[torch.classes.qkv.KVCache] = None,
        average_weights: bool = False,
    ) -> Tuple[Tensor, Tensor]:
        """The output and the weights, before dropout: (B.., num_heads, M, N), or their mean over
        the heads (B.., M, N) with ``average_weights``."""
        check_mask("qkv.nn.MultiheadAttention", attn_mask)
        q, k, v, key_mask, query_offset = self._project(query, key, value, key_padding_mask, cache)
        weights = torch.ops.qkv.attention_weights(
            q,
            k,
            attn_mask,
            self.causal,
            enable_gqa=True,
            window=self.window,
            query_offset=query_offset,
            key_mask=key_mask,
        )
        if average_weights:
            weights = weights.mean(-3)
        out = self._attend(q, k, v, attn_mask, key_mask, query_offset)
        if cache is not None and query_offset is not None:
            cache.advance(k.size(-2) - query_offset)
        return out, weights

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        """(.., rows, heads * head_dim) as (.., heads, rows, head_dim), a view."""
        return torch.unflatten(x, -1, [heads, self.head_dim]).transpose(-3, -2)

    def _project(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        cache: Optional[torch.classes.qkv.KVCache],
    ) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[int]]:
        if key is None:
            key = query
        if value is None:
            value = key
        name = "qkv.nn.MultiheadAttention"
        check_rows(name, "query", query, "embed_dim", self.embed_dim)
        check_rows(name, "key", key, "kdim", self.kdim)
        check_rows(name, "value", value, "vdim", self.vdim)
        cached = length_of(name, cache)
        key_mask = key_mask_of(name, key_padding_mask, key, cached)
        q = self._split_heads(self.w_q(query), self.num_heads)
        k = self._split_heads(self.w_k(key), self.num_kv_heads)
        v = self._split_heads(self.w_v(value), self.num_kv_heads)
        if cache is None:
            return q, k, v, key_mask, None
        k, v = cache.extended(k, v)
        return q, k, v, key_mask, cached

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Optional[Tensor],
        key_mask: Optional[Tensor],
        query_offset: Optional[int],
    ) -> Tensor:
        out = torch.ops.qkv.attention(
            q,
            k,
            v,
            attn_mask,
            self.dropout if self.training else 0.0,
            self.causal,
            enable_gqa=True,
            window=self.window,
            query_offset=query_offset,
            key_mask=key_mask,
        )
        return self.w_o(out.transpose(-3, -2).flatten(-2))

    def extra_repr(self) -> str:
        text = f"num_heads={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            text += f", num_kv_heads={self.num_kv_heads}"
        text += f", dropout={self.dropout}, causal={self.causal}"
        return text if self.window is None else f"{text}, window={tuple(self.window)}"
