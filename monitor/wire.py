"""The wire: samples as JSON or msgpack documents, checked whole.

`parse_sample` collects every fault with its JSON pointer (RFC 6901) before it raises, so that a client's author sees them
all at once. Fields that this version does not know are left alone. `sample_to_wire` is its inverse.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.columns import StatsTable, empty_column, read_column, write_column
from fp8_safeguard.monitor.coverage import coverage_to_wire, read_coverage, read_sampling
from fp8_safeguard.monitor.document import Reader, WireError, escape
from fp8_safeguard.monitor.localdecisions import read_local_decisions
from fp8_safeguard.monitor.metrics import ALL_COLUMNS
from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import Slot, SlotError, slots_id
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.thresholds import PRESETS

__all__ = [
    "ACCEPTED_SCHEMAS",
    "MAX_BATCH",
    "MODES",
    "REQUIRED_COLUMNS",
    "SCHEMA",
    "Attempt",
    "RunIdError",
    "Sample",
    "WireError",
    "check_run_id",
    "columns_for",
    "decode_number",
    "encode_number",
    "parse_sample",
    "sample_to_wire",
]

SCHEMA = 1
ACCEPTED_SCHEMAS = (1,)
"""This schema and the one before it, once there is one."""

MAX_BATCH = 256
"""Samples in one request."""

MODES = ("observe", "advise", "enforce")

REQUIRED_COLUMNS = (
    *("count", "zeros", "underflow", "saturated", "nan", "inf"),
    *("amax", "sum_sq", "sum_sq_q", "sum_sq_err"),
)

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCALAR = {"layer": "text", "name": "required text", "value": "number"}
_RANK = {
    **{"rank": "count", "host": "text", "layer": "text", "operand": "text", "gemm": "text"},
    **{"metric": "text", "value": "number"},
}
_SET_BY_TRAINER = ("learning_rate", "tokens")
"""Run values that are chosen, not measured, and so are never non-finite."""


class RunIdError(ValueError):
    """A run id that cannot be part of an address."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: a resume or a rewind starts another."""

    id: str = "0"
    parent: str | None = None
    from_step: int = 0
    """First step that the attempt produces itself; those below it are its parent's."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All slots of one group at one step, as they travelled."""

    schema: int = SCHEMA
    batch_id: str | None = None
    attempt: Attempt = Attempt()
    group: str = "0"
    groups: int = 1
    step: int
    mode: str = "observe"
    thresholds: str = "floor"
    """Preset that the run is judged by; like the mode, the run's first sample sets it."""
    plan_version: int = 0
    effective_step: int | None = None
    overhead_ratio: float | None = None
    dropped: int = 0
    slots: tuple[Slot, ...]
    columns: Mapping[str, NDArray[Any]]
    """Every column, in slot order: counts int64 [S], sums float64 [S], histogram int64 [S, 16]."""
    nulls: Mapping[str, NDArray[np.bool_]]
    """Every column's null mask [S]; the value under a null is 0 (counts) or NaN (sums)."""
    indices: tuple[int, ...] = ()
    """Where each slot stands in the model's order (rows of a heatmap); the position in the list if not sent."""
    run: Mapping[str, float | None] = field(default_factory=dict)
    scalars: tuple[Mapping[str, Any], ...] = ()
    ranks: tuple[Mapping[str, Any], ...] = ()
    coverage: tuple[Mapping[str, Any], ...] | None = None
    """Every weight matrix as `{"name", "shape", "status", "reason"}`; sent first and whenever it has changed."""
    sampling: Mapping[str, Any] | None = None
    """What the overhead budget makes of the sampling now."""
    local_decisions: tuple[Decision, ...] = ()
    """What the client has decided while it could not reach the server, until the server has taken it over."""
    left_out: frozenset[str] = frozenset()
    """Of parent, from_step and groups, what the document did not say: the attempt's first sample said it for all."""

    @cached_property
    def table(self) -> StatsTable:
        """The columns as a table of TensorStats."""
        return StatsTable(self.columns, self.nulls)

    @cached_property
    def slots_id(self) -> str:
        """Digest of the slot list."""
        return slots_id(self.slots)


def columns_for(sample: Sample, index: int) -> TensorStats:
    """The statistics of the slot at that position of the sample."""
    return sample.table.stats(index)


def check_run_id(run: Any) -> str:
    """The run id, if it may be part of an address; RunIdError otherwise."""
    if not isinstance(run, str) or not _RUN_ID.fullmatch(run):
        raise RunIdError(
            f"run id {quoted(run)} is not allowed: 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return run


def parse_sample(body: Any, *, known_slots: Callable[[str], tuple[Slot, ...] | None] | None = None) -> Sample:
    """The sample in a decoded JSON or msgpack document. Raises WireError with every fault found.

    `known_slots` gives the slot list of a slots_id, or None where it was never accepted.
    """
    if not isinstance(body, Mapping):
        raise WireError([("", f"a sample is an object, not {type(body).__name__}")])
    reader = Reader(body)
    _check_schema(reader)
    slots, indices = _read_slots(reader, known_slots)
    columns, nulls = _read_columns(reader, len(slots)) if slots is not None else ({}, {})
    fields: dict[str, Any] = {
        "batch_id": reader.text("batch_id", None),
        "attempt": _read_attempt(reader),
        "group": reader.text("group", required=True),
        "groups": reader.count("groups", 1, least=1),
        "step": reader.count("step", required=True),
        "mode": reader.choice("mode", MODES, "observe"),
        "thresholds": reader.choice("thresholds", tuple(PRESETS), "floor"),
        "plan_version": reader.count("plan_version", 0),
        "effective_step": reader.count("effective_step", None),
        "overhead_ratio": reader.number("overhead_ratio", finite=True),
        "dropped": reader.count("dropped", 0),
        "run": _read_run(reader),
        "scalars": reader.records("scalars", _SCALAR),
        "ranks": reader.records("ranks", _RANK),
        "coverage": read_coverage(reader),
        "sampling": read_sampling(reader),
        "local_decisions": read_local_decisions(reader),
    }
    reader.raise_faults()
    fields["left_out"] = _left_out(body)
    return Sample(slots=slots or (), indices=indices, columns=columns, nulls=nulls, **fields)


def sample_to_wire(sample: Sample, *, binary: bool, by_id: bool = False) -> dict[str, Any]:
    """The document of a sample: lists for JSON, raw columns (`binary`) for msgpack. Keys as in the contract.

    With `by_id` the slot list is left out and named by its digest: for a server that has accepted it before.
    """
    table, null_at = sample.table, sample.table.null_positions()
    sent = [
        name for name in ALL_COLUMNS if name in REQUIRED_COLUMNS or len(null_at[name]) < len(sample.slots)
    ]
    attempt = {
        "id": sample.attempt.id,
        "parent": sample.attempt.parent,
        "from_step": sample.attempt.from_step,
    }
    return {
        "schema": sample.schema,
        "batch_id": sample.batch_id,
        "attempt": {name: value for name, value in attempt.items() if name not in sample.left_out},
        "group": sample.group,
        **({} if "groups" in sample.left_out else {"groups": sample.groups}),
        "step": sample.step,
        "mode": sample.mode,
        "thresholds": sample.thresholds,
        "plan_version": sample.plan_version,
        "effective_step": sample.effective_step,
        "overhead_ratio": sample.overhead_ratio,
        "dropped": sample.dropped,
        **({"slots_id": sample.slots_id} if by_id else {"slots": _listed(sample)}),
        "columns": {name: write_column(table, name, binary=binary, null_at=null_at[name]) for name in sent},
        "run": {name: encode_number(value) for name, value in sample.run.items()},
        "scalars": [_encode_record(record) for record in sample.scalars],
        "ranks": [_encode_record(record) for record in sample.ranks],
        **_own_watching(sample),
    }


def _listed(sample: Sample) -> list[dict[str, Any]]:
    indices = sample.indices or range(len(sample.slots))
    pairs = zip(indices, sample.slots, strict=True)
    return [{"index": index, **slot.to_wire()} for index, slot in pairs]


def _own_watching(sample: Sample) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if sample.coverage is not None:
        said["coverage"] = coverage_to_wire(sample.coverage)
    if sample.sampling is not None:
        said["sampling"] = {name: value for name, value in sample.sampling.items() if value is not None}
    if sample.local_decisions:
        said["local_decisions"] = [decision.to_wire() for decision in sample.local_decisions]
    return said


def _encode_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: encode_number(value) if name == "value" else value for name, value in record.items()}


def _check_schema(reader: Reader) -> None:
    schema = reader.body.get("schema")
    if schema is None:
        reader.fault("/schema", f"schema is required; this version writes {SCHEMA}")
    elif isinstance(schema, bool) or not isinstance(schema, int):
        reader.fault("/schema", f"schema is an integer, not {quoted(schema)}")
    elif schema not in ACCEPTED_SCHEMAS:
        accepted = ", ".join(map(str, ACCEPTED_SCHEMAS))
        raise WireError(
            [("/schema", f"schema {schema} is not accepted here; accepted: {accepted}")], "schema"
        )


def _read_attempt(reader: Reader) -> Attempt:
    wire = reader.body.get("attempt")
    if not isinstance(wire, Mapping):
        problem = "is required" if wire is None else f"is an object, not {quoted(wire)}"
        reader.fault("/attempt", f"attempt {problem}; the least is {{'id': '0'}}")
        return Attempt()
    if wire.get("id") in (None, ""):
        reader.fault("/attempt/id", "attempt.id is required")
    identity = reader.checked_text("/attempt/id", "attempt.id", wire.get("id", "0"))
    parent = wire.get("parent")
    if parent is not None:
        parent = reader.checked_text("/attempt/parent", "attempt.parent", parent)
    from_step = reader.count_in(wire, "/attempt", "from_step", 0)
    return Attempt(identity or "0", parent, from_step or 0)


def _left_out(body: Mapping[str, Any]) -> frozenset[str]:
    wire = body["attempt"]
    # A null parent says that there is none; a null number says nothing.
    said = {"parent": "parent" in wire, "from_step": wire.get("from_step") is not None}
    said["groups"] = body.get("groups") is not None
    return frozenset(name for name, is_said in said.items() if not is_said)


def _read_slots(
    reader: Reader, known_slots: Callable[[str], tuple[Slot, ...] | None] | None
) -> tuple[tuple[Slot, ...] | None, tuple[int, ...]]:
    """The slots and their indices; None where they cannot be read, and then neither can the columns."""
    wire, digest = reader.body.get("slots"), reader.body.get("slots_id")
    if wire is None and digest is None:
        reader.fault("/slots", "slots is required (or slots_id, once the server has accepted the list)")
        return None, ()
    if wire is None:
        return _known_slots(reader, digest, known_slots)
    if not isinstance(wire, (list, tuple)):
        reader.fault("/slots", f"slots is a list, not {type(wire).__name__}")
        return None, ()
    listed = itertools.takewhile(lambda placed: not reader.full, enumerate(wire))
    slots = [_read_slot(reader, position, item) for position, item in listed]
    if reader.full:
        return None, ()
    _check_distinct(reader, slots)
    if any(slot is None for slot in slots):
        # Columns can still be checked against the number of slots; the stand-in never leaves this module.
        return tuple(slot or Slot("?", gemm="fprop") for slot in slots), ()
    found = tuple(slot for slot in slots if slot is not None)
    if digest is not None and digest != slots_id(found):
        reader.fault("/slots_id", f"slots_id {quoted(digest)} is not the digest of slots, {slots_id(found)}")
    return found, _read_indices(reader, wire)


def _known_slots(
    reader: Reader, digest: Any, known_slots: Callable[[str], tuple[Slot, ...] | None] | None
) -> tuple[tuple[Slot, ...] | None, tuple[int, ...]]:
    if not isinstance(digest, str):
        reader.fault("/slots_id", f"slots_id is text, not {quoted(digest)}")
        return None, ()
    slots = known_slots(digest) if known_slots is not None else None
    if slots is None:
        message = f"slots_id {quoted(digest)} is not known here; send the slot list itself once"
        raise WireError([("/slots_id", message)], "slots-unknown")
    return slots, tuple(range(len(slots)))


def _read_slot(reader: Reader, position: int, wire: Any) -> Slot | None:
    if not isinstance(wire, Mapping):
        reader.fault(f"/slots/{position}", f"a slot is an object, not {quoted(wire)}")
        return None
    try:
        return Slot.from_wire(wire)
    except SlotError as error:
        reader.fault(f"/slots/{position}/{error.field}", str(error))
        return None


def _check_distinct(reader: Reader, slots: Sequence[Slot | None]) -> None:
    first: dict[str, int] = {}
    for position, slot in enumerate(slots):
        if slot is None:
            continue
        earlier = first.setdefault(slot.key, position)
        if earlier != position:
            reader.fault(
                f"/slots/{position}", f"{slot.label} is already at /slots/{earlier}; send each slot once"
            )


def _read_indices(reader: Reader, wire: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    return tuple(
        reader.count_in(item, f"/slots/{position}", "index", position) or 0
        for position, item in enumerate(wire)
    )


def _read_columns(reader: Reader, slots: int) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    wire = reader.body.get("columns")
    columns: dict[str, NDArray[Any]] = {}
    nulls: dict[str, NDArray[np.bool_]] = {}
    if not isinstance(wire, Mapping):
        reader.fault("/columns", "columns is required: an object of one list for each column")
        return columns, nulls
    for name in ALL_COLUMNS:
        read = _read_one_column(reader, name, wire.get(name), slots)
        if read is not None:
            columns[name], nulls[name] = read
    return columns, nulls


def _read_one_column(
    reader: Reader, name: str, wire: Any, slots: int
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    if wire is not None:
        return read_column(name, wire, slots, lambda at, text: reader.fault(f"/columns/{name}{at}", text))
    if name in REQUIRED_COLUMNS:
        reader.fault(f"/columns/{name}", f"column {name} is required (null where a slot has no such value)")
    return empty_column(name, slots)


def _read_run(reader: Reader) -> dict[str, float | None]:
    wire = reader.body.get("run")
    if wire is None:
        return {}
    if not isinstance(wire, Mapping):
        reader.fault("/run", f"run is an object of numbers, not {quoted(wire)}")
        return {}
    values: dict[str, float | None] = {}
    for name, value in wire.items():
        pointer = f"/run/{escape(name)}"
        if reader.checked_text(pointer, "name", name) is not None:
            values[name] = reader.checked_number(pointer, name, value, finite=name in _SET_BY_TRAINER)
    return values
