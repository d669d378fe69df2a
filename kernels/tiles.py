"""FP8 layers' products on a CPU: operands quantised and multiplied."""

# Shapes: T tokens, N output features, K input features, E experts.
# fprop  Y[T,N]  = X[T,K]  W[N,K]^T     X in rows, W in tiles
# dgrad  dX[T,K] = dY[T,N] W[N,K]       dY in rows, W in tiles
# wgrad  dW[N,K] = dY[T,N]^T X[T,K]     both in columns
# The native kernels and numba's add in the same order and give the same bits.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fp8_safeguard.kernels import compiled, native, native_gemm, numba_tiles, scaled
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.dispatch import backend, is_compiled
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor, scale_shape


def gemm_backend() -> str:
    """What multiplies in FP8 layers on a CPU: `amx` (matrix tiles), `avx-512`, `avx2` or `sse2`, all native.

    Without the native kernels `amx` is numba's, and `float32` stands for torch products, several times slower.
    """
    if _default() == "native":
        return native_gemm.INSTRUCTION_SETS[native_gemm.level()].lower()
    return "amx" if _default() == "numba" else "float32"


def usable(x: Tensor) -> bool:
    """Whether products with x can run here."""
    return x.device.type == "cpu" and _default() != ""


def multiplies_codes(x: Tensor) -> bool:
    """Whether those products read the codes that `quantize` gives."""
    return usable(x) and _default() == "native"


@dataclass(frozen=True)
class TiledWeight:
    """A weight's codes and scales, kept from fprop for dgrad."""

    kept: QuantizedTensor | numba_tiles.Weight
    """[E,N,K] in tiles, as one of the two kinds of kernels reads it; native ones read [N,K] too, for all rows."""


def weight(w_ENK: Tensor, operand: OperandFormat, *, backend: str | None = None) -> TiledWeight:
    """Quantise weights [E,N,K] in tiles, for `native` or `numba` products."""
    if _uses_numba(backend) and operand.is_plain:
        return TiledWeight(numba_tiles.weight(w_ENK, operand))
    experts, rows, columns = w_ENK.shape
    bounds = [expert * rows for expert in range(experts + 1)]
    codes, scales = _quantized(w_ENK.reshape(experts * rows, columns), bounds, "tile", operand)
    scale = scale_shape(scales, w_ENK, "tile")
    return TiledWeight(QuantizedTensor(codes.reshape(w_ENK.shape), scale, "tile", operand.fmt))


def measured_weight(w: Tensor, operand: OperandFormat) -> tuple[Tensor, QuantizedTensor]:
    """TensorStats of a weight [N,K] or [E,N,K] in tiles, float64 [E,S], and its codes, from one read by native kernels."""
    rows, columns = w.shape[-2:]
    experts = w.shape[0] if w.dim() == 3 else 1
    w_RK = w.detach().reshape(experts * rows, columns)
    bounds = range(0, (experts + 1) * rows, rows) if rows else [0] * (experts + 1)
    if operand.is_plain:
        options = get_format(operand.fmt), operand.scale, operand.multiplier
        codes, scales, vectors_ES = native.measured_rows(w_RK, bounds, "tile", *options)
    else:
        codes, scales = scaled.quantize_rows(w_RK, bounds, "tile", operand)
        vectors_ES = scaled.stats_of_rows(w_RK, bounds, "tile", operand)
    if w.dim() == 3:
        codes, scales = codes.view(w.shape), scale_shape(scales, w, "tile")
    return vectors_ES, QuantizedTensor(codes, scales, "tile", operand.fmt)


def fprop(
    x_TK: Tensor, w: TiledWeight, features: int, operand: OperandFormat, bounds: list[int], dtype: torch.dtype
) -> Tensor:
    """Y = X W^T [T,N] in dtype, each expert's rows with its weight, zeros behind the last bound."""
    if isinstance(w.kept, numba_tiles.Weight) and operand.is_plain:
        return numba_tiles.fprop(x_TK, w.kept, features, operand, bounds, dtype)
    return _product(_rows(x_TK, operand), _codes(w, features, x_TK.shape[1]), bounds, dtype)


def dgrad(
    dy_TN: Tensor,
    w: TiledWeight,
    features: int,
    operand: OperandFormat,
    bounds: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """dX = dY W [T,K] in dtype, each expert's rows with its weight, zeros behind the last bound."""
    if isinstance(w.kept, numba_tiles.Weight) and operand.is_plain:
        return numba_tiles.dgrad(dy_TN, w.kept, features, operand, bounds, dtype)
    kept = _codes(w, dy_TN.shape[1], features)
    # Views: the GEMM takes any strides.
    w_EKN = QuantizedTensor(kept.data.mT, kept.scale.mT, "tile", kept.fmt)
    return _product(_rows(dy_TN, operand), w_EKN, bounds, dtype)


def wgrad(
    dy_TN: Tensor,
    x_TK: Tensor,
    dy_operand: OperandFormat,
    x_operand: OperandFormat,
    bounds: list[int],
    *,
    backend: str | None = None,
) -> Tensor:
    """dW = dY^T X [E,N,K] in float32, zeros for an expert without rows; `native` or `numba` products."""
    if _uses_numba(backend) and dy_operand.is_plain and x_operand.is_plain:
        return numba_tiles.wgrad(dy_TN, x_TK, dy_operand, x_operand, bounds)
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cpu")
    dy, x = _columns(dy_TN, offsets, bounds, dy_operand), _columns(x_TK, offsets, bounds, x_operand)
    dw_ENK: Tensor = _products().grouped_wgrad(dy, x, bounds, torch.float32)
    return dw_ENK


@cache
def _default() -> str:
    """`native`, `numba` (matrix tiles only), or nothing."""
    if backend() == "native" and native_gemm.available():
        return "native"
    if is_compiled(torch.empty(0, device="cpu")) and numba_tiles.available():
        return "numba"
    return ""


def _uses_numba(name: str | None) -> bool:
    return (_default() if name is None else name) == "numba"


def _product(a: QuantizedTensor, b: QuantizedTensor, bounds: list[int], dtype: torch.dtype) -> Tensor:
    products = _products()
    out: Tensor = (
        products.gemm_nt(a, b, dtype) if b.data.dim() == 2 else products.grouped_nt(a, b, bounds, dtype)
    )
    return out


def _products() -> ModuleType:
    """Who multiplies codes here."""
    return native_gemm if _default() == "native" else compiled_module("numba_products")


def _codes(w: TiledWeight, rows: int, columns: int) -> QuantizedTensor:
    """The weight's codes [E,N,K]; what only numba's own kernels read is turned back into them, exactly."""
    return w.kept if isinstance(w.kept, QuantizedTensor) else numba_tiles.codes_of(w.kept, rows, columns)


def _rows(x_TC: Tensor, operand: OperandFormat) -> QuantizedTensor:
    codes, scales = _quantized(x_TC, [0, x_TC.shape[0]], "row", operand)
    return QuantizedTensor(codes, scales, "row", operand.fmt)


def _columns(x_TC: Tensor, offsets: Tensor, bounds: list[int], operand: OperandFormat) -> QuantizedTensor:
    """Columns of each expert's rows; rows behind the last bound are unspecified."""
    codes, scales = _quantized(x_TC, bounds, "col", operand)
    return QuantizedTensor(codes, scales, "col", operand.fmt, offsets)


def _quantized(x_RC: Tensor, bounds: list[int], layout: str, operand: OperandFormat) -> tuple[Tensor, Tensor]:
    if not operand.is_plain:
        return scaled.quantize_rows(x_RC.detach(), bounds, layout, operand)
    module = native if _default() == "native" else compiled
    options = get_format(operand.fmt), operand.scale, operand.multiplier
    codes, scales = module.quantize_rows(x_RC.detach(), bounds, layout, *options)
    return codes, scales
