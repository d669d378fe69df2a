"""Rows behind decisions, and the log of who did what when."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.plan import Decision, Plan
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auditview import decision_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import audit_log, decisions, pins

POLICY, CLIENT = "policy", "client"
"""Actors that are no person: the server's own policy, and the training side."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """One thing that somebody did."""

    actor: str
    what: str
    """A state that a decision entered, `graded`, or mode, thresholds, baseline, ended, pin, release, kill-switch."""
    decision: str | None = None
    step: int | None = None
    """The training step that it belongs to, where that is known."""
    facts: Mapping[str, Any] = field(default_factory=dict)


def note(conn: Connection, run_id: int, acts: Iterable[Act]) -> None:
    """Add to the log of a run; nothing in it is ever changed."""
    now = freshness_of(conn)[0]
    rows = [
        {
            "run_id": run_id,
            "created_at": now,
            "actor": act.actor,
            "what": act.what,
            "decision_id": act.decision,
            "step": act.step,
            "body": strict_dumps(dict(act.facts)),
        }
        for act in acts
    ]
    if rows:
        conn.execute(audit_log.insert(), rows)


def record_decisions(
    conn: Connection, run: Row[Any], made: Iterable[Decision], plan_version: int, now: float
) -> list[dict[str, Any]]:
    """Store decisions and return them as the contract shows them.

    `plan_version` is that of the plan which holds those that changed it.
    """
    made = list(made)
    rows = [_decision_row(run, decision, plan_version, now) for decision in made]
    if not rows:
        return []
    begun = (Act(actor=one.actor, what=one.state, decision=one.id, step=one.step) for one in made)
    note(conn, run.id, begun)
    insert = decisions.insert().returning(*decisions.c, sort_by_parameter_order=True)
    return [decision_item(row) for row in conn.execute(insert, rows)]


def _decision_row(run: Row[Any], decision: Decision, plan_version: int, now: float) -> dict[str, Any]:
    in_plan = decision.state in ("approved", "sent") and decision.action != "advice"
    return {
        "id": decision.id,
        "run_id": run.id,
        "step": decision.step,
        "layer": decision.layer,
        "action": decision.action,
        "mode": decision.mode,
        "state": decision.state,
        "plan_version": plan_version if in_plan else None,
        "body": strict_dumps(decision.to_wire()),
        "created_at": now,
    }


def mark_sent(conn: Connection, run: Row[Any], plan_version: int) -> list[Event]:
    """The plan of that version goes out with this reply: decisions in it are sent."""
    return _advance(
        conn,
        run,
        decisions.c.state == "approved",
        decisions.c.plan_version <= plan_version,
        act=Act(actor=POLICY, what="sent"),
    )


def mark_applied(conn: Connection, run: Row[Any], sample: Sample) -> list[Event]:
    """The client says since which step it applies a plan: decisions up to that version are applied."""
    if sample.effective_step is None or not sample.plan_version:
        return []
    return _advance(
        conn,
        run,
        decisions.c.state.in_(("approved", "sent")),
        decisions.c.plan_version <= sample.plan_version,
        act=Act(actor=CLIENT, what="applied", step=sample.effective_step),
        effective_step=sample.effective_step,
    )


def _advance(conn: Connection, run: Row[Any], *which: Any, act: Act, **values: Any) -> list[Event]:
    mine = decisions.update().where(decisions.c.run_id == run.id, *which)
    changed = conn.execute(mine.values({"state": act.what, **values}).returning(*decisions.c)).all()
    note(conn, run.id, (replace(act, decision=row.id) for row in changed))
    return [Event(run=run.name, kind="decision", data=decision_item(row)) for row in changed]


def expire_proposals(conn: Connection, run: Row[Any], before: PolicyState, after: PolicyState) -> list[Event]:
    """Proposals that the policy has dropped: what asked for them has gone."""
    kept = {made.decision_id for made in after.proposals.values()}
    gone = [made.decision_id for made in before.proposals.values() if made.decision_id not in kept]
    if not gone:
        return []
    which = (decisions.c.id.in_(gone), decisions.c.state == "proposed")
    return _advance(conn, run, *which, act=Act(actor=POLICY, what="expired", step=after.last_step))


def begin_attempt(conn: Connection, run: Row[Any], state: PolicyState) -> list[Event]:
    """Keep exactly the proposals that an attempt starts with: what asked for the others did not happen, or starts over."""
    kept = [made.decision_id for made in state.proposals.values()]
    asked = (decisions.c.state == "proposed", decisions.c.action != "advice", decisions.c.id.not_in(kept))
    return _advance(conn, run, *asked, act=Act(actor=POLICY, what="expired", step=state.last_step))


def record_grades(
    conn: Connection, run: Row[Any], grades: Mapping[str, str], step: int | None
) -> list[Event]:
    """Store the outcomes that a step told of earlier decisions; one that says the same again changes nothing."""
    mine = (decisions.c.run_id == run.id, decisions.c.id.in_(list(grades)))
    found = conn.execute(select(decisions).where(*mine).order_by(decisions.c.number)).all() if grades else ()
    events, acts = [], []
    for row in found:
        body, outcome = json.loads(row.body), grades[row.id]
        if body.get("outcome") == outcome:
            continue
        text = strict_dumps({**body, "outcome": outcome})
        update = decisions.update().where(decisions.c.number == row.number).values(body=text)
        changed = conn.execute(update.returning(*decisions.c)).one()
        acts.append(Act(actor=POLICY, what="graded", decision=row.id, step=step, facts={"outcome": outcome}))
        events.append(Event(run=run.name, kind="decision", data=decision_item(changed)))
    note(conn, run.id, acts)
    return events


def refreshed(conn: Connection, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same decisions as they are stored now."""
    names = [item["id"] for item in shown]
    rows = conn.execute(select(decisions).where(decisions.c.id.in_(names))).all() if names else []
    by_name = {row.id: decision_item(row) for row in rows}
    return [by_name[name] for name in names]


def pinned_layers(conn: Connection, run_id: int) -> frozenset[str]:
    """Layers that people have fixed."""
    return frozenset(conn.execute(select(pins.c.layer).where(pins.c.run_id == run_id)).scalars())


def plan_columns(plan: Plan) -> dict[str, Any]:
    """The run's columns for a plan."""
    entries = [entry.to_wire() for entry in plan.entries]
    return {"plan_version": plan.version, "plan": strict_dumps(entries)}


def plan_from(run: Row[Any]) -> Plan:
    """The plan in force from a run's row."""
    return Plan.from_wire({"version": run.plan_version, "entries": json.loads(run.plan)})
