"""Heatmap rows at every step of an attempt, kept and extended."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, select

from fp8_safeguard.server.branch import Segment, live_branch
from fp8_safeguard.server.grid import Grid, Selection, load_rows
from fp8_safeguard.server.tables import samples
from fp8_safeguard.server.worst import Measured, reduce_rows

PART_STEPS = 64
"""Steps whose rows are in memory together: about 6 MB for a hundred layers, little enough for the caches."""
MOST_BYTES = 256 * 2**20
"""Kept tables of all runs: a hundred layers at ten thousand steps take about 10 MB a metric."""


@dataclass(frozen=True)
class StepTable:
    """One metric of some layers at the sampled steps of one attempt; never changed, so that requests may share it."""

    layers: tuple[str, ...]
    steps: NDArray[np.int64]
    """[T], ascending."""
    table: Measured
    """[layers, T]"""
    newest: int = -1
    """The highest row of `samples` that it has seen. Rows are never changed, and those of an attempt only grow in number."""

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.table.values.nbytes + self.table.bad.nbytes + sum(map(_bytes_of, self._counts))

    @property
    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.table.nan, self.table.inf

    def of_layers(self, layers: Sequence[str]) -> "StepTable":
        """The same with the rows of these layers; a row that it has not is null."""
        if tuple(layers) == self.layers:
            return self
        number = {layer: place for place, layer in enumerate(layers)}
        kept = [place for place, layer in enumerate(self.layers) if layer in number]
        rows = np.array([number[self.layers[place]] for place in kept], dtype=np.intp)
        table = _parts(self.table, lambda part: _placed(part[kept], rows, len(layers)))
        return StepTable(tuple(layers), self.steps, table, self.newest)

    def between(self, keep: NDArray[np.bool_]) -> "StepTable":
        """The columns where `keep` is true."""
        if keep.all():
            return self
        return StepTable(
            self.layers, self.steps[keep], _parts(self.table, lambda part: part[:, keep]), self.newest
        )

    def with_columns(self, fresh: "StepTable") -> "StepTable":
        """These columns and those of `fresh`, which has the same layers; where both have a step, the fresh one."""
        return _side_by_side([self.between(~np.isin(self.steps, fresh.steps)), fresh])


def values_by_step(
    conn: Connection,
    run_id: int,
    name: str,
    selection: Selection,
    layers: Sequence[str],
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> tuple[Measured, NDArray[np.int64]]:
    """[layers, T] of one metric over the live branch, and its steps; of each layer the worst of its selected tensors.

    An answer over all steps is kept and later extended by what has arrived since; then parts of it cost little. A part that is
    asked for first is read on its own.
    """
    found: list[StepTable] = []
    claimed: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    for segment in live_branch(conn, run_id):
        source = _Source(conn, run_id, segment.attempt_id, name, selection, tuple(layers))
        bounds = _bounds(segment, from_step, to_step)
        table = source.part(*bounds) if from_step is not None or to_step is not None else source.whole()
        inside = (table.steps >= bounds[0]) & (table.steps <= bounds[1]) & ~np.isin(table.steps, claimed)
        found.append(table.between(inside))
        claimed = np.concatenate([claimed, found[-1].steps])
    joined = _side_by_side(found) if len(found) > 1 else (*found, _empty(tuple(layers)))[0]
    return joined.table, joined.steps


def by_layer(name: str, grid: Grid, layers: Sequence[str]) -> Measured:
    """[layers, T]: the worst of each layer's selected tensors."""
    values, bad = grid.metric(name)
    nan, inf = grid.nonfinite()
    number = {layer: place for place, layer in enumerate(layers)}
    row_of = np.array([number[tensor.layer] for tensor in grid.tensors], dtype=np.intp)
    return reduce_rows(name, Measured(values, bad, nan, inf), row_of, len(layers))


@dataclass(frozen=True)
class _Source:
    """The samples of one attempt as rows of a heatmap."""

    conn: Connection
    run_id: int
    attempt_id: int
    name: str
    selection: Selection
    layers: tuple[str, ...]

    @property
    def _key(self) -> "_Key":
        return (self.attempt_id, self.name, self.selection)

    def whole(self) -> StepTable:
        """All steps: what is kept, and what has arrived since."""
        memory = _memory_of(self.conn)
        # Two pages that ask at once: the second one waits for what the first one reads.
        with memory.turn(self._key):
            held = memory.get(self._key)
            known = _empty(self.layers) if held is None else held.of_layers(self.layers)
            rows = self._arrived(known.newest)
            if rows:
                steps = sorted({step for _, step in rows})
                fresh = self._read(steps, newest=max(number for number, _ in rows))
                known = known.with_columns(fresh)
            memory.keep(self._key, known)
        return known

    def part(self, first: int, last: int) -> StepTable:
        """Steps between two, both included."""
        if _memory_of(self.conn).get(self._key) is not None:
            return self.whole()
        rows = self._arrived(-1)
        return self._read(sorted({step for _, step in rows if first <= step <= last}))

    def _arrived(self, since: int) -> list[tuple[int, int]]:
        """(row, step) of the attempt's samples after a row."""
        mine = samples.c.attempt_id == self.attempt_id
        query = select(samples.c.id, samples.c.step).where(mine, samples.c.id > since)
        return [(row.id, row.step) for row in self.conn.execute(query)]

    def _read(self, steps: Sequence[int], newest: int = -1) -> StepTable:
        """These steps, in parts: the rows of only one are in memory at a time."""
        parts = [
            self._read_part(steps[at : at + PART_STEPS], newest) for at in range(0, len(steps), PART_STEPS)
        ]
        return _side_by_side(parts) if parts else _empty(self.layers, newest)

    def _read_part(self, steps: Sequence[int], newest: int) -> StepTable:
        rows = load_rows(self.conn, self.attempt_id, steps)
        grid = Grid.of_rows(self.conn, self.run_id, self.selection, rows)
        return StepTable(self.layers, grid.steps, by_layer(self.name, grid, self.layers), newest)


def _bounds(segment: Segment, from_step: int | None, to_step: int | None) -> tuple[int, int]:
    ends = [end for end in (segment.upto, to_step) if end is not None]
    return (from_step or 0), min(ends, default=2**63 - 1)


def _empty(layers: tuple[str, ...], newest: int = -1) -> StepTable:
    shape = (len(layers), 0)
    counts = np.zeros(shape, dtype=np.int64)
    table = Measured(np.zeros(shape), np.zeros(shape, dtype=np.bool_), counts, counts)
    return StepTable(layers, np.zeros(0, dtype=np.int64), table, newest)


def _side_by_side(tables: Sequence[StepTable]) -> StepTable:
    """The columns of tables with the same layers, by step."""
    steps = np.concatenate([each.steps for each in tables])
    order = np.argsort(steps, kind="stable")
    ascending = bool((order == np.arange(len(order))).all())

    def joined(name: str) -> NDArray[Any]:
        parts = [getattr(each.table, name) for each in tables]
        if name in ("nan", "inf") and not any(_bytes_of(part) and part.any() for part in parts):
            return _no_counts((len(parts[0]), len(steps)))
        whole = np.concatenate(parts, axis=1)
        return whole if ascending else whole[:, order]

    table = Measured(*(joined(name) for name in ("values", "bad", "nan", "inf")))
    return StepTable(tables[0].layers, steps[order], table, max(each.newest for each in tables))


def _parts(table: Measured, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Measured:
    return Measured(change(table.values), change(table.bad), change(table.nan), change(table.inf))


def _placed(part: NDArray[Any], rows: NDArray[np.intp], count: int) -> NDArray[Any]:
    """Rows at other places of a taller table, null elsewhere."""
    fill = np.nan if part.dtype == np.float64 else 0
    whole = np.full((count, part.shape[1]), fill, dtype=part.dtype)
    whole[rows] = part
    return whole


def _no_counts(shape: tuple[int, int]) -> NDArray[np.int64]:
    """Zeros that take no memory: most runs hold no NaN at all."""
    return np.broadcast_to(np.int64(0), shape)


def _bytes_of(part: NDArray[Any]) -> int:
    return part.nbytes if all(part.strides) else 0


_Key = tuple[int, str, Selection]


class _Memory:
    """Tables of one database, those asked for last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[_Key, threading.Lock] = {}
        self._tables: OrderedDict[_Key, StepTable] = OrderedDict()

    def turn(self, key: _Key) -> threading.Lock:
        with self._lock:
            return self._turns.setdefault(key, threading.Lock())

    def get(self, key: _Key) -> StepTable | None:
        with self._lock:
            return self._tables.get(key)

    def keep(self, key: _Key, table: StepTable) -> None:
        with self._lock:
            self._tables[key] = table
            self._tables.move_to_end(key)
            while len(self._tables) > 1 and sum(each.nbytes for each in self._tables.values()) > MOST_BYTES:
                dropped, _ = self._tables.popitem(last=False)
                self._turns.pop(dropped, None)


_memories: WeakKeyDictionary[Engine, _Memory] = WeakKeyDictionary()


def _memory_of(conn: Connection) -> _Memory:
    return _memories.setdefault(conn.engine, _Memory())
