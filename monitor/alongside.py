"""Whether a layer waits for a scale that others with its fault get."""

from fp8_safeguard.monitor.gate import LATE_STEPS, SETTLE_STEPS, Gate
from fp8_safeguard.monitor.remedies import Candidate, scale_target
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.monitor.state import Change


def waits_for_scale(gate: Gate, candidate: Candidate, first_step: int) -> bool:
    """Whether a fallback has to wait, because what the gemm reads was just given another scale in layers with the same fault.

    Saturation may show in one layout of an operand first, or a sample later: then the layer's own statistics ask for the
    scale while the others' takes effect. first_step: where its fault began.
    """
    gemm = candidate.target.gemm
    if candidate.action != "bf16_fallback" or gemm is None:
        return False
    keys = {
        scale_target(Slot(candidate.layer, operand=operand, layout=layout)).key
        for operand, layout in GEMM_OPERANDS[gemm]
    }
    changed = any(
        _target_key(spot) in keys and _is_of_the_same(gate, change, gemm, first_step)
        for spot, change in gate.changes.items()
    )
    return changed or any(
        made.action == "scale_multiplier"
        and _target_key(place.rpartition("|")[0]) in keys
        and gate.step < made.step + SETTLE_STEPS
        for place, made in gate.proposals.items()
    )


def _is_of_the_same(gate: Gate, change: Change, gemm: str, first_step: int) -> bool:
    """Whether a scale has yet to show its effect on a fault that was seen in that gemm, or in an operand, at that time."""
    if change.action != "scale_multiplier" or not gate.fresh(change):
        return False
    if abs(change.step - first_step) > LATE_STEPS:
        return False
    for decision in gate.decisions:
        if decision.id == change.decision_id:
            named = {signal["slot"].get("gemm") for signal in decision.evidence["signals"]}
            return bool(named & {gemm, None})
    pending = gate.state.outcomes.pending.get(change.decision_id)
    return pending is not None and pending.signal is not None and pending.signal.slot.gemm in (gemm, None)


def _target_key(spot: str) -> str:
    return spot.rpartition("|")[2]
