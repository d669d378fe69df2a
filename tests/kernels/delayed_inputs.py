"""Configurations and operands of the tests of delayed scaling."""

from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels import LinearPrecision, OperandFormat


def delayed(**options: Any) -> LinearPrecision:
    operand = OperandFormat(scaling="delayed", **options)
    return LinearPrecision(x=operand, w=operand, dy=operand)


def with_amax(rows: int, columns: int, amax: float, seed: int = 0) -> Tensor:
    """Random values within half of amax, and one that is amax."""
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) * amax / 2
    values[rows // 2, columns // 3] = -amax
    return values
