"""Causes that precision helps against: outliers, scales, wrong results.

Fingerprints, as measured on eleven faults that harm FP8 and not BF16:

    saturation                                             scale-too-small; stuck-scale where the scale does not move
    values vanish, SQNR or cosine gone                     scale-too-large, or stuck-scale
    rows of dy vanish and what is left is exact, or nothing is   flushed-gradients: an amax floor under the block scales
    x in rows and w in tiles vanish together, SQNR healthy outlier-channels: they carry the energy, the others vanish
    result wrong, its operands healthy                     stale-inverse-scale: c times the right one if the cosine is 1

An x, a w or an fprop is traced forward through the model, a dy, a dgrad or a wgrad backward: what lies behind the first one
is its consequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fp8_safeguard.monitor.cause import Diagnosis, Finding, numbers, percent
from fp8_safeguard.monitor.formats import get_format
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.symptoms import MAIN, Symptoms

SCALE_CAUSES = ("scale-too-small", "scale-too-large", "stuck-scale", "flushed-gradients")
"""What an operand's own scale does to it; no consequence of anything before."""

GROUP = "fp8 "
"""How the groups of these findings begin: `fp8 forward`, `fp8 backward`."""

SURE = 1
"""Samples where a level to act on is passed."""
LIKELY = 2
"""Samples where only a watch level is passed: one may be chance."""

_NOISE_COSINE = 0.99
_VANISHED = 0.05
_FAR_LOG2 = 4.0
"""A scale that fits its operand puts amax within this power of two of the format's maximum, history and margin included."""
_STILL = 3
"""Samples of a scale that has not moved."""
_SAME_DIRECTION = 0.99
"""Cosine of a result and the right one from which on it is a multiple of it: a constant factor is all that is wrong."""

_FOUND = {
    "scale-too-small": "its scale is too small",
    "scale-too-large": "its scale is too large",
    "stuck-scale": "its scale does not follow its amax",
    "flushed-gradients": "an amax floor under its scales is far above it",
}


def fp8_findings(seen: Symptoms) -> list[Finding]:
    """At most one of the forward pass, and one of the backward: the earliest, with what follows from it folded in."""
    forward = [found for layer in seen.breaches for found in _forward(seen, layer)]
    if any(found.said.cause == "outlier-channels" for found in forward):
        forward += _joining(seen, {found.said.layer for found in forward})
    backward = [found for layer in seen.breaches for found in _backward(seen, layer)]
    if forward:
        # A wrong forward pass leaves its traces in the backward; the scale of a dy is its own.
        backward = [found for found in backward if found.said.cause in SCALE_CAUSES]
    return [*_folded(seen, forward, is_forward=True), *_folded(seen, backward, is_forward=False)]


def _folded(seen: Symptoms, found: Iterable[Finding], *, is_forward: bool) -> Iterator[Finding]:
    by_layer = {finding.said.layer or "": finding for finding in found}
    if by_layer:
        first = by_layer[seen.first(by_layer, forward=is_forward)]
        others = len(by_layer) - 1
        more = f" (and in {others} more layer{'s' * (others > 1)})" if others else ""
        said = replace(
            first.said,
            summary=f"{first.said.summary}{more}",
            evidence={**first.said.evidence, "layers_in_breach": len(by_layer)},
            reaches=frozenset(by_layer),
        )
        samples = min(finding.samples for finding in by_layer.values())
        yield replace(first, said=said, samples=samples)


def _forward(seen: Symptoms, layer: str) -> list[Finding]:
    found = _scale(seen, layer, "x") or _scale(seen, layer, "w") or _outliers(seen, layer, "x")
    found = found or _wrong_result(seen, layer, ("fprop",))
    return [] if found is None else [replace(found, group=f"{GROUP}forward")]


def _joining(seen: Symptoms, known: set[str | None]) -> list[Finding]:
    """Layers whose amax has jumped and whose x vanishes, beside one whose w does, too: theirs is on its way."""
    found = []
    for layer, breaches in seen.breaches.items():
        if layer not in known and {("amax-jump", "x row"), ("underflow", "x row")} <= breaches.keys():
            found.append(_outlier_finding(seen, layer, "x", breaches["underflow", "x row"], None, None))
    return found


def _backward(seen: Symptoms, layer: str) -> list[Finding]:
    found = _scale(seen, layer, "dy") or _outliers(seen, layer, "dy")
    found = found or _wrong_result(seen, layer, ("dgrad", "wgrad"))
    return [] if found is None else [replace(found, group=f"{GROUP}backward")]


def _breaches_of(seen: Symptoms, layer: str, rule: str, operand: str) -> list[Breach]:
    """The breaches of a rule by an operand in any layout, the worst first."""
    found = [
        breach
        for (name, _), breach in seen.breaches.get(layer, {}).items()
        if name == rule and breach.slot.operand == operand
    ]
    return sorted(found, key=lambda breach: breach.rank, reverse=True)


def _scale(seen: Symptoms, layer: str, operand: str) -> Finding | None:
    """What a scale does to its operand that block scales never do by themselves."""
    saturated = _breaches_of(seen, layer, "saturation", operand)
    part = MAIN[operand]
    evidence = _evidence(seen, layer, part)
    if saturated:
        small = "stuck-scale" if _stands_still(seen, layer, operand) else "scale-too-small"
        words = f"{percent(saturated[0].value)} of {operand} saturates"
        return _scale_finding(seen, layer, operand, small, words, evidence, saturated[0])
    cause = _flush_cause(seen, layer, operand)
    if cause is None:
        return None
    flushed = _breaches_of(seen, layer, "rows-flushed", operand)
    words = f"{percent(seen.value(layer, part, 'underflow_ratio'))} of {operand} vanishes"
    if flushed:
        words += f", {percent(flushed[0].value)} of its rows whole"
    return _scale_finding(seen, layer, operand, cause, words, evidence, None)


def _flush_cause(seen: Symptoms, layer: str, operand: str) -> str | None:
    part = MAIN[operand]
    if seen.value(layer, part, "underflow_ratio") < _VANISHED:
        return None
    noisy = any(breach.severity == "act" for breach in _breaches_of(seen, layer, "sqnr", operand))
    nothing_left = seen.value(layer, part, "sum_sq_q") == 0.0
    noisy |= nothing_left or seen.value(layer, part, "cosine") < _NOISE_COSINE
    whole_rows = any(
        breach.severity == "act" for breach in _breaches_of(seen, layer, "rows-flushed", operand)
    )
    if not noisy and not whole_rows:
        return None
    if _stands_still(seen, layer, operand):
        return "stuck-scale"
    # A scale that is off by a factor spares the largest elements. A floor spares whole blocks, or nothing at all.
    floor = operand == "dy" and whole_rows and (nothing_left or not noisy)
    return "flushed-gradients" if floor else "scale-too-large"


def _stands_still(seen: Symptoms, layer: str, operand: str) -> bool:
    """Whether a delayed scale is far from what its amax asks for and does not follow it."""
    scale = seen.scalar(layer, f"{operand}_scale")
    amax = seen.value(layer, MAIN[operand], "amax")
    slot = seen.slot(layer, MAIN[operand])
    if slot is None or not scale > 0 or not amax > 0:
        return False
    largest = scale * get_format(slot.fmt or "e4m3").max
    if abs(math.log2(amax / largest)) < _FAR_LOG2:
        return False
    history = seen.scalar(layer, f"{operand}_history_amax")
    if history > 0 and abs(math.log2(history / largest)) >= _FAR_LOG2:
        # Not even what it remembers asks for it.
        return True
    window = [*seen.series.window(f"{operand}_scale", layer)[1 - _STILL :], scale]
    return len(window) == _STILL and len({float(f"{value:.5g}") for value in window}) == 1


def _scale_finding(
    seen: Symptoms,
    layer: str,
    operand: str,
    cause: str,
    words: str,
    evidence: Mapping[str, float],
    saturated: Breach | None,
) -> Finding:
    scale, history = (seen.scalar(layer, f"{operand}_{name}") for name in ("scale", "history_amax"))
    said = Diagnosis(
        cause=cause,
        kind="fp8",
        layer=layer,
        slot=seen.slot(layer, MAIN[operand]) if saturated is None else saturated.slot,
        summary=f"{layer!r}: {words}: {_FOUND[cause]}",
        evidence={**evidence, **numbers(scale=scale, history_amax=history)},
    )
    watch = saturated is not None and saturated.severity == "watch"
    return Finding(said=said, group="", samples=LIKELY if watch else SURE)


def _outliers(seen: Symptoms, layer: str, operand: str) -> Finding | None:
    """Most of a block vanishes beside a few channels that carry all of its energy: SQNR and cosine see nothing."""
    part, gemm = MAIN[operand], "fprop" if operand == "x" else "dgrad"
    vanishing = seen.breach(layer, "underflow", part)
    weights = seen.breach(layer, "underflow", "w tile") if operand == "x" else None
    wrong = seen.acts(layer, gemm)
    if vanishing is None or (weights is None and wrong is None):
        return None
    return _outlier_finding(seen, layer, operand, vanishing, weights, wrong)


def _outlier_finding(
    seen: Symptoms, layer: str, operand: str, vanishing: Breach, weights: Breach | None, wrong: Breach | None
) -> Finding:
    part, gemm = MAIN[operand], "fprop" if operand == "x" else "dgrad"
    sure = wrong is not None or (weights is not None and "act" in (vanishing.severity, weights.severity))
    growth = seen.amax_growth(layer, part)
    channels = seen.scalar(layer, f"{operand}_outlier_channels")
    words = [f"{percent(vanishing.value)} of {operand}"]
    words += [f"{percent(weights.value)} of w"] if weights is not None else []
    said = f"{layer!r}: {' and '.join(words)} vanish{'' if weights else 'es'} beside outlier channels"
    said += f", {channels:.0f} of them" if channels > 0 else ""
    said += f" (amax {growth:.3g} times its median)" if growth > 2 else ""
    said += f"; {gemm} is {percent(wrong.value)} off" if wrong is not None else ""
    evidence = {
        **_evidence(seen, layer, part),
        **numbers(
            w_underflow_ratio=seen.value(layer, "w tile", "underflow_ratio"),
            gemm_error=seen.value(layer, gemm, "relative_error"),
            outlier_channels=channels,
            outlier_ratio=seen.scalar(layer, f"{operand}_outlier_ratio"),
        ),
    }
    diagnosis = Diagnosis(
        cause="outlier-channels",
        kind="fp8",
        layer=layer,
        slot=vanishing.slot,
        summary=said,
        evidence=evidence,
    )
    return Finding(said=diagnosis, group=f"{GROUP}forward", samples=SURE if sure else LIKELY)


def _wrong_result(seen: Symptoms, layer: str, gemms: Iterable[str]) -> Finding | None:
    """A result that is not what its healthy operands give."""
    for gemm in gemms:
        wrong = seen.acts(layer, gemm)
        if wrong is None or not seen.reads_healthy(layer, gemm):
            continue
        error, cosine = wrong.value, seen.value(layer, gemm, "cosine")
        energy = seen.value(layer, gemm, "sum_sq_q") / seen.value(layer, gemm, "sum_sq")
        factor = math.sqrt(energy) if energy >= 0 else math.nan
        scaled = cosine >= _SAME_DIRECTION and math.isfinite(factor)
        said = f"{layer!r} {gemm} is {percent(error)} off although what it reads is healthy"
        said += (
            f": it is {factor:.3g} times the right result, as with a stale inverse scale" if scaled else ""
        )
        diagnosis = Diagnosis(
            cause="stale-inverse-scale",
            kind="fp8",
            layer=layer,
            slot=wrong.slot,
            summary=said,
            evidence=numbers(
                gemm_error=error,
                error_median=seen.median(layer, gemm),
                cosine=cosine,
                factor=factor if scaled else math.nan,
            ),
        )
        return Finding(said=diagnosis, group="", samples=SURE if wrong.instant else LIKELY)
    return None


def _evidence(seen: Symptoms, layer: str, part: str) -> dict[str, float]:
    metrics = ("underflow_ratio", "saturation_ratio", "rows_flushed_ratio", "cosine", "sqnr_db", "amax")
    values = {metric: seen.value(layer, part, metric) for metric in metrics}
    return numbers(**values, amax_growth=seen.amax_growth(layer, part))
