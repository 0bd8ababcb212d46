"""Bad input: the error names the operator, the rule and what was found, and comes before any work."""

import re

import pytest
import torch
import torch.nn.attention.bias
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qkv

NAN, INF = float("nan"), float("inf")
DEVICE = torch.empty(()).device.type
OPS = ["attention", "attention_with_lse", "attention_weights", "explain"]

# One call that is right, with everything there is.
RIGHT = {
    "query": torch.randn(2, 4, 5, 8),
    "key": torch.randn(2, 4, 7, 8),
    "value": torch.randn(2, 4, 7, 8),
    "attn_mask": torch.randn(2, 1, 5, 7),
    "alibi_slopes": torch.rand(2, 4),
    "sinks": torch.rand(2, 4),
    "key_mask": torch.ones(2, 7, dtype=torch.bool),
}


class Seen(TorchDispatchMode):
    """Collects the operators that run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(str(function))
        return function(*args, **(kwargs or {}))


def assert_refused(op, changes, error, message):
    """The whole message, one sentence without a C++ stack, and no operator has run by then."""
    arguments = {**RIGHT, **changes}
    if op == "attention_weights":
        arguments.pop("value")
        arguments.pop("dropout_p", None)
    with Seen() as seen, pytest.raises(error) as caught:
        getattr(torch.ops.qkv, op)(**arguments)
    assert str(caught.value) == f"qkv::{op}: {message}"
    assert seen.ops == []


# -- Tensors of the wrong kind: every argument, every kind --------------------------------------


def wrong_dtype(name: str, dtype: torch.dtype) -> str:
    found = str(dtype).removeprefix("torch.")
    if name in ("query", "key", "value"):
        if dtype not in (torch.float64, torch.bfloat16):
            return f"{name} must be float64, float32, bfloat16 or float16, but is {found}"
        query, other = (
            (found, "key is float32") if name == "query" else ("float32", f"{name} is {found}")
        )
        return f"query, key and value must have one dtype, but query is {query} and {other}"
    rule = {
        "attn_mask": "bool (True = may attend), or float32 as query is",
        "key_mask": "bool (True = may be attended to)",
    }.get(name, "float32 as query is")
    return f"{name} must be {rule}, but is {found}"


def wrong_device(name: str) -> str:
    ours = torch.empty(()).device
    where = f"meta and key on {ours}" if name == "query" else f"{ours} and {name} on meta"
    return f"all tensors must be on one device, but query is on {where}"


def as_csr(x: Tensor) -> Tensor:
    return x.flatten(0, -2).to_sparse_csr()


def nested(layout):
    return lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=layout)


DTYPES = "bool uint8 int32 int64 complex64 float64 bfloat16 float8_e4m3fn".split()
KINDS = {
    "sparse": (lambda x: x.to_sparse(), "must be a dense tensor, but has layout Sparse"),
    "csr": (as_csr, "must be a dense tensor, but has layout SparseCsr"),
    "jagged": (nested(torch.jagged), "must be a dense tensor, but is nested"),
    "nested": (nested(torch.strided), "must be a dense tensor, but is nested"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "must not be quantized, but is qint8",
    ),
}
if DEVICE == "cpu":  # which alone has it
    message = "must be a dense tensor, but has layout Mkldnn"
    KINDS["mkldnn"] = (lambda x: x.float().to_mkldnn(), message)


# attention_weights has neither value nor dropout.
CELLS = [(op, name) for op in OPS for name in RIGHT if (op, name) != ("attention_weights", "value")]
every_argument = pytest.mark.parametrize(("op", "name"), CELLS)


@every_argument
def test_right(op, name):
    """The table starts from a call that is right, and any one optional argument may be missing."""
    arguments = dict(RIGHT)
    if op == "attention_weights":
        arguments.pop("value")
    if name not in ("query", "key", "value"):
        arguments.pop(name)
    getattr(torch.ops.qkv, op)(**arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@every_argument
def test_dtype(op, name, dtype):
    # A bool mask is right, a float one is not if it must be bool.
    if dtype == "bool" and name in ("attn_mask", "key_mask"):
        dtype = "float16"
    x = RIGHT[name].to(getattr(torch, dtype))
    assert_refused(op, {name: x}, TypeError, wrong_dtype(name, x.dtype))


@pytest.mark.parametrize("kind", KINDS)
@every_argument
def test_kind(op, name, kind):
    spoil, message = KINDS[kind]
    assert_refused(op, {name: spoil(RIGHT[name])}, TypeError, f"{name} {message}")


@every_argument
def test_device(op, name):
    assert_refused(op, {name: RIGHT[name].to("meta")}, ValueError, wrong_device(name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
def test_dtypes_that_go_with_another_query(name, dtype):
    others = {
        torch.float64: torch.float16,
        torch.bfloat16: torch.float16,
        torch.float16: torch.bfloat16,
    }
    changes = {n: RIGHT[n].to(dtype) for n in ("query", "key", "value")}
    qkv.attention(**{**RIGHT, **changes, name: RIGHT[name].float()})
    changes[name] = RIGHT[name].to(others[dtype])
    mask = "bool (True = may attend), or " if name == "attn_mask" else ""
    type_name, found = (str(t).removeprefix("torch.") for t in (dtype, others[dtype]))
    assert_refused("attention", changes, TypeError,
                   f"{name} must be {mask}{type_name} as query is or float32, but is {found}")  # fmt: skip


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_missing(name):
    with pytest.raises((RuntimeError, TypeError)):  # of PyTorch's own, by the schema
        torch.ops.qkv.attention(**{**RIGHT, name: None})


# -- Shapes and numbers ------------------------------------------------------------------------

Q, K, V = RIGHT["query"], RIGHT["key"], RIGHT["value"]
SCORES, KEYS, HEADS = (
    "(batch.., Hq, M, N) = [2, 4, 5, 7]",
    "(batch.., N) = [2, 7]",
    "(batch.., Hq) = [2, 4]",
)
BOTH_SIDES = "window must be (left, right) with both >= 0, or -1 for unbounded, but is"

# What is wrong: (changed arguments, message).
VALUES = {
    "query_rank_0": ({"query": torch.tensor(1.0)}, "query must have at least the dimensions (rows, width), but has shape []"),
    "query_rank_1": ({"query": Q[0, 0, 0]}, "query must have at least the dimensions (rows, width), but has shape [8]"),
    "key_rank_1": ({"key": K[0, 0, 0]}, "key must have at least the dimensions (rows, width), but has shape [8]"),
    "value_rank_1": ({"value": V[0, 0, 0]}, "value must have at least the dimensions (rows, width), but has shape [8]"),
    "query_width": ({"query": Q[..., :6]}, "query and key must have the same head dim, but query has D=6 and key D=8"),
    "query_width_0": ({"query": Q[..., :0]}, "query and key must have the same head dim, but query has D=0 and key D=8"),
    "key_width": ({"key": K[..., :6]}, "query and key must have the same head dim, but query has D=8 and key D=6"),
    "keys": ({"value": V[:, :, :3]}, "key and value must have the same number of keys, but key has N=7 and value N=3"),
    "keys_1": ({"value": V[:, :, :1]}, "key and value must have the same number of keys, but key has N=7 and value N=1"),
    "kv_heads": ({"value": V[:, :3]}, "key and value must have the same number of heads (or one), but key has 4 and value 3"),
    "heads": ({"key": K[:, :2], "value": V[:, :2]}, "query has Hq=4 heads and key and value Hkv=2; enable_gqa=True allows Hkv to be a divisor of Hq"),
    "heads_3": ({"key": K[:, :3], "value": V[:, :3]}, "query has Hq=4 heads and key and value Hkv=3; enable_gqa=True allows Hkv to be a divisor of Hq"),
    "divisor": ({"key": K[:, :3], "value": V[:, :3], "enable_gqa": True}, "with enable_gqa, Hkv must divide Hq, but Hq=4 and Hkv=3"),
    "no_kv_heads": ({"key": K[:, :0], "value": V[:, :0], "enable_gqa": True}, "with enable_gqa, Hkv must divide Hq, but Hq=4 and Hkv=0"),
    "key_batch": ({"key": torch.cat([K, K[:1]])}, "the batch dimensions of query and key must broadcast, but are [2] and [3]"),
    "key_batch_0": ({"key": K[:0]}, "the batch dimensions of query and key must broadcast, but are [2] and [0]"),
    "value_batch": ({"value": torch.cat([V, V[:1]])}, "the batch dimensions of query, key and value must broadcast, but are [2] and [3]"),
    "mask_keys": ({"attn_mask": torch.ones(5, 6) > 0}, f"attn_mask must broadcast to {SCORES}, but has shape [5, 6]"),
    "mask_rows": ({"attn_mask": torch.ones(4, 7)}, f"attn_mask must broadcast to {SCORES}, but has shape [4, 7]"),
    "mask_transposed": ({"attn_mask": torch.ones(7, 5)}, f"attn_mask must broadcast to {SCORES}, but has shape [7, 5]"),
    "mask_heads": ({"attn_mask": torch.ones(3, 5, 7)}, f"attn_mask must broadcast to {SCORES}, but has shape [3, 5, 7]"),
    "mask_batch": ({"attn_mask": torch.ones(3, 1, 5, 7)}, f"attn_mask must broadcast to {SCORES}, but has shape [3, 1, 5, 7]"),
    "mask_rank": ({"attn_mask": torch.ones(1, 2, 4, 5, 7)}, f"attn_mask must broadcast to {SCORES}, but has shape [1, 2, 4, 5, 7]"),
    "mask_empty": ({"attn_mask": torch.ones(5, 0)}, f"attn_mask must broadcast to {SCORES}, but has shape [5, 0]"),
    "key_mask_keys": ({"key_mask": torch.ones(2, 5) > 0}, f"key_mask must broadcast to {KEYS}, but has shape [2, 5]"),
    "key_mask_batch": ({"key_mask": torch.ones(3, 7) > 0}, f"key_mask must broadcast to {KEYS}, but has shape [3, 7]"),
    "key_mask_rank": ({"key_mask": torch.ones(1, 2, 7) > 0}, f"key_mask must broadcast to {KEYS}, but has shape [1, 2, 7]"),
    **{
        f"{x}_{what}": ({x: torch.ones(shape)}, message.format(x) + f", but has shape {list(shape)}")
        for x in ("alibi_slopes", "sinks")
        for what, shape, message in [
            ("rank_0", (), "{} must have one number for each of the Hq=4 query heads"),
            ("one", (1,), "{} must have one number for each of the Hq=4 query heads"),
            ("heads", (3,), "{} must have one number for each of the Hq=4 query heads"),
            ("batch", (3, 4), f"{{}} must broadcast to {HEADS}"),
            ("rank", (1, 2, 4), f"{{}} must broadcast to {HEADS}"),
        ]
    },
    "dropout_high": ({"dropout_p": 1.1}, "dropout_p must be between 0 and 1, but is 1.1"),
    "dropout_negative": ({"dropout_p": -0.1}, "dropout_p must be between 0 and 1, but is -0.1"),
    "dropout_nan": ({"dropout_p": NAN}, "dropout_p must be between 0 and 1, but is nan"),
    "dropout_inf": ({"dropout_p": INF}, "dropout_p must be between 0 and 1, but is inf"),
    "scale_nan": ({"scale": NAN}, "scale must be finite in float32, but is nan"),
    "scale_inf": ({"scale": INF}, "scale must be finite in float32, but is inf"),
    "scale_minus_inf": ({"scale": -INF}, "scale must be finite in float32, but is -inf"),
    "scale_too_large": ({"scale": 1e39}, "scale must be finite in float32, but is 1e+39"),
    "scale_too_small": ({"scale": -1e39}, "scale must be finite in float32, but is -1e+39"),
    "softcap_negative": ({"softcap": -1.0}, "softcap must be positive and finite, or 0 for none, but is -1"),
    "softcap_nan": ({"softcap": NAN}, "softcap must be positive and finite, or 0 for none, but is nan"),
    "softcap_inf": ({"softcap": INF}, "softcap must be positive and finite, or 0 for none, but is inf"),
    "window_none": ({"window": ()}, "window must be two numbers, (left, right), but has 0"),
    "window_one": ({"window": (3,)}, "window must be two numbers, (left, right), but has 1"),
    "window_three": ({"window": (1, 2, 3)}, "window must be two numbers, (left, right), but has 3"),
    "window_left": ({"window": (-2, 0)}, f"{BOTH_SIDES} (-2, 0)"),
    "window_right": ({"window": (0, -2)}, f"{BOTH_SIDES} (0, -2)"),
    "window_far": ({"window": (-(2**63), 2**63 - 1)}, f"{BOTH_SIDES} (-9223372036854775808, 9223372036854775807)"),
}  # fmt: skip


def has_arguments(op: str, changes: dict) -> bool:
    return (
        op != "attention_weights" or not {"value", "dropout_p"} & changes.keys() or "key" in changes
    )


@pytest.mark.parametrize(
    ("op", "case"), [(op, c) for c in VALUES for op in OPS if has_arguments(op, VALUES[c][0])]
)
def test_value(op, case):
    changes, message = VALUES[case]
    assert_refused(op, changes, ValueError, message)


def test_numbers_at_their_limits():
    """Not errors: numbers as large as they may be."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 5, 8).unbind())

    def attends(**options):
        """Whether any query does; that nothing is NaN, and gradients finite."""
        out, lse = qkv.attention_with_lse(q, k, v, **options)
        assert out.isfinite().all() and not lse.isnan().any()
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad.isfinite().all()
        return not lse.isinf().any()

    for far in (2**62, 2**63 - 1, -(2**62), -(2**63)):
        assert attends(query_offset=far)
        assert attends(query_offset=far, is_causal=True) == (far > 0)
        assert not attends(query_offset=far, window=(3, 3))
    assert attends(window=(2**63 - 1, 2**63 - 1)) and attends(window=(2**63 - 1, 0))
    for scale in (1e36, -1e36, 1e-300, 0.0):
        assert attends(scale=scale)
    for softcap in (1e-320, 1e-30, 1e300):
        assert attends(softcap=softcap)
    for p in (0.0, 1.0, 1e-300):
        assert attends(dropout_p=p)
    with pytest.raises((RuntimeError, TypeError, OverflowError)):
        attends(query_offset=2**64)


# -- Nothing is allocated first ----------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_errors_come_before_memory(op):
    """Operands that need no memory themselves, of a call that needs hundreds of GB."""
    n = 2**29
    q, k = (torch.zeros(1).expand(2, 4, n, 8) for _ in range(2))
    arguments = {"query": q, "key": k, "value": k, "attn_mask": torch.zeros(1).expand(n, n - 1)}
    if op == "attention_weights":
        arguments.pop("value")
    with pytest.raises(ValueError, match=rf"^qkv::{op}: attn_mask must broadcast to .*{n - 1}\]$"):
        getattr(torch.ops.qkv, op)(**arguments)


def functions_of(x):
    """Each with the tensors that it takes."""
    names = ("attention", "attention_with_lse", "explain")
    return [(getattr(qkv, name), (x, x, x)) for name in names] + [(qkv.attention_weights, (x, x))]


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_the_memory_of_a_causal_bias_is_not_read(variant):
    """Nobody has written it: only F.scaled_dot_product_attention knows what it means."""
    bias = getattr(torch.nn.attention.bias, variant)(5, 5)
    x = torch.randn(2, 5, 4)
    message = r"attn_mask must be a mask, but is a CausalBias: .* query_offset=N - M$"
    for f, tensors in functions_of(x):
        with pytest.raises(TypeError, match=f"qkv.{f.__name__}: {message}"):
            f(*tensors, bias)
    for module in (
        qkv.nn.MultiheadAttention(4, 2),
        qkv.nn.SelfAttention(4, 4),
        qkv.nn.ScaledDotProductAttention(),
    ):
        for call in (module, module.forward_with_weights):
            with pytest.raises(TypeError, match=f"qkv.nn.{type(module).__name__}: {message}"):
                call(x, attn_mask=bias)


@pytest.mark.parametrize("window", [3, 2.5, (2.5, 0), [1, 0.0]])
def test_a_window_is_two_ints(window):
    x = torch.randn(2, 3, 4)
    found = re.escape(repr(window))
    for f, tensors in functions_of(x):
        with pytest.raises(TypeError, match=f"must be .left, right., two ints, but is {found}$"):
            f(*tensors, window=window)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_tensor_is_no_number(name):
    x = torch.randn(2, 3, 4)
    number = torch.tensor(0.5, requires_grad=True)
    for f, tensors in functions_of(x):
        with pytest.raises(TypeError, match=f"{name} must be a number, but is a tensor"):
            f(*tensors, **{name: number})
        with pytest.raises(TypeError, match="query_offset must be an int, but is a tensor"):
            f(*tensors, query_offset=torch.tensor(2.9))
        with pytest.raises(ValueError, match=r"query_offset must be one int, .* of shape \[2\]$"):
            f(*tensors, query_offset=torch.tensor([1, 2]))
        if f is not qkv.attention_weights:
            with pytest.raises(TypeError, match="dropout_p must be a number, but is a tensor"):
                f(*tensors, dropout_p=number)


def test_none_is_no_softcap():
    """As with scale and window, and as attention interfaces say that there is none."""
    x = torch.randn(2, 3, 4)
    assert torch.equal(qkv.attention(x, x, x, softcap=None), qkv.attention(x, x, x))
    assert qkv.explain(x, x, x, softcap=None) == qkv.explain(x, x, x)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), "0.5"], ids=["tensor", "str"])
def test_a_scale_of_a_module_is_a_number(scale):
    with pytest.raises(TypeError, match="^qkv.nn.ScaledDotProductAttention: scale must be a numb"):
        qkv.nn.ScaledDotProductAttention(scale=scale)
    with pytest.raises(TypeError, match="^qkv.nn.SelfAttention: scale must be a number, but is"):
        qkv.nn.SelfAttention(4, 4, scale=scale)


def rng_state() -> Tensor:
    return (torch.cuda if DEVICE == "cuda" else torch).get_rng_state()


def test_too_many_different_batch_dimensions():
    # 10 dimensions of size 2, of which the key is expanded in every other one.
    q = torch.randn(*[2] * 10, 1, 2, 4)
    k = torch.randn(*[1, 2] * 5, 1, 3, 4)
    message = r"^qkv::%s: .* step in 10 different ways, but the kernels handle at most 8"
    random = rng_state()
    for device in (q.device, "meta"):
        with pytest.raises(ValueError, match=message % "attention"):
            qkv.attention(q.to(device), *2 * [k.to(device)], dropout_p=0.5)
    with pytest.raises(ValueError, match=message % "explain"):
        qkv.explain(q, k, k)
    assert torch.equal(rng_state(), random)
    dense = k.expand(*[2] * 10, 1, 3, 4).contiguous()
    merged = qkv.attention(q.flatten(0, 9), *2 * [dense.flatten(0, 9)])
    torch.testing.assert_close(qkv.attention(q, dense, dense), merged.view(q.shape))
    # As ever before any memory is asked for; here it would be terabytes.
    rows = 2**40
    with pytest.raises(ValueError, match=message % "attention"):
        qkv.attention(q[..., :1, :].expand(*[2] * 10, 1, rows, 4), k, k)


def test_a_mask_counts_among_the_batch_dimensions_before_a_seed_is_drawn():
    q, mask = torch.randn(*[2] * 10, 1, 2, 4), torch.randn(*[1, 2] * 5, 1, 2, 2)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="^qkv::attention: .* step in 10 different ways"):
        qkv.attention(q, q, q, mask, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


# -- Internal operators: they are not for callers, but who calls them gets an error, not a crash --


def internal_arguments(op: str) -> list:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    mask, slopes, sinks = torch.randn(5, 7), torch.rand(4), torch.rand(4)
    operands = [q, k, v, mask, slopes, sinks, torch.ones(2, 7) > 0, torch.tensor([1, 2])]
    operands += [0.3, 1.5, 0.1, [-1, 3, 2]]
    if op == "_attention_forward":
        return operands
    if "weights" in op:  # of values without columns, without dropout
        operands[2], operands[7], operands[10] = v[..., :0], None, 0.0
        weights, *of_rows = torch.ops.qkv._attention_weights(*operands)
        backward = [torch.randn_like(weights), *of_rows, [True] * 6]
        return operands if op == "_attention_weights" else operands + backward
    results = list(torch.ops.qkv._attention_forward(*operands))
    tangents = [torch.randn_like(x) for x in operands[:6]]
    if op == "_attention_jvp":
        return operands + results + tangents
    grads = [torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5)]
    if op == "_attention_backward":
        return operands + grads + results + [[True] * 6]
    return operands + grads + results + tangents + [[True] * 8]


INTERNAL = [
    "_attention_forward",
    "_attention_backward",
    "_attention_weights",
    "_attention_weights_backward",
    "_attention_jvp",
    "_attention_backward_backward",
]
JUNK_TENSORS = {
    "missing": lambda x: None,
    "empty": lambda x: x.new_empty(0),
    "rank_0": lambda x: x.new_zeros(()),
    "fewer_dimensions": lambda x: x[0],
    "more_dimensions": lambda x: x.expand(3, 3, *x.shape),
    "smaller": lambda x: x[..., : x.shape[-1] // 2],
    "larger": lambda x: torch.cat([x, x], -1),
    "fewer_rows": lambda x: x[: x.shape[0] // 2],
    "integer": lambda x: x.to(torch.int32),
    "bool": lambda x: x.to(torch.bool),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "huge": lambda x: x.new_zeros(1).expand(2**40, 2**20),
    "nan": lambda x: x * NAN if x.is_floating_point() else x,
}
JUNK = {
    Tensor: JUNK_TENSORS,
    float: {str(x): lambda _, x=x: x for x in (NAN, INF, -INF, -1.0, 2.0, 1e300)},
    list: {
        "none": lambda x: [],
        "one": lambda x: x[:1],
        "too_many": lambda x: x + x,
        "extreme": lambda x: [-(2**63), 2**63 - 1, 2**63 - 1] if len(x) == 3 else x,
    },
}
# What may be right after query, key and value, of which only NaN are: a softcap of any size, a mask
# that broadcasts, a tangent of zeros left out, ...
MAY_BE_RIGHT = {
    Tensor: {"missing", "nan", "bool", "rank_0", "fewer_dimensions", "fewer_rows"},
    float: {"2.0", "1e+300", "-1.0"},
    list: {"extreme"},
}


def fits(op: str, arguments: list) -> bool:
    """Whether a call has succeeded; if it has not, with an error of the usual kind."""
    try:
        getattr(torch.ops.qkv, op)(*arguments)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, IndexError) as error:
        assert "INTERNAL ASSERT" not in str(error), error
        return False
    return True


@pytest.mark.parametrize("device", ["cpu", "meta"] + ["cuda"] * torch.cuda.is_available())
@pytest.mark.parametrize("op", INTERNAL)
def test_internal_operators(op, device):
    if device == "cuda" and "weights" in op:
        pytest.skip("on a GPU weights are formulas")
    right = internal_arguments(op)
    right = [x.to(device) if isinstance(x, Tensor) else x for x in right]
    assert fits(op, right)
    for position, argument in enumerate(right):
        if argument is None:
            continue
        kind = Tensor if isinstance(argument, Tensor) else type(argument)
        may_be_right = {"nan"} if position < 3 else set(MAY_BE_RIGHT[kind])
        if op == "_attention_forward" and position == 2:
            may_be_right |= {"smaller", "larger"}  # values may be of any width
        for name, spoil in JUNK[kind].items():
            if device == "meta" and name in ("sparse", "quantized", "meta"):
                continue
            arguments = list(right)
            arguments[position] = junk = spoil(argument)
            if name in ("smaller", "larger") and junk.shape == argument.shape:
                continue  # output_rest has no columns
            assert not fits(op, arguments) or name in may_be_right, f"argument {position} {name}"
    # Gradients of what is not there.
    if "_backward" in op:
        for position in (3, 4, 5):
            arguments = list(right)
            arguments[position] = None
            assert not fits(op, arguments)
        arguments = list(right)
        arguments[3] = torch.ones(5, 7, dtype=torch.bool, device=device)
        assert not fits(op, arguments)
    # Dropout without a seed; of weights there is none at all.
    arguments = list(right)
    arguments[7], arguments[10] = None, 0.1
    assert not fits(op, arguments)
