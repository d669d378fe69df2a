"""The policy: from a step's statistics to alerts and decisions.

`decide(state, observation, config) -> (state, decisions)` is pure: no clock, no I/O, no random number, and nothing in it
depends on the order of the slots. It runs once a step, in step order.

1. Every slot is held against the preset's thresholds (`signals`), and breaches that last become alerts (`alerts`).
2. Breaches ask for remedies (`remedies`): a neutral scale multiplier where a scale is at fault, BF16 for single gemms where
   the recomputed result, or weights and activations vanishing together, say that FP8 is at fault.
3. A remedy becomes a decision (`gate`) if its spot was at rest for the dwell, its layer is not pinned, it is not already in
   the plan or proposed, and the fallback budget holds it. Where the budget does not, people get advice, once.
4. A gemm in fallback is restored after the dwell, once what it reads has been healthy for some samples (and its emulated
   FP8 result, where only the result showed the fault); each time the same spot returns, the wait doubles.

In `enforce` decisions change the plan; in `observe` and `advise` they are proposed, and `approve` changes it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.alerts import Alert, AnyBreach, Evidence, follow_alerts, follow_evidence
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.columns import StatsTable, merge_tables
from fp8_safeguard.monitor.gate import Gate, PolicyConfig, PolicyConfigError, change_of
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.nonfinite import Began, Origin, broken_sums, find_origin, read_key
from fp8_safeguard.monitor.plan import Decision, PlanEntry
from fp8_safeguard.monitor.precision import BF16
from fp8_safeguard.monitor.remedies import (
    Candidate,
    fallback_candidates,
    nonfinite_candidates,
    pair_candidates,
    pair_up,
    scale_candidates,
)
from fp8_safeguard.monitor.runwatch import loss_jump, run_breaches, says_something, with_loss
from fp8_safeguard.monitor.shadow import Shadow
from fp8_safeguard.monitor.sight import Sight
from fp8_safeguard.monitor.signals import (
    Breach,
    Measures,
    SlotList,
    compile_slots,
    find_breaches,
    history_values,
)
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.monitor.state import Change, PolicyState, spot
from fp8_safeguard.monitor.wire import Sample

__all__ = [
    "Alert",
    "PolicyConfig",
    "PolicyConfigError",
    "PolicyState",
    "StepObservation",
    "approve",
    "budget_used_ratio",
    "decide",
    "kill",
    "observe",
    "reject",
    "revert",
]

RELEARN_SAMPLES = 32
"""A slot beyond a level relative to its own median for this long has a new normal: it enters the history again."""


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """What all groups of a run measured at one step, merged."""

    step: int
    slots: tuple[Slot, ...]
    stats: StatsTable
    """One row a slot."""
    run: Mapping[str, float | None] = field(default_factory=dict)
    plan_version: int = 0
    """The plan that the step ran with."""
    indices: tuple[int, ...] = ()
    """The slots' order in the model, to tell the earliest layer; empty: layer names decide."""


def observe(samples: Sequence[Sample]) -> StepObservation:
    """The observation in the samples of one step, one from each group that has arrived."""
    ordered = sorted(samples, key=lambda sample: sample.group)
    slots, stats = merge_tables([(sample.slots, sample.table) for sample in ordered])
    index: dict[str, int] = {}
    run: dict[str, float | None] = {}
    for sample in ordered:
        for position, slot in zip(sample.indices or range(len(sample.slots)), sample.slots, strict=True):
            index.setdefault(slot.key, position)
        for name, value in sample.run.items():
            if run.get(name) is None:
                run[name] = value
    return StepObservation(
        step=ordered[0].step,
        slots=slots,
        stats=stats,
        run=run,
        plan_version=min(sample.plan_version for sample in ordered),
        indices=tuple(index[slot.key] for slot in slots),
    )


def decide(
    state: PolicyState, step: StepObservation, config: PolicyConfig
) -> tuple[PolicyState, tuple[Decision, ...]]:
    """The state after that step and what was decided in it. A step not after the last decided one changes nothing.

    The alerts open afterwards are the new state's `alerts`.
    """
    if state.last_step is not None and step.step <= state.last_step:
        return state, ()
    compiled = compile_slots(step.slots, config.thresholds)
    measures = Measures(step.stats)
    found = find_breaches(compiled, measures, state.history.medians(compiled.keys))
    breaches, pairs = pair_up(_worst_of_each_key(found))
    origin = find_origin(
        step.slots, step.indices, measures["nonfinite_count"], step=step.step, began=_began(state)
    )
    if origin is not None:
        breaches[origin.key] = origin.breach(_nonfinite_severity(origin, state, step, config))
    falls = _scale_falls(state, step)
    everything = _with_watched(breaches, step, state, falls)
    loss = step.run.get("loss")
    jump = loss_jump(loss, state.losses)
    if jump is not None:
        everything[jump.key] = jump
    if origin is not None:
        everything.update(origin.companions(breaches[origin.key].severity))
    sight = Sight(compiled, step.stats)
    observed = _observer(sight, step, falls)
    evidence = follow_evidence(state.evidence, everything, observed, step.step, config.clear_samples)
    shadow = Shadow(compiled, measures, breaches, fallbacks(state.plan))
    current = replace(
        state,
        last_step=step.step,
        evidence=evidence,
        alerts=_alerts(state, evidence, everything, shadow, step.step, config),
        costs=state.costs.learned(step.slots, step.stats),
        loss_scale=step.run.get("loss_scale"),
        losses=with_loss(state.losses, loss, jumped=jump is not None),
    )
    candidates = [
        *scale_candidates(breaches),
        *pair_candidates(pairs),
        *fallback_candidates(breaches, evidence, compiled.families),
        *_nonfinite(origin, breaches),
    ]
    gate = Gate(current, config, step.step, step.plan_version, evidence)
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        gate.offer(candidate, breaches, in_bf16=shadow.configured(candidate.layer, candidate.target) == BF16)
    probation = _restore(gate, compiled, measures, breaches, origin, sight)
    history = current.history
    if origin is None:
        # What a non-finite step measured elsewhere is no norm for anything.
        admit = _admitted(compiled, found, evidence)
        history = history.added(compiled.keys, history_values(compiled, measures), admit)
    return replace(gate.result(), probation=probation, history=history), tuple(gate.decisions)


def budget_used_ratio(state: PolicyState, config: PolicyConfig) -> float:
    """Part of the fallback budget that the plan uses: 1 when it is full."""
    share = state.costs.share(fallbacks(state.plan))
    return share / config.budget_ratio if config.budget_ratio else float(share > 0)


def approve(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person approves a proposal at that step: the plan takes it up."""
    key = spot(decision.layer, decision.target)
    changed = change_of(decision, state.changes.get(key), step)
    return replace(
        _without_proposal(state, decision.id),
        plan=state.plan.with_decision(decision),
        changes={**state.changes, key: changed},
    )


def reject(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person rejects a proposal at that step: its spot rests for the dwell before it may be proposed again."""
    return _rested(_without_proposal(state, decision.id), decision, step)


def revert(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person undoes a decision at that step: its entry leaves the plan, and its spot rests for the dwell."""
    return _rested(replace(state, plan=state.plan.without_decision(decision.id)), decision, step)


def kill(state: PolicyState, step: int) -> PolicyState:
    """The kill switch: an empty plan and no proposals. Every spot that had an entry rests for the dwell."""
    rested = {
        spot(entry.layer, entry.target): Change(step, entry.decision_id, "restore")
        for entry in state.plan.entries
    }
    return replace(
        state, plan=state.plan.emptied(), proposals={}, probation={}, changes={**state.changes, **rested}
    )


def _without_proposal(state: PolicyState, decision_id: str) -> PolicyState:
    kept = {key: made for key, made in state.proposals.items() if made.decision_id != decision_id}
    return replace(state, proposals=kept)


def _rested(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    key = spot(decision.layer, decision.target)
    before = state.changes.get(key)
    rest = Change(step, decision.id, "restore", restores=before.restores if before else 0)
    return replace(state, changes={**state.changes, key: rest})


def _worst_of_each_key(found: Iterable[Breach]) -> dict[str, Breach]:
    """Several experts of a layer share a key: the worst one speaks."""
    worst: dict[str, Breach] = {}
    for breach in found:
        key = breach.key
        if key not in worst or breach.rank > worst[key].rank:
            worst[key] = breach
    return worst


def _with_watched(
    breaches: Mapping[str, Breach], step: StepObservation, state: PolicyState, scale_falls: bool
) -> dict[str, AnyBreach]:
    """With what is for people only: sums that are none, and the run's own values."""
    rows = {key: old.watch for key, old in state.evidence.items() if not old.clear}
    spoken_of = {breach.slot.key for breach in breaches.values()}
    found = (breach for breach in broken_sums(step.slots, step.stats) if breach.slot.key not in spoken_of)
    broken = {breach.key: breach for breach in found}
    return {**breaches, **broken, **run_breaches(step.run, rows, scale_falls=scale_falls)}


def _alerts(
    state: PolicyState,
    evidence: Mapping[str, Evidence],
    breaches: Mapping[str, AnyBreach],
    shadow: Shadow,
    step: int,
    config: PolicyConfig,
) -> dict[str, Alert]:
    """Open alerts after a step. What a gemm would do in FP8 that the plan has taken out of it is no news."""
    known = {signal.key for alert in state.alerts.values() for signal in alert.live}
    told = {
        key: breach
        for key, breach in breaches.items()
        if key in known or breach.place is None or not shadow.fallen(breach.place)
    }
    return follow_alerts(state.alerts, evidence, told, step, config.hysteresis, shadow.what_if)


def _scale_falls(state: PolicyState, step: StepObservation) -> bool:
    """A gradient scaler looks for its scale by overflowing: that is its way, not a fault."""
    scale = step.run.get("loss_scale")
    return scale is not None and state.loss_scale is not None and scale < state.loss_scale


def _observer(sight: Sight, step: StepObservation, scale_falls: bool) -> Callable[[str], bool]:
    def observed(key: str) -> bool:
        of_run = says_something(key, step.run, scale_falls=scale_falls)
        if of_run is not None:
            return of_run
        rule, _, family = key.partition("|")
        if rule == NON_FINITE.rule:
            layer, family = read_key(key)
            if not family:
                return sight.shows_layer(layer)
            return sight.shows_whole(family)
        return sight.shows(rule, family)

    return observed


def _nonfinite_severity(
    origin: Origin, state: PolicyState, step: StepObservation, config: PolicyConfig
) -> str:
    """act once the place has been the origin in enough consecutive samples."""
    before = state.evidence.get(origin.key)
    samples = before.watch + 1 if before is not None and before.clear == 0 else 1
    if not origin.forward and _scale_falls(state, step):
        return "watch"
    return "act" if samples >= config.nonfinite_samples else "watch"


def _began(state: PolicyState) -> list[Began]:
    """Where non-finite values began that were there in the latest sample, the earliest first."""
    found = [
        signal
        for alert in state.alerts.values()
        if alert.rule == NON_FINITE.rule
        for signal in alert.live
        if signal.key in state.evidence
        and not state.evidence[signal.key].clear
        and not read_key(signal.key)[1]
    ]
    found.sort(key=lambda signal: (signal.first_step, signal.key))
    return [
        Began(signal.slot, signal.value, signal.first_step) for signal in found if signal.slot is not None
    ]


def _nonfinite(origin: Origin | None, breaches: Mapping[str, Breach]) -> list[Candidate]:
    if origin is None or breaches[origin.key].severity != "act":
        return []
    return nonfinite_candidates(origin)


def _admitted(
    compiled: SlotList, found: Iterable[Breach], evidence: Mapping[str, Evidence]
) -> NDArray[np.bool_]:
    """Which values [own, 2] enter the history: not those beyond a level relative to it, unless for long.

    What reaches an act level never does: a fault is not a new normal, however long it lasts.
    """
    admit = np.ones((len(compiled.own), 2), dtype=bool)
    for breach in found:
        row = compiled.own_row.get(breach.slot.key)
        relative = breach.rule.watch_over_median is not None
        recent = breach.severity == "act" or evidence[breach.key].watch <= RELEARN_SAMPLES
        if relative and row is not None and recent:
            admit[row, 1 if breach.rule.metric == "kurtosis" else 0] = False
    return admit


def _restore(
    gate: Gate,
    compiled: SlotList,
    measures: Measures,
    breaches: Mapping[str, Breach],
    origin: Origin | None,
    sight: Sight,
) -> dict[str, int]:
    """Restore what has passed its probation; the healthy samples of what has not."""
    probation: dict[str, int] = {}
    for entry, change in list(_own_fallbacks(gate)):
        gemm, key = entry.target.gemm or "", spot(entry.layer, entry.target)
        healthy = _healthy(entry.layer, gemm, breaches, origin, sight)
        if healthy and change.by_result and not _emulated(entry.layer, gemm, compiled):
            healthy = None
        samples = gate.state.probation.get(key, 0)
        samples = samples if healthy is None else samples + 1 if healthy else 0
        wait = gate.config.dwell_steps * 2**change.restores
        shown = change.restorable or change.by_result
        if shown and samples >= gate.config.restore_samples and gate.step >= change.step + wait:
            gate.restore(entry.layer, entry.target, samples, _readings(entry.layer, gemm, compiled, measures))
        probation[key] = samples
    return {key: samples for key, samples in probation.items() if samples}


def _own_fallbacks(gate: Gate) -> Iterator[tuple[PlanEntry, Change]]:
    """Entries that the policy made: what a person put into the plan, a person takes out."""
    for entry in gate.plan.entries:
        change = gate.changes.get(spot(entry.layer, entry.target))
        mine = change is not None and change.decision_id == entry.decision_id
        if change is not None and mine and entry.action == "bf16_fallback" and entry.target.gemm:
            yield entry, change


def _healthy(
    layer: str, gemm: str, breaches: Mapping[str, Breach], origin: Origin | None, sight: Sight
) -> bool | None:
    """Whether all that a gemm reads is below its watch levels; None where the sample does not show."""
    read = GEMM_OPERANDS[gemm]
    families = [Slot(layer, operand=operand, layout=layout).family for operand, layout in read]
    if origin is not None or not all(map(sight.holds, families)):
        return False if origin is not None and origin.slot.layer == layer else None
    harmed = any(
        breach.slot.layer == layer
        and (breach.slot.gemm == gemm or (breach.slot.operand, breach.slot.layout) in read)
        for breach in breaches.values()
        # A jump against the own median is news, not harm.
        if breach.rule.act is not None or breach.rule.watch_over_median is None
    )
    return False if harmed else True if all(map(sight.shows_whole, families)) else None


def _emulated(layer: str, gemm: str, compiled: SlotList) -> bool:
    """Whether the sample shows what a gemm's result would be in FP8."""
    row = compiled.own_row.get(Slot(layer, gemm=gemm).key)
    return row is not None and compiled.slots[compiled.own[row]].emulated


def _readings(layer: str, gemm: str, compiled: SlotList, measures: Measures) -> dict[str, float]:
    """Underflow of what a gemm reads, and the error of its emulated result, by slot label, for the record."""
    wanted = {Slot(layer, operand=operand, layout=layout).key for operand, layout in GEMM_OPERANDS[gemm]}
    values = measures["underflow_ratio"]
    readings = {
        f"{slot.label} underflow_ratio": float(values[at])
        for at, slot in enumerate(compiled.slots)
        if slot.key in wanted
    }
    if _emulated(layer, gemm, compiled):
        result = Slot(layer, gemm=gemm)
        at = compiled.own[compiled.own_row[result.key]]
        readings[f"{result.label} relative_error"] = float(measures["relative_error"][at])
    return readings
