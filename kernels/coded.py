"""A linear layer's products on a CPU, each operand made as codes first."""

# Shapes: T tokens, K input features, N output features, E experts.
# The way of layers with a scale for a whole operand, and of those whose operands somebody changes before they are
# multiplied. Block scales that nobody touches give the same bits here as in passes.py, which is faster.

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels.gemm import fp8_gemm_nt
from fp8_safeguard.kernels.grouped import grouped_gemm_nt, grouped_gemm_wgrad
from fp8_safeguard.kernels.passes import LinearCall
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantize import quantize
from fp8_safeguard.kernels.quantized import QuantizedTensor


def weight(w: Tensor, operand: OperandFormat) -> QuantizedTensor:
    """The weight [N,K] or [E,N,K] in tiles."""
    return _quantized(w, "tile", operand)


def fprop(x_TK: Tensor, w: QuantizedTensor, operand: OperandFormat, call: LinearCall) -> Tensor:
    """Y = X W^T [T,N] in x's dtype; zeros behind the last expert."""
    x = call.tampered("fprop", "x", _quantized(x_TK, "row", operand))
    return _product(x, call.tampered("fprop", "w", w), call, x_TK.dtype)


def dgrad(
    dy_TN: Tensor, w: QuantizedTensor, operand: OperandFormat, call: LinearCall, dtype: torch.dtype
) -> Tensor:
    """dX = dY W [T,K] in dtype; zeros behind the last expert."""
    dy = call.tampered("dgrad", "dy", _quantized(dy_TN, "row", operand))
    return _product(dy, call.tampered("dgrad", "w", w).transpose(), call, dtype)


def wgrad(
    dy_TN: Tensor, x_TK: Tensor, dy_operand: OperandFormat, x_operand: OperandFormat, call: LinearCall
) -> Tensor:
    """dW = dY^T X, float32 [N,K] or [E,N,K]; zeros for an expert without rows."""
    offsets = torch.tensor(call.spans(x_TK), dtype=torch.int32, device="cpu")
    covered = int(offsets[-1])
    dy, x = (
        call.tampered("wgrad", name, _quantized(tensor_TC[:covered], "col", operand, offsets))
        for name, tensor_TC, operand in (("dy", dy_TN, dy_operand), ("x", x_TK, x_operand))
    )
    dw_ENK = grouped_gemm_wgrad(dy, x, offsets, torch.float32, backend=call.backend)
    return dw_ENK[0] if call.bounds is None else dw_ENK


def _quantized(
    x: Tensor, layout: str, operand: OperandFormat, offsets: Tensor | None = None
) -> QuantizedTensor:
    """x in that layout, under its own blocks' scales or the operand's one."""
    return quantize(
        x, layout=layout, fmt=operand.fmt, scale=operand.scale, multiplier=operand.multiplier, offsets=offsets,
        tensor_scale=operand.tensor_scale, amax_floor=operand.amax_floor,
    )  # fmt: skip


def _product(a: QuantizedTensor, b: QuantizedTensor, call: LinearCall, dtype: torch.dtype) -> Tensor:
    """a [T,D] times b transposed, dense or expert by expert."""
    if call.bounds is None:
        return fp8_gemm_nt(a, b, dtype, backend=call.backend)
    offsets = torch.tensor(call.bounds, dtype=torch.int32, device="cpu")
    return grouped_gemm_nt(a, b, offsets, dtype, backend=call.backend)
