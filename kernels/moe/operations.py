"""Which raw operations take a tensor: fused kernels, or plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fp8_safeguard.kernels.device import triton_installed
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.moe import eager


def operations(x: Tensor) -> ModuleType:
    """What to call with x: under torch.compile the operators of `library`, else what runs."""
    if not torch.compiler.is_compiling():
        return running(x)
    from fp8_safeguard.kernels.moe import library

    return library


def running(x: Tensor) -> ModuleType:
    """`triton_ops` on CUDA, `eager` elsewhere and for float64, in which only checks of gradients compute."""
    fused = x.is_cuda and x.dtype != torch.float64 and triton_installed()
    return compiled_module("moe.triton_ops") if fused else eager
