"""Decides which GEMMs are recomputed, and puts the results into the frame."""

# Shapes: T tokens, N output features, K input features, E experts, R sampled rows, V = 29 TensorStats entries.

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from fp8_safeguard.hooks import channels, grouped, recompute, whatif
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.hooks.readable import version_of
from fp8_safeguard.hooks.recompute import SAMPLED_ROWS, RowSampler
from fp8_safeguard.hooks.whatif import Form, Forms
from fp8_safeguard.kernels import LinearPrecision
from fp8_safeguard.kernels.stats import merge_stats
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

CHUNK_ELEMENTS = 2**22
"""Results that are compared at once where a whole GEMM is: about 100 MB in float64."""


@dataclass(slots=True, frozen=True)
class Judgement:
    """How the GEMMs of one call are judged."""

    emulate: LinearPrecision | None = None
    """The FP8 precision to emulate; None compares the layer's real result."""
    gain_K: Tensor | None = None
    """The layer's input gain."""


def fprop(
    session: Session,
    layer: ObservedLayer,
    x_TK: Tensor,
    w: Tensor,
    y_TN: Tensor | None,
    how: Judgement,
    *,
    bias_N: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """One forward: 64 of its output rows, or all. w is [N, K], or [E, N, K] with offsets; y None is not compared.

    In a shadow run a layer that computes by itself also says what FP8 would give (variant `fp8`).
    """
    if not _takes_part(session, layer, x_TK):
        return
    if looks_closely(session, layer):
        channels.note(session, layer, "x", x_TK)
    real_TN = x_TK if y_TN is None else y_TN
    experts = _Experts(session, layer, Part.FPROP, offsets, x_TK.shape[0], w.shape[-2], x_TK.device)

    weight = codes_of(layer, w)

    def emulated(rows: Tensor | None, emulate: LinearPrecision | None) -> Tensor:
        if offsets is not None and experts.bounds is None:
            return grouped.fprop_error(x_TK, w, real_TN, offsets, rows, emulate=emulate)
        assert rows is not None
        how: _Emulated = {"emulate": emulate, "weight": weight}
        if experts.bounds is None:
            return recompute.fprop_error(x_TK, w, real_TN, rows, bias_N, **how)
        return recompute.grouped_fprop_error(x_TK, w, real_TN, experts.bounds, _Drawn(rows), **how)

    def error(rows: Tensor | None) -> Tensor:
        return emulated(rows, how.emulate)

    def variants(rows: Tensor, forms: Forms) -> dict[str, Tensor]:
        if len(forms) == 1:
            return {whatif.PLAIN: emulated(rows, _precision(layer, how))}
        if offsets is not None and experts.bounds is None:
            return grouped.fprop_variants(x_TK, w, offsets, rows, forms)
        if experts.bounds is None:
            return whatif.fprop(x_TK, w, rows, forms)
        return experts.each(rows, forms, lambda e, at, span: whatif.fprop(x_TK[span], w[e], at, forms))

    compared = y_TN is not None or how.emulate is not None
    shadows = session.options.shadow and how.emulate is None and not layer.own
    experts.judge(error if compared else None, variants, how, shadows=shadows)


def dgrad(
    session: Session,
    layer: ObservedLayer,
    dy_TN: Tensor,
    w: Tensor,
    dx_TK: Tensor | None,
    how: Judgement,
    *,
    offsets: Tensor | None = None,
) -> None:
    """One input gradient: 64 of its rows, or all; dx is None where it is emulated."""
    if not _takes_part(session, layer, dy_TN) or (dx_TK is None and how.emulate is None):
        return
    if looks_closely(session, layer):
        channels.note(session, layer, "dy", dy_TN)
    judged: recompute.Judged = {"gain_K": how.gain_K, "emulate": how.emulate}
    weight = codes_of(layer, w)
    experts = _Experts(session, layer, Part.DGRAD, offsets, dy_TN.shape[0], w.shape[-1], dy_TN.device)

    def error(rows: Tensor | None) -> Tensor:
        if offsets is not None and experts.bounds is None:
            return grouped.dgrad_error(dy_TN, w, dx_TK, offsets, rows, **judged)
        assert rows is not None
        if experts.bounds is None:
            return recompute.dgrad_error(dy_TN, w, dx_TK, rows, weight=weight, **judged)
        drawn = _Drawn(rows)
        return recompute.grouped_dgrad_error(dy_TN, w, dx_TK, experts.bounds, drawn, weight=weight, **judged)

    def variants(rows: Tensor, forms: Forms) -> dict[str, Tensor]:
        gain_K = how.gain_K
        if offsets is not None and experts.bounds is None:
            return grouped.dgrad_variants(dy_TN, w, offsets, rows, forms, gain_K)
        if experts.bounds is None:
            return whatif.dgrad(dy_TN, w, rows, forms, gain_K)
        return experts.each(
            rows, forms, lambda e, at, span: whatif.dgrad(dy_TN[span], w[e], at, forms, gain_K)
        )

    experts.judge(error, variants, how)


def wgrad(
    session: Session,
    layer: ObservedLayer,
    dy_TN: Tensor,
    x_TK: Tensor,
    dw: Tensor | None,
    how: Judgement,
    *,
    offsets: Tensor | None = None,
) -> None:
    """One weight gradient when it is the layer's turn: 64 of its output features, or all; dw is None where emulated."""
    if not _takes_part(session, layer, dy_TN) or not keeps_x(session, layer):
        return
    if dw is None and how.emulate is None:
        return
    judged: recompute.Judged = {"gain_K": how.gain_K, "emulate": how.emulate}
    experts = _Experts(session, layer, Part.WGRAD, offsets, dy_TN.shape[1], x_TK.shape[1], dy_TN.device)

    def error(features: Tensor | None) -> Tensor:
        assert features is not None
        if offsets is not None and experts.bounds is None:
            return grouped.wgrad_error(dy_TN, x_TK, dw, offsets, features, **judged)
        if experts.bounds is None:
            return recompute.wgrad_error(dy_TN, x_TK, dw, features, **judged)
        return recompute.grouped_wgrad_error(dy_TN, x_TK, dw, experts.bounds, features, **judged)

    def variants(features: Tensor, forms: Forms) -> dict[str, Tensor]:
        gain_K = how.gain_K
        if offsets is not None and experts.bounds is None:
            return grouped.wgrad_variants(dy_TN, x_TK, offsets, features, forms, gain_K)
        if experts.bounds is None:
            return whatif.wgrad(dy_TN, x_TK, features, forms, gain_K)
        return experts.each(
            None, forms, lambda e, _, span: whatif.wgrad(dy_TN[span], x_TK[span], features, forms, gain_K)
        )

    experts.judge(error, variants, how)


def keeps_x(session: Session, layer: ObservedLayer) -> bool:
    """Whether the weight gradient will be recomputed in this step: then the input is kept for the backward."""
    if session.frame is None or not session.scope(layer).judged:
        return False
    return session.picks_wgrad(layer) or looks_closely(session, layer)


def looks_closely(session: Session, layer: ObservedLayer) -> bool:
    """Whether this step recomputes the layer's GEMMs whole, and measures alternatives: the same for all of its calls."""
    frame = session.frame
    if frame is None:
        return False
    if frame.closely is None:
        frame.closely = session.builder.flags.choose(
            lambda name: any(session.scope(each).full for each in session.layers if each.name == name)
        )
    return layer.name in frame.closely


def wants_codes(session: Session, layer: ObservedLayer) -> bool:
    """Whether a GEMM with the layer's weight will be emulated in this step: its codes are then worth keeping."""
    precision = layer.step.precision
    real = layer.own and precision is not None and precision.fprop == precision.dgrad == "fp8"
    return session.scope(layer).judged and not real


def place_of(w: Tensor) -> tuple[object, ...]:
    """Where a weight lies, how, and its version: a square one and its transpose differ in their strides alone."""
    version = version_of(w)
    # Without one nobody knows whether it was changed: it is like no other.
    return w.data_ptr(), object() if version is None else version, w.shape, w.stride(), w.dtype


def codes_of(layer: ObservedLayer, w: Tensor) -> recompute.QuantisedWeight | None:
    """The weight's codes, if they are of this very weight as it is now."""
    if layer.step.codes is None:
        return None
    place, codes = layer.step.codes
    return codes if w.is_cpu and place == place_of(w) else None


def _precision(layer: ObservedLayer, how: Judgement) -> LinearPrecision:
    """What FP8 means for the layer."""
    return how.emulate or layer.step.precision or LinearPrecision()


def _takes_part(session: Session, layer: ObservedLayer, operand: Tensor) -> bool:
    return session.frame is not None and operand.shape[0] > 0 and session.scope(layer).judged


class _Emulated(TypedDict):
    emulate: LinearPrecision | None
    weight: recompute.QuantisedWeight | None


class _Drawn(RowSampler):
    """Rows that have been drawn already, for whoever asks for a draw."""

    def __init__(self, rows: Tensor) -> None:
        self._given = rows

    def rows(self, total: int, device: torch.device) -> Tensor:
        """Those."""
        return self._given


class _Experts:
    """One GEMM of a layer, dense or by expert: which rows of it are recomputed, and where the results go."""

    def __init__(
        self,
        session: Session,
        layer: ObservedLayer,
        part: Part,
        offsets: Tensor | None,
        rows: int,
        width: int,
        device: torch.device,
    ) -> None:
        self._session, self._layer, self._part = session, layer, part
        self._width, self._device = width, device
        self.bounds: list[int] | None = None
        """The experts' rows; None for a dense layer, and on a device, which is not waited for."""
        self._by_expert = offsets is not None
        if offsets is not None and offsets.is_cpu:
            self.bounds = offsets.tolist()
        self._rows = self.bounds[-1] if self.bounds and part is not Part.WGRAD else rows

    def judge(
        self,
        error: Callable[[Tensor | None], Tensor] | None,
        variants: Callable[[Tensor, Forms], dict[str, Tensor]],
        how: Judgement,
        *,
        shadows: bool = False,
    ) -> None:
        """`error` of the sampled rows, or of all; and the variants of the sampled ones."""
        frame, layer = self._session.frame, self._layer
        assert frame is not None
        closely = looks_closely(self._session, layer)
        forms = self._forms(how, closely=closely, shadows=shadows)
        if error is None and not forms:
            return
        rows = self._session.sampler.rows(self._rows, self._device)
        slot_row, first_row = layer.rows[self._part], layer.row(self._part)
        if error is not None:
            vectors = self._whole(error) if closely else error(rows)
            frame.add(first_row, vectors.reshape(layer.experts, VECTOR_LENGTH))
        if not forms:
            return
        try:
            found = variants(rows, forms)
        except Exception as problem:  # what might be must not cost what is
            self._session.once.failure("a what-if", problem, at=layer.name)
            return
        for name, vectors in found.items():
            frame.add_variant(
                slot_row,
                name,
                whatif.coarsest(forms[name]),
                vectors.reshape(layer.experts, VECTOR_LENGTH),
                experts=layer.all_experts,
                first=first_row - slot_row,
            )

    def each(
        self,
        rows: Tensor | None,
        forms: Forms,
        measured: Callable[[int, Any, slice], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """float64 [E, V] by variant: `measured` of each expert, its rows counted from its first, and its span.

        rows None: the GEMM's result has none of the experts' rows, and is there for each of them.
        """
        assert self.bounds is not None
        shape = self._layer.experts, VECTOR_LENGTH
        totals = {name: torch.zeros(shape, dtype=torch.float64, device=self._device) for name in forms}
        for expert, (start, end) in enumerate(itertools.pairwise(self.bounds)):
            inside = None if rows is None else rows[(rows >= start) & (rows < end)] - start
            if inside is None or len(inside):
                for name, vector in measured(expert, inside, slice(start, end)).items():
                    totals[name][expert] = vector
        return totals

    def _whole(self, error: Callable[[Tensor | None], Tensor]) -> Tensor:
        """All rows, some at a time."""
        if self._by_expert and self.bounds is None and self._part is not Part.WGRAD:
            return error(None)
        experts = self._layer.experts
        a_row = self._width * (experts if self._part is Part.WGRAD else 1)
        step = max(SAMPLED_ROWS, CHUNK_ELEMENTS // max(1, a_row))
        ends = [*range(step, self._rows, step), self._rows]
        rows = [torch.arange(at, end, device=self._device) for at, end in itertools.pairwise([0, *ends])]
        parts_EPV = torch.stack([error(each).reshape(experts, VECTOR_LENGTH) for each in rows], dim=1)
        return torch.stack([merge_stats(parts_PV) for parts_PV in parts_EPV])

    def _forms(self, how: Judgement, *, closely: bool, shadows: bool) -> Mapping[str, tuple[Form, Form]]:
        precision = _precision(self._layer, how)
        gemm = self._part.name.lower()
        if closely:
            return whatif.alternatives(gemm, precision)
        return whatif.plain(gemm, precision) if shadows else {}
