"""Files of state dicts: what reads what, and what is said before anything is changed."""

import io
import json
import pickle
import subprocess

import pytest
import torch
from test_modules import BUILD, beside_cpp

import qkv


def test_files_of_every_kind(tmp_path):
    module = qkv.nn.MultiheadAttention(8, 2)
    x = torch.randn(1, 4, 8)
    torch.jit.script(module).save(str(tmp_path / "script"))
    torch.save(dict(module.state_dict()), tmp_path / "dict")
    torch.save(module.state_dict(), tmp_path / "ordered_dict")
    for name in ("script", "dict", "ordered_dict"):
        other = qkv.nn.MultiheadAttention(8, 2)
        qkv.nn.load_state_dict(other, tmp_path / name)
        assert torch.equal(other(x), module(x))


@pytest.mark.parametrize(
    "write",
    [
        qkv.nn.save_state_dict,
        lambda module, file: torch.save(module.state_dict(), file),
        lambda module, file: torch.save(
            module.state_dict(), file, _use_new_zipfile_serialization=False
        ),
        lambda module, file: torch.jit.save(torch.jit.script(module), file),
    ],
    ids=["qkv", "torch", "old format", "script"],
)
def test_open_files(write):
    module, other = qkv.nn.SelfAttention(4, 4), qkv.nn.SelfAttention(4, 4)
    file = io.BytesIO()
    write(module, file)
    file.seek(0)
    qkv.nn.load_state_dict(other, file)
    assert torch.equal(other.w_q.weight, module.w_q.weight)


class WithTable(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.attention = qkv.nn.SelfAttention(4, 4)
        self.register_buffer("table", torch.full((3,), number), persistent=False)

    def forward(self, x: torch.Tensor):
        return self.attention(x * self.table.sum())


def test_script_archives_hold_buffers_that_are_not_persistent(tmp_path):
    torch.jit.script(torch.nn.Sequential(WithTable(1.0))).save(str(tmp_path / "script"))
    other = torch.nn.Sequential(WithTable(2.0))
    before = other[0].attention.w_q.weight.clone()
    qkv.nn.load_state_dict(other, tmp_path / "script")
    assert not torch.equal(other[0].attention.w_q.weight, before)
    assert other[0].table.tolist() == [2.0] * 3


def test_state_dict_of_the_old_format(tmp_path):
    module, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    path = tmp_path / "old.pt"
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False)
    qkv.nn.load_state_dict(other, path)
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize("content", [torch.ones(2), {"w_q.weight": 1}], ids=["tensor", "numbers"])
def test_load_state_dict_names_a_file_of_something_else(content, tmp_path):
    torch.save(content, tmp_path / "file")
    with pytest.raises(RuntimeError, match="^qkv.nn.load_state_dict: .*file holds no dict of tens"):
        qkv.nn.load_state_dict(qkv.nn.SelfAttention(4, 4), tmp_path / "file")


@pytest.mark.parametrize("content", ["", "a line\nand another\n"], ids=["empty", "text"])
def test_load_state_dict_names_a_file_of_no_tensors(content, tmp_path):
    (tmp_path / "file").write_text(content)
    with pytest.raises(RuntimeError, match="^qkv.nn.load_state_dict: .*file holds nothing that"):
        qkv.nn.load_state_dict(qkv.nn.SelfAttention(4, 4), tmp_path / "file")


def test_load_state_dict_changes_all_or_nothing(tmp_path):
    other = qkv.nn.MultiheadAttention(8, 2)
    before = {name: x.clone() for name, x in other.state_dict().items()}
    for options, message in (
        ({"vdim": 3}, r"w_v.weight has shape \[8, 8\], but .* has \[8, 3\]"),
        ({"bias": False}, "does not fit MultiheadAttention; missing: .'w_k.bias'"),
    ):
        qkv.nn.save_state_dict(qkv.nn.MultiheadAttention(8, 2, **options), tmp_path / "file")
        with pytest.raises(RuntimeError, match=message):
            qkv.nn.load_state_dict(other, tmp_path / "file")
        assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())


def test_save_state_dict_names_what_is_no_tensor(tmp_path):
    class WithVersion(qkv.nn.SelfAttention):
        def get_extra_state(self):
            return {"version": 1}

    with pytest.raises(
        RuntimeError, match="save_state_dict: _extra_state must be a tensor, but is"
    ):
        qkv.nn.save_state_dict(WithVersion(4, 4), tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint16, torch.sparse_coo], ids=str)
def test_save_state_dict_names_what_libtorch_cannot_read(kind, tmp_path):
    x = torch.ones(4)
    module = torch.nn.Module()
    module.register_buffer("x", x.to_sparse() if kind == torch.sparse_coo else x.to(kind))
    with pytest.raises(RuntimeError, match="save_state_dict: x is a torch.*, which LibTorch cann"):
        qkv.nn.save_state_dict(module, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_load_state_dict_says_first_what_cannot_be_written(tmp_path):
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.ones(2))
    module.register_buffer("view", torch.ones(3))
    qkv.nn.save_state_dict(module, tmp_path / "file")
    module.first.data.zero_()
    with torch.inference_mode():
        of_inference = torch.zeros(3)
    for view, what in (
        (torch.zeros(1).expand(3), "an expanded view, which cannot be written"),
        (of_inference, "an inference tensor, which cannot be written outside"),
    ):
        module.view = view
        with pytest.raises(RuntimeError, match=f"view is {what}"):
            qkv.nn.load_state_dict(module, tmp_path / "file")
        assert (module.first == 0).all()
    with torch.inference_mode():
        qkv.nn.load_state_dict(module, tmp_path / "file")
    assert (module.first == 1).all() and (module.view == 1).all()


def test_load_state_dict_says_first_what_cannot_be_copied(tmp_path):
    module = torch.nn.Sequential(qkv.nn.SelfAttention(8, 4))
    before = {n: x.clone() for n, x in module.state_dict().items()}
    for kind in (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x.to_sparse(),
    ):
        state = {n: kind(x) if "w_v" in n else x + 1 for n, x in before.items()}
        torch.save(state, tmp_path / "file")
        with pytest.raises(
            RuntimeError, match=r"0.w_v.weight is a torch\..*FloatTensor, but .* has a torch\."
        ):
            qkv.nn.load_state_dict(module, tmp_path / "file")
        assert all(torch.equal(x, before[n]) for n, x in module.state_dict().items())


def test_meta_holds_no_numbers(tmp_path):
    qkv.nn.save_state_dict(qkv.nn.SelfAttention(8, 4), tmp_path / "file")
    with torch.device("meta"):
        other = qkv.nn.SelfAttention(8, 4)
    with pytest.raises(
        RuntimeError, match="load_state_dict: w_q.weight is on meta, which holds no"
    ):
        qkv.nn.load_state_dict(other, tmp_path / "file")
    with pytest.raises(
        RuntimeError, match="save_state_dict: w_q.weight is on meta, which holds no"
    ):
        qkv.nn.save_state_dict(other, tmp_path / "meta")
    assert not (tmp_path / "meta").exists()


@beside_cpp
@pytest.mark.parametrize("kind", ["ordered_dict", "quantized", "text", "nothing", "folder"])
def test_cpp_says_what_it_cannot_read(kind, tmp_path):
    weights = tmp_path / "weights.pt"
    if kind == "ordered_dict":
        torch.save(torch.nn.Linear(8, 8).state_dict(), weights)
    elif kind == "quantized":
        state = dict(qkv.nn.SelfAttention(8, 8).state_dict())
        state["w_v.weight"] = torch.quantize_per_tensor(state["w_v.weight"], 0.1, 0, torch.qint8)
        torch.save(state, weights)
    elif kind == "folder":
        weights.mkdir()
    else:
        weights.write_text("no archive" if kind == "text" else "")
    spec = {"module": "SelfAttention", "options": {"d_in": 8, "d_out": 8}, "weights": str(weights)}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    found = subprocess.run(
        [BUILD / "tests" / "module_twin", tmp_path / "spec.json"], capture_output=True, text=True
    )
    assert found.returncode != 0
    if kind == "quantized":
        rule = f"w_v.weight is a CPUFloatType, but {weights} has a QuantizedCPUQInt8Type"
        assert f"qkv::nn::load_state_dict: {rule}" in found.stderr
        return
    assert f"qkv::nn::load_state_dict: {weights} is no archive" in found.stderr
    assert "torch.save(dict(module.state_dict()), path)" in found.stderr


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_nothing_in_a_file_is_run(tmp_path):
    torch.save({"w_q.weight": Runs()}, tmp_path / "file")
    with pytest.raises(pickle.UnpicklingError):
        qkv.nn.load_state_dict(qkv.nn.SelfAttention(4, 4), tmp_path / "file")


def test_script_archives_of_a_module_in_two_places(tmp_path):
    def shared(number):
        return torch.nn.Sequential(*2 * [WithTable(number)])

    torch.jit.script(shared(1.0)).save(str(tmp_path / "script"))
    other = shared(2.0)
    qkv.nn.load_state_dict(other, tmp_path / "script")
    assert other[0].table.tolist() == [2.0] * 3
