"""CPU kernels, native and fallbacks, against a copy and a bf16 matmul, on one thread."""

# Shapes: M x N a result, K the summed dimension, R rows, C columns.

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
import torch
from torch import Tensor

from fp8_safeguard.kernels import dispatch, fp8_gemm_nt, fp8_linear, native, quantize, tensor_stats
from fp8_safeguard.kernels.layouts import quantize_layouts

QUANTIZE_GOALS = {"native": 4.0, "numba": 12.0}
"""Times a copy of the tensor: codes, scales and statistics of both layouts that a linear layer needs."""
STATS_GOALS = {"native": 2.5, "numba": 12.0}
"""Times a copy: statistics alone."""
GEMM_GOALS = {"native": 5.0, "numba": 14.0}
"""Times one bf16 matmul of the same shape: FP8 training on a CPU then takes minutes, not hours."""
SLOW_PAIRS = 3
"""The reference needs seconds for what others do in milliseconds."""


def cases(quick: bool) -> Sequence[harness.Case]:
    """Each backend's quantisation, statistics and products."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    size = 2048 if quick else 4096
    x_RC = torch.randn(size, size, generator=generator).bfloat16()
    quantising = working("quantising", {name: not_quantising(name) for name in dispatch.BACKENDS})
    found = [quantize_case(x_RC, name) for name in quantising]
    found += [stats_case(x_RC, name) for name in quantising]
    products = working("products", {name: dispatch.unavailable(name, "cpu") for name in dispatch.BACKENDS})
    for rows, name in ((1024, ""), (4096, "_4096x1024x1024")):
        a_MK, b_NK = (torch.randn(n, 1024, generator=generator).bfloat16() for n in (rows, 1024))
        found += [gemm_case(f"gemm_vs_bf16_mm{name}", a_MK, b_NK, backend) for backend in products]
    found.append(linear_case(a_MK, b_NK))
    return found


def not_quantising(backend: str) -> str:
    """Why a backend cannot quantise here; empty if it can."""
    if backend == "native" and native.library() is None:
        return "the native kernels were not built; install with a C++ compiler"
    if backend == "numba" and not dispatch.numba_installed():
        return "numba is not installed; install fp8-safeguard[train]"
    return ""


def working(what: str, missing: dict[str, str]) -> list[str]:
    """The backends that nothing is missing of; which are left out is said."""
    for backend, reason in missing.items():
        if reason:
            print(f"{what} with {backend!r} left out: {reason}", file=sys.stderr)
    return [backend for backend, reason in missing.items() if not reason]


def named(case: str, backend: str) -> str:
    """The native kernels' case has the plain name."""
    return case if backend == "native" else f"{case}_{backend}"


def running(backend: str, function: Callable[[], object]) -> Callable[[], object]:
    """The function with that backend, which is otherwise chosen once for the process."""

    def call() -> object:
        with patch.object(dispatch, "backend", lambda: backend):
            return function()

    return call


def copy_case(
    name: str, x_RC: Tensor, backend: str, function: Callable[[], object], goals: dict[str, float]
) -> harness.Case:
    """Something with that backend against x copied into memory that exists already."""
    target = torch.empty_like(x_RC)
    return harness.Case(
        name=named(name, backend),
        ours=running(backend, function),
        baseline=lambda: target.copy_(x_RC),
        goal=goals.get(backend),
        most_pairs=SLOW_PAIRS if backend == "reference" else None,
    )


def quantize_case(x_RC: Tensor, backend: str) -> harness.Case:
    """Row and col codes, scales and TensorStats of both."""
    name = "quantize_both_layouts_stats_bf16_vs_copy"
    return copy_case(
        name, x_RC, backend, lambda: quantize_layouts(x_RC, blocks="col", stats=True), QUANTIZE_GOALS
    )


def stats_case(x_RC: Tensor, backend: str) -> harness.Case:
    """TensorStats of row blocks."""
    return copy_case("tensor_stats_bf16_vs_copy", x_RC, backend, lambda: tensor_stats(x_RC), STATS_GOALS)


def gemm_case(name: str, a_MK: Tensor, b_NK: Tensor, backend: str) -> harness.Case:
    """Quantised operands multiplied against one bf16 matmul of the same shape, operands in the same order."""
    a, b = quantize(a_MK), quantize(b_NK, layout="tile")
    return harness.Case(
        name=named(name, backend),
        ours=lambda: fp8_gemm_nt(a, b, torch.bfloat16, backend=backend),
        baseline=lambda: torch.mm(a_MK, b_NK.t()),
        goal=GEMM_GOALS.get(backend),
        repeats=3,
    )


def linear_case(x_TK: Tensor, w_NK: Tensor) -> harness.Case:
    """A linear layer forward and backward, quantisation included, against the same layer in bf16."""
    dy_TN = torch.randn(x_TK.shape[0], w_NK.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [x_TK.clone().requires_grad_(), w_NK.clone().requires_grad_()]

    def both_passes(layer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(*leaves), leaves, dy_TN)

    return harness.Case(
        name="linear_forward_backward_vs_bf16",
        ours=both_passes(fp8_linear),
        baseline=both_passes(torch.nn.functional.linear),
    )


if __name__ == "__main__":
    harness.main("kernels_cpu", cases)
