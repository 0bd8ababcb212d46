"""What only a GPU can show. (That its results are right, the tests for all devices show: see
conftest.py. That the kernels are, on any machine, tests/cuda_emulation.)"""

import pytest
import torch
from torch.func import jvp

import qkv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def operands(
    batch: int = 2, length: int = 200, dtype=torch.float32, device: str = "cuda", width: int = 40
):
    g = torch.Generator(device=device).manual_seed(0)
    shape = (batch, 4, length, width)
    return [
        torch.randn(shape, generator=g, dtype=dtype, device=device, requires_grad=True)
        for _ in range(3)
    ]


def results(q, k, v, **kwargs):
    out = qkv.attention(q, k, v, **kwargs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def second_order(q, k, v, **kwargs):
    """The double backward, and forward mode along the operands themselves."""
    grads = torch.autograd.grad(
        qkv.attention(q, k, v, **kwargs).square().sum(), (q, k, v), create_graph=True
    )
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))
    inputs = tuple(x.detach() for x in (q, k, v))
    return [*second, jvp(lambda *x: qkv.attention(*x, **kwargs), inputs, inputs)[1]]


def test_explain_says_what_runs():
    lines = qkv.explain(*operands()).splitlines()
    for what in ("forward, backward", "second order, jvp"):
        assert any(what in line and "fused cuda float32 simt" in line for line in lines)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_equals_the_cpu(dtype):
    inputs = operands(dtype=dtype)
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for found, expected in zip(results(*inputs, is_causal=True), results(*on_cpu, is_causal=True)):
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_second_order_equals_the_cpu(dtype, monkeypatch):
    monkeypatch.setenv("QKV_STRICT", "1")
    inputs = operands(dtype=dtype)
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for found, expected in zip(
        second_order(*inputs, is_causal=True), second_order(*on_cpu, is_causal=True)
    ):
        size = expected.abs().max().item()
        torch.testing.assert_close(found.cpu(), expected, atol=tolerance * size, rtol=tolerance)


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ids=["f64", "f32", "bf16", "f16"],
)
def test_sanitize(dtype, width):
    """Every kernel, small: what compute-sanitizer watches. Rows are few, in each way, and many; of
    16 bits with keys enough for tensor cores, with options and without."""
    options = {"dtype": dtype, "device": "cuda", "requires_grad": True}
    sizes = [(1, 70), (3, 70), (6, 70), (70, 70)] + [(150, 150)] * (dtype.itemsize == 2)
    for rows, keys in sizes:
        q = operands(1, rows, dtype, width=width)[0]
        _, k, v = operands(1, keys, dtype, width=width)
        mask = torch.zeros(rows, keys, **options)
        slopes, sinks = (torch.rand(4, **options) for _ in range(2))
        out = qkv.attention(q, k, v, mask, 0.1, True, alibi_slopes=slopes, sinks=sinks)
        inputs = (q, k, v, mask, slopes, sinks)
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
        second_order(q, k, v)
    q, k, v = operands(1, 1100, dtype, width=width)
    qkv.attention(q[:, :, :1], k, v)  # in several ranges of keys, which are merged
    torch.cuda.synchronize()


def test_runs_on_the_current_stream():
    inputs = operands()
    expected = results(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(*inputs)  # its memory is asked of the device, which may wait
        torch.cuda._sleep(100_000_000)
        found = results(*inputs)
    assert not stream.query(), "something waited for the device"
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def captured(f):
    """A graph of what f does, and f's results, which each replay of the graph writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()  # whatever is done once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = f()
    return graph, found


def test_graph_capture():
    inputs = operands()
    graph, found = captured(lambda: results(*inputs, is_causal=True))
    for _ in range(2):
        graph.replay()
        expected = results(*inputs, is_causal=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        with torch.no_grad():
            for x in inputs:
                x.mul_(0.5)


def test_graph_capture_of_dropout():
    """Each replay drops others, the same in forward and backward: the output is linear in v."""
    inputs = operands(dtype=torch.float64)
    graph, (out, _, _, grad_v) = captured(lambda: results(*inputs, dropout_p=0.5))
    outs = []
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close((grad_v * inputs[2]).sum(), 2 * out.square().sum())
        outs.append(out.clone())
    assert not torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_autocast(dtype):
    inputs = operands()
    with torch.autocast("cuda", dtype=dtype):
        out = qkv.attention(*inputs)
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
    assert [x.dtype for x in found] == [dtype, *3 * [torch.float32]]
    expected = results(*(x.detach().to(dtype).requires_grad_() for x in inputs))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected))


def test_bits_do_not_depend_on_the_batch():
    inputs = operands(batch=3)
    alone = [x.detach()[1:2].clone().requires_grad_() for x in inputs]
    for f in (results, second_order):
        for of_all, of_one in zip(f(*inputs), f(*alone)):
            assert torch.equal(of_all[1:2], of_one)
        assert all(torch.equal(a, b) for a, b in zip(f(*inputs), f(*inputs)))


def test_every_device():
    for index in range(torch.cuda.device_count()):
        inputs = operands(device=f"cuda:{index}")
        found = results(*inputs)
        assert all(x.device.index == index for x in found)
        assert torch.equal(found[0].cpu(), results(*operands(device="cuda:0"))[0].cpu())


def test_offsets_of_64_bits():
    """An operand of more than 2^31 numbers, of which the last heads are seen."""
    heads, length, width = 2**15 + 8, 1024, 64
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB")
    k = torch.zeros(1, heads, length, width, dtype=torch.float16, device="cuda")
    k[:, -1] = torch.randn(length, width, dtype=torch.float16, device="cuda")
    q = torch.randn(1, heads, 1, width, dtype=torch.float16, device="cuda")
    found = qkv.attention(q, k, k)[:, -1]
    exact = qkv.attention(q[:, -1:].double(), k[:, -1:].double(), k[:, -1:].double())[:, -1]
    torch.testing.assert_close(found.double(), exact, atol=2e-3, rtol=2e-3)
