"""State dicts that Python and C++ read from each other."""

import pickle
import zipfile
from os import PathLike
from typing import IO, Any, Dict, List, Union

import torch
from torch import Tensor

# What torch.save takes.
File = Union[str, "PathLike[str]", IO[bytes]]

# What LibTorch reads of what Python writes, if it is strided.
_READ_BY_LIBTORCH = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.quint8,
    torch.qint8,
    torch.qint32,
}


def save_state_dict(module: torch.nn.Module, path: File) -> None:
    """Writes a module's parameters and buffers for ``qkv::nn::load_state_dict`` in C++, to
    a file or into an open one.

    It is ``torch.save`` of a plain dict: the OrderedDict that ``state_dict()`` returns cannot be
    read by LibTorch.

    Raises:
        RuntimeError: if the module is on meta, or has an extra state that is no tensor or a tensor
            that LibTorch cannot read (sparse, float8), or if the file cannot be written.
    """
    state = module.state_dict()
    for name, x in state.items():
        if not isinstance(x, Tensor):
            raise RuntimeError(
                f"qkv.nn.save_state_dict: {name} must be a tensor, but is {type(x).__name__}"
            )
        if x.is_meta:
            raise RuntimeError(f"qkv.nn.save_state_dict: {name} is on meta, which holds no numbers")
        if x.layout != torch.strided or x.is_nested or x.dtype not in _READ_BY_LIBTORCH:
            raise RuntimeError(
                f"qkv.nn.save_state_dict: {name} is a {x.type()}, which LibTorch cannot read; "
                "torch.save(dict(module.state_dict()), path) writes it for Python"
            )
    torch.save({name: x.detach() for name, x in state.items()}, path)


def load_state_dict(module: torch.nn.Module, path: File) -> None:
    """Fills a module from a file, or an open one, of :func:`save_state_dict`, of
    ``qkv::nn::save_state_dict`` or ``torch::save`` in C++, or of ``torch.jit.save``, which also
    writes buffers that are not persistent: those of this module stay as they are. Numbers are
    converted to its dtypes.

    Raises:
        RuntimeError: if the file holds no dict of tensors, if names, shapes or layouts differ, or
            if the module is on meta or has a tensor that cannot be written (an expanded view, or
            one of inference mode outside it), or if the file is none of torch's; nothing has been
            changed then.
        pickle.UnpicklingError: if the file holds other objects.
        OSError: if it cannot be read.
    """
    if _is_script_archive(path):
        state = torch.jit.load(path, map_location="cpu").state_dict()
        for name in _not_persistent(module):
            state.pop(name, None)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, pickle.UnpicklingError):
            raise
        except Exception as error:  # of text an IndexError, of nothing an EOFError
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {path} holds nothing that torch.load can read"
            ) from error
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise RuntimeError(f"qkv.nn.load_state_dict: {path} holds no dict of tensors")
    _check_fits(module, state, path)
    module.load_state_dict(state)


def _check_fits(module: torch.nn.Module, state: Dict[str, Any], path: File) -> None:
    """``torch.nn.Module.load_state_dict`` would change what fits before it raises."""
    own = module.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    if missing or unexpected:
        raise RuntimeError(
            f"qkv.nn.load_state_dict: {path} does not fit {type(module).__name__}; "
            f"missing: {missing}, unexpected: {unexpected}"
        )
    for name, x in own.items():
        if not isinstance(x, Tensor):
            continue
        found = state[name]
        if x.is_meta:
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {name} is on meta, which holds no numbers; "
                "module.to_empty(device=..) first"
            )
        if x.shape != found.shape:
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {name} has shape {list(x.shape)}, but {path} has "
                f"{list(found.shape)}"
            )
        if (x.layout, x.is_quantized) != (found.layout, found.is_quantized):
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {name} is a {x.type()}, but {path} has a {found.type()}"
            )
        if _is_expanded(x):
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {name} is an expanded view, which cannot be written"
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"qkv.nn.load_state_dict: {name} is an inference tensor, which cannot be written "
                "outside of torch.inference_mode()"
            )


def _not_persistent(module: torch.nn.Module) -> List[str]:
    """The buffers that ``state_dict()`` leaves out."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    ]


def _is_expanded(x: Tensor) -> bool:
    strided = x.layout == torch.strided
    return strided and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def _is_script_archive(path: File) -> bool:
    start = None if isinstance(path, (str, PathLike)) else path.tell()
    try:
        if not zipfile.is_zipfile(path):  # torch.save's old format
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    finally:
        if start is not None:
            path.seek(start)
