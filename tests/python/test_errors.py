"""Bad input: the error names the operator, the rule and what was found."""

import re

import pytest
import torch

import qkv

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
NAN = float("nan")

# What is wrong: (changed arguments, error type, message).
CASES = {
    "integer": ({"query": torch.ones(2, 4, 5, 8, dtype=torch.int32)}, TypeError,
                "query must be float64, float32, bfloat16 or float16, but is int32"),
    "complex": ({"key": K.to(torch.complex64)}, TypeError, "key must be float64, .* but is complex64"),
    "dtype": ({"value": V.double()}, TypeError,
              "query, key and value must have one dtype, but query is float32 and value is float64"),
    "sparse": ({"query": Q.to_sparse()}, TypeError,
               "query must be a dense tensor, but has layout Sparse"),
    "nested": ({"query": torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)}, TypeError,
               "query must be a dense tensor, but is nested"),
    "quantized": ({"query": torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)}, TypeError,
                  "query must not be quantized, but is qint8"),
    "device": ({"key": K.to("meta")}, ValueError,
               "all tensors must be on one device, but query is on cpu and key on meta"),
    "rank": ({"query": Q[0, 0, 0]}, ValueError,
             r"query must have at least the dimensions \(rows, width\), but has shape \[8\]"),
    "head_dim": ({"query": Q[..., :6]}, ValueError,
                 "query and key must have the same head dim, but query has D=6 and key D=8"),
    "keys": ({"value": V[:, :, :3]}, ValueError,
             "key and value must have the same number of keys, but key has N=7 and value N=3"),
    "kv_heads": ({"value": V[:, :3]}, ValueError,
                 r"key and value must have the same number of heads \(or one\), but key has 4 and value 3"),
    "heads": ({"key": K[:, :2], "value": V[:, :2]}, ValueError,
              "query has Hq=4 heads and key and value Hkv=2; enable_gqa=True allows"),
    "divisor": ({"key": K[:, :3], "value": V[:, :3], "enable_gqa": True}, ValueError,
                "with enable_gqa, Hkv must divide Hq, but Hq=4 and Hkv=3"),
    "batch": ({"key": K[:1].expand(3, 4, 7, 8), "value": V[:1].expand(3, 4, 7, 8)}, ValueError,
              r"the batch dimensions of query and key must broadcast, but are \[2\] and \[3\]"),
    "mask_shape": ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, ValueError,
                   r"attn_mask must broadcast to \(batch.., Hq, M, N\) = \[2, 4, 5, 7\], but has shape \[5, 6\]"),
    "mask_batch": ({"attn_mask": torch.ones(3, 1, 5, 7, dtype=torch.bool)}, ValueError,
                   r"but has shape \[3, 1, 5, 7\]"),
    "mask_rank": ({"attn_mask": torch.ones(1, 2, 4, 5, 7, dtype=torch.bool)}, ValueError,
                  "attn_mask must broadcast to"),
    "mask_integer": ({"attn_mask": torch.ones(5, 7, dtype=torch.int64)}, TypeError,
                     r"attn_mask must be bool \(True = may attend\), or float with query's dtype, "
                     "float32, or float32, but is int64"),
    "mask_dtype": ({"attn_mask": torch.zeros(5, 7, dtype=torch.float64)}, TypeError, "but is float64"),
    "key_mask_dtype": ({"key_mask": torch.ones(2, 7)}, TypeError,
                       r"key_mask must be bool \(True = may be attended to\), but is float32"),
    "key_mask_shape": ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError,
                       r"key_mask must broadcast to \(batch.., N\) = \[2, 7\], but has shape \[2, 5\]"),
    "slopes_shape": ({"alibi_slopes": torch.ones(3)}, ValueError,
                     r"alibi_slopes must have one number for each of the Hq=4 query heads, but has shape \[3\]"),
    "slopes_dtype": ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, TypeError,
                     "alibi_slopes must have query's dtype, float32, or float32, but is int64"),
    "sinks_shape": ({"sinks": torch.ones(3, 4)}, ValueError,
                    r"sinks must broadcast to \(batch.., Hq\) = \[2, 4\], but has shape \[3, 4\]"),
    "dropout_high": ({"dropout_p": 1.1}, ValueError, "dropout_p must be between 0 and 1, but is 1.1"),
    "dropout_negative": ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1"),
    "dropout_nan": ({"dropout_p": NAN}, ValueError, "dropout_p must be between 0 and 1, but is nan"),
    "scale_nan": ({"scale": NAN}, ValueError, "scale must be finite, but is nan"),
    "scale_beyond_float32": ({"scale": 1e39}, ValueError, r"scale must be finite, but is 1e\+39"),
    "softcap_negative": ({"softcap": -1.0}, ValueError, "softcap must be positive, or 0 for none, but is -1"),
    "window_one": ({"window": (3,)}, ValueError, r"window must be two numbers, \(left, right\), but has 1"),
    "window_three": ({"window": (1, 2, 3)}, ValueError, "window must be two numbers, .* but has 3"),
    "window_negative": ({"window": (-2, 0)}, ValueError,
                        r"window must be \(left, right\) with both >= 0, or -1 for unbounded, but is \(-2, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["attention", "attention_with_lse", "explain", "attention_weights"])
@pytest.mark.parametrize("case", CASES)
def test_message(case, op):
    changes, error, message = CASES[case]
    arguments = {"query": Q, "key": K, "value": V, **changes}
    if op == "attention_weights":
        if {"value", "dropout_p"} & changes.keys() and "key" not in changes:
            pytest.skip("attention_weights has no such argument")
        arguments.pop("value")
    with pytest.raises(error, match=rf"^qkv::{op}: (?s:.*){message}") as caught:
        getattr(torch.ops.qkv, op)(**arguments)
    # One sentence, no C++ stack.
    assert len(str(caught.value).splitlines()) == 1


def test_too_many_different_batch_dimensions():
    # 10 dimensions of size 2, of which the key is expanded in every other one.
    q = torch.randn(*[2] * 10, 1, 2, 4)
    k = torch.randn(*[1, 2] * 5, 1, 3, 4)
    with pytest.raises(
        ValueError, match="step in 10 different ways, but the kernels handle at most 8"
    ):
        qkv.attention(q, k, k)
    torch.testing.assert_close(
        qkv.attention(q, k.expand(*[2] * 10, 1, 3, 4).contiguous(), k.expand(*[2] * 10, 1, 3, 4).contiguous()),
        qkv.attention(q.flatten(0, 9), *2 * [k.expand(*[2] * 10, 1, 3, 4).flatten(0, 9)]).view(q.shape),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda nn: nn.MultiheadAttention(10, 4),
            "embed_dim must be divisible by num_heads unless head_dim",
        ),
        (
            lambda nn: nn.MultiheadAttention(8, 4, num_kv_heads=3),
            "num_kv_heads must divide num_heads",
        ),
        (lambda nn: nn.MultiheadAttention(8, 0), "num_heads must be positive, but is 0"),
        (
            lambda nn: nn.MultiheadAttention(8, 2, window=(1, 2, 3)),
            r"window must be \(left, right\)",
        ),
        (lambda nn: nn.SelfAttention(0, 4), "d_in must be positive, but is 0"),
        (lambda nn: nn.ScaledDotProductAttention(dropout=2.0), "dropout must be between 0 and 1"),
        (lambda nn: nn.KVCache(0), "max_length must be positive, but is 0"),
    ],
)
def test_modules(make, message):
    with pytest.raises((ValueError, RuntimeError), match=re.compile(message)):
        make(qkv.nn)
