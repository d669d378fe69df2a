"""Picks 128 x 128 tiles of an operand, and copies no others."""

# Shapes: E matrices of one size, T rows, K columns, n tiles picked of each matrix, B = 128.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
"""Rows and columns: every block of every layout lies within one tile, so a tile's statistics are exact."""

FEW_TILES = 4
"""Up to this many tiles in all, picking one costs as much as measuring them."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Some tiles of each of E matrices, the same ones of every matrix."""

    values_EnRC: Tensor
    """[E, n, R, C], 128 x 128 or as high and wide as the matrix; zeros where a tile reaches beyond it."""
    padding: int
    """How many of these zeros each matrix has."""

    @property
    def matrices(self) -> Tensor:
        """The tiles of all matrices, [E n, R, C]."""
        return self.values_EnRC.flatten(0, 1)


def tiles_of(rows: int, columns: int) -> int:
    """How many tiles cover a matrix."""
    return -(-rows // TILE) * -(-columns // TILE)


def step_between(stride: int, *grid: int) -> int:
    """The stride, or the next number that shares no factor with any of these: no column or row is always the same."""
    while any(math.gcd(stride, size) > 1 for size in grid):
        stride += 1
    return stride


def positions(number: int, step: int, turn: int) -> range:
    """Which of `number` places are picked at the turn-th time: at least one, and each of them within `step` turns."""
    if step >= number:
        return range(turn % number, turn % number + 1)
    return range(turn % step, number, step)


def pick(x_ETK: Tensor, stride: int, turn: int, *, least: int = 1) -> Picked:
    """One tile in `stride` of each matrix; least: rows of a tile at least, even where the matrix has fewer.

    On a device the places are computed there: nothing is copied to it.
    """
    _, rows, columns = x_ETK.shape
    down, across = -(-rows // TILE), -(-columns // TILE)
    places = positions(down * across, step_between(stride, down, across), turn)
    size = (max(least, min(TILE, rows)), min(TILE, columns))
    elements = (_elements(place, across, rows, columns) for place in places)
    copied = _copied(x_ETK, places, across, size) if x_ETK.is_cpu else _gathered(x_ETK, places, across, size)
    return Picked(copied, len(places) * size[0] * size[1] - sum(elements))


def pick_columns(x_TK: Tensor, stride: int, turn: int) -> Tensor:
    """One band of 128 columns in `stride`, all rows: for rows that belong to experts, which only the device knows."""
    columns = x_TK.shape[1]
    across = -(-columns // TILE)
    places = positions(across, step_between(stride, across), turn)
    bands = [x_TK[:, place * TILE : (place + 1) * TILE] for place in places]
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim=1)


def _elements(place: int, across: int, rows: int, columns: int) -> int:
    """Elements of the matrix in a tile."""
    down, right = divmod(place, across)
    return min(TILE, rows - down * TILE) * min(TILE, columns - right * TILE)


def _copied(x_ETK: Tensor, places: range, across: int, size: tuple[int, int]) -> Tensor:
    """Tile by tile: on a CPU faster than an index for each element."""
    matrices, rows, columns = x_ETK.shape
    ragged = rows % size[0] or columns % size[1]
    make = x_ETK.new_zeros if ragged else x_ETK.new_empty
    copied = make((matrices, len(places), *size))
    for at, place in enumerate(places):
        down, right = (index * TILE for index in divmod(place, across))
        tile = x_ETK[:, down : down + TILE, right : right + TILE]
        copied[:, at, : tile.shape[1], : tile.shape[2]] = tile
    return copied


def _gathered(x_ETK: Tensor, places: range, across: int, size: tuple[int, int]) -> Tensor:
    """All tiles in one call, their places counted out on the device."""
    _, rows, columns = x_ETK.shape
    place_n = torch.arange(places.start, places.stop, places.step, device=x_ETK.device)
    within_R, within_C = (torch.arange(length, device=x_ETK.device) for length in size)
    row_nR = place_n.div(across, rounding_mode="floor")[:, None] * TILE + within_R
    column_nC = (place_n % across)[:, None] * TILE + within_C
    inside_nRC = (row_nR < rows)[:, :, None] & (column_nC < columns)[:, None, :]
    rows_nR1 = row_nR.clamp(max=rows - 1)[:, :, None]
    columns_n1C = column_nC.clamp(max=columns - 1)[:, None, :]
    found_EnRC = x_ETK[:, rows_nR1, columns_n1C]
    # A tile that ends with the matrix is filled up with zeros, not with what was read in its place.
    return torch.where(inside_nRC, found_EnRC, found_EnRC.new_zeros(()))
