"""Finds a run, its layers and slots, or says what is missing."""

from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.slots import GEMMS, LAYOUTS, OPERANDS
from fp8_safeguard.server.grid import Selection
from fp8_safeguard.server.problems import invalid, not_found
from fp8_safeguard.server.slotlists import in_order, layers_of, of_run
from fp8_safeguard.server.tables import runs


def find_run(conn: Connection, run: str) -> Row[Any]:
    """The row of a run. Raises Problem 404."""
    row = conn.execute(select(runs).where(runs.c.name == run)).one_or_none()
    if row is None:
        raise not_found(
            "run-not-found", f"no sample of a run {run!r} has arrived; GET /api/v1/runs lists the runs"
        )
    return row


def check_selection(conn: Connection, run: Row[Any], selection: Selection) -> None:
    """Refuse a slot that cannot exist (422) or that the run does not have (404)."""
    for name, value, known in (
        ("operand", selection.operand, OPERANDS),
        ("layout", selection.layout, LAYOUTS),
        ("gemm", selection.gemm, GEMMS),
    ):
        if value is not None and value not in known:
            message = f"{name} {value!r} is not one of {', '.join(known)}"
            raise invalid(message, [(f"/query/{name}", message)])
    lists = of_run(conn, run.id)
    if selection.layer is not None and selection.layer not in layers_of(lists):
        raise not_found("layer-not-found", f"run {run.name!r} has no layer {selection.layer!r}")
    if not any(selection.has(slot) for slot in in_order(lists)):
        raise not_found("slot-not-found", f"run {run.name!r} has no slot with {_in_words(selection)}")


def _in_words(selection: Selection) -> str:
    named = {name: value for name, value in vars(selection).items() if value not in (None, False)}
    gradients = named.pop("gradients", False)
    parts = [f"{name} {value}" for name, value in named.items()]
    return ", ".join([*parts, "a gradient in it"] if gradients else parts) or "statistics"
