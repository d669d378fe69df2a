"""Whether a run's GEMMs could run in FP8, from its stored samples."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, LargeBinary, Row, literal, select

from fp8_safeguard.monitor import readiness as judge
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.coverage import MAX_ROWS, NOT_OBSERVED
from fp8_safeguard.monitor.readings import GemmReadings, OperandReadings
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import MIN_UNDERFLOW_COUNT
from fp8_safeguard.server import clientreports, slotlists
from fp8_safeguard.server.answers import encode_float
from fp8_safeguard.server.audit import plan_from
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.decided import decided
from fp8_safeguard.server.grid import Grid, Selection
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import samples

PART_STEPS = 64
"""Steps whose rows are in memory together."""
MOST_STEPS = 2048
MOST_BYTES = 512 * 2**20
"""Packed rows that one report reads, the newest first: a thousand slots at MOST_STEPS take 240 MB."""

# Legend: K tensors, T steps of one part.
_Owners = list[tuple[int, int]]
"""(step, attempt) ascending."""


def readiness(
    conn: Connection, run: str, *, from_step: int | None = None, to_step: int | None = None
) -> dict[str, Any]:
    """The report over a range of steps of the live branch; of a long one its newest steps.

    `from_step` and `to_step` of the answer are the first and last step that was used; `steps_used` and `steps_in_range` count
    sampled steps, and `decided` lists what was in force or advised meanwhile. Weight matrices that the run's newest coverage calls not observed enter the summary. Raises Problem 404.
    """
    row = find_run(conn, run)
    owners = _owners(conn, row.id, from_step, to_step)
    reading = _Reading()
    used: list[int] = []
    for rows in _newest_first(conn, owners):
        reading.add(conn, row.id, rows)
        used += {each.step for each in rows}
    order = slotlists.order_of(conn, row.id)
    slots = _as_sent_last(conn, row.id, owners[-len(used) :] if used else [])
    coverage = clientreports.coverage(conn, run, status=NOT_OBSERVED, page_size=MAX_ROWS)
    report = judge.assess(
        reading.gemms(slots),
        reading.operands(),
        order=order.layers,
        fallen=fallbacks(plan_from(row)),
        coverage=coverage["items"],
        ended=row.ended_at is not None,
    )
    return {
        "run": run,
        "from_step": min(used, default=None),
        "to_step": max(used, default=None),
        "steps_used": len(used),
        "steps_in_range": len(owners),
        "summary": asdict(report.summary),
        "items": [_item(each) for each in report.rows],
        "decided": decided(conn, row.id, min(used, default=None), max(used, default=None)),
    }


def _item(row: judge.Row) -> dict[str, Any]:
    """A row as JSON has it."""
    item = asdict(row)
    for name in ("error_median", "error_worst", "error_latest", "underflow", "rows_flushed"):
        item[name] = encode_float(item[name])
    best = item["best"]
    if best is not None:
        best["error_median"], best["error_worst"] = map(
            encode_float, (best["error_median"], best["error_worst"])
        )
    return item


def _owners(conn: Connection, run_id: int, from_step: int | None, to_step: int | None) -> _Owners:
    """Which attempt speaks for each sampled step of the range."""
    rows = visible_rows(conn, run_id, [samples.c.attempt_id], from_step=from_step, to_step=to_step)
    return sorted({row.step: row.attempt_id for row in rows}.items())


def _newest_first(conn: Connection, owners: _Owners) -> Iterator[list[Row[Any]]]:
    """Packed rows of the newest steps in parts, as many as the bounds allow."""
    left = MOST_BYTES
    newest = owners[-MOST_STEPS:]
    for end in range(len(newest), 0, -PART_STEPS):
        if left <= 0:
            return
        rows = [
            row
            for attempt, part in groupby(newest[max(0, end - PART_STEPS) : end], key=lambda pair: pair[1])
            for row in _packed(conn, attempt, [step for step, _ in part])
        ]
        left -= sum(len(row.columns) for row in rows)
        yield rows


def _packed(conn: Connection, attempt_id: int, steps: Sequence[int]) -> list[Row[Any]]:
    """What a grid is made of, but for the histograms, which nothing here needs."""
    names = ("step", "group", "part", "slot_list_id", "columns")
    wanted: list[Any] = [*(samples.c[name] for name in names)]
    query = select(*wanted, literal(b"", LargeBinary).label("histograms"))
    mine = samples.c.attempt_id == attempt_id, samples.c.step.in_(steps)
    return list(conn.execute(query.where(*mine)))


def _as_sent_last(conn: Connection, run_id: int, owners: _Owners) -> dict[str, Slot]:
    """GEMM slots by key as the newest of these steps named them: what is emulated changes with the plan."""
    lists = slotlists.of_run(conn, run_id)
    newest: dict[int, int] = {}
    for attempt, part in groupby(owners, key=lambda pair: pair[1]):
        steps = [step for step, _ in part]
        within = samples.c.step.between(steps[0], steps[-1])
        query = select(samples.c.slot_list_id, samples.c.step).where(samples.c.attempt_id == attempt, within)
        for found in conn.execute(query):
            newest[found.slot_list_id] = max(found.step, newest.get(found.slot_list_id, -1))
    slots: dict[str, Slot] = {}
    for list_id in sorted(newest, key=newest.__getitem__):
        slots.update({slot.key: slot for slot in lists[list_id].slots if slot.gemm and slot.expert is None})
    return slots


class _Reading:
    """What the parts of a range say of each slot, the newest part first."""

    def __init__(self) -> None:
        self._errors: dict[Slot, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        self._nonfinite: dict[Slot, int] = {}
        self._operands: dict[Slot, OperandReadings] = {}

    def add(self, conn: Connection, run_id: int, rows: Sequence[Row[Any]]) -> None:
        """One more part."""
        lists = slotlists.of_run(conn, run_id)
        present = {row.slot_list_id for row in rows}
        variants = {slot.variant for list_id in present for slot in lists[list_id].slots}
        for variant in sorted(variants, key=lambda name: name or ""):
            grid = Grid.of_rows(conn, run_id, Selection(variant=variant), rows)
            self._add_gemms(grid, variant)
            if variant is None:
                self._add_operands(grid)

    def _add_gemms(self, grid: Grid, variant: str | None) -> None:
        errors_KT, broken_KT = grid.metric("relative_error")
        nan_KT, inf_KT = grid.nonfinite()
        broken_KT = broken_KT | (nan_KT > 0) | (inf_KT > 0)
        for place, tensor in enumerate(grid.tensors):
            if tensor.gemm is None:
                continue
            slot = Slot(tensor.layer, gemm=tensor.gemm, variant=variant)
            held = ~np.isnan(errors_KT[place])
            if held.any():
                self._errors.setdefault(slot, []).append((grid.steps[held], errors_KT[place, held]))
            broken = int(broken_KT[place].sum())
            if held.any() or broken:
                self._nonfinite[slot] = self._nonfinite.get(slot, 0) + broken

    def _add_operands(self, grid: Grid) -> None:
        lost_KT, _ = grid.metric("underflow_ratio")
        counts_KT, _ = grid.metric("underflow")
        flushed_KT, _ = grid.metric("rows_flushed_ratio")
        sure_KT = np.where(counts_KT >= MIN_UNDERFLOW_COUNT, lost_KT, np.nan)
        for place, tensor in enumerate(grid.tensors):
            if tensor.operand is None:
                continue
            slot = Slot(tensor.layer, operand=tensor.operand, layout=tensor.layout)
            before = self._operands.get(slot, OperandReadings(slot=slot))
            lost = _worse(grid, lost_KT[place], (before.underflow, before.underflow_step))
            flushed = _worse(grid, flushed_KT[place], (before.rows_flushed, before.rows_flushed_step))
            self._operands[slot] = OperandReadings(
                slot=slot,
                underflow=lost[0],
                underflow_step=lost[1],
                sure_underflow=_worse(grid, sure_KT[place], (before.sure_underflow, None))[0],
                rows_flushed=flushed[0],
                rows_flushed_step=flushed[1],
            )

    def gemms(self, sent: dict[str, Slot]) -> Iterator[GemmReadings]:
        """Errors of every GEMM slot; `sent` has the slots as they were sent last, by key."""
        for slot, nonfinite in self._nonfinite.items():
            parts = self._errors.get(slot, [])
            empty = (np.zeros(0, dtype=np.int64), np.zeros(0))
            steps, errors = map(np.concatenate, zip(*(empty, *reversed(parts)), strict=True))
            yield GemmReadings(slot=sent.get(slot.key, slot), steps=steps, errors=errors, nonfinite=nonfinite)

    def operands(self) -> Iterator[OperandReadings]:
        """The worst of every operand slot that has been measured."""
        return (each for each in self._operands.values() if each.underflow is not None)


def _worse(
    grid: Grid, values_T: NDArray[np.float64], before: tuple[float | None, int | None]
) -> tuple[float | None, int | None]:
    """The largest value with its step; of equals that of the earlier step."""
    if np.isnan(values_T).all():
        return before
    place = int(np.nanargmax(values_T))
    value, step = float(values_T[place]), int(grid.steps[place])
    # Parts come newest first, so this one is earlier.
    return (value, step) if before[0] is None or value >= before[0] else before
