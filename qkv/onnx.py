"""How the operators are translated to ONNX. Needs ``pip install onnx onnxscript``."""

import math
from typing import TYPE_CHECKING, Callable, Optional, Sequence, Union

import torch

if TYPE_CHECKING:
    from onnxscript.ir import Value
    from onnxscript.values import Opset


def translation_table() -> dict[Callable, Callable]:
    """The ``custom_translation_table`` with which ``torch.onnx.export`` exports calls of ``qkv``.

    ::

        program = torch.onnx.export(
            model.eval(),
            args,
            dynamo=True,
            custom_translation_table=qkv.onnx.translation_table(),
        )
        program.save("model.onnx")

    The exporter decomposes the public operators to ``qkv::_attention_forward``,
    ``qkv::_attention_weights`` and ATen; the table has the former two, in terms of standard ONNX
    operators (opset 18). So every option, dtype, rank and dynamic size is covered; not dropout, and
    not ``qkv.nn.KVCache``.

    The numbers are those of ``qkv`` except that a NaN or inf in a masked key, value or mask entry
    may reach rows that do not keep it, that no size may be 0 (onnxruntime fails or is wrong there),
    and that memory holds all M x N scores.

    Returns:
        The operators and the functions that build their ONNX graphs.

    Raises:
        ImportError: onnxscript is not installed.
        torch.onnx.OnnxExporterError: not here but from ``torch.onnx.export``, if there is dropout.
    """
    try:
        from onnxscript import opset18
    except ImportError as error:
        raise ImportError(
            "qkv.onnx: exporting to ONNX needs onnxscript: pip install onnx onnxscript"
        ) from error

    # The exporter evaluates annotations, which those of the functions below are too lazy for.
    def attention_forward(*operands: object) -> tuple[object, ...]:
        return _attention_forward(opset18, *operands)

    def attention_weights(*operands: object) -> tuple[object, ...]:
        return _attention_weights(opset18, *operands)

    return {
        torch.ops.qkv._attention_forward.default: attention_forward,
        torch.ops.qkv._attention_weights.default: attention_weights,
    }


def _attention_forward(
    op: "Opset",
    query: "Value",
    key: "Value",
    value: "Value",
    *operands: object,
) -> tuple["Value", ...]:
    """The operands of csrc/operands.h to output (B.., Hq, M, Dv) and logsumexp (B.., Hq, M)."""
    weights, total, logsumexp = _softmax(op, query, key, *operands)
    grouped = query.shape[-3] != key.shape[-3]
    product = _product(op, weights, op.CastLike(value, weights), grouped)
    output = op.CastLike(product / total, query)
    # Nothing that is exported reads the last two, which are for derivatives.
    return output, logsumexp, op.Identity(logsumexp), op.Identity(logsumexp)


def _attention_weights(
    op: "Opset", query: "Value", key: "Value", value: "Value", *operands: object
) -> tuple["Value", ...]:
    """The same operands to weights (B.., Hq, M, N) and logsumexp."""
    weights, total, logsumexp = _softmax(op, query, key, *operands)
    return op.CastLike(weights / total, query), logsumexp, op.Identity(logsumexp)


def _softmax(
    op: "Opset",
    query: "Value",
    key: "Value",
    attn_mask: Optional["Value"],
    alibi_slopes: Optional["Value"],
    sinks: Optional["Value"],
    key_mask: Optional["Value"],
    dropout_seed: Optional["Value"],
    scale: Optional[float],
    softcap: float,
    dropout_p: float,
    band: Sequence[Union[int, "Value"]],
    needs_rest: bool = True,
) -> tuple["Value", ...]:
    """Weights (B.., Hq, M, N) that are not divided yet, by what (B.., Hq, M, 1), and logsumexp."""
    from onnxscript import ir

    if dropout_seed is not None:
        raise ValueError(
            f"qkv.onnx: dropout is not exported to ONNX, but dropout_p is {dropout_p}; call "
            "model.eval() first"
        )
    real = ir.DataType.DOUBLE if query.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    grouped = query.shape[-3] != key.shape[-3]

    def number(x: float) -> "Value":
        return op.Constant(value=ir.tensor(x, dtype=real))

    def as_real(x: "Value") -> "Value":
        return op.Cast(x, to=real)

    def as_column(x: "Value") -> "Value":
        """(B.., Hq) to (B.., Hq, 1, 1)."""
        return op.Unsqueeze(as_real(x), [-2, -1])

    rank = len(key.shape)
    transposed_key = op.Transpose(as_real(key), perm=[*range(rank - 2), rank - 1, rank - 2])
    if scale is None:
        factor = number(1.0) / op.Sqrt(as_real(op.Shape(query, start=-1)))
    else:
        factor = number(scale)
    scores = _product(op, as_real(query) * factor, transposed_key, grouped)
    if softcap != 0.0:
        scores = op.Tanh(scores / number(softcap)) * number(softcap)
    if attn_mask is not None and attn_mask.dtype != ir.DataType.BOOL:
        scores = scores + as_real(attn_mask)
        attn_mask = None
    p = op.Unsqueeze(_row_numbers(op, query) + band[2], [-1])
    j = _row_numbers(op, key)
    if alibi_slopes is not None:
        scores = scores - as_column(alibi_slopes) * op.Abs(as_real(p) - as_real(j))
    for keep in _masks(op, attn_mask, key_mask, p, j, band):
        scores = op.Where(keep, scores, number(-math.inf))

    # Finite even in a row that keeps no key, so that its weights are exp(-inf), not exp(NaN).
    largest = op.Max(op.ReduceMax(scores, [-1]), number(real.min))
    if sinks is not None:
        largest = op.Max(largest, as_column(sinks))
    weights = op.Exp(scores - largest)
    total = op.ReduceSum(weights, [-1])
    if sinks is not None:
        total = total + op.Exp(as_column(sinks) - largest)
    # The largest score or sink adds 1 to total, so Max changes only the 0 / 0 of such a row.
    return weights, op.Max(total, number(1.0)), op.Squeeze(op.Log(total) + largest, [-1])


def _product(op: "Opset", a: "Value", b: "Value", grouped: bool) -> "Value":
    """a (B.., Hq, M, K) times b (B.., Hkv, K, L): the query heads of a group share b's head."""
    if not grouped:
        return op.MatMul(a, b)
    stacked = op.Concat(
        op.Shape(b, end=-2), op.Constant(value_ints=[-1]), op.Shape(a, start=-1), axis=0
    )
    product = op.MatMul(op.Reshape(a, stacked), b)  # (B.., Hkv, Hq / Hkv * M, L)
    return op.Reshape(product, op.Concat(op.Shape(a, end=-1), op.Shape(b, start=-1), axis=0))


def _row_numbers(op: "Opset", x: "Value") -> "Value":
    """(.., rows, width) to 0, 1, .. rows - 1 in int64."""
    return op.Range(0, op.Squeeze(op.Shape(x, start=-2, end=-1)), 1)


def _masks(
    op: "Opset",
    attn_mask: Optional["Value"],
    key_mask: Optional["Value"],
    p: "Value",
    j: "Value",
    band: Sequence[Union[int, "Value"]],
) -> list["Value"]:
    """Bool tensors that broadcast to (B.., Hq, M, N); a pair is kept if all of them keep it.

    p (M, 1) is each query's position among the keys, j (N) each key's, both int64.
    """
    masks = [] if attn_mask is None else [attn_mask]
    if key_mask is not None:
        masks.append(op.Unsqueeze(key_mask, [-3, -2]))
    left, right, _ = band
    for bound, keep in ((left, p - left <= j), (right, j <= p + right)):
        if not isinstance(bound, int):  # a number that is known only when the model runs
            masks.append(op.Or(bound < 0, keep))
        elif bound >= 0:
            masks.append(keep)
    return masks
