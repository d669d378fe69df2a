"""Which implementation runs the kernels here, chosen and logged once."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fp8_safeguard.kernels import compiled, native, reference
from fp8_safeguard.kernels.errors import KernelError, require_option
from fp8_safeguard.kernels.lazy import compiled_module

logger = logging.getLogger("fp8_safeguard")

BACKENDS = ("native", "numba", "reference")
"""What can run the CPU kernels, the fastest first."""
VARIABLE = "FP8_SAFEGUARD_KERNELS"
"""Environment variable that names one of them; otherwise the first that works here is taken."""
GEMM_BACKENDS = ("triton", "native", "numba", "reference", "torch", "deep_gemm")
"""What can multiply in FP8: `triton`, `torch` and `deep_gemm` on CUDA, `native` and `numba` on a CPU, `reference`
anywhere."""
GEMM_VARIABLE = "FP8_SAFEGUARD_GEMM"
"""Environment variable that names one of them for the devices it runs on."""
RESULTS_VARIABLE = "FP8_SAFEGUARD_GEMM_RESULTS"
"""Environment variable that names a file of benchmarks/gpu_check.py, to choose between FP8 and BF16 by."""
DEVICE_BACKENDS = ("triton", "torch", "deep_gemm")
"""Those whose operands stay on the device: nothing is read back to the host."""

TENSOR_CORES = (9, 10)
"""Major compute capabilities that the Triton products are written for: Hopper and Blackwell."""

_MODULES = {"native": native, "numba": compiled, "reference": reference}
_DEFAULT_GEMM = {"cuda": ("triton", "reference"), "cpu": ("native", "numba", "reference")}
_KIND = {"triton": "cuda", "torch": "cuda", "deep_gemm": "cuda", "native": "cpu", "numba": "cpu"}


@cache
def backend() -> str:
    """What quantises and measures on a CPU: one of BACKENDS. Logged once.

    `native` is C++ built with the package, `numba` compiles on first use, `reference` is eager torch, many times
    slower. Raises UnknownOptionError where FP8_SAFEGUARD_KERNELS names something else or what does not work here.
    """
    # One after the other: importing numba takes a fifth of a second that native kernels save.
    chosen = os.environ.get(VARIABLE) or next(name for name in BACKENDS if _works(name))
    if chosen not in BACKENDS or not _works(chosen):
        require_option(VARIABLE, chosen, tuple(name for name in BACKENDS if _works(name)))
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


def _works(name: str) -> bool:
    """Whether one of BACKENDS can run here."""
    return name == "reference" or (native.library() is not None if name == "native" else numba_installed())


def results_file() -> str:
    """The file that FP8_SAFEGUARD_GEMM_RESULTS names, or nothing."""
    return os.environ.get(RESULTS_VARIABLE, "")


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


class _Asked:
    """What use_gemm_backend asked for. One for the process: a backward pass runs in threads of its own."""

    name = ""


@contextmanager
def use_gemm_backend(name: str) -> Iterator[None]:
    """Multiply in FP8 with this backend inside the block, in every thread of the process.

    The backward pass of a linear layer uses the backend of its forward. Raises UnknownOptionError for a name that
    does not exist, and KernelError at the first product that the backend cannot run.
    """
    require_option("backend", name, GEMM_BACKENDS)
    before, _Asked.name = _Asked.name, name
    try:
        yield
    finally:
        _Asked.name = before


def gemm_backend_of(device: torch.device, name: str | None = None) -> str:
    """Which of GEMM_BACKENDS multiplies on that device: `name`, use_gemm_backend's, the environment's, the default.

    Logged once for a device. Raises KernelError where what was asked for by name does not work here.
    """
    return _gemm_backend(name or "", _Asked.name, device.type, device.index)


def _gemm_backend(name: str, asked: str, device: str, index: int | None) -> str:
    return _resolved(name, asked, device, index)


# What torch.compiler.assume_constant_result does, without importing the compiler: torch.compile, which cannot look
# through a cache, takes the answer into its graph and asks again when what was asked for changes.
_gemm_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _resolved(name: str, asked: str, device: str, index: int | None) -> str:
    kind = "cpu" if device == "cpu" else "cuda"
    wanted = name or asked or os.environ.get(GEMM_VARIABLE, "")
    if wanted:
        require_option("backend" if name or asked else GEMM_VARIABLE, wanted, GEMM_BACKENDS)
        missing = unavailable(wanted, device, index)
        if not missing:
            logger.info("FP8 products on %s: backend %r, asked for by name", device, wanted)
            return wanted
        # A name for the other kind of device leaves this one alone, as long as there is such a device.
        if name or _KIND.get(wanted) == kind or not torch.cuda.is_available():
            raise KernelError(f"FP8 products on {device}: backend {wanted!r} cannot run here: {missing}")
    return _default(kind, device, index)


def _default(kind: str, device: str, index: int | None) -> str:
    """The first backend that works on the device; a slow one is warned of."""
    missing = {}
    for candidate in _DEFAULT_GEMM[kind]:
        missing[candidate] = unavailable(candidate, device, index)
        if not missing[candidate]:
            break
    del missing[candidate]
    why = "".join(f"; {other!r} cannot run: {reason}" for other, reason in missing.items())
    level = logging.WARNING if candidate == "reference" else logging.INFO
    logger.log(level, "FP8 products on %s: backend %r%s", device, candidate, why)
    return candidate


def unavailable(name: str, device: str, index: int | None = None) -> str:
    """Why a GEMM backend cannot run on a device, and the way out; empty if it can."""
    if name == "reference":
        return ""
    if name == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if name in DEVICE_BACKENDS and device != "cuda":
        return "it multiplies on CUDA devices only; use 'native', 'numba' or 'reference' on a CPU"
    if name not in DEVICE_BACKENDS and device != "cpu":
        return "it multiplies on a CPU only; use 'triton' on CUDA devices"
    if name == "triton":
        return _unavailable_triton(0 if index is None else index)
    if name in DEVICE_BACKENDS:
        module = {"torch": "torch_products", "deep_gemm": "deep_gemm"}[name]
        return str(compiled_module(module).unavailable(torch.device(device, 0 if index is None else index)))
    return _unavailable_here(name)


def _unavailable_triton(index: int) -> str:
    """Why Triton's products cannot run on that CUDA device; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install fp8-safeguard[train]"
    major, minor = torch.cuda.get_device_capability(index)
    if major in TENSOR_CORES:
        return ""
    return f"its products are for compute capability 9.0 and 10.0, this device has {major}.{minor}; use precision bf16"


def _unavailable_here(name: str) -> str:
    """Why `native` or `numba` cannot multiply on this CPU; empty if it can."""
    if name == "native":
        if backend() == "native" and compiled_module("native_gemm").available():
            return ""
        return "the native kernels were not built, or FP8_SAFEGUARD_KERNELS names others; install with a C++ compiler"
    if backend() != "reference" and numba_installed() and compiled_module("numba_amx").available():
        return ""
    return (
        "numba is missing or refused, or this processor has no bfloat16 matrix tiles (AMX); use 'reference'"
    )
