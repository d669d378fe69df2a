"""Stored steps of the live branch, one after the other."""

from collections.abc import Iterator

from sqlalchemy import Connection, select

from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.server import slotlists
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.deciding import observation_of
from fp8_safeguard.server.export import document_of
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.store import Store
from fp8_safeguard.server.tables import attempts, samples

PAGE_STEPS = 32
"""Steps that are read with one connection: a slow reader pins none."""

Owners = list[tuple[int, int]]
"""(step, row of its attempt), ascending."""


def owners_of(
    conn: Connection, run_id: int, from_step: int | None = None, to_step: int | None = None
) -> Owners:
    """The sampled steps of the range, and which attempt of the live branch speaks for each."""
    rows = visible_rows(conn, run_id, [samples.c.attempt_id], from_step=from_step, to_step=to_step)
    return sorted({row.step: row.attempt_id for row in rows}.items())


def observations(
    store: Store, run: str, from_step: int | None = None, to_step: int | None = None
) -> Iterator[StepObservation]:
    """What the policy saw, or would have seen, of each step, in step order. Raises Problem 404."""
    with store.read() as conn:
        row = find_run(conn, run)
        owners = owners_of(conn, row.id, from_step, to_step)
    for start in range(0, len(owners), PAGE_STEPS):
        with store.read() as conn:
            page = [
                observation_of(conn, row, attempt, step)
                for step, attempt in owners[start : start + PAGE_STEPS]
            ]
        yield from page


def sample_lines(
    store: Store, run: str, from_step: int | None = None, to_step: int | None = None
) -> Iterator[str]:
    """The samples of these steps as JSON lines, wire documents that can be posted again, in step order."""
    with store.read() as conn:
        row = find_run(conn, run)
        owners = owners_of(conn, row.id, from_step, to_step)
    for start in range(0, len(owners), PAGE_STEPS):
        with store.read() as conn:
            page = list(_documents(conn, row.id, owners[start : start + PAGE_STEPS]))
        yield "".join(page)


def _documents(conn: Connection, run_id: int, owners: Owners) -> Iterator[str]:
    lists = slotlists.of_run(conn, run_id)
    owner = dict(owners)
    query = (
        select(samples, attempts.c.name, attempts.c.parent, attempts.c.from_step, attempts.c.groups)
        .join(attempts, attempts.c.id == samples.c.attempt_id)
        .where(samples.c.attempt_id.in_(set(owner.values())), samples.c.step.in_(list(owner)))
        .order_by(samples.c.step, samples.c.group, samples.c.part)
    )
    for row in conn.execute(query):
        if owner[row.step] == row.attempt_id:
            yield strict_dumps(document_of(row, lists[row.slot_list_id])) + "\n"
