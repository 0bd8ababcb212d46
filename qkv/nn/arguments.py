"""What the modules ask of their arguments."""

from typing import Optional

import torch
from torch import Tensor


def key_mask_of(module: str, padding: Optional[Tensor]) -> Optional[Tensor]:
    """True = padding, as modules have it, to True = may be attended to, as the operator has it."""
    if padding is None:
        return None
    if padding.dtype != torch.bool:
        # (TorchScript would print a number.)
        found = "" if torch.jit.is_scripting() else f", but is {padding.dtype}"
        raise TypeError(f"{module}: key_padding_mask must be bool (True = padding){found}")
    return padding.logical_not()


def check_rows(module: str, name: str, x: Tensor, letters: str, width: int) -> None:
    if x.dim() < 2 or x.size(-1) != width:
        raise ValueError(
            f"{module}: {name} must be (.., rows, {letters}={width}), but has shape {list(x.shape)}"
        )


def check_dropout(module: str, dropout: float) -> None:
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{module}: dropout must be between 0 and 1, but is {dropout}")


def check_positive(module: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{module}: {name} must be positive, but is {size}")
