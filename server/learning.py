"""Learns a baseline from stored steps, or says why it cannot."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.baseline import Baseline, BaselineError, Learner
from fp8_safeguard.monitor.inforce import reasons
from fp8_safeguard.monitor.numbers import NumberError, decode_count
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server.decided import all_decisions
from fp8_safeguard.server.observations import observations, owners_of
from fp8_safeguard.server.problems import Problem, invalid
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.store import Store
from fp8_safeguard.server.tables import attempts

MOST_STEPS = 20_000
"""Sampled steps of one window: about a minute of learning."""
_KNOWN = ("run", "from_step", "to_step", "use", "by")


def wish_of(body: Mapping[str, Any]) -> tuple[str | None, int, int, bool]:
    """(run to learn from, first and last step, whether it is to be used) of a request. Raises Problem 422."""
    errors = [(f"/{name[:200]}", f"{quoted(name)} is not known") for name in body if name not in _KNOWN]
    steps = [_step(body.get(name)) for name in ("from_step", "to_step")]
    for name, step in zip(("from_step", "to_step"), steps, strict=True):
        if step is None:
            errors.append((f"/{name}", f"{name} is a step, 0 or above, not {quoted(body.get(name))}"))
    run, use = body.get("run"), body.get("use", True)
    if run is not None and not isinstance(run, str):
        errors.append(("/run", f"run is the name of a run, not {quoted(run)}"))
    if not isinstance(use, bool):
        errors.append(("/use", f"use is true or false, not {quoted(use)}"))
    if errors:
        raise invalid("; ".join(message for _, message in errors), errors)
    return run, int(steps[0] or 0), int(steps[1] or 0), bool(use)


def choice_of(body: Mapping[str, Any]) -> int | None:
    """The id of the baseline that is chosen; None for none. Raises Problem 422."""
    number = _step(body.get("baseline"))
    wrong = number == 0 or (number is None and body.get("baseline") is not None)
    if "baseline" not in body or wrong or set(body) - {"baseline", "by"}:
        message = 'give the id of a baseline, or null: {"baseline": 3}'
        raise invalid(message, [("/baseline", message)])
    return number


def _step(value: Any) -> int | None:
    """The step that was sent; None for what is none."""
    try:
        return decode_count(value)
    except NumberError:
        return None


def learn_window(store: Store, run: str, from_step: int, to_step: int) -> Baseline:
    """What a run shows between two steps, both included. Raises Problem 404, or 409 where it is not healthy."""
    with store.read() as conn:
        row = find_run(conn, run)
        owners = owners_of(conn, row.id, from_step, to_step)
        refused = _reasons(conn, row, from_step, to_step)
        attempt = _attempt_name(conn, owners[-1][1]) if owners else "0"
    if len(owners) > MOST_STEPS:
        refused.append(
            f"the window holds {len(owners)} sampled steps, and at most {MOST_STEPS} can be learned from"
        )
        owners = []
    learner = Learner()
    try:
        for seen in observations(store, run, from_step, to_step) if owners else ():
            learner.add(seen)
    except BaselineError as error:
        raise _refusal([str(error)]) from error
    refused += learner.refusals() if owners or not refused else []
    if refused:
        raise _refusal(refused)
    return learner.finish(run=run, attempt=attempt, preset=row.preset)


def _refusal(reasons: list[str]) -> Problem:
    return Problem(409, "baseline-refused", "; ".join(reasons), reasons=reasons)


def _attempt_name(conn: Connection, number: int) -> str:
    return str(conn.execute(select(attempts.c.name).where(attempts.c.id == number)).scalar_one())


def _reasons(conn: Connection, row: Row[Any], from_step: int, to_step: int) -> list[str]:
    """The decisions that were in force at some step of the window, as reasons to refuse it."""
    return reasons(all_decisions(conn, row.id), from_step, to_step)
