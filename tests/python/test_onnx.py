"""Models that call the operator, exported to ONNX and run by onnxruntime."""

import sys

import pytest
import samples
import torch
from torch import Tensor

import qkv

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ANY = torch.export.Dim.DYNAMIC


class Function(torch.nn.Module):
    """A function as the module that the exporter asks for."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor):
        return self.function(*args, **kwargs)


def export(model, args, **options):
    return torch.onnx.export(
        model,
        args,
        dynamo=True,
        verbose=False,
        custom_translation_table=qkv.onnx.translation_table(),
        **options,
    )


def assert_same(program, model, args, kwargs=None, tolerance=1e-5):
    """onnxruntime's outputs are the model's, of their dtypes."""
    kwargs = kwargs or {}
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [x.name for x in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, [*args, *kwargs.values()], strict=True)}
    actual = [torch.from_numpy(x) for x in session.run(None, feed)]
    expected = model(*args, **kwargs)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def check_sample(name: str, dtype: torch.dtype, tolerance: float) -> None:
    sample = samples.make(samples.entry(name), dtype)
    tensors = {n: x for n, x in sample.kwargs.items() if isinstance(x, Tensor)}
    scalars = {n: x for n, x in sample.kwargs.items() if n not in tensors}
    model = Function(
        lambda *args, **kwargs: torch.ops.qkv.attention_with_lse(*args, **kwargs, **scalars)
    )
    args = (sample.query, sample.key, sample.value)
    assert_same(export(model, args, kwargs=tensors), model, args, tensors, tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "causal_lower_right",
        "window_causal",
        "gqa_causal",
        "one_query_head",
        "value_dim_larger",
        "no_batch",
        "no_head_causal_mask",
        "batch_broadcast",
        "float_mask_minus_inf",
        "bool_mask_empty_rows",
        "key_mask_empty_batch",
        "alibi_causal",
        "sinks_empty_rows",
        "softcap_alibi_sinks",
    ],
)
def test_samples(name):
    check_sample(name, torch.float32, 1e-5)


def test_float16():
    check_sample("everything", torch.float16, 2e-3)


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="the last onnxruntime for Python 3.10 fuses float64 products to a kernel it lacks",
)
def test_float64():
    check_sample("everything", torch.float64, 1e-12)


def test_module_with_dynamic_sizes():
    model = qkv.nn.MultiheadAttention(16, 4, num_kv_heads=2, causal=True).eval()
    program = export(model, (torch.randn(2, 5, 16),), dynamic_shapes=({0: ANY, 1: ANY},))
    assert {node.domain for node in program.model.graph} == {""}  # nothing a runtime may not have
    for batch, length in ((2, 5), (1, 1), (3, 20)):
        assert_same(program, model, (torch.randn(batch, length, 16),))


def test_module_with_weights_and_padding():
    module = qkv.nn.MultiheadAttention(16, 4, window=(2, 0)).eval()
    model = Function(lambda x, padding: module.forward_with_weights(x, key_padding_mask=padding))
    args = (torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [2]]))
    assert_same(export(model, args), model, args)


def test_band_that_depends_on_dynamic_sizes():
    def attention(query: Tensor, key: Tensor) -> Tensor:
        queries, keys = query.shape[-2], key.shape[-2]
        window = (keys - 5, 1)  # -1, unbounded, for 4 keys
        return qkv.attention(query, key, key, window=window, query_offset=keys - queries)

    model = Function(attention)
    args = (torch.randn(2, 3, 4), torch.randn(2, 7, 4))
    program = export(model, args, dynamic_shapes=(({1: ANY}, {1: ANY}),))
    for queries, keys in ((3, 7), (1, 12), (6, 4)):
        assert_same(program, model, (torch.randn(2, queries, 4), torch.randn(2, keys, 4)))


def test_masks_of_the_lowest_number():
    """They leave the mean of the values, where -inf would leave 0."""
    model = Function(qkv.attention_with_lse)
    args = (*torch.randn(3, 2, 4, 4), torch.full((4, 4), torch.finfo(torch.float32).min))
    assert_same(export(model, args), model, args)


def test_dropout_is_an_error():
    model = qkv.nn.ScaledDotProductAttention(dropout=0.1)
    with pytest.warns(UserWarning, match="training mode"):
        with pytest.raises(
            torch.onnx.OnnxExporterError, match=r"dropout_p is 0.1; call model.eval"
        ):
            export(model, (torch.randn(2, 5, 4),))
    export(model.eval(), (torch.randn(2, 5, 4),))


def test_without_onnxscript(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="pip install onnx onnxscript"):
        qkv.onnx.translation_table()
