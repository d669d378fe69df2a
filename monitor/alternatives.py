"""What-ifs that help a GEMM which plain FP8 harms.

One fault gets one advice: where the policy would act on what a layer shows, the report names what the policy would take of the
same what-ifs (`treatment.choices`), held against every sample of the range. What no plan can bring about, block shapes, only
people can change: that is advised where nothing else helps.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.readings import Finding, GemmReadings, Verdict, level_of, verdict_of
from fp8_safeguard.monitor.treatment import Case, Choice, Remedy, choices, is_reproduced, ranked
from fp8_safeguard.monitor.whatifs import BF16_VARIANT, PLAIN, VARIANTS, Look, Measured, variant_of

_UNPLANNED = Plan()
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


class Judged(NamedTuple):
    """One GEMM of a layer: what plain FP8 does to it, the verdict, and every what-if."""

    plain: GemmReadings
    finding: Finding
    variants: Sequence[GemmReadings]

    @property
    def alternatives(self) -> list[GemmReadings]:
        """Those that were measured and change something."""
        return [each for each in self.variants if each.samples and _name(each) not in (PLAIN, BF16_VARIANT)]

    @property
    def failing(self) -> bool:
        """Whether the policy would ask for it to be cured."""
        return self.finding.fails or self.finding.vanishing

    @property
    def emulated(self) -> GemmReadings:
        """Plain FP8 as the alternatives are made; the judged readings where that was not measured."""
        return next((each for each in self.variants if each.samples and _name(each) == PLAIN), self.plain)

    def spoken_of(self) -> NDArray[np.int64]:
        """Steps whose what-ifs speak of the fault: those in which it fails, or else all that have any."""
        held = np.unique(np.concatenate([each.steps for each in self.alternatives] or [self.plain.steps]))
        act = level_of(self.plain.slot.gemm or "", "act", self.plain.fmt)
        failed = np.intersect1d(held, self.plain.steps[self.plain.errors > act])
        # Most what-ifs are there only where something was flagged: the healthy rest would make them look bad.
        return failed if len(failed) else held


class Advice(NamedTuple):
    """What is said of the alternatives of one GEMM."""

    best: Alternative | None
    """The one to take, or to look at first; None where none helps, or none is needed."""
    remedy: str | None
    """`safe with e5m2 for x`, where that is so and the policy would agree."""
    measured: int
    """Alternatives that were measured of it: with none there is nothing to advise."""


def advise(layer: str, judged: Mapping[str, Judged]) -> dict[str, Advice]:
    """The advice on each GEMM of a layer, by its name."""
    if not any(each.alternatives for each in judged.values()):
        return dict.fromkeys(judged, Advice(None, None, 0))
    case, look = _case(layer, judged), _look(judged)
    speaks = is_reproduced(case, look)
    found = choices(case, look, _UNPLANNED, lambda remedy: True) if case.failing or case.lost else []
    kept = [choice for choice in found if all(_is_safe(judged[gemm], gemm, choice) for gemm in case.failing)]
    choice = next(iter(kept or found), None)
    return {
        gemm: Advice(*_advised(gemm, each, choice, speaks), len(each.alternatives))
        for gemm, each in judged.items()
    }


def _case(layer: str, judged: Mapping[str, Judged]) -> Case:
    """The layer as the policy would put it, of the whole range instead of one sample."""
    failing = {gemm for gemm, each in judged.items() if each.failing}
    flushed = any(each.finding.flushed for each in judged.values())
    return Case(
        layer=layer,
        breaches=(),
        failing=frozenset(failing),
        judged={
            gemm: _error(each.plain, each.spoken_of()) for gemm, each in judged.items() if each.finding.fails
        },
        vanishing=any(each.finding.vanishing for each in judged.values()),
        lost=frozenset({"dy"}) if flushed else frozenset(),
        first_step=0,
        because="",
        rule="",
    )


def _look(judged: Mapping[str, Judged]) -> Look:
    """Every what-if that a plan can bring about, as one close look."""
    errors: dict[tuple[str, str], Measured] = {}
    for gemm, each in judged.items():
        steps, emulated = each.spoken_of(), each.emulated
        if each.alternatives or emulated is not each.plain:
            errors[gemm, PLAIN] = Measured(_error(emulated, steps), emulated.fmt)
        for readings in each.alternatives:
            if _remedy_of(_name(readings)) is not None:
                errors[gemm, _name(readings)] = Measured(_error(readings, steps), readings.fmt)
    return Look(0, errors)


def _error(readings: GemmReadings, steps: NDArray[np.int64]) -> float:
    """The median error in the samples of these steps; where it has none of them, in all."""
    shared = readings.errors[np.isin(readings.steps, steps)]
    errors = shared if len(shared) else readings.errors
    return float(np.median(errors)) if len(errors) else 0.0


def _advised(
    gemm: str, each: Judged, choice: Choice | None, speaks: bool
) -> tuple[Alternative | None, str | None]:
    finding = each.finding
    if finding.verdict == "safe" or (finding.verdict == "keep_bf16" and not speaks):
        # What the emulation does not show, such as a stale inverse scale, no format and no scale heals.
        return None, None
    helping = [readings for readings in each.alternatives if _helps(readings, each)]
    chosen = None if choice is None else _variant(gemm, choice)
    # What vanishes needs more range: there the policy takes a format with more noise, too.
    offered = each.alternatives if each.failing else helping
    taken = next((readings for readings in offered if _name(readings) == chosen), None)
    if taken is None:
        left = [readings for readings in helping if not _contradicts(_name(readings), choice)]
        taken = _first(gemm, left, each)
    if taken is None:
        return None, None
    best = _alternative(taken)
    refused = finding.verdict == "keep_bf16" and _remedy_of(best.variant) is not None
    agreed = best.variant == chosen or not refused
    return best, f"safe with {variant_words(best.variant)}" if best.verdict == "safe" and agreed else None


def _is_safe(each: Judged, gemm: str, choice: Choice) -> bool:
    """Whether a choice keeps its promise in every sample, and not in the typical one alone."""
    name = _variant(gemm, choice)
    return any(verdict_of(held, ()).verdict == "safe" for held in each.alternatives if _name(held) == name)


def _variant(gemm: str, choice: Choice) -> str | None:
    """The what-if that a choice is for one GEMM."""
    return variant_of(gemm, choice.remedy.beyond(_UNPLANNED, ""))


def _helps(readings: GemmReadings, each: Judged) -> bool:
    """Whether it changes what is lost, and has less error than plain FP8 in the same samples."""
    name, beside = _name(readings), np.intersect1d(each.spoken_of(), readings.steps)
    return _changes(name, each.finding.lost_in) and _error(readings, beside) < _error(each.plain, beside)


def _changes(variant: str, lost_in: Iterable[frozenset[str]]) -> bool:
    """Whether a what-if changes an operand of each of these sets; one that names none changes all."""
    operand = re.match("(x|w|dy)_", variant)
    return all(places if operand is None else operand[1] in places for places in lost_in)


def _contradicts(variant: str, choice: Choice | None) -> bool:
    """Whether it sets what the choice sets, and to something else."""
    remedy = _remedy_of(variant)
    if choice is None or remedy is None or remedy.action != choice.remedy.action:
        return False
    return remedy.value != choice.remedy.value and not set(remedy.changed).isdisjoint(choice.remedy.changed)


def _first(gemm: str, helping: Sequence[GemmReadings], each: Judged) -> GemmReadings | None:
    """Of those that help one GEMM: safe ones in the policy's order, then safe ones of people's, then the nearest."""
    safe = [readings for readings in helping if verdict_of(readings, ()).verdict == "safe"]
    plans = {remedy: readings for readings in safe if (remedy := _remedy_of(_name(readings))) is not None}
    if plans:
        of_gemm = [
            Choice(remedy, {gemm: Measured(_error(held, each.spoken_of()), held.fmt)}, {}, 0)
            for remedy, held in plans.items()
        ]
        return plans[ranked(of_gemm)[0].remedy]
    return min(safe or helping, key=_nearness, default=None)


def _nearness(readings: GemmReadings) -> tuple[float, float, str]:
    """How far under its own format's level it lies; lower is better."""
    made = _alternative(readings)
    return made.error_worst / made.threshold, made.error_median, made.variant


def _alternative(readings: GemmReadings) -> Alternative:
    assert readings.median is not None
    assert readings.worst is not None
    return Alternative(
        variant=_name(readings),
        verdict=verdict_of(readings, ()).verdict,
        error_median=readings.median,
        error_worst=readings.worst[0],
        samples=readings.samples,
        threshold=level_of(readings.slot.gemm or "", "act", readings.fmt),
    )


def _remedy_of(name: str) -> Remedy | None:
    """What a plan would hold to bring a what-if about; None where none can."""
    variant = VARIANTS.get(name)
    if variant is None or not variant.plannable or name in (PLAIN, BF16_VARIANT):
        return None
    return Remedy(variant.action or "", variant.value, () if variant.operand is None else (variant.operand,))


def _name(readings: GemmReadings) -> str:
    return readings.slot.variant or ""


def variant_words(name: str) -> str:
    """A what-if's name in a sentence: `e5m2 for dy`, `multiplier 2^-4 for x`; one that is not known stays as it is."""
    operand = re.fullmatch(r"(x|w|dy)_(.+)", name)
    what = operand[2] if operand else name
    scale = re.fullmatch(r"(multiplier|margin)_(2\^-?\d+)", what)
    what = f"{scale[1]} {scale[2]}" if scale else _WORDS.get(what, what)
    return f"{what} for {operand[1]}" if operand else what
