"""What the modules ask of their arguments."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import List, Optional

import torch
from torch import Tensor

from qkv.functional import check_mask


def _differ(a: int, b: int) -> bool:
    """Whether sizes are known to differ: in a graph those that depend on data are not known."""
    if torch.jit.is_scripting():
        return a != b
    else:
        differ = a != b
        if torch.compiler.is_compiling() or isinstance(differ, torch.SymBool):
            # Imported by then; to import it takes nearly a second.
            return torch.fx.experimental.symbolic_shapes.guard_or_false(differ)
        return bool(differ)


def key_mask_of(
    module: str, padding: Optional[Tensor], keys: Tensor, cached: int = 0
) -> Optional[Tensor]:
    """True = padding, as modules have it, to True = may be attended to, as the operator has it,
    which would broadcast what is meant for one key. The keys (.., rows, width) come after
    ``cached`` ones."""
    if padding is None:
        return None
    check_tensor(module, "key", keys)
    check_tensor(module, "key_padding_mask", padding)
    if padding.layout != torch.strided:
        raise TypeError(f"{module}: key_padding_mask must be a dense tensor, but is sparse")
    if padding.dtype != torch.bool:
        # (TorchScript would print a number.)
        found = "" if torch.jit.is_scripting() else f", but is {padding.dtype}"
        raise TypeError(f"{module}: key_padding_mask must be bool (True = padding){found}")
    if keys.dim() >= 2:  # else the operator says that they are no rows
        count = cached + keys.size(-2)
        if padding.dim() < 1 or _differ(padding.size(-1), count):
            included = ", cached keys included" if cached > 0 else ""
            raise ValueError(
                f"{module}: key_padding_mask must be (B.., N={count}){included}, but has shape "
                f"{list(padding.shape)}"
            )
    return padding.logical_not()


def mask_of_one_head(module: str, mask: Optional[Tensor], input: Tensor) -> Optional[Tensor]:
    """Of a module with one head, whose masks have no dimension for it, to that of the operator."""
    if mask is None:
        return None
    check_tensor(module, "attn_mask", mask)
    check_mask(module, mask)
    full = list(input.shape[:-1]) + [input.size(-2)]
    fits = mask.dim() <= len(full)
    if fits:
        for d in range(1, mask.dim() + 1):
            if _differ(mask.size(-d), full[-d]) and _differ(mask.size(-d), 1):
                fits = False
    if not fits:
        raise ValueError(
            f"{module}: attn_mask must broadcast to (B.., T, T) = {full}, but has shape "
            f"{list(mask.shape)}"
        )
    return mask.unsqueeze(-3) if mask.dim() > 2 else mask


def check_tensor(module: str, name: str, x: Tensor) -> None:
    if not torch.jit.is_scripting():  # where that is known
        if not isinstance(x, Tensor):
            raise TypeError(f"{module}: {name} must be a tensor, but is {repr(x)}")


def length_of(module: str, cache: Optional[torch.classes.qkv.KVCache]) -> int:
    """How many keys are cached, none without a cache."""
    if cache is None:
        return 0
    if not torch.jit.is_scripting():  # where that is known
        if not torch.compiler.is_compiling() and not isinstance(cache, torch.ScriptObject):
            raise TypeError(f"{module}: cache must be a qkv.nn.KVCache, but is {repr(cache)}")
    return cache.length()


def check_rows(module: str, name: str, x: Tensor, letters: str, width: int) -> None:
    check_tensor(module, name, x)
    if x.dim() < 2 or x.size(-1) != width:
        raise ValueError(
            f"{module}: {name} must be (.., rows, {letters}={width}), but has shape {list(x.shape)}"
        )


def checked_dropout(module: str, dropout: float) -> float:
    """As a float, whatever number it is, NumPy's too: TorchScript tells them apart."""
    if not isinstance(dropout, Real):
        raise TypeError(f"{module}: dropout must be a number, but is {dropout!r}")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{module}: dropout must be between 0 and 1, but is {dropout}")
    return float(dropout)


def checked_scale(module: str, scale: Optional[float]) -> Optional[float]:
    if scale is None:
        return None
    if not isinstance(scale, Real):
        raise TypeError(f"{module}: scale must be a number, but is {scale!r}")
    return float(scale)


def checked_size(module: str, name: str, size: int) -> int:
    if not isinstance(size, Integral) or isinstance(size, bool):  # as torch's bias by position
        raise TypeError(f"{module}: {name} must be an int, but is {size!r}")
    if size <= 0:
        raise ValueError(f"{module}: {name} must be positive, but is {size}")
    return int(size)


def checked_window(module: str, window: Optional[Sequence[int]]) -> Optional[List[int]]:
    if window is None:
        return None
    rule = f"{module}: window must be (left, right)"
    if not isinstance(window, Sequence) or not all(isinstance(x, Integral) for x in window):
        raise TypeError(f"{rule}, two ints, but is {window!r}")
    if len(window) != 2:
        raise ValueError(f"{rule}, but is {window}")
    if min(window) < -1:
        raise ValueError(f"{rule} with both >= 0, or -1 for unbounded, but is {window}")
    return [int(x) for x in window]
