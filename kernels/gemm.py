"""FP8 matrix product: exact code products, accumulated and scaled in float32."""

# Shapes: M x N the result, K the summed dimension, T tokens.

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS, gemm_backend_of
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.matmul import mm_exact
from fp8_safeguard.kernels.operands import check_together
from fp8_safeguard.kernels.quantized import QuantizedTensor

SMALLEST_SCALE = 2.0**-110
"""Times the smallest code, 2^-16 in E5M2, still a normal float32: below it a product loses bits."""

PRODUCTS = {
    "triton": "triton_products",
    "torch": "torch_products",
    "deep_gemm": "deep_gemm",
    "native": "native_gemm",
    "numba": "numba_products",
}
"""The module behind each backend's name; `reference` is here and in grouped.py."""


def fp8_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> Tensor:
    """a [M,K] (row or tile) times b [N,K] (row or tile) transposed: [M,N] in out_dtype.

    The result is within 1e-6 x sum |a||b| of the float64 product of the dequantised operands, before the one
    rounding to out_dtype; `torch` and `deep_gemm` promise what their tensor cores do. `backend` is one of
    GEMM_BACKENDS, by default what gemm_backend_of the operands' device says. Raises OperandError for operands that
    do not fit each other or the backend, KernelError for a backend that cannot run there.
    """
    require_operand("a", a, 2, ("row", "tile"))
    require_operand("b", b, 2, ("row", "tile"))
    require_same("K", "a", a.shape[1], "b", b.shape[1])
    check_together(a=a.scale, b=b.scale)
    for name, operand in (("a", a), ("b", b)):
        if operand.offsets is not None:
            raise OperandError(
                f"{name} has tiles that start anew at each expert, which only grouped layouts know: quantise {name} "
                "without offsets"
            )
    chosen = gemm_backend_of(a.device, backend)
    result: Tensor
    if torch.compiler.is_compiling():
        from fp8_safeguard.kernels import library

        return library.multiply(a, b, None, out_dtype, 1, chosen)
    require_output(out_dtype)
    if chosen in DEVICE_BACKENDS:
        result = compiled_module(PRODUCTS[chosen]).fp8_gemm_nt(a, b, out_dtype)
    elif chosen != "reference":
        result = compiled_module(PRODUCTS[chosen]).gemm_nt(a, b, out_dtype)
    else:
        a_MK, b_NK = dequantized(a, b)
        result = mm_exact(a_MK, b_NK.t()).to(out_dtype)
    return result


def dequantized(*operands: QuantizedTensor) -> list[Tensor]:
    """The operands in float32, or all in float64 where a scale is so small that code x scale would be subnormal."""
    tiny = any(bool((operand.scale < SMALLEST_SCALE).any()) for operand in operands)
    return [operand.dequantize(torch.float64 if tiny else torch.float32) for operand in operands]


def turned(operand: QuantizedTensor) -> QuantizedTensor:
    """A matrix and its scales as transposed views: nothing moves."""
    layout = {"row": "col", "col": "row", "tile": "tile"}[operand.layout]
    return QuantizedTensor(operand.data.t(), operand.scale.t(), layout, operand.fmt)


def require_operand(name: str, operand: QuantizedTensor, dimensions: int, layouts: tuple[str, ...]) -> None:
    """Raise OperandError unless the operand has that many dimensions and one of those layouts."""
    if operand.data.dim() != dimensions or operand.layout not in layouts:
        raise OperandError(
            f"{name} is a {operand.layout!r} tensor of shape {list(operand.shape)}: this GEMM takes {dimensions} "
            f"dimensions in layout {' or '.join(map(repr, layouts))}; quantise it that way"
        )
    _require_scales(name, operand)


def require_output(out_dtype: torch.dtype) -> None:
    """Raise OperandError unless a product can be written in that dtype."""
    if not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point:
        raise OperandError(f"out_dtype={out_dtype!r}: pass torch.float32 or torch.bfloat16")


def _require_scales(name: str, operand: QuantizedTensor) -> None:
    """Raise OperandError unless codes and scales are what the layout says: kernels read them without looking."""
    data, scale, dtype = operand.data, operand.scale, get_format(operand.fmt).dtype
    if data.dtype != dtype or scale.dtype != torch.float32:
        raise OperandError(
            f"{name} has {data.dtype} codes and {scale.dtype} scales: {operand.fmt} takes {dtype} and torch.float32"
        )
    rows = data.shape[-2] if operand.layout == "row" else -(-data.shape[-2] // BLOCK)
    columns = data.shape[-1] if operand.layout == "col" else -(-data.shape[-1] // BLOCK)
    # Blocks that start anew at each expert are as many as the offsets say.
    fits = scale.dim() == data.dim() and scale.shape[-1] == columns and scale.device == data.device
    if not fits or (operand.offsets is None and scale.shape[:-1] != (*data.shape[:-2], rows)):
        raise OperandError(
            f"{name} has codes {list(data.shape)} on {data.device} and scales {list(scale.shape)} on {scale.device}: "
            f"layout {operand.layout!r} needs scales {[*data.shape[:-2], rows, columns]}; pass what quantize() returned"
        )


def require_same(dimension: str, first: str, first_size: int, second: str, second_size: int) -> None:
    """Raise OperandError unless two operands agree on the size of a dimension."""
    if first_size != second_size:
        raise OperandError(
            f"{dimension} differs: {first} has {first_size}, {second} has {second_size}; they must be equal"
        )
