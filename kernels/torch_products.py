"""FP8 products through torch.nn.functional.scaled_mm, where its recipes fit."""

# Shapes: M x N the result, K the summed dimension, T tokens; Mb, Nb, Kb blocks of 128, Kp a multiple of 4 of them.
# cuBLAS reads the scales of 1x128 blocks with the rows next to each other, and those of 128x128 blocks with the blocks
# of K next to each other, their number rounded up to 4 (aten/src/ATen/native/cuda/ScaledBlas.cpp).

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.gemm import turned
from fp8_safeguard.kernels.quantized import QuantizedTensor

HOPPER = 9
LEAST_CUDA = (12, 9)
CODE_ALIGNMENT = 16
"""N and K are multiples of it: cuBLAS reads codes 16 bytes at a time."""
SCALE_ALIGNMENT = 4
"""Rows of an operand in 1x128 blocks are a multiple of it: their float32 scales, too, are read 16 bytes at a time."""
BLOCKS_OF_K = 4
"""What the number of 128x128 blocks along K is rounded up to."""
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def unavailable(device: torch.device) -> str:
    """Why torch cannot multiply block-scaled FP8 on a CUDA device; empty if it can."""
    if not hasattr(F, "scaled_mm") or not hasattr(F, "ScalingType"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; install 2.10 or newer"
    version = torch.version.cuda or ""
    if not version or tuple(map(int, version.split(".")[:2])) < LEAST_CUDA:
        return f"torch was built for CUDA {version or 'none'}; block scales need 12.9 or newer"
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        return f"its block recipes run on compute capability 9.0 only, this device has {major}.{minor}; use 'triton'"
    return ""


def fp8_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M,K] (row or tile) times b [N,K] (row or tile, not both tile) transposed: [M,N] in out_dtype.

    Raises OperandError for operands that cuBLAS does not take: see CODE_ALIGNMENT, SCALE_ALIGNMENT and OUTPUTS.
    """
    require_fit(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    product: Tensor = F.scaled_mm(
        _k_major(a.data),
        _k_major(b.data).t(),
        scale_of(a),
        _recipe(a),
        scale_of(b),
        _recipe(b),
        output_dtype=out_dtype,
        # Fast accumulation keeps the tensor core's 14 bits over all of K.
        use_fast_accum=False,
    )
    return product


def fp8_gemm_wgrad(dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """dy [T,N] (col) transposed times x [T,K] (col): [N,K] in out_dtype."""
    return fp8_gemm_nt(turned(dy), turned(x), out_dtype)


def grouped_gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype
) -> NoReturn:
    """Raises OperandError: torch's grouped product has no block scales."""
    raise OperandError(_NO_GROUPS)


def grouped_gemm_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype, *, aligned: bool
) -> NoReturn:
    """Raises OperandError: torch's grouped product has no block scales."""
    raise OperandError(_NO_GROUPS)


_NO_GROUPS = (
    "backend 'torch' has no grouped product with block scales (scaled_grouped_mm takes one scale a row): use backend "
    "'triton' for grouped layers"
)


def require_fit(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> None:
    """Raise OperandError unless cuBLAS takes these operands."""
    (m, k), n = a.shape, b.shape[0]
    if a.layout == b.layout == "tile":
        _refuse("both operands are in 'tile' blocks", "quantise one in 'row' blocks")
    if a.fmt == b.fmt == "e5m2":
        _refuse("both operands are E5M2", "quantise one as 'e4m3'")
    if out_dtype not in OUTPUTS:
        _refuse(f"the result is asked for in {out_dtype}", f"ask for one of {', '.join(map(str, OUTPUTS))}")
    if n % CODE_ALIGNMENT or k % CODE_ALIGNMENT:
        _refuse(f"N = {n} and K = {k} are not both multiples of {CODE_ALIGNMENT}", "pad them")
    for rows, operand in ((m, a), (n, b)):
        if operand.layout == "row" and rows % SCALE_ALIGNMENT:
            _refuse(
                f"an operand in 1x128 blocks has {rows} rows, not a multiple of {SCALE_ALIGNMENT}", "pad it"
            )


def _refuse(why: str, way_out: str) -> NoReturn:
    raise OperandError(
        f"backend 'torch' does not take this product: {why}; {way_out}, or use backend 'triton'"
    )


def scale_of(operand: QuantizedTensor) -> Tensor:
    """The scales where cuBLAS looks for them: [rows, Kb] strides (1, rows), or [Kp, row blocks] strides (1, Kp)."""
    scale = operand.scale
    rows, blocks = scale.shape
    if operand.layout == "row":
        if scale.stride() == (1, rows):
            return scale
        return torch.empty((blocks, rows), dtype=scale.dtype, device=scale.device).copy_(scale.t()).t()
    whole = -(-blocks // BLOCKS_OF_K) * BLOCKS_OF_K
    padded = torch.ones((rows, whole), dtype=scale.dtype, device=scale.device)
    padded[:, :blocks] = scale
    return padded.t()


def _recipe(operand: QuantizedTensor) -> F.ScalingType:
    return F.ScalingType.BlockWise1x128 if operand.layout == "row" else F.ScalingType.BlockWise128x128


def _k_major(codes: Tensor) -> Tensor:
    """Codes with the summed dimension contiguous and rows 16 bytes aligned: FP8 tensor cores on Hopper read no other."""
    if codes.stride(1) == 1 and codes.stride(0) % CODE_ALIGNMENT == 0:
        return codes
    return codes.view(torch.uint8).contiguous().view(codes.dtype)
