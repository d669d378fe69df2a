"""FP8 matrix product: exact code products, accumulated and scaled in float32."""

# Shapes: M x N the result, K the summed dimension.

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.matmul import mm_exact
from fp8_safeguard.kernels.quantized import QuantizedTensor

SMALLEST_SCALE = 2.0**-110
"""Times the smallest code, 2^-16 in E5M2, still a normal float32: below it a product loses bits."""


def fp8_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M,K] (row) times b [N,K] (row or tile) transposed: [M,N] in out_dtype.

    The result is within 1e-6 x sum |a||b| of the float64 product of the dequantised operands, before the one
    rounding to out_dtype.
    """
    require_operand("a", a, 2, ("row", "tile"))
    require_operand("b", b, 2, ("row", "tile"))
    require_same("K", "a", a.shape[1], "b", b.shape[1])
    a_MK, b_NK = dequantized(a, b)
    return mm_exact(a_MK, b_NK.t()).to(out_dtype)


def dequantized(*operands: QuantizedTensor) -> list[Tensor]:
    """The operands in float32, or all in float64 where a scale is so small that code x scale would be subnormal."""
    tiny = any(bool((operand.scale < SMALLEST_SCALE).any()) for operand in operands)
    return [operand.dequantize(torch.float64 if tiny else torch.float32) for operand in operands]


def require_operand(name: str, operand: QuantizedTensor, dimensions: int, layouts: tuple[str, ...]) -> None:
    """Raise OperandError unless the operand has that many dimensions and one of those layouts."""
    if operand.data.dim() != dimensions or operand.layout not in layouts:
        raise OperandError(
            f"{name} is a {operand.layout!r} tensor of shape {list(operand.shape)}: this GEMM takes {dimensions} "
            f"dimensions in layout {' or '.join(map(repr, layouts))}; quantise it that way"
        )


def require_same(dimension: str, first: str, first_size: int, second: str, second_size: int) -> None:
    """Raise OperandError unless two operands agree on the size of a dimension."""
    if first_size != second_size:
        raise OperandError(
            f"{dimension} differs: {first} has {first_size}, {second} has {second_size}; they must be equal"
        )
