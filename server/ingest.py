"""Samples in: parse, store once, decide, reply, in one transaction."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.wire import (
    ACCEPTED_SCHEMAS,
    RunIdError,
    Sample,
    WireError,
    check_run_id,
    parse_sample,
)
from fp8_safeguard.server import clientreports, deciding, ending, slotlists
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.problems import Problem, invalid, shortened
from fp8_safeguard.server.store import Store
from fp8_safeguard.server.storing import CONFLICT, store_sample
from fp8_safeguard.server.tables import attempts, runs

_LOGGER = logging.getLogger("fp8_safeguard.server")


@dataclass(frozen=True)
class Outcome:
    """Replies in the order of the samples, and what the readers of the run are told."""

    results: list[dict[str, Any] | Problem]
    events: list[Event]


def ingest(store: Store, run: str, bodies: Sequence[Any], clock: Callable[[], float]) -> Outcome:
    """Store the samples of one request; each is accepted or refused on its own.

    Raises Problem 422 for a run id that cannot be one.
    """
    try:
        check_run_id(run)
    except RunIdError as error:
        raise invalid(str(error), [("/run", str(error))]) from error
    parsed = _parse_all(store, bodies)
    outcome = Outcome([], [])
    if all(isinstance(sample, Problem) for sample in parsed):
        outcome.results.extend(sample for sample in parsed if isinstance(sample, Problem))
        return outcome
    with store.write(run) as conn:
        for sample in parsed:
            outcome.results.append(_accept_or_refuse(conn, run, sample, clock(), outcome.events))
    return outcome


def _parse_all(store: Store, bodies: Sequence[Any]) -> list[Sample | Problem]:
    known: dict[str, tuple[Slot, ...]] = {}
    places: dict[tuple[Any, ...], str] = {}

    def known_slots(digest: str) -> tuple[Slot, ...] | None:
        if digest not in known:
            found = _accepted_before(store, digest)
            if found is None:
                return None
            known[digest] = found
        return known[digest]

    parsed: list[Sample | Problem] = []
    for place, body in enumerate(bodies):
        try:
            sample = parse_sample(body, known_slots=known_slots)
            _check_once(sample, f"/samples/{place}" if len(bodies) > 1 else "", places)
        except WireError as error:
            parsed.append(_wire_problem(error))
        except Problem as problem:
            parsed.append(problem)
        else:
            if "slots" not in body:
                # The list was found under this digest, so it need not be computed again.
                vars(sample)["slots_id"] = body["slots_id"]
            known[sample.slots_id] = sample.slots
            parsed.append(sample)
    return parsed


def _accepted_before(store: Store, digest: str) -> tuple[Slot, ...] | None:
    """The slots that were once accepted under a digest: it always means the same, so it need not be looked up again."""
    found = store.accepted_slots.get(digest)
    if found is None:
        with store.read() as conn:
            found = slotlists.find(conn, digest)
        if found is not None:
            store.accepted_slots.put(digest, found)
    return found


def _wire_problem(error: WireError) -> Problem:
    faults = [(shortened(pointer), shortened(message)) for pointer, message in error.errors]
    if error.kind == "validation":
        return invalid(shortened(str(error)), faults)
    listed = [{"pointer": pointer, "message": message} for pointer, message in faults]
    return Problem(
        409, error.kind, shortened(str(error)), errors=listed, accepted_schemas=list(ACCEPTED_SCHEMAS)
    )


def _check_once(sample: Sample, prefix: str, places: dict[tuple[Any, ...], str]) -> None:
    """Refuse a slot that an earlier sample of the same body already holds, naming both places."""
    errors = []
    for index, slot in enumerate(sample.slots):
        here = f"{prefix}/slots/{index}"
        first = places.setdefault((sample.attempt.id, sample.group, sample.step, slot.key), here)
        if first != here:
            errors.append((here, f"{slot.label} of step {sample.step} is already at {first}; send it once"))
    if errors:
        raise invalid("; ".join(f"{pointer}: {message}" for pointer, message in errors), errors)


def _accept_or_refuse(
    conn: Connection, run: str, sample: Sample | Problem, now: float, events: list[Event]
) -> dict[str, Any] | Problem:
    if isinstance(sample, Problem):
        return sample
    try:
        with conn.begin_nested():
            reply, raised = _accept(conn, run, sample, now)
    except Problem as problem:
        if problem.kind == CONFLICT:
            _note_conflict(conn, run, sample)
        return problem
    events.extend(raised)
    return reply


def _note_conflict(conn: Connection, run: str, sample: Sample) -> None:
    """Count a refused sample with its attempt: two clients of one run id show in no other place."""
    mine = select(runs.c.id).where(runs.c.name == run).scalar_subquery()
    values = {"conflicts": attempts.c.conflicts + 1, "last_conflict_step": sample.step}
    conn.execute(
        attempts.update()
        .where(attempts.c.run_id == mine, attempts.c.name == sample.attempt.id)
        .values(values)
    )


def _accept(conn: Connection, run: str, sample: Sample, now: float) -> tuple[dict[str, Any], list[Event]]:
    run_row = _ensure_run(conn, run, sample, now)
    attempt = _ensure_attempt(conn, run_row, sample, now)
    inserted, duplicates = store_sample(conn, run_row.id, attempt.id, sample, now)
    clientreports.keep(conn, attempt.id, sample)
    conn.execute(runs.update().where(runs.c.id == run_row.id).values(last_report_at=now))
    if inserted or not duplicates:
        ending.reopen(conn, run_row, attempt, sample.group)
    raised = deciding.after_sample(conn, run_row, attempt, sample, now)
    _log(run, sample)
    reply: dict[str, Any] = {
        "accepted": True,
        "inserted": inserted,
        "duplicates": duplicates,
        "plan_version": raised.plan_version,
        "plan": raised.plan,
        "decisions": raised.decisions,
        "alerts": raised.alerts,
    }
    if sample.local_decisions:
        reply["local_decisions"] = [decision.id for decision in sample.local_decisions]
    arrived = {"step": sample.step, "attempt": sample.attempt.id, "group": sample.group, "inserted": inserted}
    return reply, [Event(run=run, kind="sample", data=arrived), *raised.events]


def _ensure_run(conn: Connection, run: str, sample: Sample, now: float) -> Row[Any]:
    """The run's row; its first sample makes it, and sets mode and thresholds."""
    query = select(runs).where(runs.c.name == run)
    found = conn.execute(query).one_or_none()
    if found is not None:
        return found
    conn.execute(
        runs.insert().values(
            name=run,
            mode=sample.mode,
            preset=sample.thresholds,
            plan_version=0,
            plan="[]",
            created_at=now,
            last_report_at=now,
        )
    )
    return conn.execute(query).one()


def _ensure_attempt(conn: Connection, run: Row[Any], sample: Sample, now: float) -> Row[Any]:
    """The attempt's row, new with its first sample, and whether it is the run's `newest`.

    Raises Problem 409 where the attempt was announced differently before.
    """
    of_run = attempts.alias()
    latest = select(func.max(of_run.c.id)).where(of_run.c.run_id == run.id).scalar_subquery()
    query = select(attempts, (attempts.c.id == latest).label("newest")).where(
        attempts.c.run_id == run.id, attempts.c.name == sample.attempt.id
    )
    found = conn.execute(query).one_or_none()
    if found is None:
        conn.execute(
            attempts.insert().values(
                run_id=run.id,
                name=sample.attempt.id,
                parent=sample.attempt.parent,
                from_step=sample.attempt.from_step,
                groups=sample.groups,
                created_at=now,
            )
        )
        return conn.execute(query).one()
    announced = {"parent": found.parent, "from_step": found.from_step, "groups": found.groups}
    told = {
        "parent": sample.attempt.parent,
        "from_step": sample.attempt.from_step,
        "groups": sample.groups,
    }
    told = {name: value for name, value in told.items() if name not in sample.left_out}
    before = {name: announced[name] for name in told}
    differing = [name for name in told if told[name] != before[name]]
    if differing:
        told_apart = "; ".join(
            f"{name} was {_in_words(before[name])}, now {_in_words(told[name])}" for name in differing
        )
        pointers = {"parent": "/attempt/parent", "from_step": "/attempt/from_step", "groups": "/groups"}
        errors = [{"pointer": pointers[name], "message": "announced differently"} for name in differing]
        detail = f"attempt {sample.attempt.id!r} was announced before: {told_apart}; a resumed run needs a new attempt id"
        raise Problem(409, "attempt-conflict", detail, errors=errors)
    return found


def _in_words(value: str | int | None) -> str:
    return "none" if value is None else str(value)


def _log(run: str, sample: Sample) -> None:
    if not _LOGGER.isEnabledFor(logging.INFO) or not sample.slots:
        return
    # A what-if is not what the run does.
    real = np.array([slot.variant is None for slot in sample.slots], dtype=bool)
    underflow, cosine = (sample.table.derive(name)[real] for name in ("underflow_ratio", "cosine"))
    worst_underflow = np.fmax.reduce(underflow, initial=np.nan)
    worst_cosine = np.fmin.reduce(cosine, initial=np.nan)
    _LOGGER.info(
        "run %s step %d group %s: worst underflow %.4g, worst cosine %.6g",
        run,
        sample.step,
        sample.group,
        worst_underflow,
        worst_cosine,
    )
