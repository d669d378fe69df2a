"""What people change: approve, reject, revert, and the kill switch."""

from dataclasses import replace

from fp8_safeguard.monitor.gate import change_of
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.state import Change, PolicyState, spot


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
