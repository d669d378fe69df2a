"""Whether a run's GEMMs could run in FP8: a report.

What is judged (`readings`) is the what-if `fp8` where a run has it (shadow mode), else the layer's own recomputed result. The
forward result of a foreign layer in high precision is its real output: it says nothing of FP8, and its GEMM stays unknown
without shadow mode. A model of which a weight matrix was not observed is not ready, whatever is known of the others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fp8_safeguard.monitor.alternatives import Advice, Alternative, Judged, advise
from fp8_safeguard.monitor.budget import fits
from fp8_safeguard.monitor.history import SAMPLES_NEEDED
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.precision import FP8, FP8_LEAST_ERROR, precisions_of
from fp8_safeguard.monitor.readings import (
    VERDICTS,
    GemmReadings,
    OperandReadings,
    Unseen,
    Verdict,
    level_of,
    percent,
    unseen,
    vanishing_together,
    verdict_of,
)
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, GEMMS, Slot
from fp8_safeguard.monitor.whatifs import PLAIN

Source = Literal["shadow", "emulated", "measured"]
"""Where the FP8 result came from: a what-if beside the real one, an emulation in its place, or the layer itself."""

SHADOW_HINT = "attach(..., shadow=True)"
RECOMPUTE_HINT = "attach(recompute=N) recomputes more weight gradients a sample"
MOST_NAMES = 3
"""Matrices that the sentence names."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict on one GEMM of one layer, with what it rests on."""

    layer: str
    gemm: str
    verdict: Verdict
    reason: str
    """Why it is not safe; empty where it is."""
    source: Source | None
    samples: int
    error_median: float | None
    error_worst: float | None
    error_worst_step: int | None
    error_latest: float | None
    error_latest_step: int | None
    threshold: float
    """The error from which on the GEMM stays in BF16."""
    underflow: float | None
    """Of the operand that lost most."""
    underflow_slot: str | None
    """That operand in its layout, `dy row`."""
    underflow_step: int | None
    rows_flushed: float | None
    nonfinite_samples: int
    alternatives: int
    """What-ifs that were measured of it; with none nothing is advised."""
    best: Alternative | None
    """Where plain FP8 is not safe: the what-if that the policy would take, or else the first of those that help."""
    cause: str
    """What beside the error keeps it in BF16, `x and w vanish together`; empty where the error alone does."""
    remedy: str | None
    """`safe with e5m2 for x`, where that is so."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the rows say together."""

    verdict: Literal["ready", "ready_with_bf16", "not_ready"]
    sentence: str
    gemms: int
    counts: Mapping[Verdict, int]
    safe_ratio: float | None
    """GEMMs that are safe, of all."""
    layers: int
    keep_bf16_layers: tuple[str, ...]
    keep_bf16_ratio: float | None
    """Layers with a GEMM to keep in BF16, of all."""
    budget_ratio: float
    samples: int
    """Recomputed results that the verdicts rest on, of all GEMMs."""
    samples_needed: int
    """Of each GEMM, unless fewer show that it is bad."""
    gemms_short: int
    """GEMMs that have fewer, and no verdict."""
    samples_short: int
    """More that each of those needs at most."""
    unobserved: tuple[Unseen, ...]
    """Weights of GEMMs that were not observed: with any, the model is not ready."""
    left_out: tuple[Unseen, ...]
    """Not observed either, but excluded by the user or a convolution: the verdict does not wait for them."""


@dataclass(frozen=True)
class Report:
    """The readiness of a run."""

    rows: tuple[Row, ...]
    summary: Summary


@dataclass
class _Layer:
    """Everything that was read of one layer."""

    gemms: dict[str, GemmReadings] = field(default_factory=dict)
    variants: dict[str, list[GemmReadings]] = field(default_factory=dict)
    operands: dict[tuple[str, str], OperandReadings] = field(default_factory=dict)
    precision: Mapping[str, str | None] = field(default_factory=dict)

    def wanted(self) -> tuple[str, ...]:
        """GEMMs that a verdict is due on: those with a slot, and those that only wait for their turn."""
        known = {*self.gemms, *self.variants}
        # A first layer's input needs no gradient: there a dgrad that was never sent does not exist.
        waiting = (
            gemm for gemm in ("fprop", "wgrad") if all(part in self.operands for part in GEMM_OPERANDS[gemm])
        )
        known.update(waiting)
        return tuple(gemm for gemm in GEMMS if gemm in known)

    def read_by(self, gemm: str) -> list[OperandReadings]:
        """What was read of the operands of a GEMM."""
        return [self.operands[place] for place in GEMM_OPERANDS[gemm] if place in self.operands]

    def judged(self, gemm: str) -> tuple[GemmReadings, Source] | None:
        """The readings that tell what FP8 does to a GEMM; None where there are none."""
        own = self.gemms.get(gemm)
        if own is not None and not self.is_real(gemm):
            # The what-if of the same is there only where something was flagged; this is in every sample.
            return own, "emulated" if own.slot.emulated else "measured"
        shadows = (each for each in self.variants.get(gemm, ()) if each.slot.variant == PLAIN)
        return next(((each, "shadow") for each in shadows if each.samples), None)

    def is_real(self, gemm: str) -> bool:
        """Whether the slot compares a result that was never FP8 with itself in high precision."""
        own = self.gemms.get(gemm)
        if gemm != "fprop" or own is None or own.slot.emulated:
            return False
        # A layer whose backward results were FP8 is ours, and so was its forward result.
        if any(not each.slot.emulated for name, each in self.gemms.items() if name != gemm):
            return False
        near = own.median is not None and own.median < FP8_LEAST_ERROR
        return near or self.precision.get(gemm, FP8) != FP8


def assess(
    gemms: Iterable[GemmReadings],
    operands: Iterable[OperandReadings] = (),
    *,
    order: Iterable[str] = (),
    fallen: Collection[tuple[str, str]] = (),
    coverage: Iterable[Mapping[str, Any]] = (),
    ended: bool = False,
    budget_ratio: float = PolicyConfig.budget_ratio,
) -> Report:
    """One row for each GEMM of each layer that something was read of.

    order: the layers in the model's order; others follow as they are named. fallen: (layer, gemm) that the plan runs in BF16.
    coverage: rows of the run's coverage; without any, every weight matrix counts as observed. ended: whether no sample will
    follow. budget_ratio: share of the layers that may stay in BF16.
    """
    layers = _by_layer(order, gemms, operands, fallen)
    rows = tuple(row for name, layer in layers.items() for row in _rows(name, layer))
    return Report(rows, _summary(rows, coverage, ended, budget_ratio))


def _by_layer(
    order: Iterable[str],
    gemms: Iterable[GemmReadings],
    operands: Iterable[OperandReadings],
    fallen: Collection[tuple[str, str]],
) -> dict[str, _Layer]:
    layers = {name: _Layer() for name in order}
    for operand in operands:
        place = (operand.slot.operand or "", operand.slot.layout or "")
        layers.setdefault(operand.slot.layer, _Layer()).operands[place] = operand
    seen = []
    for readings in gemms:
        slot, layer = readings.slot, layers.setdefault(readings.slot.layer, _Layer())
        if slot.variant is not None:
            layer.variants.setdefault(slot.gemm or "", []).append(readings)
        else:
            layer.gemms[slot.gemm or ""] = readings
            seen.append((slot, np.nan if readings.median is None else readings.median))
    for name, precision in precisions_of(seen, fallen).items():
        layers[name].precision = precision
    return layers


def _rows(name: str, layer: _Layer) -> Iterator[Row]:
    """A row for each GEMM of a layer; what helps them is told of all together."""
    judged = {gemm: _judged(name, gemm, layer) for gemm in layer.wanted()}
    advice = advise(name, judged)
    for gemm, each in judged.items():
        yield _row(gemm, each, layer, advice[gemm])


def _judged(name: str, gemm: str, layer: _Layer) -> Judged:
    found = layer.judged(gemm)
    readings = _nothing(name, gemm) if found is None else found[0]
    reads_weight = any(place[0] == "w" for place in GEMM_OPERANDS[gemm])
    together = vanishing_together(layer.operands) if reads_weight else ""
    finding = verdict_of(readings, layer.read_by(gemm), together)
    if finding.verdict == "unknown" and found is None and layer.is_real(gemm):
        reason = f"its real output is not FP8: {SHADOW_HINT} measures what FP8 would give"
        finding = finding._replace(reason=reason)
    return Judged(readings, finding, layer.variants.get(gemm, ()))


def _row(gemm: str, judged: Judged, layer: _Layer, advice: Advice) -> Row:
    readings, finding, found = judged.plain, judged.finding, layer.judged(gemm)
    operands = layer.read_by(gemm)
    lossy = max(
        (each for each in operands if each.underflow is not None),
        key=lambda each: each.underflow or 0.0,
        default=None,
    )
    flushed = (each.rows_flushed for each in operands if each.rows_flushed is not None)
    return Row(
        layer=readings.slot.layer,
        gemm=gemm,
        verdict=finding.verdict,
        reason=finding.reason,
        source=found[1] if found is not None else None,
        samples=readings.samples,
        error_median=readings.median,
        error_worst=readings.worst[0] if readings.worst else None,
        error_worst_step=readings.worst[1] if readings.worst else None,
        error_latest=readings.latest[0] if readings.latest else None,
        error_latest_step=readings.latest[1] if readings.latest else None,
        threshold=level_of(gemm, "act", readings.fmt),
        underflow=lossy.underflow if lossy else None,
        underflow_slot=lossy.name if lossy else None,
        underflow_step=lossy.underflow_step if lossy else None,
        rows_flushed=max(flushed, default=None),
        nonfinite_samples=readings.nonfinite,
        alternatives=advice.measured,
        best=advice.best,
        cause=finding.cause,
        remedy=advice.remedy,
    )


def _nothing(layer: str, gemm: str) -> GemmReadings:
    return GemmReadings(slot=Slot(layer, gemm=gemm), steps=np.zeros(0, np.int64), errors=np.zeros(0))


def _summary(
    rows: Sequence[Row], coverage: Iterable[Mapping[str, Any]], ended: bool, budget_ratio: float
) -> Summary:
    counts: dict[Verdict, int] = {
        verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS
    }
    layers = dict.fromkeys(row.layer for row in rows)
    kept = tuple(dict.fromkeys(row.layer for row in rows if row.verdict == "keep_bf16"))
    kept_ratio = len(kept) / len(layers) if layers else None
    few = _few(rows)
    unobserved, left_out = unseen(coverage)
    faults = [
        _over_budget(kept, len(layers), budget_ratio) if rows else "no GEMM was measured in these steps",
        _not_known(rows, counts["unknown"], ended),
        _not_observed(unobserved),
    ]
    verdict, sentence = _conclusion(len(rows), counts["watch"], kept, [fault for fault in faults if fault])
    return Summary(
        verdict=verdict,
        sentence=sentence,
        gemms=len(rows),
        counts=counts,
        safe_ratio=counts["safe"] / len(rows) if rows else None,
        layers=len(layers),
        keep_bf16_layers=kept,
        keep_bf16_ratio=kept_ratio,
        budget_ratio=budget_ratio,
        samples=sum(row.samples for row in rows),
        samples_needed=SAMPLES_NEEDED,
        gemms_short=len(few),
        samples_short=max((SAMPLES_NEEDED - row.samples for row in few), default=0),
        unobserved=unobserved,
        left_out=left_out,
    )


def _conclusion(
    gemms: int, watched: int, kept: Sequence[str], faults: Sequence[str]
) -> tuple[Literal["ready", "ready_with_bf16", "not_ready"], str]:
    if faults:
        return "not_ready", f"not ready: {'; '.join(faults)}"
    watch = f", {watched} of {gemms} GEMMs to watch" if watched else ""
    if kept:
        return "ready_with_bf16", f"ready with {_layers(len(kept))} kept in BF16{watch}"
    return "ready", f"ready for FP8{watch}"


def _over_budget(kept: Sequence[str], layers: int, budget_ratio: float) -> str:
    if fits(len(kept) / layers, budget_ratio):
        return ""
    share = f"{len(kept)} of {_layers(layers)} ({percent(len(kept) / layers)})"
    return f"{share} would have to stay in BF16, and the budget is {percent(budget_ratio)}"


def _few(rows: Iterable[Row]) -> list[Row]:
    """GEMMs without a verdict that more samples of the same kind would give one."""
    return [row for row in rows if row.verdict == "unknown" and SHADOW_HINT not in row.reason]


def _not_known(rows: Sequence[Row], unknown: int, ended: bool) -> str:
    """How many GEMMs have no verdict, and what gives them one; empty where all have."""
    if not unknown:
        return ""
    few = _few(rows)
    ways_out = [f"run it with {SHADOW_HINT}"] if len(few) < unknown else []
    if few and not ended:
        # In shadow mode the run starts anew anyway.
        ways_out = ways_out or ["let it run on"]
    elif few:
        missing = max(SAMPLES_NEEDED - row.samples for row in few)
        lack = "it lacks" if len(few) == 1 else "they lack up to"
        ways_out.append(f"the run has ended, and {lack} {missing} sample{'' if missing == 1 else 's'}")
        if any(row.gemm == "wgrad" for row in few):
            ways_out.append(RECOMPUTE_HINT)
    yet = "" if ended else " yet"
    return f"{unknown} of {len(rows)} GEMMs are not known{yet}; {'; '.join(ways_out)}"


def _not_observed(unobserved: Sequence[Unseen]) -> str:
    if not unobserved:
        return ""
    many = len(unobserved)
    named = ", ".join(each.name for each in unobserved[:MOST_NAMES])
    more = f" and {many - MOST_NAMES} more" if many > MOST_NAMES else ""
    were = "weight matrix was" if many == 1 else "weight matrices were"
    return f"{many} {were} not observed: {named}{more}"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
