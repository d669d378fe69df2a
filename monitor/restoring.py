"""Restores a gemm in fallback once it has been healthy for long enough."""

from collections.abc import Iterator, Mapping

from fp8_safeguard.monitor.gate import Gate
from fp8_safeguard.monitor.nonfinite import Origin
from fp8_safeguard.monitor.plan import PlanEntry
from fp8_safeguard.monitor.sight import Sight
from fp8_safeguard.monitor.signals import Breach, Measures, SlotList
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.monitor.state import Change, spot


def restore(
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
