"""The live branch: which attempt of a run speaks for a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server.problems import not_found
from fp8_safeguard.server.tables import attempts, runs, samples


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One attempt of the live branch."""

    attempt_id: int
    """Row of the attempt."""
    upto: int | None
    """Last step for which it may speak; None for the newest attempt."""


def viewed(conn: Connection, run: str, attempt: str) -> Connection:
    """The connection, for which that attempt is the live one, whichever came after it. Raises Problem 404."""
    row = conn.execute(
        select(attempts.c.id, attempts.c.run_id)
        .join(runs, runs.c.id == attempts.c.run_id)
        .where(runs.c.name == run, attempts.c.name == attempt)
    ).one_or_none()
    if row is None:
        raise not_found(
            "attempt-not-found",
            f"run {quoted(run)} has no attempt {quoted(attempt)}; GET /api/v1/runs/{{run}}/attempts lists them",
        )
    return conn.execution_options(fp8_safeguard_attempt=(row.run_id, row.id))


def live_branch(conn: Connection, run_id: int) -> tuple[Segment, ...]:
    """The newest attempt (or the one viewed) and its ancestors, newest first; each ends before its child's first step."""
    found = conn.execute(
        select(attempts.c.id, attempts.c.name, attempts.c.parent, attempts.c.from_step)
        .where(attempts.c.run_id == run_id)
        .order_by(attempts.c.id)
    ).all()
    by_name = {row.name: row for row in found}
    branch: list[Segment] = []
    of_run, chosen = conn.get_execution_options().get("fp8_safeguard_attempt", (None, None))
    current = found[-1] if found else None
    if of_run == run_id:
        current = next((row for row in found if row.id == chosen), current)
    upto: int | None = None
    while current is not None:
        branch.append(Segment(attempt_id=current.id, upto=upto))
        shared = current.from_step - 1
        upto = shared if upto is None else min(upto, shared)
        # An attempt descends from an older one only, so a cycle of names cannot loop here.
        parent = by_name.get(current.parent)
        current = parent if parent is not None and parent.id < current.id else None
    return tuple(branch)


def segment_rows(segment: Segment, from_step: int | None, to_step: int | None) -> list[ColumnElement[bool]]:
    """Conditions on `samples` for one segment within a range of steps."""
    conditions: list[ColumnElement[bool]] = [samples.c.attempt_id == segment.attempt_id]
    if segment.upto is not None:
        conditions.append(samples.c.step <= segment.upto)
    if from_step is not None:
        conditions.append(samples.c.step >= from_step)
    if to_step is not None:
        conditions.append(samples.c.step <= to_step)
    return conditions


def visible_rows(
    conn: Connection,
    run_id: int,
    wanted: Sequence[Any],
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Row[Any]]:
    """Rows of `samples` of the live branch by step, group and part; one attempt a step, the newest that has it.

    `wanted` are further columns; `step`, `group` and `part` are always there.
    """
    chosen: list[Row[Any]] = []
    claimed: set[int] = set()
    for segment in live_branch(conn, run_id):
        rows = conn.execute(
            select(samples.c.step, samples.c.group, samples.c.part, *wanted).where(
                *segment_rows(segment, from_step, to_step)
            )
        ).all()
        fresh = [row for row in rows if row.step not in claimed] if claimed else rows
        chosen.extend(fresh)
        claimed.update(row.step for row in fresh)
    chosen.sort(key=lambda row: (row.step, row.group, row.part))
    return chosen


def last_steps(conn: Connection, run_id: int, count: int, upto: int | None = None) -> list[int]:
    """The newest `count` sampled steps of the live branch, ascending; none after `upto`."""
    steps: set[int] = set()
    for segment in live_branch(conn, run_id):
        query = select(samples.c.step).where(*segment_rows(segment, None, upto)).distinct()
        steps.update(conn.execute(query.order_by(samples.c.step.desc()).limit(count)).scalars())
    return sorted(steps)[-count:]
