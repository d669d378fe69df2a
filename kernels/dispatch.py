"""Which implementation runs the kernels here, chosen and logged once."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

from torch import Tensor

logger = logging.getLogger("fp8_safeguard")


def backend() -> str:
    """What runs the kernels on a CPU: `numba`, or `reference` (eager torch, many times slower)."""
    return "numba" if _numba_installed() else "reference"


def is_compiled(x: Tensor) -> bool:
    """Whether compiled kernels take x; where they do not, the reference does."""
    return x.device.type == "cpu" and _numba_installed()


@cache
def compiled_module(name: str) -> ModuleType:
    """A compiled module, imported on first use: importing the package must not import numba."""
    return importlib.import_module(f"fp8_safeguard.kernels.{name}")


@cache
def _numba_installed() -> bool:
    """Whether numba can be imported; the answer is logged by name, once."""
    try:
        importlib.import_module("numba")
    except ImportError as error:
        logger.warning(
            "FP8 kernels: backend 'reference' (eager torch, many times slower) because numba cannot be imported "
            "(%s); install fp8-safeguard[train] for the compiled one",
            error,
        )
        return False
    logger.info(
        "FP8 kernels: backend 'numba'; each kernel compiles on its first use and is then kept on disk"
    )
    return True
