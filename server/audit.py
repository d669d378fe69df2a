"""Rows behind decisions: what was decided, sent and applied."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.plan import Decision, Plan
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auditview import decision_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.tables import decisions, pins


def record_decisions(
    conn: Connection, run: Row[Any], made: Iterable[Decision], plan_version: int, now: float
) -> list[dict[str, Any]]:
    """Store decisions and return them as the contract shows them.

    `plan_version` is that of the plan which holds those that changed it.
    """
    rows = [_decision_row(run, decision, plan_version, now) for decision in made]
    if not rows:
        return []
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
        state="sent",
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
        state="applied",
        effective_step=sample.effective_step,
    )


def _advance(conn: Connection, run: Row[Any], *which: Any, **values: Any) -> list[Event]:
    changed = conn.execute(
        decisions.update().where(decisions.c.run_id == run.id, *which).values(values).returning(*decisions.c)
    ).all()
    return [Event(run=run.name, kind="decision", data=decision_item(row)) for row in changed]


def expire_proposals(conn: Connection, before: PolicyState, after: PolicyState) -> None:
    """Proposals that the policy has dropped: what asked for them has gone."""
    kept = {made.decision_id for made in after.proposals.values()}
    gone = [made.decision_id for made in before.proposals.values() if made.decision_id not in kept]
    if gone:
        stale = (decisions.c.id.in_(gone), decisions.c.state == "proposed")
        conn.execute(decisions.update().where(*stale).values(state="expired"))


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
