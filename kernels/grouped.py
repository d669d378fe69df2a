"""Grouped FP8 matrix products: each expert's rows with its own weight."""

# Shapes: M rows sorted by expert, N output features, K input features, E experts.

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS, gemm_backend_of
from fp8_safeguard.kernels.errors import OffsetsError
from fp8_safeguard.kernels.gemm import (
    PRODUCTS,
    dequantized,
    require_operand,
    require_output,
    require_same,
)
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.matmul import mm_exact
from fp8_safeguard.kernels.operands import check_together, offsets_list
from fp8_safeguard.kernels.quantized import QuantizedTensor

TMA_ALIGNMENT = 16
"""Offsets that are multiples of it let a device read the columns of each expert with its fast loads."""
PLAN_ROWS = 64
"""BF16 segments are padded to a multiple of this: oneDNN plans anew for every row count it has not seen."""


def grouped_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    alignment: int = 1,
    backend: str | None = None,
) -> Tensor:
    """a [M,K] (row) times each expert's b [E,N,K] (row or tile) transposed: [M,N] in out_dtype.

    Rows offsets[e] to offsets[e+1] belong to expert e; rows behind the last offset give zeros. `alignment` promises
    that every offset is a multiple of it, which `deep_gemm` needs to be 128. On the device the offsets are not read
    back, so neither they nor the promise are checked there; a CPU checks both. `backend` as for fp8_gemm_nt.
    """
    require_operand("a", a, 2, ("row",))
    require_operand("b", b, 3, ("row", "tile"))
    require_same("K", "a", a.shape[1], "b", b.shape[2])
    check_together(a=a.scale, b=b.scale)
    chosen = gemm_backend_of(a.device, backend)
    result: Tensor
    if torch.compiler.is_compiling():
        from fp8_safeguard.kernels import library

        return library.multiply(a, b, offsets, out_dtype, alignment, chosen)
    require_output(out_dtype)
    if chosen in DEVICE_BACKENDS:
        return device_nt(chosen, a, b, offsets, out_dtype, alignment)
    bounds = expert_bounds(offsets, a.shape[0], b.shape[0], alignment)
    if chosen != "reference":
        result = compiled_module(PRODUCTS[chosen]).grouped_nt(a, b, bounds, out_dtype)
    else:
        a_MK, b_ENK = dequantized(a, b)
        result = grouped_mm(a_MK, b_ENK.mT, bounds).to(out_dtype)
    return result


def grouped_gemm_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    alignment: int = 1,
    backend: str | None = None,
) -> Tensor:
    """dy [M,N] (col) transposed times x [M,K] (col), expert by expert: [E,N,K] in out_dtype.

    An expert without rows gives exact zeros. `alignment` and `backend` as for grouped_gemm_nt; from an alignment of
    16 on `triton` has faster loads.
    """
    require_operand("dy", dy, 2, ("col",))
    require_operand("x", x, 2, ("col",))
    require_same("M", "dy", dy.shape[0], "x", x.shape[0])
    check_together(dy=dy.scale, x=x.scale)
    chosen = gemm_backend_of(x.device, backend)
    result: Tensor
    if torch.compiler.is_compiling():
        from fp8_safeguard.kernels import library

        return library.multiply_wgrad(dy, x, offsets, out_dtype, alignment, chosen)
    require_output(out_dtype)
    if chosen in DEVICE_BACKENDS:
        return device_wgrad(chosen, dy, x, offsets, out_dtype, alignment)
    bounds = expert_bounds(offsets, x.shape[0], offsets.numel() - 1, alignment)
    if chosen != "reference":
        result = compiled_module(PRODUCTS[chosen]).grouped_wgrad(dy, x, bounds, out_dtype)
    else:
        dy_MN, x_MK = dequantized(dy, x)
        result = grouped_mm_wgrad(dy_MN, x_MK, bounds).to(out_dtype)
    return result


def device_nt(
    backend: str, a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, dtype: torch.dtype, alignment: int
) -> Tensor:
    """grouped_gemm_nt by one of DEVICE_BACKENDS; the offsets stay on the device."""
    module = compiled_module(PRODUCTS[backend])
    promise = {"alignment": alignment} if backend == "deep_gemm" else {}
    product: Tensor = module.grouped_gemm_nt(a, b, offsets, dtype, **promise)
    return product


def device_wgrad(
    backend: str, dy: QuantizedTensor, x: QuantizedTensor, offsets: Tensor, dtype: torch.dtype, alignment: int
) -> Tensor:
    """grouped_gemm_wgrad by one of DEVICE_BACKENDS; the offsets stay on the device."""
    module = compiled_module(PRODUCTS[backend])
    product: Tensor = module.grouped_gemm_wgrad(dy, x, offsets, dtype, aligned=alignment % TMA_ALIGNMENT == 0)
    return product


def expert_bounds(offsets: Tensor, rows: int, experts: int, alignment: int = 1) -> list[int]:
    """offsets as integers, once they fit the rows, the experts and the promised alignment."""
    bounds = offsets_list(offsets, rows)
    if alignment < 1:
        raise OffsetsError(f"alignment={alignment} must be at least 1, which promises nothing")
    if len(bounds) != experts + 1:
        raise OffsetsError(
            f"{len(bounds)} offsets describe {len(bounds) - 1} experts, the weight has {experts}"
        )
    if any(bound % alignment for bound in bounds):
        raise OffsetsError(
            f"offsets {bounds} are not all multiples of {alignment}, as alignment={alignment} promises: pad each "
            "expert's rows, or leave alignment out"
        )
    return bounds


def require_offsets(offsets: Tensor, experts: int, device: torch.device) -> None:
    """Raise OffsetsError unless offsets fit so many experts by shape, dtype and device: their values stay unread."""
    fits = offsets.shape == (experts + 1,) and offsets.dtype in (torch.int32, torch.int64)
    if not fits or offsets.device != device:
        raise OffsetsError(
            f"offsets are {offsets.dtype} {list(offsets.shape)} on {offsets.device}, {experts} experts need int32 "
            f"[{experts + 1}] on {device}: build them there, for example with torch.cat([zero, counts.cumsum(0)]).int()"
        )


def grouped_mm(a_MK: Tensor, b_EKN: Tensor, bounds: list[int]) -> Tensor:
    """[M,N] float32: each expert's rows of a times its b."""
    out_MN = a_MK.new_empty(a_MK.shape[0], b_EKN.shape[2])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            mm_exact(a_MK[start:end], b_EKN[expert], out_MN[start:end])
    out_MN[bounds[-1] :].zero_()
    return out_MN


def grouped_mm_wgrad(dy_MN: Tensor, x_MK: Tensor, bounds: list[int]) -> Tensor:
    """[E,N,K] float32: each expert's dy^T x, zeros for an expert without rows."""
    out_ENK = x_MK.new_empty(len(bounds) - 1, dy_MN.shape[1], x_MK.shape[1])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            mm_exact(dy_MN[start:end].t(), x_MK[start:end], out_ENK[expert])
        else:
            out_ENK[expert].zero_()
    return out_ENK


def grouped_mm_bf16(a_MK: Tensor, b_EKN: Tensor, bounds: list[int]) -> Tensor:
    """[M,N] bfloat16: each expert's rows of a times its b, both rounded to bfloat16."""
    a_MK, b_EKN = a_MK.to(torch.bfloat16), b_EKN.to(torch.bfloat16)
    out_MN = a_MK.new_zeros(a_MK.shape[0], b_EKN.shape[2])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            out_MN[start:end] = (_whole_rows(a_MK[start:end]) @ b_EKN[expert])[: end - start]
    return out_MN


def grouped_mm_wgrad_bf16(dy_MN: Tensor, x_MK: Tensor, bounds: list[int]) -> Tensor:
    """[E,N,K] bfloat16: each expert's dy^T x, both rounded to bfloat16, zeros for an expert without rows."""
    dy_MN, x_MK = dy_MN.to(torch.bfloat16), x_MK.to(torch.bfloat16)
    out_ENK = x_MK.new_zeros(len(bounds) - 1, dy_MN.shape[1], x_MK.shape[1])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            torch.mm(_whole_rows(dy_MN[start:end]).t(), _whole_rows(x_MK[start:end]), out=out_ENK[expert])
    return out_ENK


def _whole_rows(x_RC: Tensor) -> Tensor:
    """x with zero rows appended up to a multiple of PLAN_ROWS."""
    missing = -x_RC.shape[0] % PLAN_ROWS
    return torch.nn.functional.pad(x_RC, (0, 0, 0, missing)) if missing else x_RC
