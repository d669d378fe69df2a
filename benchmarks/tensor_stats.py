"""tensor_stats against a copy of the same tensor, on one thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
import torch
from torch import Tensor

from fp8_safeguard.kernels import quantize, tensor_stats

GOAL = 2.5
"""Times a copy, for the native kernels; what kernels_cpu.py runs the fallbacks against is 12."""


def cases(quick: bool) -> Sequence[harness.Case]:
    """Square and oblong matrices in bfloat16, then float32 and quantisation for comparison."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    size = 1024 if quick else 4096
    headline = torch.randn(size, size, generator=generator).bfloat16()
    found = [stats_case("tensor_stats_bf16_vs_copy", headline, "row", GOAL)]
    for rows, columns in ((1024, 1024), (1024, 4096), (4096, 1024), (2048, 2048)):
        x = torch.randn(rows, columns, generator=generator).bfloat16()
        found += [
            stats_case(f"bf16_{layout}_{rows}x{columns}_vs_copy", x, layout)
            for layout in ("row", "col", "tile")
        ]
    full = torch.randn(2048, 2048, generator=generator)
    found += [
        stats_case(f"fp32_{layout}_2048x2048_vs_copy", full, layout) for layout in ("row", "col", "tile")
    ]
    half = full.bfloat16()
    found += [
        copy_case(
            f"quantize_bf16_{layout}_2048x2048_vs_copy",
            half,
            lambda layout=layout: quantize(half, layout=layout),
        )
        for layout in ("row", "col", "tile")
    ]
    return found


def stats_case(name: str, x: Tensor, layout: str, goal: float | None = None) -> harness.Case:
    """tensor_stats of x against x copied."""
    return copy_case(name, x, lambda: tensor_stats(x, layout=layout), goal)


def copy_case(name: str, x: Tensor, ours: Callable[[], object], goal: float | None = None) -> harness.Case:
    """Something against x copied into memory that exists already."""
    target = torch.empty_like(x)
    return harness.Case(name=name, ours=ours, baseline=lambda: target.copy_(x), goal=goal, repeats=3)


if __name__ == "__main__":
    harness.main("tensor_stats", cases)
