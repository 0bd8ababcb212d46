"""The modules: against plain operations, against torch.nn, and against their twins in C++."""

import copy
import inspect
import json
import pickle
import struct
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

import qkv

BUILD = Path(__file__).parents[2] / "build"
beside_cpp = pytest.mark.skipif(
    torch.empty(()).device.type != "cpu", reason="the program in C++ runs on the CPU"
)

# Module, constructor arguments, shapes of the inputs by name (lists of ints: bool masks).
TWINS = {
    "sdpa": ("ScaledDotProductAttention", {}, {"query": (2, 3, 5, 8)}),
    "sdpa_cross": ("ScaledDotProductAttention", {"scale": 1.0},
                   {"query": (2, 3, 5, 8), "key": (2, 3, 7, 8), "value": (2, 3, 7, 6)}),
    "sdpa_causal_masks": ("ScaledDotProductAttention", {"causal": True},
                          {"query": (2, 3, 5, 8), "attn_mask": [2, 1, 5, 5], "key_padding_mask": [2, 5]}),
    "self": ("SelfAttention", {"d_in": 6, "d_out": 4}, {"input": (2, 5, 6)}),
    "self_unbatched": ("SelfAttention", {"d_in": 6, "d_out": 4, "d_v": 3, "bias": True, "causal": True},
                       {"input": (5, 6)}),
    "self_masks": ("SelfAttention", {"d_in": 6, "d_out": 4, "scale": 0.3},
                   {"input": (2, 5, 6), "attn_mask": [2, 5, 5], "key_padding_mask": [2, 5]}),
    "mha": ("MultiheadAttention", {"embed_dim": 12, "num_heads": 3}, {"query": (2, 5, 12)}),
    "mha_unbatched": ("MultiheadAttention", {"embed_dim": 12, "num_heads": 3, "causal": True},
                      {"query": (5, 12)}),
    "mha_cross": ("MultiheadAttention",
                  {"embed_dim": 12, "num_heads": 3, "kdim": 7, "vdim": 9, "bias": False},
                  {"query": (2, 5, 12), "key": (2, 4, 7), "value": (2, 4, 9)}),
    "mha_gqa_window": ("MultiheadAttention",
                       {"embed_dim": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5,
                        "causal": True, "window": (2, 0)},
                       {"query": (2, 9, 12), "attn_mask": [9, 9], "key_padding_mask": [2, 9]}),
}  # fmt: skip


def make_twin(name):
    kind, options, shapes = TWINS[name]
    torch.manual_seed(0)
    module = getattr(qkv.nn, kind)(**options)
    inputs = {
        n: torch.rand(s) < 0.3 if isinstance(s, list) else torch.randn(s) for n, s in shapes.items()
    }
    if "attn_mask" in inputs:
        inputs["attn_mask"] = ~inputs["attn_mask"]
    return module, inputs


@beside_cpp
@pytest.mark.parametrize("name", TWINS)
def test_twin_in_cpp(name, tmp_path):
    """The same output, weights and gradients from C++, through a state dict that goes both ways."""
    module, inputs = make_twin(name)
    kind, options, _ = TWINS[name]
    paths = {n: str(tmp_path / n) for n in ("weights", "inputs", "output", "saved")}
    spec = {"module": kind, "options": options, **paths}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    qkv.nn.save_state_dict(module, paths["weights"])
    torch.save(inputs, paths["inputs"])
    subprocess.run([BUILD / "tests" / "module_twin", tmp_path / "spec.json"], check=True)
    found = torch.load(paths["output"], weights_only=False)

    output, weights = module.forward_with_weights(**inputs)
    torch.testing.assert_close(found["output"], output.detach())
    torch.testing.assert_close(found["weights"], weights.detach())
    if list(module.parameters()):
        output.sin().sum().backward()
    for parameter, value in module.named_parameters():
        torch.testing.assert_close(found[f"grad.{parameter}"], value.grad)

    other, _ = make_twin(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    qkv.nn.load_state_dict(other, paths["saved"])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters()))


@pytest.mark.parametrize("name", TWINS)
def test_scripted(name):
    module, inputs = make_twin(name)
    scripted = torch.jit.script(module)
    assert torch.equal(scripted(**inputs), module(**inputs))
    for s, e in zip(
        scripted.forward_with_weights(**inputs), module.forward_with_weights(**inputs), strict=True
    ):
        assert torch.equal(s, e)


@pytest.mark.parametrize("name", TWINS)
def test_traced(name):
    """By itself, not inside another module: trace then compiles what is exported beside forward."""
    module, inputs = make_twin(name)
    traced = torch.jit.trace(module, example_kwarg_inputs=inputs)
    others = {n: x if x.dtype == torch.bool else torch.randn(x.shape) for n, x in inputs.items()}
    for given in (inputs, others):
        assert torch.equal(traced(**given), module(**given))
        for t, e in zip(
            traced.forward_with_weights(**given), module.forward_with_weights(**given), strict=True
        ):
            assert torch.equal(t, e)


@pytest.mark.parametrize("name", TWINS)
def test_symbolic_trace(name):
    """For any sizes, which are checked when the graph runs."""
    module, inputs = make_twin(name)
    arguments = dict.fromkeys(inspect.signature(module.forward).parameters)
    others = {n: None for n in arguments if n not in inputs}
    traced = torch.fx.symbolic_trace(module, concrete_args=others)
    longer = {n: torch.cat([x, x], -2) for n, x in inputs.items() if "mask" not in n}
    for given in (inputs, longer) if len(longer) == len(inputs) else (inputs,):
        assert torch.equal(traced(*{**arguments, **given}.values()), module(**given))
    if list(module.parameters()):
        narrower = {n: x[..., :-1] if "mask" not in n else x for n, x in inputs.items()}
        with pytest.raises(ValueError, match=f"qkv.nn.{type(module).__name__}: .* must be"):
            traced(*{**arguments, **narrower}.values())


@pytest.mark.parametrize("name", TWINS)
def test_weights_belong_to_the_output(name):
    """The output of the fused path is what the weights make of the values."""
    module, inputs = make_twin(name)
    output, weights = module.forward_with_weights(**inputs)
    assert torch.equal(module(**inputs), output)
    query = inputs.get("query", inputs.get("input"))
    value = inputs.get("value", inputs.get("key", query))
    if isinstance(module, qkv.nn.MultiheadAttention):
        v = module.w_v(value).unflatten(-1, (module.num_kv_heads, -1)).transpose(-3, -2)
        v = v.repeat_interleave(module.num_heads // module.num_kv_heads, -3)
        expected = module.w_o((weights @ v).transpose(-3, -2).flatten(-2))
    elif isinstance(module, qkv.nn.SelfAttention):
        expected = weights @ module.w_v(value)
    else:
        expected = weights @ value
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", TWINS)
def test_copies_and_compiles(name):
    module, inputs = make_twin(name)
    expected = module(**inputs)
    assert torch.equal(copy.deepcopy(module)(**inputs), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(**inputs), expected)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), expected)
    # Under a default device, which is a mode: methods of tensors are then Python's, and not all of
    # them can be traced.
    with expected.device:
        torch.testing.assert_close(compiled(**inputs), expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_multihead_attention(options, causal):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)  # biases too, which start as zeros
    ours = qkv.nn.MultiheadAttention.from_torch(theirs, causal=causal)
    query = torch.randn(2, 5, 12)
    key = torch.randn(2, 6, options.get("kdim", 12))
    value = torch.randn(2, 6, options.get("vdim", 12))
    padding = torch.tensor([[False] * 5 + [True], [False] * 6])
    mask = torch.ones(5, 6, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(
        query, key, value, key_padding_mask=padding, attn_mask=mask, average_attn_weights=True
    )
    found, found_weights = ours.forward_with_weights(
        query, key, value, key_padding_mask=padding, average_weights=True
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_weights, weights)


def test_initialised_as_torch_multihead_attention():
    """Same ranges and moments; with kdim, also the same bounds of each matrix."""
    torch.manual_seed(0)
    for options in ({}, {"kdim": 96, "vdim": 32}):
        ours, theirs = qkv.nn.MultiheadAttention(64, 4, **options), None
        theirs = qkv.nn.MultiheadAttention.from_torch(torch.nn.MultiheadAttention(64, 4, **options))
        for (name, a), (_, b) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            torch.testing.assert_close(a.abs().max(), b.abs().max(), rtol=0.02, atol=0)
            torch.testing.assert_close(a.std(), b.std(), rtol=0.06, atol=0, msg=name)


def test_fully_padded_sample_in_training_and_evaluation():
    """torch.nn.MultiheadAttention gives three different answers here, NaN among them."""
    module = qkv.nn.MultiheadAttention(8, 2)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[True] * 5, [False] * 5])
    out, weights = module.forward_with_weights(x, key_padding_mask=padding)
    assert torch.equal(out[0], module.w_o.bias.expand(5, 8)) and (weights[0] == 0).all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert torch.equal(module.eval()(x, key_padding_mask=padding), out)


@pytest.mark.parametrize("scripted", [False, True])
def test_cache(scripted):
    module = qkv.nn.MultiheadAttention(8, 4, num_kv_heads=2, causal=True, window=(3, 0)).eval()
    attend = torch.jit.script(module) if scripted else module
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        cache = qkv.nn.KVCache(9)
        parts = [attend(x[:, i:j], cache=cache) for i, j in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, 1), module(x))
        assert cache.length() == len(cache) == 9 and cache.max_length() == 9
        cache.truncate(4)
        torch.testing.assert_close(attend(x[:, 4:5], cache=cache), parts[1])
        again = copy.deepcopy(cache)
        torch.testing.assert_close(attend(x[:, 5:9], cache=again), attend(x[:, 5:9], cache=cache))


def test_cache_with_padding():
    """Left padding of a prompt stays masked while tokens are added."""
    module = qkv.nn.MultiheadAttention(8, 2, causal=True).eval()
    prompt, tokens = torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    with torch.no_grad():
        expected = module(torch.cat([prompt, tokens], 1))[:, 3:]
        padded = torch.cat([torch.randn(1, 2, 8), prompt], 1)
        padding = torch.tensor([[True, True] + 7 * [False]])
        cache = qkv.nn.KVCache(9)
        module(padded, key_padding_mask=padding[:, :5], cache=cache)
        found = [
            module(tokens[:, i : i + 1], key_padding_mask=padding[:, : 6 + i], cache=cache)
            for i in range(4)
        ]
        with pytest.raises(ValueError, match=r"must be \(B.., N=10\), cached keys included, but"):
            module(tokens[:, :1], key_padding_mask=padding[:, :1], cache=cache)
    torch.testing.assert_close(torch.cat(found, 1), expected)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}])
def test_from_torch_leaves_frozen_what_is(options):
    theirs = torch.nn.MultiheadAttention(8, 2, **options).requires_grad_(False)
    theirs.in_proj_bias.requires_grad_()
    theirs.out_proj.weight.requires_grad_()
    ours = qkv.nn.MultiheadAttention.from_torch(theirs)
    trained = {name for name, x in ours.named_parameters() if x.requires_grad}
    assert trained == {"w_q.bias", "w_k.bias", "w_v.bias", "w_o.weight"}


def test_masks_of_sizes_that_depend_on_data():
    """Of as many keys as another tensor selects, which no graph knows to be those of the input."""
    module = qkv.nn.MultiheadAttention(8, 2)

    def attend(x, padding, mask, kept, same_kept):
        rows, keys = kept.nonzero().squeeze(-1), same_kept.nonzero().squeeze(-1)
        mask = mask.index_select(0, rows).index_select(1, keys)
        padding = padding.index_select(1, keys)
        return module(x.index_select(1, rows), attn_mask=mask, key_padding_mask=padding)

    x, mask, kept = torch.randn(2, 6, 8), torch.randn(6, 6), torch.arange(6) % 2 == 0
    padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = compiled(x, padding, mask, kept, kept.clone())
    torch.testing.assert_close(found, attend(x, padding, mask, kept, kept))


def test_repr():
    assert repr(qkv.nn.SelfAttention(4, 2, causal=True)).startswith(
        "SelfAttention(\n  causal=True, dropout=0.0\n  (w_q): Linear(in_features=4, out_features=2"
    )
    text = repr(qkv.nn.MultiheadAttention(8, 4, num_kv_heads=2, window=(2, 0)))
    assert "num_heads=4, num_kv_heads=2, dropout=0.0, causal=False, window=(2, 0)" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda p: qkv.nn.ScaledDotProductAttention(dropout=p),
        lambda p: qkv.nn.SelfAttention(8, 8, dropout=p),
        lambda p: qkv.nn.MultiheadAttention(8, 2, bias=False, dropout=p),
    ],
    ids=["sdpa", "self", "mha"],
)
def test_dropout_in_training_only(make):
    module, x = make(0.5), torch.randn(1, 20, 8)
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), module(x))
    assert (make(1.0)(x) == 0).all()


@pytest.mark.parametrize(
    "make",
    [qkv.nn.ScaledDotProductAttention, lambda: qkv.nn.MultiheadAttention(8, 2)],
    ids=["sdpa", "mha"],
)
def test_the_key_is_also_the_value_and_what_padding_is_of(make):
    module, query, key = make(), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    padding = torch.arange(7) > 4
    expected = module(query, key[..., :5, :], key[..., :5, :])
    torch.testing.assert_close(module(query, key, key_padding_mask=padding), expected)
    out, weights = module.forward_with_weights(query, key, key_padding_mask=padding)
    torch.testing.assert_close(out, expected)
    assert (weights[..., 5:] == 0).all()


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_average_weights_of_any_batch(batch):
    module, x = qkv.nn.MultiheadAttention(12, 3), torch.randn(*batch, 5, 12)
    _, weights = module.forward_with_weights(x)
    _, mean = module.forward_with_weights(x, average_weights=True)
    assert torch.equal(mean, weights.mean(-3)) and mean.shape == (*batch, 5, 5)


def test_weights_with_a_cache():
    module = qkv.nn.MultiheadAttention(8, 4, num_kv_heads=2, causal=True, window=(3, 0)).eval()
    x, cache = torch.randn(2, 9, 8), qkv.nn.KVCache(9)
    with torch.no_grad():
        out, weights = module.forward_with_weights(x)
        for i, j in ((0, 4), (4, 5), (5, 9)):
            part, of_part = module.forward_with_weights(x[:, i:j], cache=cache)
            assert cache.length() == j
            torch.testing.assert_close(part, out[:, i:j])
            torch.testing.assert_close(of_part, weights[..., i:j, :j])


@pytest.mark.parametrize("width", [1, 6])
def test_a_cache_refuses_values_of_another_width(width):
    cache, x = qkv.nn.KVCache(16), torch.randn(2, 5, 8)
    cache.append(x, x)
    with pytest.raises(ValueError, match="do not fit"):
        cache.append(x, x[..., :width])
    cache.truncate(0)
    _, values = cache.append(x, x[..., :width])
    assert torch.equal(values, x[..., :width])


def test_from_torch_takes_the_rest_over():
    theirs = torch.nn.MultiheadAttention(8, 2, dropout=0.25, dtype=torch.float64).eval()
    ours = qkv.nn.MultiheadAttention.from_torch(theirs)
    assert ours.dropout == 0.25 and not ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: qkv.nn.MultiheadAttention(8, 2, **options),
        lambda **options: qkv.nn.SelfAttention(8, 4, bias=True, **options),
    ],
    ids=["mha", "self"],
)
def test_device_and_dtype_of_all_parameters(make):
    for p in make(device="meta", dtype=torch.float64).parameters():
        assert p.is_meta and p.dtype == torch.float64


def test_parameters_are_reset():
    module = qkv.nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(9.0)
    module.reset_parameters()
    assert all(p.abs().max() < 2 for p in module.parameters())


def test_a_window_that_is_unbounded_on_one_side():
    x, module = torch.randn(2, 5, 8), qkv.nn.MultiheadAttention(8, 2, window=(-1, 0))
    causal = qkv.nn.MultiheadAttention(8, 2, causal=True)
    causal.load_state_dict(module.state_dict())
    assert torch.equal(module(x), causal(x))


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    module, cache = qkv.nn.MultiheadAttention(8, 2, causal=True), qkv.nn.KVCache(10)
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        module(x, cache=cache)
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            module(x, attn_mask=torch.zeros(1, 99), cache=cache)
        assert cache.length() == 3
        module(x, cache=cache)
        assert cache.length() == 6


def test_a_cache_advances_by_what_it_was_extended_by():
    cache, x = qkv.nn.KVCache(9), torch.randn(1, 2, 3, 4)
    with pytest.raises(
        ValueError,
        match="of the last extension 0 keys are left to take in, so it cannot advance by 1",
    ):
        cache.advance(1)
    cache.extended(x, x)
    for count in (-1, 4):
        with pytest.raises(
            ValueError, match=f"3 keys are left to take in, so it cannot advance by {count}"
        ):
            cache.advance(count)
    cache.advance(2)
    assert cache.length() == 2
    with pytest.raises(ValueError, match="cannot advance by 1"):
        cache.advance(1)


def test_a_cache_that_inference_mode_began():
    module, cache = qkv.nn.MultiheadAttention(8, 2, causal=True), qkv.nn.KVCache(6)
    x = torch.randn(1, 6, 8)
    with torch.inference_mode():
        module(x[:, :4], cache=cache)
    with torch.no_grad():
        torch.testing.assert_close(module(x[:, 4:], cache=cache), module(x)[:, 4:])


def test_samples_of_dropout_by_vmap():
    """No tensor of the module's call is mapped, only what is added to its result."""
    module, x = qkv.nn.ScaledDotProductAttention(dropout=0.5), torch.randn(3, 1, 6, 8)

    def samples_of(randomness):
        return torch.vmap(lambda i: module(*x) + i, randomness=randomness)(torch.zeros(4))

    different, same = samples_of("different"), samples_of("same")
    assert not torch.equal(different[0], different[1]) and torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="random"):
        samples_of("error")


def test_a_cache_takes_in_views_of_itself():
    """A window that slides: all keys but the oldest come back."""
    k = torch.randn(1, 2, 4000, 64)
    for first, dropped in ((0, 1000), (3, 7)):
        cache = qkv.nn.KVCache(4000)
        keys, values = cache.append(k, -k)
        cache.truncate(first)
        room = 4000 - first
        keys, values = cache.append(
            keys[..., dropped : dropped + room, :], values[..., dropped : dropped + room, :]
        )
        assert torch.equal(keys[..., first:, :], k[..., dropped : dropped + room, :])
        assert torch.equal(values, -keys)


def test_a_cache_that_is_cut_was_not_extended():
    cache, x = qkv.nn.KVCache(8), torch.randn(1, 2, 3, 8)
    cache.append(x, x)
    cache.extended(x, x)
    cache.truncate(1)
    with pytest.raises(ValueError, match="0 keys are left to take in"):
        cache.advance(3)


@pytest.mark.parametrize("which", ["key", "value"])
def test_no_gradients_flow_through_a_cache(which):
    key, value = torch.randn(2, 1, 2, 3, 8)
    (key if which == "key" else value).requires_grad_()
    with pytest.raises(ValueError, match="no gradients flow"):
        qkv.nn.KVCache(8).append(key, value)


def test_a_cache_takes_in_views_of_itself_further_on():
    key, value = torch.randn(2, 1, 1, 300, 8)
    cache = qkv.nn.KVCache(1000)
    found = cache.append(key, value)
    cache.truncate(1)
    for x, given in zip(cache.append(*found), (key, value)):
        assert torch.equal(x, torch.cat([given[..., :1, :], given], -2))


def test_a_saved_cache_holds_what_is_cached_only():
    cache, secret = qkv.nn.KVCache(1000), torch.full((1, 1, 5, 1), 1234.5)
    cache.append(secret, secret)
    cache.truncate(1)
    for _ in range(2):  # saved once, it is still whole
        data = pickle.dumps(cache)
        assert data.count(struct.pack("<f", 1234.5)) == 2 and len(data) < 4000
        assert all(torch.equal(x, secret[..., :1, :]) for x in pickle.loads(data).cached())
    assert qkv.nn.KVCache(3).cached() == (None, None)


def test_whole_numbers_as_options_can_be_scripted():
    x = torch.randn(2, 4, 8)
    for module in (
        qkv.nn.MultiheadAttention(8, 2, dropout=0, causal=1),
        qkv.nn.SelfAttention(8, 4, dropout=0, causal=1),
        qkv.nn.ScaledDotProductAttention(dropout=0, causal=1),
    ):
        torch.testing.assert_close(torch.jit.script(module)(x), module(x))


@pytest.mark.parametrize(
    "module", [qkv.nn.MultiheadAttention(8, 2), qkv.nn.SelfAttention(8, 4)], ids=["mha", "self"]
)
def test_projections_may_be_wrapped_and_run_once(module):
    calls = []
    expected = module(torch.ones(1, 3, 8))
    module.w_q = torch.nn.Sequential(module.w_q)  # without in_features
    module.w_q.register_forward_hook(lambda *_: calls.append(1))
    out, _ = module.forward_with_weights(torch.ones(1, 3, 8))
    torch.testing.assert_close(out, expected)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 3}, r"window must be \(left, right\), two ints, but is 3"),
        ({"window": (None, 0)}, r"window must be \(left, right\), two ints"),
        ({"window": (2.5, 0)}, r"window must be \(left, right\), two ints"),
        ({"dropout": None}, "dropout must be a number, but is None"),
        ({"dropout": "0.1"}, "dropout must be a number, but is '0.1'"),
        ({"embed_dim": "8"}, "embed_dim must be an int, but is '8'"),
        ({"num_heads": 2.0}, "num_heads must be an int, but is 2.0"),
        ({"kdim": True}, "kdim must be an int, but is True"),
    ],
)
def test_options_of_the_wrong_type(options, message):
    with pytest.raises(TypeError, match=f"qkv.nn.MultiheadAttention: {message}"):
        qkv.nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options})


def test_options_as_numbers_of_numpy():
    """As the modules of torch take them; those of scripted modules are Python's."""
    size, part = numpy.int64, numpy.float32(0.25)
    module = qkv.nn.MultiheadAttention(
        size(8),
        size(2),
        size(8),
        size(8),
        size(1),
        size(4),
        dropout=part,
        window=(size(2), size(0)),
    )
    x = torch.ones(1, 3, 8)
    assert torch.jit.script(module.eval())(x).shape == x.shape
    one_head = qkv.nn.SelfAttention(size(8), size(4), size(6), dropout=part, scale=part)
    assert torch.jit.script(one_head.eval())(x).shape == (1, 3, 6)
    assert one_head.scale == 0.25 and isinstance(module.num_heads, int)
