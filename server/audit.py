"""Rows behind decisions and alerts: what was decided, raised, sent and applied."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.alerts import Alert
from fp8_safeguard.monitor.plan import Decision, Plan
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auditview import alert_item, decision_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.tables import alerts, decisions, pins


def record_decisions(
    conn: Connection, run: Row[Any], made: Iterable[Decision], plan_version: int, now: float
) -> list[dict[str, Any]]:
    """Store decisions; `plan_version` is that of the plan which holds those that changed it."""
    return [record_decision(conn, run, decision, plan_version, now) for decision in made]


def record_decision(
    conn: Connection, run: Row[Any], decision: Decision, plan_version: int, now: float
) -> dict[str, Any]:
    """Store one decision and return it as the contract shows it."""
    in_plan = decision.state in ("approved", "sent") and decision.action != "advice"
    added = conn.execute(
        decisions.insert()
        .values(
            id=decision.id,
            run_id=run.id,
            step=decision.step,
            layer=decision.layer,
            action=decision.action,
            mode=decision.mode,
            state=decision.state,
            plan_version=plan_version if in_plan else None,
            body=strict_dumps(decision.to_wire()),
            created_at=now,
        )
        .returning(*decisions.c)
    )
    return decision_item(added.one())


def mark_sent(conn: Connection, run: Row[Any]) -> list[Event]:
    """The plan goes out with this reply: decisions in it are sent."""
    return _advance(
        conn,
        run,
        decisions.c.state == "approved",
        decisions.c.plan_version <= run.plan_version,
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


def record_alerts(
    conn: Connection, run: Row[Any], attempt_id: int, before: PolicyState, after: PolicyState, now: float
) -> list[dict[str, Any]]:
    """Store what opened, changed and closed between two states; the newly opened or worsened ones."""
    raised = []
    for key, alert in after.alerts.items():
        old = before.alerts.get(key)
        if old is None:
            raised.append(_open(conn, run, attempt_id, key, alert, now))
        elif old != alert:
            item = _update(conn, run, key, alert, now)
            if (old.severity, alert.severity) == ("watch", "act"):
                raised.append(item)
    close_alerts(conn, run, [key for key in before.alerts if key not in after.alerts])
    return raised


def close_alerts(conn: Connection, run: Row[Any], keys: list[str]) -> None:
    """Resolve open alerts."""
    for key in keys:
        conn.execute(alerts.update().where(*_is_open(run, key)).values(state="resolved"))


def _is_open(run: Row[Any], key: str) -> tuple[Any, ...]:
    return (alerts.c.run_id == run.id, alerts.c.key == key, alerts.c.state == "open")


def _open(
    conn: Connection, run: Row[Any], attempt_id: int, key: str, alert: Alert, now: float
) -> dict[str, Any]:
    row = {
        "run_id": run.id,
        "attempt_id": attempt_id,
        "key": key,
        "state": "open",
        "created_at": now,
        **_changing(alert),
    }
    added = conn.execute(alerts.insert().values(row).returning(*alerts.c)).one()
    return alert_item(added, run.name, now)


def _update(conn: Connection, run: Row[Any], key: str, alert: Alert, now: float) -> dict[str, Any]:
    query = alerts.update().where(*_is_open(run, key)).values(_changing(alert)).returning(*alerts.c)
    return alert_item(conn.execute(query).one(), run.name, now)


def _changing(alert: Alert) -> dict[str, Any]:
    return {
        "rule": alert.rule,
        "severity": alert.severity,
        "layer": alert.layer,
        "body": strict_dumps(alert.to_dict()),
    }


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
