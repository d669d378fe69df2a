"""Stored baselines: listed, chosen, dropped, and decoded once."""

import json
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.server import audit
from fp8_safeguard.server.answers import rfc3339, strict_dumps
from fp8_safeguard.server.audit import Act
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.problems import Problem, not_found
from fp8_safeguard.server.recent import Recent
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import baselines, runs

MOST_BASELINES = 64
"""Of one run."""
_KEPT = 16
_DECODED: Recent[str, Baseline] = Recent(_KEPT)
"""By digest: equal digests are equal baselines."""

_HEAD = [column for column in baselines.c if column is not baselines.c.body]


def chosen(conn: Connection, run: Row[Any]) -> Baseline | None:
    """The baseline that a run is judged by, from its row; nothing is read for a run without one."""
    if run.baseline_id is None:
        return None
    which = baselines.c.id == run.baseline_id
    digest = conn.execute(select(baselines.c.digest).where(which)).scalar_one_or_none()
    if digest is None:
        return None
    known = _DECODED.get(digest)
    if known is not None:
        return known
    body = conn.execute(select(baselines.c.body).where(which)).scalar_one()
    return _DECODED.put(digest, Baseline.from_dict(json.loads(body)))


def baselines_of(conn: Connection, run: str) -> dict[str, Any]:
    """The baselines of a run, the newest first. Raises Problem 404."""
    row = find_run(conn, run)
    query = select(*_HEAD).where(baselines.c.run_id == row.id).order_by(baselines.c.id.desc())
    items = [_item(found, row) for found in conn.execute(query)]
    return {"items": items, "next_page_token": None}


def baseline_detail(conn: Connection, run: str, number: int) -> dict[str, Any]:
    """One baseline with what it learned. Raises Problem 404."""
    row = find_run(conn, run)
    found = _find(conn, row, number)
    return {**_item(found, row), "baseline": json.loads(found.body)}


def add(
    conn: Connection, run: str, baseline: Baseline, actor: str, now: float, *, use: bool
) -> dict[str, Any]:
    """Store a baseline for a run; `use`: and judge the run by it. Raises Problem 404, or 409 where there are too many."""
    row = find_run(conn, run)
    count = conn.execute(select(func.count()).where(baselines.c.run_id == row.id)).scalar_one()
    if count >= MOST_BASELINES:
        raise Problem(
            409,
            "baseline-refused",
            f"run {run!r} has {count} baselines, the most it may have; drop one that is not needed",
        )
    values = {
        "run_id": row.id,
        "digest": baseline.digest,
        "summary": strict_dumps(baseline.summary()),
        "created_at": now,
        "created_by": actor,
        "body": strict_dumps(baseline.to_dict()),
    }
    number = conn.execute(baselines.insert().values(values).returning(baselines.c.id)).scalar_one()
    if use:
        _choose(conn, row, number, actor)
        row = find_run(conn, run)
    found = conn.execute(select(*_HEAD).where(baselines.c.id == number)).one()
    return _item(found, row)


def use(conn: Connection, run: str, number: int | None, actor: str) -> list[Event]:
    """Judge a run by one of its baselines, from the next sample on; None: by its preset alone. Raises Problem 404."""
    row = find_run(conn, run)
    if number is not None:
        _find(conn, row, number)
    _choose(conn, row, number, actor)
    return [Event(run=run, kind="state", data={"baseline": number})]


def drop(conn: Connection, run: str, number: int, actor: str) -> list[Event]:
    """Delete a baseline; a run that was judged by it goes back to its preset. Raises Problem 404."""
    row = find_run(conn, run)
    _find(conn, row, number)
    if row.baseline_id == number:
        _choose(conn, row, None, actor)
    conn.execute(baselines.delete().where(baselines.c.id == number))
    return [Event(run=run, kind="state", data={"baseline": None})] if row.baseline_id == number else []


def _choose(conn: Connection, row: Row[Any], number: int | None, actor: str) -> None:
    conn.execute(runs.update().where(runs.c.id == row.id).values(baseline_id=number))
    facts = {"from": row.baseline_id, "to": number}
    audit.note(conn, row.id, [Act(actor=actor, what="baseline", facts=facts)])


def _find(conn: Connection, row: Row[Any], number: int) -> Row[Any]:
    mine = (baselines.c.id == number, baselines.c.run_id == row.id)
    found = conn.execute(select(baselines).where(*mine)).one_or_none()
    if found is None:
        raise not_found(
            "baseline-not-found",
            f"run {row.name!r} has no baseline {number}; GET /api/v1/runs/{{run}}/baselines lists them",
        )
    return found


def _item(found: Row[Any], row: Row[Any]) -> dict[str, Any]:
    return {
        "id": found.id,
        **json.loads(found.summary),
        "used": row.baseline_id == found.id,
        "created": rfc3339(found.created_at),
        "created_by": found.created_by,
    }
