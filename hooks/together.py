"""Measures a plain use of a dense weight on a CPU in one native call."""

# Shapes: T tokens, N output features, K input features, V = 29 TensorStats entries.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.hooks import judge
from fp8_safeguard.hooks.budget import WHOLE
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.hooks.recompute import QuantisedWeight
from fp8_safeguard.kernels import LinearPrecision, OperandFormat, native_use
from fp8_safeguard.kernels.native_use import COL, PRODUCT, ROW, WEIGHT, Measured
from fp8_safeguard.kernels.stats import LAYOUT_PAIR

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_CPU = torch.device("cpu")


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

    Not for what needs more than all of the operands and sampled rows of a real result: then nothing was done. x, y and
    the bias may carry gradients.
    """
    frame = session.frame
    fits = (
        y_TN is not None
        and native_use.fits(x_TK, w_NK, precision.x, precision.w)
        and native_use.fits_result(y_TN)
    )
    if frame is None or not fits or not _is_plain(session, layer) or session.options.shadow:
        return False
    weight = _room(layer, w_NK, precision.w)
    measured = _measured(
        session, frame, layer, x_TK, w_NK, (Part.X_ROW, Part.X_COL), precision.x, precision.w,
        columns=columns, codes=weight.codes, weighs=True, y_TN=y_TN, bias_N=bias_N,
    )  # fmt: skip
    frame.add_row(layer.row(Part.W_TILE), measured.stats[WEIGHT])
    layer.step.codes = judge.place_of(w_NK), weight
    if measured.judged:
        frame.add_row(layer.row(Part.FPROP), measured.stats[PRODUCT])
    else:
        y_TN, bias_N = (None if each is None else each.detach() for each in (y_TN, bias_N))
        judge.fprop(session, layer, x_TK.detach(), w_NK, y_TN, judge.Judgement(), bias_N=bias_N)
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
    if frame is None or weight is None or weight.operand is not precision.w or not _is_plain(session, layer):
        return False
    if not native_use.fits(dy_TN, w_NK, precision.dy, precision.w):
        return False
    measured = _measured(
        session, frame, layer, dy_TN, w_NK, (Part.DY_ROW, Part.DY_COL), precision.dy, precision.w,
        columns=columns, codes=weight.codes, weighs=False,
    )  # fmt: skip
    if measured.judged:
        frame.add_row(layer.row(Part.DGRAD), measured.stats[PRODUCT])
    else:
        judge.dgrad(session, layer, dy_TN, w_NK, None, judge.Judgement(emulate=precision))
    return True


def _room(layer: ObservedLayer, w_NK: Tensor, operand: OperandFormat) -> QuantisedWeight:
    """Where the codes of the layer's weight go: where those of the last sample were, as long as they fit."""
    room: QuantisedWeight | None = layer.kept.get("codes")
    if room is None or room.codes.shape != w_NK.shape or room.operand is not operand:
        room = QuantisedWeight(native_use.room_for_codes(w_NK, operand.fmt), operand)
        layer.kept["codes"] = room
    return room


def _is_plain(session: Session, layer: ObservedLayer) -> bool:
    """Whether the layer is dense, measured in full, judged by sampled rows, and not looked at closely in this sample."""
    state = layer.step
    if state.plain is None:
        scope = session.scope(layer)
        whole = layer.all_experts == 1 and scope.full and scope.judged
        state.plain = whole and not judge.looks_closely(session, layer)
    return state.plain


def _measured(
    session: Session,
    frame: Frame,
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
    recent = session.recent
    key = recent.key(operand_TC, (layouts, operand, WHOLE))
    known = recent.find(key)
    rows = session.sampler.rows(operand_TC.shape[0], _CPU)
    wants = known is None, known is None and columns
    measured = native_use.measure(
        operand_TC, w_NK, rows, operand=operand, weight=weight, wants=wants, **product
    )
    if known is None:
        known = measured.stats[ROW : COL + 1 if columns else COL]
        recent.keep(key, known)
    for part, vector_1V in zip(parts, known, strict=False):
        # Torch's where `operands` measured it.
        frame.add_row(layer.row(part), np.asarray(vector_1V))
    session.meter.operands_took(measured.operand_seconds)
    return measured
