"""Statistics of FP8 operands, as they pass, into the step's frame."""

# Shapes: T tokens, K features of an operand, N output features, E experts, V = 29 TensorStats entries, S of them.

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from fp8_safeguard.hooks import judge, recompute, tiles
from fp8_safeguard.hooks.budget import WHOLE, Scope
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.kernels import OperandFormat, layout_stats, tensor_stats
from fp8_safeguard.kernels.stats import LAYOUT_PAIR
from fp8_safeguard.kernels.tiles import multiplies_codes
from fp8_safeguard.monitor.stats import COLUMNS

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

SAMPLED_COLUMNS = ("count", "zeros", "underflow", "saturated", "nan", "inf")
"""What some tiles say of the whole: its rates, with the number of elements that they were counted in.

Of 1,024 x 2,048 elements one tile in 17 gives an underflow rate above 1e-3 within 10 % rms. A cosine, SQNR, amax or
kurtosis of the whole hangs on a few tiles (1 - cosine off by up to 1400 %), so tiles do not speak of them. An amax of
all elements would cost as much again as the tiles in both layouts (0.6 ms and 0.55 ms in float32, where all of it takes
1.8 ms), a count of all non-finite ones 10 ms: that waits for the layer's turn. A NaN that spreads is in every layer's
tiles a step later.
"""

_COUNT, _ZEROS = COLUMNS.index("count"), COLUMNS.index("zeros")
_FIRST_UNSAMPLED = len(SAMPLED_COLUMNS)
assert COLUMNS[:_FIRST_UNSAMPLED] == SAMPLED_COLUMNS


class _How(TypedDict):
    """Format of an operand, as the kernels take it."""

    fmt: str
    scale: str
    multiplier: float
    offsets: Tensor | None
    tensor_scale: float | None
    amax_floor: float


def measure(
    session: Session,
    layer: ObservedLayer,
    x_TK: Tensor,
    operand: OperandFormat,
    *,
    row: Part | None = None,
    col: Part | None = None,
    offsets: Tensor | None = None,
) -> None:
    """Statistics of one operand in one or both of its layouts; with offsets by expert.

    Of a layer that is not measured in full now, one tile in so many is read, of experts' rows one band of columns. An
    operand that was measured a moment ago, as the one input of q, k and v, is not measured again.
    """
    parts = [part for part in (row, col) if part is not None]
    if session.frame is None or not parts:
        return
    layouts = LAYOUT_PAIR if len(parts) == 2 else ("col",) if row is None else ("row",)
    begun = session.meter.begin_operands()
    scope = session.scope(layer)
    sampled = not scope.full and tiles.tiles_of(*x_TK.shape) > tiles.FEW_TILES
    which = scope if sampled else WHOLE

    def compute() -> list[Tensor]:
        return _statistics(x_TK, layouts, operand, offsets, which)

    asked = (layouts, operand, which)
    vectors = compute() if offsets is not None else session.recent.get(x_TK, asked, compute)
    for part, vectors_EV in zip(parts, vectors, strict=True):
        # Those that one native call measured are numpy's.
        session.frame.add(layer.row(part), torch.as_tensor(vectors_EV))
    session.meter.end_operands(begun, layer.name)


def measure_weight(session: Session, layer: ObservedLayer, w: Tensor, operand: OperandFormat) -> None:
    """Statistics of a [N, K] or [E, N, K] weight in tiles; no tile straddles two experts.

    Where a GEMM will be emulated its codes are made now, for both; then all of it is measured.
    """
    if session.frame is None:
        return
    scope = session.scope(layer)
    if judge.wants_codes(session, layer) and multiplies_codes(w):
        # Out of its turn it is for the judge that all of it is read: so is the time.
        begun = session.meter.begin_operands() if scope.full else None
        vectors_EV, codes = recompute.weigh(w, operand)
        layer.step.codes = None if codes is None else (judge.place_of(w), codes)
    else:
        begun = session.meter.begin_operands()
        vectors_EV = _weight_statistics(w, operand, scope)
    session.frame.add(layer.row(Part.W_TILE), vectors_EV)
    if begun is not None:
        session.meter.end_operands(begun, layer.name)


def _weight_statistics(w: Tensor, operand: OperandFormat, scope: Scope) -> Tensor:
    """float64 [E, V] of all of a weight or of its tiles."""
    w_ENK, padding = w if w.dim() == 3 else w[None], 0
    experts, whole = len(w_ENK), scope.full or tiles.tiles_of(*w.shape[-2:]) <= tiles.FEW_TILES
    if not whole:
        # An expert's tiles lie one below the other: each has to fill a block.
        picked = tiles.pick(w_ENK, scope.stride, scope.turn, least=tiles.TILE if experts > 1 else 1)
        padding = picked.padding
        w_ENK = picked.values_EnRC.flatten(1, 2) if w.dim() == 3 else picked.matrices
    offsets = None
    if w.dim() == 3:
        offsets = torch.arange(experts + 1, dtype=torch.int32, device=w.device) * w_ENK.shape[1]
        w_ENK = w_ENK.flatten(0, 1)
    vectors = tensor_stats(w_ENK, layout="tile", **_how(operand, offsets))
    return _by_expert(vectors, padding, whole=whole)


def _statistics(
    x_TK: Tensor, layouts: tuple[str, ...], operand: OperandFormat, offsets: Tensor | None, scope: Scope
) -> list[Tensor]:
    """float64 [E, V] of each layout, of all of x or of its tiles."""
    padding, how = 0, _how(operand, offsets)
    if not scope.full and offsets is None:
        picked = tiles.pick(x_TK[None], scope.stride, scope.turn)
        x_TK, padding = picked.matrices, picked.padding
    elif not scope.full:
        x_TK = tiles.pick_columns(x_TK, scope.stride, scope.turn)
    both = len(layouts) == 2
    found = layout_stats(x_TK, **how).unbind() if both else [tensor_stats(x_TK, layout=layouts[0], **how)]
    return [_by_expert(vectors, padding, whole=scope.full) for vectors in found]


def _by_expert(vectors: Tensor, padding: int, *, whole: bool) -> Tensor:
    """float64 [E, V], E = 1 for a dense layer; NaN, which no count can be, for what tiles do not tell."""
    vectors_EV = vectors if vectors.dim() == 2 else vectors.unsqueeze(0)
    if not whole:
        vectors_EV[:, _FIRST_UNSAMPLED:] = math.nan
        # Zeros that only fill up a tile are no elements of the operand.
        vectors_EV[:, _COUNT] -= padding
        vectors_EV[:, _ZEROS] -= padding
    return vectors_EV


def _how(operand: OperandFormat, offsets: Tensor | None) -> _How:
    return {
        "fmt": operand.fmt,
        "scale": operand.scale,
        "multiplier": operand.multiplier,
        "offsets": offsets,
        "tensor_scale": operand.tensor_scale,
        "amax_floor": operand.amax_floor,
    }
