"""What people say about alerts: acknowledged, silenced."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from fp8_safeguard.server.auditview import alert_item
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.problems import invalid, not_found
from fp8_safeguard.server.tables import alerts, runs

DEFAULT_SILENCE_SECONDS = 3600.0
LONGEST_SILENCE_SECONDS = 30 * 86400.0


def acknowledge(conn: Connection, alert: int, actor: str, now: float) -> tuple[dict[str, Any], list[Event]]:
    """Note that somebody knows of an alert. Raises Problem 404."""
    return _change(conn, alert, now, acknowledged_by=actor, acknowledged_at=now)


def silence(
    conn: Connection, alert: int, body: Mapping[str, Any], now: float
) -> tuple[dict[str, Any], list[Event]]:
    """Keep quiet about an alert for a while. Raises Problem 404 or 422."""
    seconds = body.get("seconds", DEFAULT_SILENCE_SECONDS)
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= LONGEST_SILENCE_SECONDS:
        message = f"seconds is a number from above 0 to {LONGEST_SILENCE_SECONDS:.0f}, not {seconds!r}"
        raise invalid(message, [("/seconds", message)])
    return _change(conn, alert, now, silenced_until=now + seconds)


def _change(conn: Connection, alert: int, now: float, **values: Any) -> tuple[dict[str, Any], list[Event]]:
    row = conn.execute(
        alerts.update().where(alerts.c.id == alert).values(values).returning(*alerts.c)
    ).one_or_none()
    if row is None:
        raise not_found("alert-not-found", f"there is no alert {alert}")
    run = conn.execute(select(runs.c.name).where(runs.c.id == row.run_id)).scalar_one()
    item = alert_item(row, run, now)
    return item, [Event(run=run, kind="alert", data=item)]
