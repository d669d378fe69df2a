"""To FP8 and back to float32 in one pass, as GEMM operand."""

# Shapes: B matrices, R rows, C columns, E experts.

from __future__ import annotations

from torch import Tensor

from fp8_safeguard.kernels import scaled
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.dispatch import implementation
from fp8_safeguard.kernels.operands import as_rows
from fp8_safeguard.kernels.precision import OperandFormat


def round_trip(x: Tensor, layout: str, operand: OperandFormat, bounds: list[int] | None = None) -> Tensor:
    """quantize(x, ...).dequantize() in float32, bit for bit, without the codes in between.

    `bounds` are expert offsets of a matrix: `col` blocks then start at each expert's first row, and rows behind
    the last bound are unspecified. A format whose scaling is not `block` has the scale of x as a whole: of its amax
    unless it is a ScaledFormat.
    """
    x_RC, matrices = as_rows(x.detach())
    if layout == "row":
        matrices = [0, x_RC.shape[0]]
    elif bounds is not None:
        matrices = bounds
    if not operand.is_plain:
        return scaled.round_trip_rows(x_RC, matrices, layout, operand).reshape(x.shape)
    out_RC: Tensor = implementation(x).round_trip_rows(
        x_RC, matrices, layout, get_format(operand.fmt), operand.scale, operand.multiplier
    )
    return out_RC.reshape(x.shape)
