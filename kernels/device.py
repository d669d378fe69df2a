"""Triton's kernels for CUDA tensors, where Triton is installed."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from types import ModuleType

from torch import Tensor

from fp8_safeguard.kernels.lazy import compiled_module

logger = logging.getLogger("fp8_safeguard")


def device_kernels(x: Tensor) -> ModuleType | None:
    """The module that quantises and measures x without waiting for its device; None where the others do.

    That is `triton_fused` for CUDA tensors. Without Triton the eager reference runs there, which is logged once.
    """
    return compiled_module("triton_fused") if x.is_cuda and triton_installed() else None


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported. Asked for CUDA tensors only; logged once where it cannot."""
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning(
        "FP8 kernels on CUDA: 'reference' (eager torch, many times slower); install fp8-safeguard[train] for Triton's"
    )
    return False
