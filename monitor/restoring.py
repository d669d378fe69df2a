"""Takes remedies back once their spots have been healthy for long enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8_safeguard.monitor.gate import EXPIRED, Gate
from fp8_safeguard.monitor.nonfinite import Origin
from fp8_safeguard.monitor.plan import PlanEntry, step_after
from fp8_safeguard.monitor.remedies import Candidate
from fp8_safeguard.monitor.sight import Sight
from fp8_safeguard.monitor.signals import Breach, Measures, SlotList
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.monitor.state import Change, place, spot
from fp8_safeguard.monitor.treatment import COSTS, healthy, shows, undone
from fp8_safeguard.monitor.whatifs import Look, Measured, WhatIfs

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView


def restore(gate: Gate, view: StepView, newer: WhatIfs) -> dict[str, int]:
    """Restore what has passed its probation, failed, or expired; the healthy samples of what has not."""
    _renew(gate, view, newer)
    probation = {**_fallbacks(gate, view), **_treatments(gate, newer)}
    return {key: samples for key, samples in probation.items() if samples}


def _fallbacks(gate: Gate, view: StepView) -> dict[str, int]:
    probation: dict[str, int] = {}
    for entry, change in list(_own_fallbacks(gate)):
        gemm, key = entry.target.gemm or "", spot(entry.layer, entry.target)
        healthy = _healthy(entry.layer, gemm, view.breaches, view.origin, view.sight)
        if healthy and change.by_result and not _emulated(entry.layer, gemm, view.compiled):
            healthy = None
        if change.unshown and _shows(entry.layer, gemm, change.unshown, view):
            change = gate.changes[key] = replace(change, unshown=0.0)
        samples = gate.state.probation.get(key, 0)
        samples = samples if healthy is None else samples + 1 if healthy else 0
        due = samples >= gate.config.restore_samples and gate.step >= change.step + _wait(gate, change)
        if due and change.by_result and change.unshown:
            gate.offer(_left_to_people(entry, samples), {})
        elif due and (change.restorable or change.by_result):
            seen = "its emulated result and all" if change.by_result else "all"
            values = _readings(entry.layer, gemm, view.compiled, view.measures)
            gate.restore(
                entry.layer,
                entry.target,
                f"{seen} that it reads was healthy in {samples} samples",
                {"healthy_samples": samples, "values": values},
            )
        probation[key] = samples
    return probation


def _left_to_people(entry: PlanEntry, samples: int) -> Candidate:
    """Advice instead of a restore on an emulation that never showed the fault."""
    return Candidate(
        layer=entry.layer,
        target=entry.target,
        action="advice",
        rule="probation",
        breaches=(),
        priority=4,
        because=f"{entry.layer!r} {entry.target.key}: its emulated FP8 result was healthy in {samples} samples, but it never "
        "showed the fault that the real one had (a stale inverse scale, or hardware), so it says nothing about its end; once "
        "the cause is found, revert the decision by hand",
    )


def _shows(layer: str, gemm: str, error: float, view: StepView) -> bool:
    """Whether the step's emulated result of a GEMM, of its experts the worst, shows that error."""
    slots, errors = view.compiled.slots, view.measures["relative_error"]
    return any(
        shows(gemm, error, Measured(float(errors[at]), slots[at].fmt))
        for at in view.compiled.gemms
        if slots[at].emulated and slots[at].gemm == gemm and slots[at].layer == layer
    )


def _treatments(gate: Gate, newer: WhatIfs) -> dict[str, int]:
    """Scales and formats: back once looks have shown the plain configuration to be healthy, or it itself did not help."""
    probation: dict[str, int] = {}
    own: dict[str, list[tuple[PlanEntry, Change]]] = {}
    for entry, change in _own(gate):
        if entry.action in COSTS:
            own.setdefault(entry.layer, []).append((entry, change))
    for layer, entries in own.items():
        shown = _plain(entries, newer.looks.get(layer))
        for entry, _ in entries:
            key = spot(layer, entry.target)
            samples = gate.state.probation.get(key, 0)
            samples = samples if shown is None else samples + 1 if shown else 0
            probation[key] = samples
        _end(gate, layer, entries, min(probation[spot(layer, entry.target)] for entry, _ in entries))
    return probation


def _end(gate: Gate, layer: str, entries: Sequence[tuple[PlanEntry, Change]], looks: int) -> None:
    """Take a layer's remedies out of the plan: all of them together, as they were measured."""
    rested = all(gate.step >= change.step + _wait(gate, change) for _, change in entries)
    useless = [
        entry
        for entry, change in entries
        if change.remedy and gate.state.outcomes.has_failed(layer, change.remedy)
    ]
    for entry, change in entries:
        if entry in useless and gate.step >= change.step + gate.config.dwell_steps:
            gate.restore(layer, entry.target, f"its {entry.action} did not help", {}, rule="no-help")
    if rested and not useless and looks >= gate.config.restore_samples:
        for entry, _ in entries:
            why = f"the plain configuration was healthy in {looks} close looks"
            gate.restore(layer, entry.target, why, {"healthy_looks": looks})


def _plain(entries: Sequence[tuple[PlanEntry, Change]], look: Look | None) -> bool | None:
    """Whether the plain configuration would be healthy; None where no look says so."""
    if look is None:
        return None
    shown = dict(undone((entry.action for entry, _ in entries), look))
    if not shown:
        return None
    return all(healthy(gemm, seen) for gemm, seen in shown.items())


def _renew(gate: Gate, view: StepView, newer: WhatIfs) -> None:
    """Entries with a time to live: longer where the evidence still asks for them, out of the plan once they expired.

    The trainer ends them by itself, in every mode: a plan that still held them would hide a fault that comes back.
    """
    ttl = None if gate.config.mode == "observe" else gate.config.ttl_steps
    for entry, _ in list(_own(gate)):
        if entry.expires_step is None:
            continue
        look = newer.looks.get(entry.layer)
        ill = look is not None and any(not healthy(gemm, seen) for gemm, seen in undone([entry.action], look))
        asked = place(entry.layer, entry.target, entry.action) in gate.asked
        if view.seen.step >= entry.expires_step:
            why = f"nothing asked for it for {gate.config.ttl_steps or 'its'} steps"
            gate.restore(entry.layer, entry.target, why, {}, rule=EXPIRED)
        elif ttl is not None and (ill or asked) and entry.expires_step - view.seen.step <= ttl // 2:
            gate.plan = gate.plan.renewed(entry.place, step_after(view.seen.step, ttl))


def _wait(gate: Gate, change: Change) -> int:
    """Steps from a change to its restore at the earliest: twice as many each time."""
    return gate.config.dwell_steps * int(2**change.restores)


def _own(gate: Gate) -> Iterator[tuple[PlanEntry, Change]]:
    """Entries that the policy made: what a person put into the plan, a person takes out."""
    for entry in gate.plan.entries:
        change = gate.changes.get(spot(entry.layer, entry.target))
        if change is not None and change.decision_id == entry.decision_id:
            yield entry, change


def _own_fallbacks(gate: Gate) -> Iterator[tuple[PlanEntry, Change]]:
    return (
        (entry, change)
        for entry, change in _own(gate)
        if entry.action == "bf16_fallback" and entry.target.gemm
    )


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
    values = measures["underflow_ratio"]
    # In a fixed order: a stored decision must not depend on that of the slots.
    read = (Slot(layer, operand=operand, layout=layout) for operand, layout in GEMM_OPERANDS[gemm])
    found = ((slot.label, compiled.own_row.get(slot.key)) for slot in read)
    readings = {
        f"{label} underflow_ratio": float(values[compiled.own[row]])
        for label, row in found
        if row is not None
    }
    if _emulated(layer, gemm, compiled):
        result = Slot(layer, gemm=gemm)
        at = compiled.own[compiled.own_row[result.key]]
        readings[f"{result.label} relative_error"] = float(measures["relative_error"][at])
    return readings
