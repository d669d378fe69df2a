"""Checks what callers pass and cuts it into the matrices kernels see."""

# Shapes: B matrices (all leading dimensions together), R rows, C columns, E experts.

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import LAYOUTS, SCALES, CodeFormat, get_format, require_multiplier
from fp8_safeguard.kernels.errors import OffsetsError, OperandError, require_option


def check_options(layout: str, fmt: str, scale: str, multiplier: float) -> CodeFormat:
    """The format, once every option is known to exist."""
    require_option("layout", layout, LAYOUTS)
    require_option("scale", scale, SCALES)
    require_multiplier(multiplier)
    return get_format(fmt)


def check_source(x: Tensor, offsets: Tensor | None) -> None:
    """Raise OperandError unless x can be quantised or measured."""
    if not isinstance(x, Tensor):
        raise OperandError(f"x is a {type(x).__name__}: pass a torch tensor, for example torch.as_tensor(x)")
    if not x.dtype.is_floating_point:
        raise OperandError(f"x is {x.dtype}: pass a floating-point tensor (bfloat16, float16, float32, ...)")
    if x.dim() < 1:
        raise OperandError("x has no dimension: pass at least a vector, for example x.reshape(1)")
    if offsets is not None and x.dim() != 2:
        raise OperandError(
            f"offsets split the rows of a matrix, x has shape {list(x.shape)}: pass x as [rows, columns]"
        )


def check_together(**operands: Tensor | None) -> None:
    """Raise OperandError unless the operands (None: not there) are floating tensors of one device."""
    given = {name: operand for name, operand in operands.items() if operand is not None}
    first, first_operand = next(iter(given.items()))
    for name, operand in given.items():
        if not operand.dtype.is_floating_point:
            raise OperandError(
                f"{name} is {operand.dtype}: pass a floating-point tensor (bfloat16, float32, ...)"
            )
        if operand.device != first_operand.device:
            raise OperandError(
                f"{name} is on {operand.device}, {first} on {first_operand.device}: move both to one device"
            )


def as_rows(x: Tensor) -> tuple[Tensor, list[int]]:
    """x as [R,C] and the rows where a matrix starts (and where the last one ends).

    The last two dimensions are the matrix, a vector is one row, and no block crosses two matrices.
    """
    if x.dim() == 2:
        return x, [0, x.shape[0]]
    rows, columns = (1, x.shape[0]) if x.dim() == 1 else x.shape[-2:]
    matrices = math.prod(x.shape[:-2])
    return x.reshape(matrices * rows, columns), [index * rows for index in range(matrices + 1)]


def offsets_list(offsets: Tensor, rows: int) -> list[int]:
    """Offsets [E+1] as integers, checked against the rows: expert e owns rows o[e] to o[e+1].

    They start at 0 and never fall. Rows behind the last offset belong to no expert (padding).
    """
    if not isinstance(offsets, Tensor):
        raise OffsetsError(f"offsets are a {type(offsets).__name__}: pass an int32 tensor [experts + 1]")
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise OffsetsError(
            f"offsets must be int32 [experts + 1], got {offsets.dtype} {list(offsets.shape)}: "
            "build it for example with torch.cat([zero, counts.cumsum(0)]).int()"
        )
    bounds: list[int] = offsets.tolist()
    falls = any(end < start for start, end in pairwise(bounds))
    if bounds[0] != 0 or falls or bounds[-1] > rows:
        raise OffsetsError(
            f"offsets {bounds} must start at 0, never fall and end at most at {rows}, the rows of x"
        )
    return bounds
