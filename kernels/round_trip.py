"""x to FP8 and back to float32 in one pass, as GEMM operand."""

# Shapes: B matrices, R rows, C columns, E experts.

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels import reference
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.operands import as_matrices
from fp8_safeguard.kernels.precision import OperandFormat


def round_trip(x: Tensor, layout: str, operand: OperandFormat, bounds: list[int] | None = None) -> Tensor:
    """quantize(x, ...).dequantize() in float32, bit for bit, without the codes in between.

    `bounds` are expert offsets: `col` blocks then start at each expert's first row, and rows behind the last
    bound are unspecified.
    """
    if bounds is None or layout == "row":
        return _round_trip_matrices(as_matrices(x), layout, operand).reshape(x.shape)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for start, end in zip(bounds, bounds[1:], strict=False):
        out[start:end] = _round_trip_matrices(as_matrices(x[start:end]), layout, operand)[0]
    return out


def _round_trip_matrices(x_BRC: Tensor, layout: str, operand: OperandFormat) -> Tensor:
    """Round trip of float matrices."""
    code_format = get_format(operand.fmt)
    return reference.round_trip_matrices(
        x_BRC.float(), layout, code_format, operand.scale, operand.multiplier
    )
