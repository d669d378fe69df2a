"""Decisions, alerts, the plan and the audit log as lists."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, Select, select

from fp8_safeguard.monitor.plan import DECISION_STATES, Plan
from fp8_safeguard.server.alertlog import STATES, UNRESOLVED, is_silenced
from fp8_safeguard.server.answers import rfc3339
from fp8_safeguard.server.choices import check_choice
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.standing import load_standings
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import alerts as alert_table
from fp8_safeguard.server.tables import audit_log
from fp8_safeguard.server.tables import decisions as decision_table


def plan(conn: Connection, run: str) -> dict[str, Any]:
    """The plan in force. Raises Problem 404."""
    return plan_of(find_run(conn, run))


def plan_of(row: Row[Any]) -> dict[str, Any]:
    """The contract's plan from a run's row, as it is sent to the trainer."""
    return {"version": row.plan_version, "entries": json.loads(row.plan)}


def decisions(
    conn: Connection,
    run: str,
    *,
    state: str | None = None,
    layer: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """Decisions of a run, the newest first. Raises Problem 404 or 422."""
    row = find_run(conn, run)
    check_choice("state", state, DECISION_STATES)
    query = select(decision_table).where(decision_table.c.run_id == row.id)
    if state is not None:
        query = query.where(decision_table.c.state == state)
    if layer is not None:
        query = query.where(decision_table.c.layer == layer)
    rows, token = _page(conn, query, decision_table.c.number, page_size, page_token)
    items = with_history(conn, [decision_item(found) for found in rows])
    return {"items": items, "next_page_token": token}


def decision_item(row: Row[Any]) -> dict[str, Any]:
    """The contract's decision from its row."""
    changing = {"state": row.state, "effective_step": row.effective_step}
    return {**json.loads(row.body), **changing, "created": rfc3339(row.created_at)}


def with_history(conn: Connection, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same decisions, each with its `history`: what happened to it, when, by whom, the oldest first."""
    found: dict[str, list[dict[str, Any]]] = {item["id"]: [] for item in items}
    query = select(audit_log).where(audit_log.c.decision_id.in_(list(found))).order_by(audit_log.c.id)
    for row in conn.execute(query) if found else ():
        found[row.decision_id].append(_act(row))
    return [{**item, "history": found[item["id"]]} for item in items]


def audit(
    conn: Connection,
    run: str,
    *,
    decision: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """Who did what when in a run, the newest first; of one decision, if named. Raises Problem 404."""
    row = find_run(conn, run)
    query = select(audit_log).where(audit_log.c.run_id == row.id)
    if decision is not None:
        query = query.where(audit_log.c.decision_id == decision)
    rows, token = _page(conn, query, audit_log.c.id, page_size, page_token)
    items = [{"id": found.id, "decision": found.decision_id, **_act(found)} for found in rows]
    return {"items": items, "next_page_token": token}


def _act(row: Row[Any]) -> dict[str, Any]:
    facts = json.loads(row.body)
    act = {"what": row.what, "actor": row.actor, "at": rfc3339(row.created_at), "step": row.step}
    return {**act, **({"facts": facts} if facts else {})}


def alerts(
    conn: Connection,
    run: str,
    *,
    state: str | None = None,
    layer: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """Alerts of a run, the newest first; state open, held or resolved. Raises Problem 404 or 422."""
    row = find_run(conn, run)
    check_choice("state", state, STATES)
    query = select(alert_table).where(alert_table.c.run_id == row.id)
    if state is not None:
        query = query.where(alert_table.c.state == state)
    if layer is not None:
        query = query.where(alert_table.c.layer == layer)
    rows, token = _page(conn, query, alert_table.c.id, page_size, page_token)
    return {"items": shown_alerts(conn, row, rows), "next_page_token": token}


def shown_alerts(conn: Connection, run: Row[Any], rows: Iterable[Row[Any]]) -> list[dict[str, Any]]:
    """Alerts from their rows; `waits_since` names the remedy after which one waits for its next measurement."""
    now, found = freshness_of(conn)[0], list(rows)
    unresolved = [row.layer for row in found if row.state in UNRESOLVED]
    standings = load_standings(conn, run, Plan.from_wire(plan_of(run)), unresolved)
    items = []
    for row in found:
        item = alert_item(row, run.name, now)
        standing = standings.of(item, row.state) if row.state in UNRESOLVED else None
        items.append(item if standing is None else {**item, "waits_since": standing.waits_since})
    return items


def alert_items(conn: Connection, run: Row[Any], numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Alerts by row id, in that order, each once."""
    wanted = list(dict.fromkeys(numbers))
    if not wanted:
        return []
    now = freshness_of(conn)[0]
    found = conn.execute(select(alert_table).where(alert_table.c.id.in_(wanted))).all()
    rows = {row.id: row for row in found}
    return [alert_item(rows[number], run.name, now) for number in wanted]


def alert_item(row: Row[Any], run: str, now: float) -> dict[str, Any]:
    """An alert from its row."""
    body = json.loads(row.body)
    return {
        "scope": "layer",
        "what_if": False,
        **body,
        "first_step": body["first_step"] if row.first_step is None else row.first_step,
        "step": body["step"] if row.raised_step is None else row.raised_step,
        "reopened_step": body["step"] if row.occurrences > 1 else None,
        "slots": body.get("slots") or [{name: body[name] for name in _SLOT_FIELDS}],
        "id": row.id,
        "run": run,
        "state": row.state,
        "occurrences": row.occurrences,
        "created": rfc3339(row.created_at),
        "acknowledged_by": row.acknowledged_by,
        "acknowledged": rfc3339(row.acknowledged_at),
        "silenced": is_silenced(row.silenced_until, now),
        "silenced_by": row.silenced_by,
        "silenced_until": rfc3339(row.silenced_until),
        "resolved": rfc3339(row.resolved_at),
        "resolved_by": row.resolved_by,
        "resolved_reason": row.resolved_reason,
        "waits_since": None,
    }


_SLOT_FIELDS = ("severity", "slot", "metric", "value", "threshold", "origin", "first_step", "last_step")
"""What an alert of the first schema, which had one slot, says of it."""


def _page(
    conn: Connection, query: Select[Any], key: Any, page_size: int, page_token: str | None
) -> tuple[list[Row[Any]], str | None]:
    """Rows by descending key. The token is the last key shown, so new rows move nothing."""
    after = decode_token(page_token, ("before",))
    if after is not None:
        query = query.where(key < after["before"])
    rows = list(conn.execute(query.order_by(key.desc()).limit(page_size + 1)).all())
    shown = rows[:page_size]
    if len(rows) <= page_size:
        return shown, None
    return shown, encode_token({"before": shown[-1]._mapping[key]})
