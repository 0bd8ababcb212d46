"""Bad input to modules and caches: the whole message, as test_errors.py has it of the operators."""

import pytest
import torch

import qkv

NAN = float("nan")
nn = qkv.nn
X = torch.randn(2, 5, 8)
PADDING = torch.zeros(2, 5, dtype=torch.bool)


def multihead(**options):
    return nn.MultiheadAttention(8, 2, **options)


MODULES = {
    "heads": (lambda: nn.MultiheadAttention(10, 4), ValueError,
              "qkv.nn.MultiheadAttention: embed_dim must be divisible by num_heads unless head_dim is given, but embed_dim=10 and num_heads=4"),
    "kv_heads": (lambda: nn.MultiheadAttention(8, 4, num_kv_heads=3), ValueError,
                 "qkv.nn.MultiheadAttention: num_kv_heads must divide num_heads, but num_heads=4 and num_kv_heads=3"),
    **{
        f"{name}_{size}": (lambda name=name, size=size: nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, name: size}), ValueError,
                           f"qkv.nn.MultiheadAttention: {name} must be positive, but is {size}")
        for name in ("embed_dim", "num_heads", "kdim", "vdim", "num_kv_heads", "head_dim")
        for size in (0, -1)
    },
    "width": (lambda: multihead(head_dim=2**62), ValueError,
              "qkv.nn.MultiheadAttention: num_heads * head_dim must be less than 2^63, but num_heads=2 and head_dim=4611686018427387904"),
    "window": (lambda: multihead(window=(1, 2, 3)), ValueError,
               "qkv.nn.MultiheadAttention: window must be (left, right), but is (1, 2, 3)"),
    "window_negative": (lambda: multihead(window=(-2, 0)), ValueError,
                        "qkv.nn.MultiheadAttention: window must be (left, right) with both >= 0, or -1 for unbounded, but is (-2, 0)"),
    "mha_dropout": (lambda: multihead(dropout=-0.5), ValueError,
                    "qkv.nn.MultiheadAttention: dropout must be between 0 and 1, but is -0.5"),
    "d_in": (lambda: nn.SelfAttention(0, 4), ValueError, "qkv.nn.SelfAttention: d_in must be positive, but is 0"),
    "d_out": (lambda: nn.SelfAttention(4, 0), ValueError, "qkv.nn.SelfAttention: d_out must be positive, but is 0"),
    "d_v": (lambda: nn.SelfAttention(4, 4, -1), ValueError, "qkv.nn.SelfAttention: d_v must be positive, but is -1"),
    "self_dropout": (lambda: nn.SelfAttention(4, 4, dropout=NAN), ValueError,
                     "qkv.nn.SelfAttention: dropout must be between 0 and 1, but is nan"),
    "dropout": (lambda: nn.ScaledDotProductAttention(dropout=2.0), ValueError,
                "qkv.nn.ScaledDotProductAttention: dropout must be between 0 and 1, but is 2.0"),
    "cache": (lambda: nn.KVCache(0), ValueError, "qkv::KVCache: max_length must be positive, but is 0"),
    **{
        f"{name}_padding_dtype": (lambda module=module: module(X, key_padding_mask=torch.zeros(2, 5)), TypeError,
                                  f"qkv.nn.{type(module).__name__}: key_padding_mask must be bool (True = padding), but is torch.float32")
        for name, module in (("sdpa", nn.ScaledDotProductAttention()), ("self", nn.SelfAttention(8, 8)), ("mha", multihead()))
    },
    # The operator would take one of a single key for all of them.
    **{
        f"{name}_padding_{len(padding.shape)}_{padding.numel()}": (
            lambda module=module, padding=padding: module(X, key_padding_mask=padding), ValueError,
            f"qkv.nn.{type(module).__name__}: key_padding_mask must be (B.., N=5), but has shape {list(padding.shape)}")
        for name, module in (("sdpa", nn.ScaledDotProductAttention()), ("self", nn.SelfAttention(8, 8)), ("mha", multihead()))
        for padding in (PADDING[:, :3], PADDING[:, :1], PADDING[0, :1], PADDING[0, 0])
    },
    "padding_batch": (lambda: multihead()(X, key_padding_mask=torch.cat([PADDING, PADDING])), ValueError,
                      "qkv::attention: key_mask must broadcast to (batch.., N) = [2, 5], but has shape [4, 5]"),
    **{
        f"self_mask_{'x'.join(map(str, shape))}": (
            lambda shape=shape: nn.SelfAttention(8, 8)(X, attn_mask=torch.ones(shape)), ValueError,
            f"qkv.nn.SelfAttention: attn_mask must broadcast to (B.., T, T) = [2, 5, 5], but has shape {list(shape)}")
        for shape in ((2, 1, 5, 5), (5, 4), (3, 5, 5), (8,))
    },
    "padding_list": (lambda: multihead()(X, key_padding_mask=[[True]]), TypeError,
                     "qkv.nn.MultiheadAttention: key_padding_mask must be a tensor, but is [[True]]"),
    "padding_sparse": (lambda: multihead()(X, key_padding_mask=PADDING.to_sparse()), TypeError,
                       "qkv.nn.MultiheadAttention: key_padding_mask must be a dense tensor, but is sparse"),
    "padded_list": (lambda: nn.ScaledDotProductAttention()(X, [1], key_padding_mask=PADDING), TypeError,
                    "qkv.nn.ScaledDotProductAttention: key must be a tensor, but is [1]"),
    "self_mask_list": (lambda: nn.SelfAttention(8, 8)(X, attn_mask=[1]), TypeError,
                       "qkv.nn.SelfAttention: attn_mask must be a tensor, but is [1]"),
    "no_cache": (lambda: multihead()(X, cache=3), TypeError,
                 "qkv.nn.MultiheadAttention: cache must be a qkv.nn.KVCache, but is 3"),
    "from_linear": (lambda: nn.MultiheadAttention.from_torch(torch.nn.Linear(2, 2)), TypeError,
                    "qkv.nn.MultiheadAttention: from_torch takes a torch.nn.MultiheadAttention, but got a torch.nn.modules.linear.Linear"),
    "from_quantizable": (
        lambda: nn.MultiheadAttention.from_torch(torch.ao.nn.quantizable.MultiheadAttention(8, 2)), TypeError,
        "qkv.nn.MultiheadAttention: from_torch takes a torch.nn.MultiheadAttention, but got a torch.ao.nn.quantizable.modules.activation.MultiheadAttention"),
    "query": (lambda: multihead()(None), TypeError, "qkv.nn.MultiheadAttention: query must be a tensor, but is None"),
    "mask_shape": (lambda: multihead()(X, attn_mask=torch.ones(5, 4) > 0), ValueError,
                   "qkv::attention: attn_mask must broadcast to (batch.., Hq, M, N) = [2, 2, 5, 5], but has shape [5, 4]"),
    "embed_dim": (lambda: multihead()(X[..., :6]), ValueError,
                  "qkv.nn.MultiheadAttention: query must be (.., rows, embed_dim=8), but has shape [2, 5, 6]"),
    "kdim": (lambda: multihead()(X, X[..., :6]), ValueError,
             "qkv.nn.MultiheadAttention: key must be (.., rows, kdim=8), but has shape [2, 5, 6]"),
    "vdim": (lambda: multihead()(X, X, X[..., :6]), ValueError,
             "qkv.nn.MultiheadAttention: value must be (.., rows, vdim=8), but has shape [2, 5, 6]"),
    "rank": (lambda: multihead()(X[0, 0]), ValueError,
             "qkv.nn.MultiheadAttention: query must be (.., rows, embed_dim=8), but has shape [8]"),
    "self_width": (lambda: nn.SelfAttention(8, 8)(X[..., :6]), ValueError,
                   "qkv.nn.SelfAttention: input must be (.., rows, d_in=8), but has shape [2, 5, 6]"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_module(case):
    make, error, message = MODULES[case]
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_wrong_arguments_of_scripted_modules():
    """TorchScript turns what modules check in Python into its own error, with the message in it."""
    module = torch.jit.script(multihead())
    for call, message in (
        (lambda: module(X[..., :6]), r"query must be \(.., rows, embed_dim=8\)"),
        (lambda: module(X, key_padding_mask=torch.zeros(2, 5)), "key_padding_mask must be bool"),
        (lambda: module(X, key_padding_mask=PADDING[:, :1]), r"must be \(B.., N=5\)"),
    ):
        with pytest.raises(Exception, match=message):
            call()


SPARSE, QUANTIZED = X.to_sparse(), torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
SIZES = "key and value must be (.., new keys, width), of the same sizes but for the width, but have shapes"
ON = f"on {X.device}"
CACHE = {
    "rank": (X[0, 0], X[0, 0], ValueError, f"{SIZES} [8] and [8]"),
    "new_keys": (X, X[:, :3], ValueError, f"{SIZES} [2, 5, 8] and [2, 3, 8]"),
    "batch": (X, X[:1], ValueError, f"{SIZES} [2, 5, 8] and [1, 5, 8]"),
    "dimensions": (X, X[0], ValueError, f"{SIZES} [2, 5, 8] and [5, 8]"),
    "other_batch": (X[:1], X[:1], ValueError, f"cached are keys and values float32 [2, 5, 8] {ON} and float32 "
                    f"[2, 5, 8] {ON}, which float32 [1, 5, 8] {ON} and float32 [1, 5, 8] {ON} do not fit"),
    "other_dtype": (X.double(), X.double(), ValueError, f"cached are keys and values float32 [2, 5, 8] {ON} and float32 "
                    f"[2, 5, 8] {ON}, which float64 [2, 5, 8] {ON} and float64 [2, 5, 8] {ON} do not fit"),
    "sparse_key": (SPARSE, X, TypeError, "key must be a dense tensor, but has layout Sparse"),
    "sparse_value": (X, SPARSE, TypeError, "value must be a dense tensor, but has layout Sparse"),
    "nested": (torch.nested.nested_tensor([X[0], X[1]]), X, TypeError, "key must be a dense tensor, but is nested"),
    "quantized": (QUANTIZED, QUANTIZED, TypeError, "key must not be quantized, but is qint8"),
    "integers": (X, X.long(), TypeError, "value must be float64, float32, bfloat16 or float16, but is int64"),
    "dtypes": (X, X.double(), ValueError, f"key and value must have one dtype and one device, but are float32 {ON} and float64 {ON}"),
    "room": (torch.cat([X] * 3, 1), torch.cat([X] * 3, 1), ValueError, "there is room for 16 keys, but 5 are cached and 15 come"),
}  # fmt: skip


@pytest.mark.parametrize("case", CACHE)
def test_cache(case):
    """A refused call leaves the cache as it was."""
    key, value, error, message = CACHE[case]
    cache = nn.KVCache(16)
    with torch.no_grad():
        cache.append(X, X)
        cache.extended(X, X)
        with pytest.raises(error) as caught:
            cache.append(key, value)
        assert str(caught.value) == f"qkv::KVCache: {message}"
        assert cache.length() == 5
        with pytest.raises(
            ValueError,
            match="of the last extension 0 keys are left to take in, so it cannot advance by 3",
        ):
            cache.advance(3)
        cached, _ = cache.append(X, X)
    assert torch.equal(cached, torch.cat([X, X], 1))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_from_torch_refuses(option):
    with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn have no counterpart"):
        qkv.nn.MultiheadAttention.from_torch(torch.nn.MultiheadAttention(8, 2, **{option: True}))
