"""What people say about alerts: acknowledged, silenced, resolved."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server.alertlog import UNRESOLVED
from fp8_safeguard.server.auditview import alert_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.problems import invalid, not_found
from fp8_safeguard.server.tables import alerts, runs

DEFAULT_SILENCE_SECONDS = 3600.0
LONGEST_SILENCE_SECONDS = 30 * 86400.0

Answer = tuple[dict[str, Any], list[Event]]


def acknowledge(conn: Connection, alert: int, actor: str, now: float) -> Answer:
    """Note that somebody knows of an alert. Raises Problem 404."""
    row = _find(conn, alert)
    return _change(conn, row, now, alerts.c.id == row.id, acknowledged_by=actor, acknowledged_at=now)


def silence(conn: Connection, alert: int, body: Mapping[str, Any], actor: str, now: float) -> Answer:
    """Keep quiet for a while about an alert's rule in its layer, should it open again, too; 0 seconds end it.

    Raises Problem 404 or 422.
    """
    seconds = body.get("seconds", DEFAULT_SILENCE_SECONDS)
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= LONGEST_SILENCE_SECONDS:
        message = f"seconds is a number from 0 to {LONGEST_SILENCE_SECONDS:.0f}, not {quoted(seconds)}"
        raise invalid(message, [("/seconds", message)])
    row = _find(conn, alert)
    which = (alerts.c.run_id == row.run_id) & (alerts.c.key == row.key)
    until = now + seconds if seconds else None
    return _change(conn, row, now, which, silenced_until=until, silenced_by=actor if seconds else None)


def resolve(conn: Connection, alert: int, actor: str, now: float) -> Answer:
    """Close an alert until its breach clears and comes again. One that is resolved stays as it is.

    Raises Problem 404.
    """
    row = _find(conn, alert)
    which = (alerts.c.id == row.id) & alerts.c.state.in_(UNRESOLVED)
    values = {"state": "resolved", "resolved_by": actor, "resolved_at": now}
    return _change(
        conn, row, now, which, **values, resolved_step=None, resolved_reason=f"resolved by {actor}"
    )


def _find(conn: Connection, alert: int) -> Row[Any]:
    row = conn.execute(select(alerts).where(alerts.c.id == alert)).one_or_none()
    if row is None:
        raise not_found("alert-not-found", f"there is no alert {alert}")
    return row


def _change(conn: Connection, row: Row[Any], now: float, which: Any, **values: Any) -> Answer:
    conn.execute(alerts.update().where(which).values(values))
    changed = _find(conn, row.id)
    run = conn.execute(select(runs.c.name).where(runs.c.id == row.run_id)).scalar_one()
    item = alert_item(changed, run, now)
    return item, [Event(run=run, kind="alert", data=item)]
