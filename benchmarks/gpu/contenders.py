"""The other ways to multiply: cuBLAS in BF16, scaled_mm, DeepGEMM."""

# Shapes: M x N the result, K the summed dimension.

from __future__ import annotations

import importlib

import torch
from gpu.timing import Call
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels import QuantizedTensor

SCALE_MULTIPLE = 4
"""cuBLAS wants the block scales of a 128x128 operand padded to this many along K."""


def bf16(a_MK: Tensor, b_NK: Tensor) -> Call:
    """cuBLAS, both operands and the result in BF16."""
    return lambda: torch.mm(a_MK, b_NK.t())


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Call:
    """torch.nn.functional.scaled_mm, 1x128 by 128x128 or 1x128 by 1x128."""

    def call() -> Tensor:
        kinds = F.ScalingType
        scale_b = b.scale
        if b.layout == "tile":
            scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % SCALE_MULTIPLE)).t()
        recipe_b = kinds.BlockWise128x128 if b.layout == "tile" else kinds.BlockWise1x128
        result: Tensor = F.scaled_mm(
            a.data, b.data.t(), a.scale, kinds.BlockWise1x128, scale_b, recipe_b, output_dtype=dtype
        )
        return result

    return call


def deep_gemm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Call | None:
    """DeepGEMM, where it is installed."""
    try:
        library = importlib.import_module("deep_gemm")
    except ImportError:
        return None
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    return lambda: library.fp8_gemm_nt((a.data, a.scale), (b.data, b.scale), out)


def bf16_grouped(a_MK: Tensor, b_ENK: Tensor, offsets: Tensor) -> Call:
    """torch's grouped product in BF16; offsets [E+1] stay on the device."""
    ends = offsets[1:].contiguous()
    return lambda: F.grouped_mm(a_MK, b_ENK.mT, offs=ends)


def bf16_grouped_wgrad(dy_MN: Tensor, x_MK: Tensor, offsets: Tensor) -> Call:
    """torch's grouped product along the rows, in BF16."""
    ends = offsets[1:].contiguous()
    return lambda: F.grouped_mm(dy_MN.t(), x_MK, offs=ends)


def others(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> dict[str, Call]:
    """The FP8 contenders of a dense product."""
    found: dict[str, Call] = {"scaled_mm": scaled_mm(a, b, dtype)}
    theirs = deep_gemm(a, b, dtype)
    return found if theirs is None else found | {"deep_gemm": theirs}
