"""Where FP8 products are faster than BF16 ones: a table of measurements."""

# Shapes of a layer: M tokens, N output features, K input features, E experts.
# A ratio is the time of FP8 over that of BF16, of the products alone: below 1 FP8 is faster.

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS, gemm_backend_of, logger, results_file
from fp8_safeguard.kernels.errors import KernelError, require_option
from fp8_safeguard.kernels.precision import LinearPrecision

GEMMS = ("fprop", "dgrad", "wgrad")
HOPPER = 90
NEAR = 2.0
"""A measured shape speaks for those within this factor of it, in each dimension."""


@dataclass(frozen=True, kw_only=True)
class GemmChoice:
    """What to multiply in, and why."""

    precision: str
    """`fp8` or `bf16`."""
    ratio: float | None
    """Time of FP8 over that of BF16; None where nothing is known."""
    reason: str
    """The measurement, its shape and its source."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A public throughput, for shapes that nobody has measured here."""

    ratio: float
    source: str


_BF16_H100 = 690.0
"""TFLOP/s of cuBLAS in BF16 on an H100: 667 to 716 in vLLM's benchmark of block-scaled kernels."""
PUBLIC: dict[tuple[int, str, str], Figure] = {
    (HOPPER, "triton", "dense"): Figure(
        ratio=_BF16_H100 / 580, source="SGLang's Triton kernel, 580 TFLOP/s on an H100; vLLM's reaches 405"
    ),
    (HOPPER, "deep_gemm", "dense"): Figure(
        ratio=_BF16_H100 / 1470, source="DeepGEMM, 1470 to 1550 TFLOP/s on an H800"
    ),
    (HOPPER, "deep_gemm", "fprop"): Figure(
        ratio=_BF16_H100 / 1234, source="DeepGEMM grouped, 1234 TFLOP/s on an H100"
    ),
    (HOPPER, "deep_gemm", "dgrad"): Figure(
        ratio=_BF16_H100 / 1236, source="DeepGEMM grouped, 1236 TFLOP/s on an H100"
    ),
    (HOPPER, "deep_gemm", "wgrad"): Figure(
        ratio=_BF16_H100 / 457, source="DeepGEMM grouped, 457 TFLOP/s on an H100"
    ),
}
"""By compute capability, backend, and `dense` or the GEMM of a grouped layer."""


@dataclass(frozen=True)
class _Measured:
    gemm: str
    experts: int
    shape: tuple[int, int, int]
    precision: str
    ratio: float
    machine: str


class _Results:
    """Measurements of benchmarks/gpu_check.py, by compute capability; they are of the backend `triton`."""

    by_architecture: dict[int, tuple[_Measured, ...]] | None = None


def use_results(file: Path | str, *, architecture: int | None = None) -> None:
    """Choose by what `benchmarks/gpu_check.py --json FILE` measured, on devices of that compute capability.

    `architecture` is 90 or 100, by default that of the CUDA device here, 90 without one.
    The file that FP8_SAFEGUARD_GEMM_RESULTS names is read without being asked. Raises KernelError for a file that
    holds no such results.
    """
    measured = _read(Path(file))
    if architecture is None:
        architecture = _architecture(torch.device("cuda")) if torch.cuda.is_available() else HOPPER
    _Results.by_architecture = {**(_Results.by_architecture or {}), architecture: measured}
    gemm_choice.cache_clear()
    logger.info("FP8 or BF16 is chosen by %d measured shapes of %s", len(measured), file)


@cache
def gemm_choice(
    m: int,
    n: int,
    k: int,
    *,
    gemm: str = "fprop",
    experts: int = 0,
    architecture: int = HOPPER,
    backend: str = "triton",
) -> GemmChoice:
    """Whether a layer's GEMM is faster in FP8 or in BF16; m tokens, n output and k input features, of all experts.

    For the backend `triton` what gpu_check measured decides where it measured a shape within a factor of two; otherwise
    a public figure does; where there is none the answer is BF16. `architecture` is the compute capability as 90 or 100.
    Raises UnknownOptionError for a GEMM that is none of GEMMS.
    """
    require_option("gemm", gemm, GEMMS)
    if backend not in DEVICE_BACKENDS:
        return GemmChoice(precision="bf16", ratio=None, reason="a CPU only emulates FP8")
    nearest = _nearest(architecture, gemm, experts, (m, n, k)) if backend == "triton" else None
    if nearest is not None:
        shape = "x".join(map(str, nearest.shape))
        reason = f"{nearest.ratio:.2f} of the time of BF16 at {shape}, measured on {nearest.machine}"
        return GemmChoice(precision=nearest.precision, ratio=nearest.ratio, reason=reason)
    figure = PUBLIC.get((architecture, backend, gemm if experts else "dense"))
    if figure is None:
        reason = f"{backend!r} is not measured on compute capability {architecture / 10}; run benchmarks/gpu_check.py"
        return GemmChoice(precision="bf16", ratio=None, reason=reason)
    precision = "fp8" if figure.ratio < 1 else "bf16"
    reason = f"about {figure.ratio:.2f} of the time of BF16 by a public figure: {figure.source}"
    return GemmChoice(precision=precision, ratio=figure.ratio, reason=reason)


def fast_precision(
    precision: LinearPrecision,
    *,
    tokens: int,
    out_features: int,
    in_features: int,
    experts: int = 0,
    device: torch.device | str = "cuda",
) -> LinearPrecision:
    """The precision with BF16 in the place of FP8 where FP8 is not faster there; BF16 stays BF16.

    By gemm_choice, for the backend that multiplies on the device. What is replaced is logged, once for a shape.
    """
    device = torch.device(device)
    backend, architecture = gemm_backend_of(device), _architecture(device)
    slower = {}
    for gemm in GEMMS:
        choice = gemm_choice(
            tokens,
            out_features,
            in_features,
            gemm=gemm,
            experts=experts,
            architecture=architecture,
            backend=backend,
        )
        if getattr(precision, gemm) == "fp8" and choice.precision == "bf16":
            slower[gemm] = "bf16"
            _say(gemm, (tokens, out_features, in_features, experts), choice.reason)
    return replace(precision, **slower)  # type: ignore[arg-type]


@cache
def _say(gemm: str, shape: tuple[int, int, int, int], reason: str) -> None:
    tokens, out_features, in_features, experts = shape
    among = f" among {experts} experts" if experts else ""
    logger.info(
        "%s of %d tokens%s, %d to %d features: BF16, because FP8 is not faster (%s)",
        gemm, tokens, among, in_features, out_features, reason,
    )  # fmt: skip


def _nearest(architecture: int, gemm: str, experts: int, shape: tuple[int, int, int]) -> _Measured | None:
    """The measured shape closest to this one, if it is within NEAR in each dimension."""
    if 0 in shape:
        return None
    found = []
    for measured in _results().get(architecture, ()):
        if measured.gemm == gemm and (measured.experts > 0) == (experts > 0):
            distances = [abs(math.log(a / b)) for a, b in zip(shape, measured.shape, strict=True)]
            if max(distances) <= math.log(NEAR):
                found.append((sum(distances), measured.shape, measured))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _results() -> dict[int, tuple[_Measured, ...]]:
    if _Results.by_architecture is None:
        _Results.by_architecture = {}
        file = results_file()
        if file:
            use_results(file)
    return _Results.by_architecture


def _read(file: Path) -> tuple[_Measured, ...]:
    try:
        results = json.loads(file.read_text())
        return tuple(_measured(choice, results["machine"]) for choice in results["choices"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KernelError(
            f"{file} holds no choices of benchmarks/gpu_check.py ({type(error).__name__}: {error}): write it with "
            "`python benchmarks/gpu_check.py --json FILE` on the GPU"
        ) from error


def _measured(choice: dict[str, Any], machine: str) -> _Measured:
    gemm = choice["gemm"].removeprefix("grouped_")
    require_option("gemm", gemm, GEMMS)
    require_option("precision", choice["precision"], ("fp8", "bf16"))
    shape = int(choice["m"]), int(choice["n"]), int(choice["k"])
    gpu = machine.partition(";")[0]
    return _Measured(gemm, int(choice.get("e", 0)), shape, choice["precision"], float(choice["ratio"]), gpu)


def _architecture(device: torch.device) -> int:
    """Compute capability as 90 or 100; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_capability(device)[0] * 10
