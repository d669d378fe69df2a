"""Whether a run's GEMMs could run in FP8: a report.

What is judged (`readings`) is the what-if `fp8` where a run has it (shadow mode), else the layer's own recomputed result. The
forward result of a foreign layer in high precision is its real output: it says nothing of FP8, and its GEMM stays unknown
without shadow mode. A model of which a weight matrix was not observed is not ready, whatever is known of the others.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fp8_safeguard.monitor.budget import fits
from fp8_safeguard.monitor.history import SAMPLES_NEEDED
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.precision import FP8, FP8_LEAST_ERROR, precisions_of
from fp8_safeguard.monitor.readings import (
    VERDICTS,
    Finding,
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

Source = Literal["shadow", "emulated", "measured"]
"""Where the FP8 result came from: a what-if beside the real one, an emulation in its place, or the layer itself."""

SHADOW_VARIANT = "fp8"
"""The what-if that is the configured FP8 precision itself."""
NO_FP8_VARIANT = "bf16"
"""The what-if that leaves FP8: what the others are compared with, no remedy."""
SHADOW_HINT = "attach(..., shadow=True)"
RECOMPUTE_HINT = "attach(recompute=N) recomputes more weight gradients a sample"
MOST_NAMES = 3
"""Matrices that the sentence names."""

_WORDS = {
    "pow2": "power-of-two scales",
    "fp32": "float32 scales",
    "tile128": "128x128 blocks",
    "tensor": "one scale an operand",
    "mx32": "MXFP8 blocks of 32",
}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What another way of quantising would do to the same GEMM."""

    variant: str
    verdict: Verdict
    error_median: float
    error_worst: float
    samples: int
    threshold: float


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
    best: Alternative | None
    """Where plain FP8 is not safe: the best of the what-ifs that help against the reason and have less error."""
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

    def judged(self, gemm: str) -> tuple[GemmReadings, Source] | None:
        """The readings that tell what FP8 does to a GEMM; None where there are none."""
        own = self.gemms.get(gemm)
        if own is not None and not self.is_real(gemm):
            # The what-if of the same is there only where something was flagged; this is in every sample.
            return own, "emulated" if own.slot.emulated else "measured"
        shadows = (each for each in self.variants.get(gemm, ()) if each.slot.variant == SHADOW_VARIANT)
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
    rows = tuple(_row(name, gemm, layer) for name, layer in layers.items() for gemm in layer.wanted())
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


def _row(name: str, gemm: str, layer: _Layer) -> Row:
    judged = layer.judged(gemm)
    readings, source = judged if judged is not None else (_nothing(name, gemm), None)
    operands = [layer.operands[place] for place in GEMM_OPERANDS[gemm] if place in layer.operands]
    reads_weight = any(place[0] == "w" for place in GEMM_OPERANDS[gemm])
    finding = verdict_of(readings, operands, vanishing_together(layer.operands) if reads_weight else "")
    verdict, reason = finding.verdict, finding.reason
    if verdict == "unknown" and judged is None and layer.is_real(gemm):
        reason = f"its real output is not FP8: {SHADOW_HINT} measures what FP8 would give"
    lossy = max(
        (each for each in operands if each.underflow is not None),
        key=lambda each: each.underflow or 0.0,
        default=None,
    )
    flushed = (each.rows_flushed for each in operands if each.rows_flushed is not None)
    best = None if verdict == "safe" else _best(layer.variants.get(gemm, ()), readings, finding)
    return Row(
        layer=name,
        gemm=gemm,
        verdict=verdict,
        reason=reason,
        source=source,
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
        best=best,
        cause=finding.cause,
        remedy=f"safe with {variant_words(best.variant)}" if best and best.verdict == "safe" else None,
    )


def _nothing(layer: str, gemm: str) -> GemmReadings:
    return GemmReadings(slot=Slot(layer, gemm=gemm), steps=np.zeros(0, np.int64), errors=np.zeros(0))


def _best(variants: Iterable[GemmReadings], plain: GemmReadings, finding: Finding) -> Alternative | None:
    """The what-if that lies lowest under its own format's level; safe ones first. None where none helps."""
    found = []
    for readings in variants:
        name = readings.slot.variant or ""
        if name in (SHADOW_VARIANT, NO_FP8_VARIANT) or readings.median is None or readings.worst is None:
            continue
        if not (_changes(name, finding.lost_in) and readings.median < _error_beside(readings, plain)):
            continue
        verdict = verdict_of(readings, ()).verdict
        level = level_of(readings.slot.gemm or "", "act", readings.fmt)
        made = Alternative(
            variant=name,
            verdict=verdict,
            error_median=readings.median,
            error_worst=readings.worst[0],
            samples=readings.samples,
            threshold=level,
        )
        found.append(((verdict != "safe", readings.worst[0] / level, readings.median, made.variant), made))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _changes(variant: str, lost_in: Iterable[frozenset[str]]) -> bool:
    """Whether a what-if changes an operand of each of these sets; one that names none changes all."""
    operand = re.match("(x|w|dy)_", variant)
    return all(places if operand is None else operand[1] in places for places in lost_in)


def _error_beside(variant: GemmReadings, plain: GemmReadings) -> float:
    """The plain result's median error in the samples that have the what-if; where they share none, in all."""
    # Most what-ifs are there only where something was flagged: the healthy rest would make them look bad.
    shared = plain.errors[np.isin(plain.steps, variant.steps)]
    errors = shared if len(shared) else plain.errors
    return float(np.median(errors)) if len(errors) else 0.0


def variant_words(name: str) -> str:
    """A what-if's name in a sentence: `e5m2 for dy`, `multiplier 2^-4 for x`; one that is not known stays as it is."""
    operand = re.fullmatch(r"(x|w|dy)_(.+)", name)
    what = operand[2] if operand else name
    scale = re.fullmatch(r"multiplier_(2\^-?\d+)", what)
    what = f"multiplier {scale[1]}" if scale else _WORDS.get(what, what)
    return f"{what} for {operand[1]}" if operand else what


def _summary(
    rows: Sequence[Row], coverage: Iterable[Mapping[str, Any]], ended: bool, budget_ratio: float
) -> Summary:
    counts: dict[Verdict, int] = {
        verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS
    }
    layers = dict.fromkeys(row.layer for row in rows)
    kept = tuple(dict.fromkeys(row.layer for row in rows if row.verdict == "keep_bf16"))
    kept_ratio = len(kept) / len(layers) if layers else None
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


def _not_known(rows: Sequence[Row], unknown: int, ended: bool) -> str:
    """How many GEMMs have no verdict, and what gives them one; empty where all have."""
    if not unknown:
        return ""
    waiting = [row for row in rows if row.verdict == "unknown"]
    few = [row for row in waiting if SHADOW_HINT not in row.reason]
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
