"""Numbers that a trainer logs: what counts as one."""

from __future__ import annotations

import numbers
import sys

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.hooks.errors import OptionError

Number = float | int | Tensor

_ALLOWED = "give a number (Python's, NumPy's or Decimal's) or a tensor of one element"


def number(name: str, value: object) -> Number:
    """The value as a float, or as a copy on its own device that later in-place changes do not reach.

    A tensor is not read here: that would wait for its device. Raises OptionError.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise OptionError(
                f"{name} is a tensor of shape {list(value.shape)} and type {value.dtype}: {_ALLOWED}"
            )
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # bool is an int to Python, and text may be spelt like a number: both are a mistake here.
    real = isinstance(value, numbers.Real) or _is_decimal(value)
    if not real or isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: {_ALLOWED}")
    try:
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, ValueError) as error:
        raise OptionError(f"{name} is {value!r}, which no float64 holds: {_ALLOWED}") from error


def _is_decimal(value: object) -> bool:
    """Whoever has one has imported its module, which we do not."""
    module = sys.modules.get("decimal")
    return module is not None and isinstance(value, module.Decimal)


def whole(name: str, value: object, lowest: int) -> int:
    """A whole number, NumPy's included. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < lowest:
        raise OptionError(f"{name} is {value!r}: give a whole number of at least {lowest}")
    return int(value)
