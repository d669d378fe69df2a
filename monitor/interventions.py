"""What people change: approve, reject, revert, and the kill switch."""

from dataclasses import replace

from fp8_safeguard.monitor.gate import change_of
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.state import Change, PolicyState, spot


def approve(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person approves a proposal at that step: the plan takes it up."""
    key = spot(decision.layer, decision.target)
    plan = state.plan.with_decision(decision, step)
    changed = change_of(decision, state.changes.get(key), step, plan)
    return replace(
        _without_proposal(state, decision.id),
        plan=plan,
        changes={**state.changes, key: changed},
        looks=state.looks.without([decision.layer]),
        outcomes=state.outcomes.approved(decision, plan),
    )


def reject(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person rejects a proposal at that step: its spot rests for the dwell before it may be proposed again."""
    return _rested(_without_proposal(state, decision.id), decision, step)


def revert(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    """A person undoes a decision at that step: its entry leaves the plan, and its spot rests for the dwell.

    Where the plan holds it no more there is nothing to undo, and what is at its spot by now is another decision's.
    """
    plan = state.plan.without_decision(decision.id)
    return state if plan is state.plan else _rested(replace(state, plan=plan), decision, step)


def kill(state: PolicyState, step: int) -> PolicyState:
    """The kill switch: an empty plan and no proposals. Every spot that had an entry rests for the dwell."""
    plan = state.plan.emptied()
    rested = {
        spot(entry.layer, entry.target): Change(step, entry.decision_id, "restore", version=plan.version)
        for entry in state.plan.entries
    }
    return replace(
        state,
        plan=plan,
        proposals={},
        probation={},
        changes={**state.changes, **rested},
        looks=state.looks.without({entry.layer for entry in state.plan.entries}),
    )


def _without_proposal(state: PolicyState, decision_id: str) -> PolicyState:
    kept = {key: made for key, made in state.proposals.items() if made.decision_id != decision_id}
    return replace(state, proposals=kept)


def _rested(state: PolicyState, decision: Decision, step: int) -> PolicyState:
    key = spot(decision.layer, decision.target)
    before = state.changes.get(key)
    restores = before.restores if before else 0
    rest = Change(step, decision.id, "restore", restores=restores, version=state.plan.version)
    looks = state.looks.without([decision.layer])
    return replace(state, changes={**state.changes, key: rest}, looks=looks)
