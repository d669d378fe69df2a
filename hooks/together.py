"""Measures a plain use of a dense weight on a CPU in one native call."""

# Shapes: T tokens, N output features, K input features, V = 29 TensorStats entries.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.hooks import judge
from fp8_safeguard.hooks.budget import WHOLE
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.hooks.recompute import QuantisedWeight
from fp8_safeguard.kernels import LinearPrecision, OperandFormat, native_use
from fp8_safeguard.kernels.native_use import COL, PRODUCT, ROW, WEIGHT, Measured
from fp8_safeguard.kernels.stats import LAYOUT_PAIR

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session


def fprop(
    session: Session,
    layer: ObservedLayer,
    x_TK: Tensor,
    w_NK: Tensor,
    y_TN: Tensor | None,
    bias_N: Tensor | None,
    precision: LinearPrecision,
    *,
    columns: bool,
) -> bool:
    """What `operands.measure_weight`, `operands.measure` and `judge.fprop` do of a forward; whether it was done.

    Not for what needs more than all of the operands and sampled rows of a real result: then nothing was done.
    """
    frame = session.frame
    fits = (
        y_TN is not None
        and native_use.fits(x_TK, w_NK, precision.x, precision.w)
        and native_use.fits_result(y_TN)
    )
    if frame is None or not fits or not _is_plain(session, layer) or session.options.shadow:
        return False
    measured = _measured(
        session, layer, x_TK, w_NK, (Part.X_ROW, Part.X_COL), precision.x, precision.w,
        columns=columns, forward=True, y_TN=y_TN, bias_N=bias_N,
    )  # fmt: skip
    assert measured.codes is not None
    frame.add_row(layer.row(Part.W_TILE), measured.stats[WEIGHT])
    layer.step.codes = judge.place_of(w_NK), QuantisedWeight(measured.codes, precision.w)
    if measured.judged:
        frame.add_row(layer.row(Part.FPROP), measured.stats[PRODUCT])
    else:
        judge.fprop(session, layer, x_TK, w_NK, y_TN, judge.Judgement(), bias_N=bias_N)
    return True


def dgrad(
    session: Session,
    layer: ObservedLayer,
    dy_TN: Tensor,
    w_NK: Tensor,
    precision: LinearPrecision,
    *,
    columns: bool,
) -> bool:
    """What `operands.measure` and `judge.dgrad` do of an emulated input gradient; whether it was done."""
    frame, weight = session.frame, judge.codes_of(layer, w_NK)
    if frame is None or weight is None or weight.operand != precision.w or not _is_plain(session, layer):
        return False
    if not native_use.fits(dy_TN, w_NK, precision.dy, precision.w):
        return False
    measured = _measured(
        session, layer, dy_TN, w_NK, (Part.DY_ROW, Part.DY_COL), precision.dy, precision.w,
        columns=columns, forward=False, codes=weight.codes,
    )  # fmt: skip
    if measured.judged:
        frame.add_row(layer.row(Part.DGRAD), measured.stats[PRODUCT])
    else:
        judge.dgrad(session, layer, dy_TN, w_NK, None, judge.Judgement(emulate=precision))
    return True


def _is_plain(session: Session, layer: ObservedLayer) -> bool:
    """Whether the layer is dense, measured in full, judged by sampled rows, and not looked at closely."""
    scope = session.scope(layer)
    return layer.experts == 1 and scope.full and scope.judged and not judge.looks_closely(session, layer)


def _measured(
    session: Session,
    layer: ObservedLayer,
    operand_TC: Tensor,
    w_NK: Tensor,
    parts: tuple[Part, Part],
    operand: OperandFormat,
    weight: OperandFormat,
    *,
    columns: bool,
    **product: Any,
) -> Measured:
    """The call, and the operand's statistics into the frame: those of a moment ago, where it was measured then."""
    layouts = LAYOUT_PAIR if columns else LAYOUT_PAIR[:1]
    key = session.recent.key(operand_TC, (layouts, operand, WHOLE))
    known: Sequence[Tensor | NDArray[np.float64]] | None = session.recent.find(key)
    rows = session.sampler.rows(operand_TC.shape[0], operand_TC.device)
    wants = known is None, known is None and columns
    measured = native_use.measure(
        operand_TC, w_NK, rows, operand=operand, weight=weight, wants=wants, **product
    )
    if known is None:
        known = list(measured.stats[ROW : COL + 1 if columns else COL, None])
        session.recent.keep(key, operand_TC, known)
    _add(session, layer, parts, known)
    session.meter.operands_took(measured.operand_seconds)
    return measured


def _add(
    session: Session,
    layer: ObservedLayer,
    parts: tuple[Part, Part],
    vectors: Sequence[Tensor | NDArray[np.float64]],
) -> None:
    assert session.frame is not None
    for part, vector_1V in zip(parts, vectors, strict=False):
        session.frame.add_row(layer.row(part), np.asarray(vector_1V[0]))
