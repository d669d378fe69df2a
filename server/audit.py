"""Rows behind decisions and alerts: what was decided, raised, sent and applied."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

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
    opened = {key: alert for key, alert in after.alerts.items() if key not in before.alerts}
    old = {key: before.alerts[key] for key in after.alerts if key not in opened}
    changed = {key: after.alerts[key] for key, alert in old.items() if alert != after.alerts[key]}
    worse = [key for key in changed if (old[key].severity, changed[key].severity) == ("watch", "act")]
    _update(conn, run, changed)
    close_alerts(conn, run, [key for key in before.alerts if key not in after.alerts])
    raised = _open(conn, run, attempt_id, opened, now)
    return [*raised, *(alert_item(row, run.name, now) for row in _stored(conn, run, worse))]


def begin_attempt(conn: Connection, run: Row[Any], attempt_id: int, state: PolicyState, now: float) -> None:
    """Open exactly the alerts, and keep exactly the proposals, that the attempt starts with."""
    mine = select(alerts.c.key).where(alerts.c.run_id == run.id, alerts.c.state == "open")
    stored = set(conn.execute(mine).scalars())
    close_alerts(conn, run, sorted(stored - state.alerts.keys()))
    missing = {key: alert for key, alert in state.alerts.items() if key not in stored}
    _open(conn, run, attempt_id, missing, now)
    kept = [made.decision_id for made in state.proposals.values()]
    asked = (decisions.c.run_id == run.id, decisions.c.state == "proposed", decisions.c.action != "advice")
    conn.execute(decisions.update().where(*asked, decisions.c.id.not_in(kept)).values(state="expired"))


def close_alerts(conn: Connection, run: Row[Any], keys: list[str]) -> None:
    """Resolve open alerts."""
    if keys:
        close = alerts.update().where(*_is_open(run)).values(state="resolved")
        conn.execute(close, [{"open_key": key} for key in keys])


def _is_open(run: Row[Any]) -> tuple[Any, ...]:
    """The open alert of a run under the parameter `open_key`."""
    return (alerts.c.run_id == run.id, alerts.c.state == "open", alerts.c.key == bindparam("open_key"))


def _open(
    conn: Connection, run: Row[Any], attempt_id: int, opened: dict[str, Alert], now: float
) -> list[dict[str, Any]]:
    common = {"run_id": run.id, "attempt_id": attempt_id, "state": "open", "created_at": now}
    rows = [{**common, "key": key, **_changing(alert)} for key, alert in opened.items()]
    if not rows:
        return []
    insert = alerts.insert().returning(*alerts.c, sort_by_parameter_order=True)
    return [alert_item(row, run.name, now) for row in conn.execute(insert, rows)]


def _update(conn: Connection, run: Row[Any], changed: dict[str, Alert]) -> None:
    # One prepared statement for all: a run in trouble has hundreds of open alerts, each new at every step.
    rows = [
        {"open_key": key, **{f"new_{name}": value for name, value in _changing(alert).items()}}
        for key, alert in changed.items()
    ]
    if rows:
        names = ("rule", "severity", "layer", "body")
        values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
        conn.execute(alerts.update().where(*_is_open(run)).values(values), rows)


def _stored(conn: Connection, run: Row[Any], keys: list[str]) -> list[Row[Any]]:
    query = select(alerts).where(*_is_open(run))
    return [conn.execute(query, {"open_key": key}).one() for key in keys]


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
