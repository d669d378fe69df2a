"""Groups that have finished, and the run that ends with them."""

import json
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.problems import not_found
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import attempts, runs


def end_group(conn: Connection, run: str, attempt: str, group: str, now: float) -> tuple[bool, list[Event]]:
    """Note that a group of an attempt has finished; whether the run has ended, with what its readers are told.

    The run ends once all groups of its newest attempt have said so. Raises Problem 404.
    """
    row = find_run(conn, run)
    mine = attempts.c.run_id == row.id
    found = conn.execute(select(attempts).where(mine, attempts.c.name == attempt)).one_or_none()
    if found is None:
        raise not_found("attempt-not-found", f"run {run!r} has no attempt {attempt!r}")
    ended = _with_group(found, group)
    conn.execute(attempts.update().where(attempts.c.id == found.id).values(ended_groups=strict_dumps(ended)))
    newest = conn.execute(select(func.max(attempts.c.id)).where(mine)).scalar_one()
    if row.ended_at is not None:
        return True, []
    if found.id != newest or len(ended) < found.groups:
        return False, []
    conn.execute(runs.update().where(runs.c.id == row.id).values(ended_at=now))
    return True, [Event(run=run, kind="state", data={"ended": True})]


def _with_group(attempt: Row[Any], group: str) -> list[str]:
    """The finished groups with this one; no longer than there are groups, whatever names are sent."""
    ended: list[str] = json.loads(attempt.ended_groups)
    return ended if group in ended or len(ended) >= attempt.groups else [*ended, group]


def reopen(conn: Connection, run: Row[Any], attempt: Row[Any], group: str) -> None:
    """A sample that brought something new came after its group, or the run, was said to have ended."""
    ended = [name for name in json.loads(attempt.ended_groups) if name != group]
    if strict_dumps(ended) != attempt.ended_groups:
        conn.execute(
            attempts.update().where(attempts.c.id == attempt.id).values(ended_groups=strict_dumps(ended))
        )
    if run.ended_at is not None:
        conn.execute(runs.update().where(runs.c.id == run.id).values(ended_at=None))
