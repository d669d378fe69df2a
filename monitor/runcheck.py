"""Holds a run against a reference: loss, numerics, decisions, data.

The loss is judged by `lossgap`. Numerics are held, slot by slot, against the levels that the reference's healthy values make
of the preset's; decisions, alerts and non-finite values against the reference's own.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp8_safeguard.monitor.baseline import Baseline, Learner, slot_of
from fp8_safeguard.monitor.levels import Healthy
from fp8_safeguard.monitor.lossgap import CheckError, LossReport, compare_losses
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import Preset, Threshold, get_preset, watch_level

JUDGED = ("relative_error", "underflow_ratio", "saturation_ratio", "rows_flushed_ratio")
"""Metrics of which the level is judged; non-finite values are counted."""
MOST_LISTED = 20

Kind = Literal["data", "loss", "numerics", "decisions", "alerts"]


@dataclass(frozen=True)
class Breach:
    """One way in which the run is worse than the reference."""

    kind: Kind
    said: str
    """One line for people, with the numbers."""


@dataclass
class Side:
    """What one run showed over the steps that are compared."""

    losses: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    learner: Learner = field(default_factory=Learner)

    def add(self, seen: StepObservation) -> None:
        """One more step; steps come in order."""
        for name, into in (("loss", self.losses), ("tokens", self.tokens)):
            value = seen.run.get(name)
            if value is not None:
                into[seen.step] = float(value)
        self.learner.add(seen)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    run: str
    reference: str
    loss: LossReport | None
    slots_compared: int
    breaches: tuple[Breach, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run passes."""
        return not self.breaches

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        loss = None if self.loss is None else {**asdict(self.loss), "worst": asdict(self.loss.worst)}
        return {
            "run": self.run,
            "reference": self.reference,
            "ok": self.ok,
            "loss": loss,
            "slots_compared": self.slots_compared,
            "breaches": [vars(breach) for breach in self.breaches],
            "notes": list(self.notes),
        }


def loss_breaches(report: LossReport, losses: Mapping[int, float]) -> list[Breach]:
    """What the loss does that the reference's does not. losses: the run's, by step."""
    found = []
    if report.broken:
        first, more = report.broken[0], len(report.broken) - 1
        also = f", and at {more} more steps" if more else ""
        said = f"loss is {losses[first]} at step {first}{also}; the reference's is finite there"
        found.append(Breach("loss", said))
    if report.over:
        worst = report.worst
        found.append(
            Breach(
                "loss",
                f"loss is {percent(worst.gap_ratio)} above the reference in steps {worst.from_step} to "
                f"{worst.to_step} (limit {percent(worst.limit)}, null {report.null}; "
                f"{len(report.over)} of {len(report.windows)} windows)",
            )
        )
    return found


def compare_tokens(run: Mapping[int, float], reference: Mapping[int, float]) -> list[Breach]:
    """Whether both saw as much data at the steps that both have."""
    shared = sorted(run.keys() & reference.keys())
    unlike = [step for step in shared if run[step] != reference[step]]
    if not unlike:
        return []
    step = unlike[0]
    said = f"tokens differ at {len(unlike)} of {len(shared)} steps: {run[step]:g} against {reference[step]:g} at step {step}"
    return [Breach("data", f"{said}; the losses are not of the same data")]


def compare_numerics(
    run: Baseline, reference: Baseline, preset: Preset
) -> tuple[int, list[Breach], list[str]]:
    """(slots compared, what is beyond the reference's healthy range, notes).

    A slot's own 99 % quantile is held against the watch level that the reference's values make of the preset's; one that the
    reference has not, against the preset's. Any non-finite value is a breach where the reference has none.
    """
    shared = run.families.keys() & reference.families.keys()
    notes = []
    lost = len(reference.families.keys() - shared)
    fresh = len(run.families.keys() - shared)
    if lost and shared:
        notes.append(
            f"{lost} of the reference's {len(reference.families)} slots were not measured in the run"
        )
    if fresh and shared:
        notes.append(f"{fresh} slots are not the reference's: held against the preset {preset.name}")
    found: list[tuple[float, str]] = []
    for name, family in run.families.items():
        found += _beyond(slot_of(name, family.fmt), run, reference, preset)
    found.sort(key=lambda each: (-each[0], each[1]))
    if reference.families and not shared:
        found.insert(0, (math.inf, "the run has none of the reference's slots; are the layers named alike?"))
    return len(shared), listed("numerics", [said for _, said in found]), notes


def _beyond(slot: Slot, run: Baseline, reference: Baseline, preset: Preset) -> Iterator[tuple[float, str]]:
    """(how far beyond, in words) of each metric of a slot that is."""
    bad, before = (each.healthy(slot, "nonfinite_count") for each in (run, reference))
    if bad is not None and bad.extremum > 0 and (before is None or before.extremum == 0):
        yield (
            math.inf,
            f"{slot.label}: up to {bad.extremum:g} non-finite values a step; the reference has none",
        )
    for rule in preset.matching(slot):
        seen = run.healthy(slot, rule.metric)
        if rule.metric not in JUDGED or seen is None:
            continue
        healthy = reference.healthy(slot, rule.metric)
        limit = _limit(rule, slot, healthy)
        if limit is not None and seen.high > limit:
            yield (
                seen.high / limit,
                f"{slot.label}: {rule.metric} {percent(seen.high)} is beyond {percent(limit)} ({_source(healthy)})",
            )


def _limit(rule: Threshold, slot: Slot, healthy: Healthy | None) -> float | None:
    if healthy is None and rule.watch_over_median is not None:
        return rule.level("act", slot.fmt)
    return watch_level(rule, slot.fmt, None, healthy)


def _source(healthy: Healthy | None) -> str:
    if healthy is None:
        return "the preset's level; the reference lacks the slot"
    return f"reference: median {percent(healthy.median)}, worst {percent(healthy.extremum)}"


def compare_decisions(
    run: Iterable[Mapping[str, Any]], reference: Iterable[Mapping[str, Any]]
) -> list[Breach]:
    """The run's decisions, as the API shows them, that the reference has not."""

    def key(item: Mapping[str, Any]) -> tuple[str, ...]:
        return (item["layer"], Target.from_wire(item["target"]).key, item["action"])

    known = set(map(key, reference))
    fresh = _first_of_each(run, key)
    return listed(
        "decisions",
        [
            f"{action} of {layer} {target} at step {item['step']} ({item['rule']}); the reference has no such decision"
            for (layer, target, action), item in fresh.items()
            if (layer, target, action) not in known
        ],
    )


def compare_alerts(run: Iterable[Mapping[str, Any]], reference: Iterable[Mapping[str, Any]]) -> list[Breach]:
    """The run's alerts, as the API shows them, that the reference has not, or not as badly."""
    worst: dict[tuple[str, ...], str] = {}
    for item in reference:
        name = _alert_key(item)
        worst[name] = "act" if "act" in (worst.get(name), item["severity"]) else "watch"
    said = []
    for (rule, layer), item in _first_of_each(run, _alert_key).items():
        before = worst.get((rule, layer))
        if before is None or (before, item["severity"]) == ("watch", "act"):
            than = "no such alert" if before is None else "it as a watch alert"
            said.append(
                f"{item['severity']} alert {rule} of {layer} at step {item['step']}; the reference has {than}"
            )
    return listed("alerts", said)


def _alert_key(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (item["rule"], item["layer"] or "the run")


def _first_of_each(
    items: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], tuple[str, ...]]
) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The earliest item of each key; of alerts an `act` goes before."""
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for item in sorted(items, key=lambda item: (item.get("severity") != "act", item["step"])):
        found.setdefault(key(item), item)
    return found


def listed(kind: Kind, said: Sequence[str]) -> list[Breach]:
    """A breach each; of many the first, and how many more there are."""
    shown = [Breach(kind, line) for line in said[:MOST_LISTED]]
    more = len(said) - MOST_LISTED
    return (
        [*shown, Breach(kind, f"and {more} more; the first {MOST_LISTED} are shown")] if more > 0 else shown
    )


def percent(ratio: float) -> str:
    """A ratio in percent, three digits."""
    return f"{100 * ratio:.3g} %"


def report_of(
    *,
    run: str,
    reference: str,
    ours: Side,
    theirs: Side,
    learned: Baseline | None,
    raised: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    raised_before: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    preset: str,
    twins: Sequence[Mapping[int, float]] = (),
    max_gap: float | None = None,
) -> Report:
    """All comparisons together. raised: (decisions, alerts) of the run; raised_before: of the reference.

    learned: what the reference is, where that is a baseline; its losses are compared where `theirs` shares enough steps.
    Raises CheckError where a run and a run share too few steps.
    """
    notes: list[str] = []
    loss: LossReport | None = None
    try:
        loss = compare_losses(ours.losses, theirs.losses, twins=twins, max_gap=max_gap)
    except CheckError as error:
        if learned is None:
            raise
        notes.append(f"the loss was not compared: {error}")
    numbers = learned if learned is not None else theirs.learner.finish(run=reference)
    slots, numerics, more = compare_numerics(ours.learner.finish(run=run), numbers, get_preset(preset))
    breaches = [
        *compare_tokens(ours.tokens, theirs.tokens),
        *(loss_breaches(loss, ours.losses) if loss is not None else ()),
        *numerics,
        *compare_decisions(raised[0], raised_before[0]),
        *compare_alerts(raised[1], raised_before[1]),
    ]
    return Report(
        run=run,
        reference=reference,
        loss=loss,
        slots_compared=slots,
        breaches=tuple(breaches),
        notes=(*notes, *more),
    )
