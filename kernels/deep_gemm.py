"""FP8 products through DeepGEMM, where it is installed."""

# Shapes: M x N the result, K the summed dimension, T tokens, E experts.
# DeepGEMM 2.1 and newer: fp8_gemm_nt((a, scale_a), (b, scale_b), d, c=None, recipe=None), scales float32, recipe (1, 128, 128) for
# 1x128 by 128x128 blocks and (1, 1, 128) for 1x128 by 1x128; it turns scales into the layout it wants by itself.

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from functools import cache
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.gemm import turned
from fp8_safeguard.kernels.quantized import QuantizedTensor

HOPPER = 9
NEEDED = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous")
ALIGNMENT = 16
"""K is a multiple of it, and N of it where the result is BF16: what the tensor memory accelerator can address."""
SCALE_ALIGNMENT = 4
GROUP_ALIGNMENT = 128
"""Offsets are multiples of it: a block of 128 rows has one expert."""
TILE_RECIPE, ROW_RECIPE = (1, 128, 128), (1, 1, 128)


def unavailable(device: torch.device) -> str:
    """Why DeepGEMM cannot multiply on a CUDA device; empty if it can."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "the package deep_gemm is not installed; see github.com/deepseek-ai/DeepGEMM, or use 'triton'"
    missing = [name for name in NEEDED if not hasattr(_package(), name)]
    if missing:
        return f"deep_gemm {_version()} has no {missing[0]}; install 2.1 or newer"
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:
        return (
            f"on compute capability {major}.{minor} its scales are powers of two, which a quantised tensor does not "
            "promise; use 'triton'"
        )
    return ""


def fp8_gemm_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M,K] (row) times b [N,K] (row or tile) transposed: [M,N] in out_dtype, float32 or bfloat16.

    Raises OperandError for operands that DeepGEMM does not take.
    """
    require_fit(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    pairs = (_k_major(a.data), _scales(a)), (_k_major(b.data), _scales(b))
    if b.layout == "tile":
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
        _package().fp8_gemm_nt(*pairs, out, recipe=TILE_RECIPE)
        return out
    # Hopper's kernel for 1x128 by 1x128 is made for weight gradients: float32, and added to what is there.
    out = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    _package().fp8_gemm_nt(*pairs, out, c=out, recipe=ROW_RECIPE)
    return out.to(out_dtype)


def fp8_gemm_wgrad(dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """dy [T,N] (col) transposed times x [T,K] (col): [N,K] in out_dtype."""
    return fp8_gemm_nt(turned(dy), turned(x), out_dtype)


def grouped_gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype, *, alignment: int
) -> Tensor:
    """a [T,K] (row) times each expert's b [E,N,K] (tile) transposed: [T,N], zeros behind the last offset.

    `alignment` must promise offsets that are multiples of 128, and T must be one too.
    """
    require_fit(a, b, out_dtype)
    if b.layout != "tile":
        _refuse("the experts' weights are in 'row' blocks", "quantise them in 'tile' blocks")
    rows, experts = a.shape[0], b.shape[0]
    if alignment % GROUP_ALIGNMENT or rows % GROUP_ALIGNMENT:
        _refuse(
            f"it needs experts padded to multiples of {GROUP_ALIGNMENT} rows, this call has {rows} rows and promises "
            f"alignment={alignment}",
            f"pad with routing_map(..., alignment={GROUP_ALIGNMENT}) and say so",
        )
    out = torch.zeros((rows, b.shape[1]), dtype=torch.bfloat16, device=a.device)
    if 0 in (rows, experts, *b.shape[1:]):
        return out.to(out_dtype)
    expert_T = torch.bucketize(torch.arange(rows, device=a.device), offsets[1:].contiguous(), right=True)
    # -1: rows of no expert, which are skipped.
    expert_T = torch.where(expert_T < experts, expert_T, -1).to(torch.int32)
    pairs = (_k_major(a.data), _scales(a)), (_k_major(b.data), _scales(b))
    _package().m_grouped_fp8_gemm_nt_contiguous(*pairs, out, expert_T, recipe=TILE_RECIPE)
    return out.to(out_dtype)


def grouped_gemm_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype, *, aligned: bool
) -> NoReturn:
    """Raises OperandError: DeepGEMM's K-grouped product wants the counts on the host."""
    raise OperandError(
        "backend 'deep_gemm' has no grouped weight gradient without the experts' row counts on the host: use backend "
        "'triton'"
    )


def require_fit(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> None:
    """Raise OperandError unless DeepGEMM takes these operands."""
    k, n = a.shape[1], b.shape[-2]
    if a.layout != "row":
        _refuse("the first operand is in 'tile' blocks", "quantise it in 'row' blocks")
    if "e5m2" in (a.fmt, b.fmt):
        _refuse("an operand is E5M2", "quantise it as 'e4m3'")
    if out_dtype not in (torch.bfloat16, torch.float32):
        _refuse(f"the result is asked for in {out_dtype}", "ask for torch.bfloat16 or torch.float32")
    if k % ALIGNMENT or n % ALIGNMENT:
        _refuse(f"N = {n} and K = {k} are not both multiples of {ALIGNMENT}", "pad them")


def _refuse(why: str, way_out: str) -> NoReturn:
    raise OperandError(
        f"backend 'deep_gemm' does not take this product: {why}; {way_out}, or use backend 'triton'"
    )


def _k_major(codes: Tensor) -> Tensor:
    """Codes with the summed dimension contiguous, as Hopper's FP8 tensor cores read them."""
    if codes.stride(-1) == 1 and codes.stride(-2) % ALIGNMENT == 0:
        return codes
    return codes.view(torch.uint8).contiguous().view(codes.dtype)


def _scales(operand: QuantizedTensor) -> Tensor:
    """Scales contiguous, or with the rows next to each other where a row of them fills whole 16 bytes: as they are."""
    scale = operand.scale
    rows = scale.shape[-2]
    if operand.layout == "row" and scale.stride() == (1, rows) and rows % SCALE_ALIGNMENT == 0:
        return scale
    return scale.contiguous()


@cache
def _package() -> ModuleType:
    return importlib.import_module("deep_gemm")


def _version() -> str:
    try:
        return importlib.metadata.version("deep_gemm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
