"""Takes over what a client decided while it could not reach the server."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.localdecisions import LOCAL_VERSION
from fp8_safeguard.monitor.plan import Decision, Plan
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, approve
from fp8_safeguard.monitor.slots import INT64_MAX
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server import audit, slotlists
from fp8_safeguard.server.audit import Act
from fp8_safeguard.server.auditview import decision_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.localevidence import readable
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.tables import decisions

CLIENT = "client"
LOCAL = "local"
"""In the ids of what clients decide, between the run's name and the rest."""


@dataclass(frozen=True)
class TakenOver:
    """The policy's state with the client's decisions in it, and what readers are told."""

    state: PolicyState
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """Those heard of for the first time, as the contract shows them."""
    events: list[Event] = field(default_factory=list)


def take_over(
    conn: Connection, run: Row[Any], state: PolicyState, sample: Sample, config: PolicyConfig, now: float
) -> TakenOver:
    """Record the sample's local decisions, once each, and put them into the run's plan, as the policy's own.

    The new plan's version is above the server's and the client's, so that the client leaves its own for it. What the plan
    holds already, what is pinned, what no client decides alone, and everything in a mode that changes no plan is recorded and
    not put into it. Raises Problem 422 for a version that none can be above.
    """
    fresh, events = _unknown(conn, run, sample)
    if not fresh:
        return TakenOver(state, events=events)
    before, recorded = state.plan, []
    for decision in fresh:
        refusal = _refusal(conn, run, decision, sample, config)
        held_by = _held_by(state, decision)
        if refusal is not None:
            recorded.append(_as_recorded(run, decision, config, "reverted", refusal))
            continue
        told = None if held_by is None else f"the plan held it already, by decision {held_by}"
        recorded.append(_as_recorded(run, decision, config, "sent", told))
        if held_by is None:
            state = approve(state, recorded[-1], decision.step)
    # The sample that brings a decision first ran before the client's own plan with it.
    theirs = [int(decision.evidence.get(LOCAL_VERSION, 0)) for decision in fresh]
    version = max(before.version, sample.plan_version, *theirs) + 1
    if version > INT64_MAX:
        said = f"no plan can be above version {version - 1}: a client's plans count from the server's upward, one by one"
        raise invalid(said, [("/local_decisions", said)])
    state = replace(state, plan=Plan(version, state.plan.entries))
    shown = audit.record_decisions(conn, run, recorded, version, now)
    events += _note_applied(conn, run, fresh)
    return TakenOver(state, audit.refreshed(conn, shown), events)


def note(conn: Connection, run: Row[Any], sample: Sample, config: PolicyConfig, now: float) -> list[Event]:
    """Record them for an attempt that is not the run's newest: the plan is another's by now."""
    fresh, events = _unknown(conn, run, sample)
    over = "its attempt was over before the server heard of it"
    made = [_as_recorded(run, each, config, "expired", over) for each in fresh]
    shown = audit.record_decisions(conn, run, made, run.plan_version, now)
    return [*events, *(Event(run=run.name, kind="decision", data=item) for item in shown)]


def _unknown(conn: Connection, run: Row[Any], sample: Sample) -> tuple[list[Decision], list[Event]]:
    """Those that are not stored yet, in their order; of the others, when they took effect."""
    named = (_ours(run, decision) for decision in sample.local_decisions)
    brought: dict[str, Decision] = {}
    for decision in named:
        brought.setdefault(decision.id, decision)
    query = select(decisions.c.id).where(decisions.c.id.in_(brought))
    known = set(conn.execute(query).scalars()) if brought else set()
    events = _note_applied(conn, run, [each for each in brought.values() if each.id in known])
    return [decision for name, decision in brought.items() if name not in known], events


def _ours(run: Row[Any], decision: Decision) -> Decision:
    """The decision under a name that only this run's clients give, with evidence that can be read.

    The policy's own are `{run}-1` and so on, and a checkpoint may bring what was decided in the run that it was taken from.
    """
    own = f"{run.name}-{LOCAL}-"
    name = decision.id if decision.id.startswith(own) else f"{own}{decision.id}"
    return replace(decision, id=name, evidence=readable(decision.evidence))


def _refusal(
    conn: Connection, run: Row[Any], decision: Decision, sample: Sample, config: PolicyConfig
) -> str | None:
    """Why a decision does not hold, or not any more; None where it does."""
    if (
        decision.action != "bf16_fallback"
        or decision.value is not None
        or decision.target.operand is not None
    ):
        return "alone a client only switches a gemm or a layer to BF16"
    if decision.step > sample.step:
        return f"it is on step {decision.step}, and came with step {sample.step}"
    if decision.layer not in slotlists.layers_of(slotlists.of_run(conn, run.id)):
        return f"the run has no layer {decision.layer!r}"
    if config.mode != "enforce":
        return f"the run's mode is {config.mode}: its plan does not change by itself"
    return f"{decision.layer!r} is pinned" if decision.layer in config.pins else None


def _held_by(state: PolicyState, decision: Decision) -> str | None:
    """The decision by which the plan asks for the same already: the policy's, whose reply was lost or came too late."""
    present = state.plan.find(decision.layer, decision.target, decision.action)
    return None if present is None or present.value != decision.value else present.decision_id


def _as_recorded(
    run: Row[Any], decision: Decision, config: PolicyConfig, state: str, outcome: str | None
) -> Decision:
    return replace(
        decision,
        run=run.name,
        actor=CLIENT,
        mode=config.mode,
        state=state,
        outcome=outcome,
        effective_step=None,
    )


def _note_applied(conn: Connection, run: Row[Any], made: Sequence[Decision]) -> list[Event]:
    """The client has said since when it has applied them itself."""
    events = []
    for decision in made:
        if decision.effective_step is None:
            continue
        which = (
            decisions.c.run_id == run.id,
            decisions.c.id == decision.id,
            decisions.c.effective_step.is_(None),
            decisions.c.state == "sent",
        )
        values = {"state": "applied", "effective_step": decision.effective_step}
        changed = conn.execute(decisions.update().where(*which).values(values).returning(*decisions.c)).all()
        act = Act(actor=CLIENT, what="applied", decision=decision.id, step=decision.effective_step)
        audit.note(conn, run.id, [act] if changed else [])
        events += [Event(run=run.name, kind="decision", data=decision_item(row)) for row in changed]
    return events
