"""Decisions, alerts and the plan as lists."""

import json
from typing import Any

from sqlalchemy import Connection, Row, Select, select

from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.runview import rfc3339
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import alerts as alert_table
from fp8_safeguard.server.tables import decisions as decision_table


def plan(conn: Connection, run: str) -> dict[str, Any]:
    """The plan in force. Raises Problem 404."""
    return plan_of(find_run(conn, run))


def plan_of(row: Row[Any]) -> dict[str, Any]:
    """The contract's plan from a run's row."""
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
    """Decisions of a run, the newest first."""
    row = find_run(conn, run)
    query = select(decision_table).where(decision_table.c.run_id == row.id)
    if state is not None:
        query = query.where(decision_table.c.state == state)
    if layer is not None:
        query = query.where(decision_table.c.layer == layer)
    rows, token = _page(conn, query, decision_table.c.number, page_size, page_token)
    return {"items": [decision_item(found) for found in rows], "next_page_token": token}


def decision_item(row: Row[Any]) -> dict[str, Any]:
    """The contract's decision from its row."""
    changing = {"state": row.state, "effective_step": row.effective_step}
    return {**json.loads(row.body), **changing, "created": rfc3339(row.created_at)}


def alerts(
    conn: Connection,
    run: str,
    *,
    state: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """Alerts of a run, the newest first; state open or resolved."""
    row = find_run(conn, run)
    query = select(alert_table).where(alert_table.c.run_id == row.id)
    if state is not None:
        query = query.where(alert_table.c.state == state)
    rows, token = _page(conn, query, alert_table.c.id, page_size, page_token)
    now = freshness_of(conn)[0]
    return {"items": [alert_item(found, row.name, now) for found in rows], "next_page_token": token}


def alert_item(row: Row[Any], run: str, now: float) -> dict[str, Any]:
    """An alert from its row."""
    return {
        **json.loads(row.body),
        "id": row.id,
        "run": run,
        "state": row.state,
        "created": rfc3339(row.created_at),
        "acknowledged_by": row.acknowledged_by,
        "acknowledged": rfc3339(row.acknowledged_at),
        "silenced": row.silenced_until is not None and row.silenced_until > now,
        "silenced_until": rfc3339(row.silenced_until),
    }


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
