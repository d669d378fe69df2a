"""Which implementation runs the kernels here, chosen and logged once."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from types import ModuleType

from torch import Tensor

from fp8_safeguard.kernels import compiled, native, reference
from fp8_safeguard.kernels.errors import require_option

logger = logging.getLogger("fp8_safeguard")

BACKENDS = ("native", "numba", "reference")
"""What can run the CPU kernels, the fastest first."""
VARIABLE = "FP8_SAFEGUARD_KERNELS"
"""Environment variable that names one of them; otherwise the first that works here is taken."""

_MODULES = {"native": native, "numba": compiled, "reference": reference}


@cache
def backend() -> str:
    """What quantises and measures on a CPU: one of BACKENDS. Logged once.

    `native` is C++ built with the package, `numba` compiles on first use, `reference` is eager torch, many times
    slower. Raises UnknownOptionError where FP8_SAFEGUARD_KERNELS names something else or what does not work here.
    """
    working = {"native": native.library() is not None, "numba": numba_installed(), "reference": True}
    available = tuple(name for name in BACKENDS if working[name])
    chosen = os.environ.get(VARIABLE) or available[0]
    require_option(VARIABLE, chosen, available)
    if chosen == "native":
        logger.info("FP8 kernels: backend 'native' (%s)", native.INSTRUCTION_SETS[native.level()])
    elif chosen == "numba":
        logger.info(
            "FP8 kernels: backend 'numba'; each kernel compiles on its first use and is then kept on disk"
        )
    else:
        logger.warning(
            "FP8 kernels: backend 'reference' (eager torch, many times slower); install fp8-safeguard[train] for "
            "compiled ones"
        )
    return chosen


def implementation(x: Tensor) -> ModuleType:
    """The module that quantises and measures x."""
    return _MODULES[backend()] if x.device.type == "cpu" else reference


def is_compiled(x: Tensor) -> bool:
    """Whether numba's kernels take x."""
    return x.device.type == "cpu" and backend() != "reference" and numba_installed()


@cache
def numba_installed() -> bool:
    """Whether numba can be imported."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return False
    return True
