"""Where each token goes: the routing map, padding included."""

# Shapes: T tokens, k experts of a token, E experts, R rows of the permuted tensors, D their columns, S a TensorStats vector.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_safeguard.kernels.errors import OperandError, require_option
from fp8_safeguard.kernels.operands import check_options
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.monitor.stats import COLUMNS

ALIGNMENT = 16
"""Rows an expert's share is rounded up to: a `col` code is one byte a row, and tensor memory copies start at multiples
of 16 bytes."""

_COUNT, _ZEROS, _ROWS = (COLUMNS.index(name) for name in ("count", "zeros", "rows"))


@dataclass(frozen=True, eq=False)
class RoutingMap:
    """Rows sorted by expert, then by token and slot; each expert's share rounded up with zero rows to `alignment`.

    Nothing here needs the device to be asked: R follows from the shapes alone. Rows behind `offsets[-1]` belong
    to nobody, are zero and are never measured.
    """

    source_R: Tensor
    """int32 [R]: the token that a row is a copy of; -1 on padding and behind the last expert."""
    position_Tk: Tensor
    """int32 [T, k]: the row of each of a token's copies; -1 for a copy that goes nowhere (expert id below 0)."""
    offsets: Tensor
    """int32 [E + 1]: first row of each expert, and where the last one ends; aligned."""
    counts_E: Tensor
    """int32 [E]: copies assigned to each expert, never rounded up; what load is measured with."""
    alignment: int = 1
    """What every offset is known to be a multiple of; 16 lets `col` codes be stored as tensor cores read them."""

    gapless: bool = False
    """Whether it is known, without asking the device, that there is no -1: no padding, and every copy goes somewhere."""

    @property
    def rows(self) -> int:
        """R: rows of the permuted tensors."""
        return self.source_R.shape[0]

    @property
    def experts(self) -> int:
        """E."""
        return self.counts_E.shape[0]

    @property
    def aligned(self) -> bool:
        """Whether R and every offset are multiples of 16."""
        return self.alignment % ALIGNMENT == 0 == self.rows % ALIGNMENT

    def without_padding(self, stats: Tensor, columns: int) -> Tensor:
        """TensorStats [..., E, S] of a permuted [R, columns] tensor, the zero rows of the padding taken out again.

        A zero row adds to count, zeros and rows and to nothing else, so subtracting is exact.
        """
        padding_E = (self.offsets.diff() - self.counts_E).to(stats.dtype)
        corrected = stats.clone()
        corrected[..., _COUNT] -= padding_E * columns
        corrected[..., _ZEROS] -= padding_E * columns
        corrected[..., _ROWS] -= padding_E
        return corrected


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a fused operation returns of its result besides, or instead of, the values.

    Raises UnknownOptionError for a format, scale or layout that does not exist, OperandError for statistics of no layout.
    """

    values: bool = True
    """The result itself, in the input's dtype."""
    row: bool = False
    """Its `row` codes."""
    blocks: str = ""
    """`col` for its `col` codes too; their blocks start anew at each expert's first row."""
    fmt: str = "e4m3"
    """`e4m3` or `e5m2`."""
    scale: str = "fp32"
    """`fp32` or `pow2`."""
    multiplier: float = 1.0
    """Power of two on the scale."""
    stats: bool = False
    """TensorStats of the layouts asked for."""

    def __post_init__(self) -> None:
        check_options("row", self.fmt, self.scale, self.multiplier)
        require_option("blocks", self.blocks, ("", "col"))
        if self.stats and not (self.row or self.blocks):
            raise OperandError("stats of no layout are wanted: pass row=True, or blocks='col'")


class Produced(NamedTuple):
    """What a fused operation returned; None where it was not wanted."""

    values: Tensor | None
    """In the input's dtype."""
    row: QuantizedTensor | None
    """quantize(values, layout="row"), bit for bit."""
    block: QuantizedTensor | None
    """quantize(values, layout="col"), bit for bit."""
    stats: Tensor | None
    """float64 [slots, S], with offsets [slots, E, S]: the row slot first, then the block slot."""


def spread(weight_Tk: Tensor, routing_map: RoutingMap) -> Tensor:
    """[R]: each row's weight, 0 on padding rows, with gradients; the `probability` of `swiglu`."""
    rows = routing_map.rows
    index_N, weight_N = routing_map.position_Tk.reshape(-1).long(), weight_Tk.reshape(-1)
    if routing_map.gapless:
        return weight_Tk.new_zeros(rows).scatter(0, index_N, weight_N)
    # A copy that goes nowhere lands in one row too many, which is cut off.
    index_N = torch.where(index_N < 0, rows, index_N)
    return weight_Tk.new_zeros(rows + 1).scatter(0, index_N, weight_N)[:rows]


def capacity(copies: int, experts: int, alignment: int) -> int:
    """R: the most rows that `copies` can take once each expert's share is rounded up to `alignment`."""
    if alignment == 1:
        return copies
    return copies + -copies % alignment + experts * alignment


def check_routing(expert_Tk: Tensor, experts: int, alignment: int) -> None:
    """Raise OperandError unless a routing map can be made; ids are looked at on a CPU only."""
    if expert_Tk.dim() != 2 or expert_Tk.dtype not in (torch.int32, torch.int64):
        raise OperandError(
            f"expert_Tk is {expert_Tk.dtype} {list(expert_Tk.shape)}: pass int32 [tokens, experts of a token]"
        )
    if experts < 1 or alignment < 1:
        raise OperandError(f"experts={experts} and alignment={alignment} must be at least 1")
    read = expert_Tk.device.type == "cpu" and not torch.compiler.is_compiling()
    if read and expert_Tk.numel() and int(expert_Tk.max()) >= experts:
        raise OperandError(
            f"expert_Tk holds id {int(expert_Tk.max())}, the layer has {experts} experts: ids are 0 to {experts - 1}, "
            "and -1 for a copy that goes nowhere"
        )
