"""Recomputes grouped GEMMs whose experts' bounds only the device knows."""

# Shapes: T tokens, N output features, K input features, E experts, R sampled rows or features, I tiles of up to B rows
# of one expert each, D the summed dimension, M columns of a result, V = 29 TensorStats entries.
# Every size is known on the host; which expert a tile belongs to is looked up on the device, which is never waited for.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.hooks import recompute, whatif
from fp8_safeguard.hooks.buffer import AMAX
from fp8_safeguard.hooks.whatif import Form, Forms
from fp8_safeguard.kernels import LinearPrecision, OperandFormat, QuantizedTensor, quantize
from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

ROOM = 2**25
"""Weights and operands that are gathered at once: 128 MB in float32."""


@dataclass(frozen=True)
class Tiles:
    """Rows of a [T, C] operand, each tile's within one expert."""

    index_IB: Tensor
    """Rows; some row or other where not valid."""
    valid_IB: Tensor
    expert_I: Tensor
    """The tile's expert; E where no row of it is valid."""
    experts: int

    def parts(self, elements: int) -> Iterator[Tiles]:
        """Some at a time, where each tile needs that many elements."""
        step = max(1, ROOM // max(1, elements))
        for at in range(0, self.index_IB.shape[0], step):
            chosen = slice(at, at + step)
            yield Tiles(self.index_IB[chosen], self.valid_IB[chosen], self.expert_I[chosen], self.experts)

    def rows(self, x_TC: Tensor) -> Tensor:
        """[I, B, C], zeros where not valid."""
        return torch.where(self.valid_IB[:, :, None], x_TC[self.index_IB], 0.0)

    def weights(self, w_ENK: Tensor) -> Tensor:
        """[I, N, K]: each tile's expert's."""
        return w_ENK[self.expert_I.clamp(max=self.experts - 1)]

    def summed(self, values: Tensor) -> Tensor:
        """[I, ...] summed up by expert: [E, ...]."""
        total = values.new_zeros(self.experts + 1, *values.shape[1:])
        return total.index_add_(0, self.expert_I, values)[: self.experts]


def single_rows(rows_R: Tensor, offsets: Tensor) -> Tiles:
    """A tile for each of those rows; rows behind the last expert are nobody's."""
    bounds, experts = offsets.to(torch.int64), offsets.shape[0] - 1
    expert_R = torch.bucketize(rows_R, bounds[1:], right=True)
    return Tiles(rows_R[:, None], (expert_R < experts)[:, None], expert_R, experts)


def all_rows(offsets: Tensor, total: int) -> Tiles:
    """Every expert's rows cut into blocks of 128 from its first one; as many tiles as there can be, the surplus empty."""
    bounds, experts = offsets.to(torch.int64), offsets.shape[0] - 1
    blocks_E = (bounds.diff() + BLOCK - 1) // BLOCK
    ends_E = blocks_E.cumsum(0)
    tile_I = torch.arange(total // BLOCK + experts, device=offsets.device)
    expert_I = torch.bucketize(tile_I, ends_E, right=True)
    own_I = expert_I.clamp(max=experts - 1)
    first_I = bounds[own_I] + (tile_I - (ends_E - blocks_E)[own_I]) * BLOCK
    index_IB = first_I[:, None] + torch.arange(BLOCK, device=offsets.device)
    valid_IB = (index_IB < bounds[own_I + 1][:, None]) & (expert_I < experts)[:, None]
    return Tiles(index_IB.clamp(0, max(0, total - 1)), valid_IB, expert_I, experts)


def fprop_error(
    x_TK: Tensor,
    w_ENK: Tensor,
    y_TN: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    *,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `recompute.fprop_error` by expert, of those rows; rows None: of all."""
    forms = None if emulate is None else whatif.plain("fprop", emulate)
    found = _Rows(x_TK, w_ENK.mT, offsets, rows, depth=-1).judged(forms, None if emulate else y_TN)
    return found[whatif.PLAIN]


def dgrad_error(
    dy_TN: Tensor,
    w_ENK: Tensor,
    dx_TK: Tensor | None,
    offsets: Tensor,
    rows: Tensor | None,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `recompute.dgrad_error` by expert, of those rows; rows None: of all."""
    forms = None if emulate is None else whatif.plain("dgrad", emulate)
    whole = _Rows(dy_TN, w_ENK, offsets, rows, depth=-2, gain=gain_K)
    return whole.judged(forms, None if emulate else dx_TK)[whatif.PLAIN]


def wgrad_error(
    dy_TN: Tensor,
    x_TK: Tensor,
    dw_ENK: Tensor | None,
    offsets: Tensor,
    features: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `recompute.wgrad_error` by expert, the same output features of each."""
    if emulate is not None:
        forms = whatif.plain("wgrad", emulate)
        return wgrad_variants(dy_TN, x_TK, offsets, features, forms, gain_K)[whatif.PLAIN]
    assert dw_ENK is not None
    gain = None if gain_K is None else 1.0 / gain_K
    exact_ERK = _wgrad(dy_TN, x_TK, offsets, features, None)
    return _compare_all(exact_ERK, dw_ENK[:, features], gain)


def fprop_variants(
    x_TK: Tensor, w_ENK: Tensor, offsets: Tensor, rows: Tensor, forms: Forms
) -> dict[str, Tensor]:
    """float64 [E, V] by variant: `whatif.fprop` by expert."""
    return _Rows(x_TK, w_ENK.mT, offsets, rows, depth=-1).judged(forms, None)


def dgrad_variants(
    dy_TN: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    rows: Tensor,
    forms: Forms,
    gain_K: Tensor | None = None,
) -> dict[str, Tensor]:
    """float64 [E, V] by variant: `whatif.dgrad` by expert."""
    return _Rows(dy_TN, w_ENK, offsets, rows, depth=-2, gain=gain_K).judged(forms, None)


def wgrad_variants(
    dy_TN: Tensor,
    x_TK: Tensor,
    offsets: Tensor,
    features: Tensor,
    forms: Forms,
    gain_K: Tensor | None = None,
) -> dict[str, Tensor]:
    """float64 [E, V] by variant: `whatif.wgrad` by expert."""
    gain = None if gain_K is None else 1.0 / gain_K
    exact_ERK = _wgrad(dy_TN, x_TK, offsets, features, None)
    return {
        name: _compare_all(exact_ERK, _wgrad(dy_TN, x_TK, offsets, features, pair), gain)
        for name, pair in forms.items()
    }


class _Rows:
    """A GEMM whose result has a row a token: a [T, D] times each expert's [D, M]."""

    def __init__(
        self,
        a_TD: Tensor,
        w_EDM: Tensor,
        offsets: Tensor,
        rows: Tensor | None,
        *,
        depth: int,
        gain: Tensor | None = None,
    ) -> None:
        self.a_TD, self.w_EDM, self.offsets = a_TD, w_EDM, offsets
        self.gain, self.depth = gain, depth
        """Whether the weight's memory has the summed dimension last (-1) or first (-2)."""
        whole = rows is None
        self.tiles = all_rows(offsets, a_TD.shape[0]) if rows is None else single_rows(rows, offsets)
        self.block = BLOCK if whole else 1
        self.codes: QuantizedTensor | None = None
        """Of all weights, where every tile reads the same ones."""

    def judged(self, forms: Forms | None, real_TM: Tensor | None) -> dict[str, Tensor]:
        """float64 [E, V] by variant; without forms of the real result, by the plain one's name."""
        totals: dict[str, Tensor] = {}
        if forms is not None and len(forms) == 1:
            [(_, weight)] = forms.values()
            self.codes = self._quantised(weight.operand)
        depth, width = self.w_EDM.shape[-2:]
        for tiles in self.tiles.parts(depth * width + self.block * (depth + width)):
            for name, vectors_IV in self._part(tiles, forms, real_TM).items():
                found = _by_expert(tiles, vectors_IV)
                totals[name] = found if name not in totals else _merged(totals[name], found)
        return totals

    def _part(self, tiles: Tiles, forms: Forms | None, real_TM: Tensor | None) -> dict[str, Tensor]:
        a_IBD, w_IDM = tiles.rows(self.a_TD), tiles.weights(self.w_EDM)
        exact_IBM = recompute.matmul(a_IBD, w_IDM)

        def compare(exact: Tensor, actual: Tensor) -> Tensor:
            return compare_tiles(exact, actual, tiles.valid_IB)

        if forms is None:
            assert real_TM is not None
            actual_IBM = real_TM[tiles.index_IB]
            if self.gain is not None:
                exact_IBM, actual_IBM = exact_IBM * self.gain, actual_IBM * self.gain
            return {whatif.PLAIN: compare(exact_IBM, actual_IBM)}

        def left(form: Form) -> Tensor:
            if form.blocks == "128x128":
                return self._in_tiles(tiles, form)
            amax = _amax(tiles, self.a_TD, self.offsets) if form.blocks == "tensor" else None
            return whatif.formed(a_IBD, "row", form, depth=-1, amax=amax)

        def right(form: Form) -> Tensor:
            if self.codes is not None:
                return self._dequantised(tiles, self.codes)
            # As the weight lies in memory: blocks do not depend on it, but what is contiguous is faster.
            if self.depth == -1:
                return whatif.formed(w_IDM.mT, "tile", form, depth=-1).mT
            return whatif.formed(w_IDM, "tile", form, depth=-2)

        return whatif.compared(exact_IBM, forms, left, right, gain=self.gain, compare=compare)

    def _quantised(self, operand: OperandFormat) -> QuantizedTensor:
        """Codes of the experts' weights, as they lie in memory."""
        w_ENK = self.w_EDM.mT if self.depth == -1 else self.w_EDM
        how: Any = {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}
        codes: QuantizedTensor = quantize(w_ENK, layout="tile", **how)
        return codes

    def _dequantised(self, tiles: Tiles, codes: QuantizedTensor) -> Tensor:
        """[I, D, M] in float32: each tile's expert's weight."""
        own_I = tiles.expert_I.clamp(max=tiles.experts - 1)
        # Codes move as bytes: float8 has few kernels.
        data = codes.data.view(torch.uint8)[own_I].view(codes.data.dtype)
        w_INK = QuantizedTensor(data, codes.scale[own_I], "tile", codes.fmt).dequantize()
        return w_INK.mT if self.depth == -1 else w_INK

    def _in_tiles(self, tiles: Tiles, form: Form) -> Tensor:
        """Each row out of the 128 x 128 blocks that it would lie in, cut from its expert's first row."""
        if self.block == BLOCK:
            return whatif.formed(tiles.rows(self.a_TD), "row", form, depth=-1)
        bounds = self.offsets.to(torch.int64)
        own_I = tiles.expert_I.clamp(max=tiles.experts - 1)
        row_I, first_I = tiles.index_IB[:, 0], bounds[own_I]
        begin_I = first_I + (row_I - first_I).div(BLOCK, rounding_mode="floor") * BLOCK
        index_IB = begin_I[:, None] + torch.arange(BLOCK, device=row_I.device)
        valid_IB = (index_IB < bounds[own_I + 1][:, None]) & tiles.valid_IB
        index_IB = index_IB.clamp(0, self.a_TD.shape[0] - 1)
        around = Tiles(index_IB, valid_IB, tiles.expert_I, tiles.experts)
        formed_IBD = whatif.formed(around.rows(self.a_TD), "row", form, depth=-1)
        at_I = (row_I - begin_I).clamp(0, BLOCK - 1)
        return formed_IBD[torch.arange(len(at_I), device=at_I.device), at_I][:, None]


def _wgrad(
    dy_TN: Tensor, x_TK: Tensor, offsets: Tensor, features: Tensor, forms: tuple[Form, Form] | None
) -> Tensor:
    """[E, R, K]: dY^T X of each expert's rows from operands in those forms; None: exactly."""
    total: Tensor | None = None
    every = all_rows(offsets, dy_TN.shape[0])
    wide = 2 * BLOCK * (dy_TN.shape[1] + x_TK.shape[1]) + len(features) * x_TK.shape[1]
    for tiles in every.parts(wide):
        dy_IBN, x_IBK = tiles.rows(dy_TN), tiles.rows(x_TK)
        if forms is None:
            left_IBR = dy_IBN[:, :, features]
        else:
            left_IBR = _column_form(tiles, dy_IBN, dy_TN, offsets, forms[0])[:, :, features]
            x_IBK = _column_form(tiles, x_IBK, x_TK, offsets, forms[1])
        product_IRK = recompute.matmul(left_IBR.mT, x_IBK)
        found = tiles.summed(product_IRK)
        total = found if total is None else total + found
    assert total is not None
    if forms is not None and forms[0].blocks == forms[1].blocks == "bf16":
        total = total.to(torch.bfloat16).to(total.dtype)
    return total


def _column_form(tiles: Tiles, part_IBC: Tensor, x_TC: Tensor, offsets: Tensor, form: Form) -> Tensor:
    """A wgrad operand: a tile is exactly one block along the tokens."""
    amax = _amax(tiles, x_TC, offsets) if form.blocks == "tensor" else None
    return whatif.formed(part_IBC, "col", form, depth=-2, amax=amax)


def _amax(tiles: Tiles, x_TC: Tensor, offsets: Tensor) -> Tensor:
    """[I, 1, 1]: the largest finite magnitude of each tile's expert."""
    bounds = offsets.to(torch.int64)
    rows = torch.arange(x_TC.shape[0], device=x_TC.device)
    expert_T = torch.bucketize(rows, bounds[1:], right=True)
    row_amax_T = whatif.finite_amax(x_TC[:, None])[:, 0, 0]
    amax_E = row_amax_T.new_zeros(tiles.experts + 1).scatter_reduce(0, expert_T, row_amax_T, "amax")
    return amax_E[tiles.expert_I][:, None, None]


def compare_tiles(exact: Tensor, actual: Tensor, valid_IB: Tensor) -> Tensor:
    """float64 [I, V]: `recompute.compare` of each tile's valid rows."""
    high, low, kept = exact.double(), actual.double(), valid_IB[:, :, None]
    finite = torch.isfinite(high) & torch.isfinite(low)
    nan = (torch.isnan(high) | torch.isnan(low)) & kept
    used = finite & kept
    high, low = torch.where(used, high, 0.0), torch.where(used, low, 0.0)
    both = (-2, -1)
    columns = {
        "count": valid_IB.sum(dim=1) * high.shape[-1],
        "nan": nan.sum(dim=both),
        "inf": (kept & ~finite & ~nan).sum(dim=both),
        "amax": high.abs().amax(dim=both),
        "sum_sq": high.square().sum(dim=both),
        "sum_sq_q": low.square().sum(dim=both),
        "sum_sq_err": (high - low).square().sum(dim=both),
    }
    vectors_IV = high.new_zeros(high.shape[0], VECTOR_LENGTH)
    for name, column_I in columns.items():
        vectors_IV[:, COLUMNS.index(name)] = column_I
    return vectors_IV


def _compare_all(exact_ERK: Tensor, actual_ERK: Tensor, gain: Tensor | None) -> Tensor:
    """float64 [E, V] of whole matrices."""
    if gain is not None:
        exact_ERK, actual_ERK = exact_ERK * gain, actual_ERK * gain
    valid_ER = torch.ones(exact_ERK.shape[:2], dtype=torch.bool, device=exact_ERK.device)
    return compare_tiles(exact_ERK, actual_ERK, valid_ER)


def _by_expert(tiles: Tiles, vectors_IV: Tensor) -> Tensor:
    """float64 [E, V]: the tiles' vectors merged."""
    total_EV = tiles.summed(vectors_IV)
    amax_E = vectors_IV.new_zeros(tiles.experts + 1)
    amax_E = amax_E.scatter_reduce(0, tiles.expert_I, vectors_IV[:, AMAX], "amax")
    total_EV[:, AMAX] = amax_E[: tiles.experts]
    return total_EV


def _merged(a_EV: Tensor, b_EV: Tensor) -> Tensor:
    amax_E = torch.maximum(a_EV[:, AMAX], b_EV[:, AMAX])
    total_EV = a_EV + b_EV
    total_EV[:, AMAX] = amax_E
    return total_EV
