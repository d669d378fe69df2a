"""Triton: what a fused operation launches, and its results."""

# Shapes: R rows, C columns, E experts, S a TensorStats vector.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.routing import Produced, Wanted
from fp8_safeguard.kernels.triton_fused import Request, plan
from fp8_safeguard.kernels.triton_launch import Launch

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
WARPS_OF_ROWS, WARPS_OF_BLOCKS = 4, 16
"""Of a tile of 32 and of 128 rows: 32 elements a thread, so that a computed tile fits into registers twice."""
UNFUSED_FLOATS = {"enable_fp_fusion": False}
"""A product and a sum round one after the other, as in the unfused chain. tl.fma stays one rounding."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a fused kernel writes its tiles, and what follows it."""

    arguments: dict[str, Any]
    """What place_tile and finish_tile take, by name."""
    row_tiles: int
    column_tiles: int
    warps: int
    after: list[Launch]
    """The kernels of tiles that are not plain, and of the statistics."""
    produced: Produced

    def launch(self, kernel: Any, programs: int, arguments: dict[str, Any]) -> list[Launch]:
        """The fused kernel, then those that follow."""
        known = {name: value for name, value in self.arguments.items() if name in kernel.arg_names}
        first = Launch(
            kernel=kernel, grid=(programs,), arguments=known | arguments, warps=self.warps, stages=1,
            options=UNFUSED_FLOATS,
        )  # fmt: skip
        return [first, *self.after]


def target(
    shape: tuple[int, int],
    like: Tensor,
    wanted: Wanted,
    offsets: Tensor | None = None,
    *,
    aligned: bool = False,
) -> Target:
    """Outputs of a fused operation of that shape; values have the dtype of `like`.

    Statistics are taken from the values by the kernels of triton_fused.py: inside a kernel that computes its tile
    they would spill registers. Values are written for them, and where a tile is not plain, wanted or not; so the
    memory is taken in any case, for as long as the kernels run.
    """
    values_RC = torch.empty(shape, dtype=like.dtype, device=like.device)
    quantised = wanted.row or bool(wanted.blocks)
    request = Request(
        row=wanted.row or not quantised,
        blocks=wanted.blocks,
        code_format=get_format(wanted.fmt),
        fmt=wanted.fmt,
        scale=wanted.scale,
        multiplier=wanted.multiplier,
        store=quantised,
        aligned=aligned,
        k_major=aligned or offsets is None,
    )
    launches, fused = plan(values_RC, request, offsets)
    after, stats = launches[1:] if quantised else [], None
    if wanted.stats:
        measuring, measured = plan(values_RC, replace(request, store=False, stats=True), offsets)
        after, stats = after + measuring, measured.stats
    arguments = launches[0].arguments | {
        "values_ptr": values_RC,
        "VALUES": wanted.values or wanted.stats,
        "ROW": wanted.row,
        "bounds_ptr": values_RC if offsets is None else offsets,
        "experts": 0 if offsets is None else offsets.numel() - 1,
        "BOUNDED": offsets is not None,
    }
    return Target(
        arguments=arguments,
        row_tiles=arguments["row_tiles"],
        column_tiles=-(-shape[1] // BLOCK),
        warps=WARPS_OF_BLOCKS if wanted.blocks else WARPS_OF_ROWS,
        after=after,
        produced=Produced(values_RC if wanted.values else None, fused.row, fused.block, stats),
    )


def run(launches: list[Launch]) -> None:
    """Start the kernels in order."""
    for launch in launches:
        launch.run()


def source(x: Tensor) -> Tensor:
    """x without its history, neighbouring columns next to each other: copied unless they are."""
    if x.dtype not in SOURCES:
        raise OperandError(f"a {x.dtype} tensor has no Triton kernel here: pass bfloat16, float16 or float32")
    return x.detach() if x.stride(-1) == 1 or x.numel() == 0 else x.detach().contiguous()
