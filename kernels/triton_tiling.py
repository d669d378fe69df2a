"""Triton: how a matrix is cut into tiles of rows that no segment shares."""

# Shapes: R rows (all leading dimensions together), C columns, E experts.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.triton_launch import next_power_of_two

ROW_TILE = 32
"""Rows a program takes where only the row layout is wanted: nothing is summed along them."""


@dataclass(frozen=True)
class Tiling:
    """How the rows are cut into tiles that no segment shares."""

    tile: int
    segments: int
    rows_per_segment: int
    row_tiles: int
    """Tiles of all segments; with offsets the most that there can be."""
    slots: int
    """A power of two above the number of segments, 0 where all are equal."""
    offsets: Tensor

    @classmethod
    def of(cls, x_RC: Tensor, rows_each: int, blocks: str, stats: bool, offsets: Tensor | None) -> Tiling:
        """Segments are the experts, the matrices, or (in rows only) nothing at all."""
        rows, rows_alone = x_RC.shape[0], not blocks
        if offsets is not None and (blocks or stats):
            experts = offsets.numel() - 1
            tiles = rows // BLOCK + experts + 1
            return cls(BLOCK, experts, 0, tiles, next_power_of_two(experts + 1), offsets)
        tile = ROW_TILE if rows_alone else BLOCK
        each = rows if rows_alone else rows_each
        segments = 1 if rows_alone else (rows // rows_each if rows_each else 0)
        return cls(tile, segments, each, segments * -(-each // tile), 0, x_RC)
