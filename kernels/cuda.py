"""A linear layer's three GEMMs on a device, each tensor read once."""

# Shapes: T tokens, K input features, N output features, E experts.
# Nothing is read back to the host and everything is allocated by torch, so the passes can be captured in a CUDA graph.
# x and dy are quantised in rows (fprop, dgrad) and columns (wgrad) by one read. The weight is quantised once, in tiles;
# dgrad turns those, which is exact. Only FP8 codes wait for the backward.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels.dispatch import logger
from fp8_safeguard.kernels.gemm import PRODUCTS, turned
from fp8_safeguard.kernels.grouped import TMA_ALIGNMENT, device_nt, device_wgrad
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.matmul import mm_bf16
from fp8_safeguard.kernels.passes import Kept, LinearCall
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor

FEW_ROWS = 64
"""Up to so many rows the weight is turned on its way to the tensor cores: one small product is not worth a copy of it."""
OUTPUTS = (torch.bfloat16, torch.float32)
"""Dtypes that products are written in; others are rounded from float32."""
WGRAD_BACKEND = {"deep_gemm": "triton"}
"""Who computes grouped weight gradients for a backend that has none."""
BF16_ALIGNMENT = 8
"""Features of a grouped BF16 product are padded to a multiple of it: strides of 16 bytes."""


def forward(x_TK: Tensor, w: Tensor, call: LinearCall) -> tuple[Tensor, Kept]:
    """Y = X W^T [T,N] in x's dtype, and the FP8 copies that the backward needs; w is [N,K] or [E,N,K]."""
    precision = call.precision
    fp8 = precision.fprop == "fp8"
    columns = call.needs_dw and precision.wgrad == "fp8"
    x_row, x_col = _layouts(x_TK, precision.x, call, row=fp8, columns=columns)
    if not fp8:
        return _multiply_bf16(x_TK, w.mT, call).to(x_TK.dtype), Kept(x=x_col)
    assert x_row is not None
    w_tile = _tiles(w, precision.w)
    y_TN = _multiply(
        call.tampered("fprop", "x", x_row), call.tampered("fprop", "w", w_tile), call, x_TK.dtype
    )
    return y_TN, Kept(x=x_col, w=w_tile if call.keeps_w() else None)


def backward(
    dy_TN: Tensor, x_TK: Tensor | None, w: Tensor, kept: Kept, call: LinearCall, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """dX [T,K] in dtype and dW in w's dtype, those that are needed; x only where wgrad runs in BF16."""
    precision = call.precision
    row = call.needs_dx and precision.dgrad == "fp8"
    columns = call.needs_dw and precision.wgrad == "fp8"
    dy_row, dy_col = _layouts(dy_TN, precision.dy, call, row=row, columns=columns)
    dx_TK = dw = None
    if dy_row is not None:
        w_tile = kept.w if isinstance(kept.w, QuantizedTensor) else _tiles(w, precision.w)
        dy, turned_w = (
            call.tampered("dgrad", "dy", dy_row),
            _transposed(call.tampered("dgrad", "w", w_tile), dy_TN.shape[0]),
        )
        dx_TK = _multiply(dy, turned_w, call, dtype)
    elif call.needs_dx:
        dx_TK = _multiply_bf16(dy_TN, w, call).to(dtype)
    if dy_col is not None:
        assert isinstance(kept.x, QuantizedTensor)
        dy, x = call.tampered("wgrad", "dy", dy_col), call.tampered("wgrad", "x", kept.x)
        dw = _wgrad(dy, x, call, w.dtype)
    elif call.needs_dw:
        assert x_TK is not None
        dw = _wgrad_bf16(dy_TN, x_TK, call).to(w.dtype)
    return dx_TK, dw


def _layouts(
    x_TC: Tensor, operand: OperandFormat, call: LinearCall, *, row: bool, columns: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """x in rows and in columns, those that are wanted, from one read."""
    if not (row or columns):
        return None, None
    fused = compiled_module("triton_fused").quantize_layouts(
        x_TC, row=row, blocks="col" if columns else "", **_format(operand),
        offsets=call.offsets if columns else None, aligned=columns and _is_aligned(call, x_TC),
    )  # fmt: skip
    return fused.row, fused.block


def _tiles(w: Tensor, operand: OperandFormat) -> QuantizedTensor:
    """The weight in tiles, contiguous as w need not be."""
    quantized: QuantizedTensor = (
        compiled_module("triton_fused")
        .quantize_layouts(w, row=False, blocks="tile", **_format(operand))
        .block
    )
    return quantized


def _format(operand: OperandFormat) -> dict[str, Any]:
    return {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}


def _is_aligned(call: LinearCall, x_TC: Tensor) -> bool:
    """Whether each expert's first row, and the end, is where the fast loads of wgrad can begin."""
    return call.offsets is not None and call.alignment % TMA_ALIGNMENT == 0 == x_TC.shape[0] % TMA_ALIGNMENT


def _transposed(w: QuantizedTensor, rows: int) -> QuantizedTensor:
    """Tiles [K,N] or [E,K,N] of a weight [N,K] or [E,N,K]."""
    if rows <= FEW_ROWS and w.data.dim() == 2:
        return turned(w)
    transposed: QuantizedTensor = compiled_module("triton_transpose").transpose_tiles(w)
    return transposed


def _multiply(a: QuantizedTensor, b: QuantizedTensor, call: LinearCall, dtype: torch.dtype) -> Tensor:
    """a times b transposed, dense or expert by expert, in dtype."""
    written = dtype if dtype in OUTPUTS else torch.float32
    out: Tensor
    if call.offsets is None:
        out = compiled_module(PRODUCTS[call.backend]).fp8_gemm_nt(a, b, written)
    else:
        out = device_nt(call.backend, a, b, call.offsets, written, call.alignment)
    return out.to(dtype)


def _wgrad(dy: QuantizedTensor, x: QuantizedTensor, call: LinearCall, dtype: torch.dtype) -> Tensor:
    """dy^T x, dense or expert by expert, in dtype."""
    written = dtype if dtype in OUTPUTS else torch.float32
    out: Tensor
    if call.offsets is None:
        out = compiled_module(PRODUCTS[call.backend]).fp8_gemm_wgrad(dy, x, written)
    else:
        backend = _grouped_wgrad_backend(call.backend)
        alignment = TMA_ALIGNMENT if _is_aligned(call, x.data) else 1
        out = device_wgrad(backend, dy, x, call.offsets, written, alignment)
    return out.to(dtype)


@cache
def _grouped_wgrad_backend(backend: str) -> str:
    """The backend itself, or who stands in for it; said once."""
    if backend in WGRAD_BACKEND:
        logger.info(
            "FP8 products: backend %r has no grouped weight gradient; %r computes it",
            backend,
            WGRAD_BACKEND[backend],
        )
    return WGRAD_BACKEND.get(backend, backend)


def _multiply_bf16(a_TK: Tensor, b: Tensor, call: LinearCall) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], rounded to bfloat16; zeros behind the last offset."""
    if call.offsets is None:
        return mm_bf16(a_TK, b)
    depth, features = b.shape[1:]
    a_TK = _padded(a_TK.to(torch.bfloat16))
    more = -features % BF16_ALIGNMENT, -depth % BF16_ALIGNMENT
    b_EKN = b.to(torch.bfloat16)
    b_EKN = F.pad(b_EKN, (0, more[0], 0, more[1])) if any(more) else b_EKN
    out_TN = F.grouped_mm(a_TK, b_EKN, offs=_ends(call.offsets))
    row_T = torch.arange(out_TN.shape[0], device=out_TN.device)
    return torch.where((row_T < call.offsets[-1])[:, None], out_TN[:, :features], 0)


def _wgrad_bf16(dy_TN: Tensor, x_TK: Tensor, call: LinearCall) -> Tensor:
    """dy^T x, both rounded to bfloat16; exact zeros for an expert without rows."""
    if call.offsets is None:
        return mm_bf16(dy_TN.t(), x_TK)
    n, k = dy_TN.shape[1], x_TK.shape[1]
    dy_TN, x_TK = _padded(dy_TN.to(torch.bfloat16)), _padded(x_TK.to(torch.bfloat16))
    out_ENK = F.grouped_mm(dy_TN.t(), x_TK, offs=_ends(call.offsets))
    has_rows_E = call.offsets.diff() > 0
    return torch.where(has_rows_E[:, None, None], out_ENK[:, :n, :k], 0)


def _ends(offsets: Tensor) -> Tensor:
    """Each expert's last row plus one, int32 [E]."""
    return offsets[1:].to(torch.int32)


def _padded(x_TC: Tensor) -> Tensor:
    """x, contiguous, its columns filled up with zeros to a multiple of BF16_ALIGNMENT."""
    more = -x_TC.shape[1] % BF16_ALIGNMENT
    return F.pad(x_TC, (0, more)) if more else x_TC.contiguous()
