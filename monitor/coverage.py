"""What a client says of its own watching: coverage and sampling.

Coverage names every weight matrix of a model as observed, adapted or not observed, with the reason. Sampling says what the
overhead budget makes of it: how often a step is sampled, how much of it, and at what share of the training time.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8_safeguard.monitor.document import Reader
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import is_count

OBSERVED, ADAPTED, NOT_OBSERVED = STATUSES = ("observed", "adapted", "not observed")
"""The best first: a matrix that one rank observes is observed."""

MAX_ROWS = 20_000
MAX_TEXT = 4096
"""Characters of a name or a reason."""
MAX_DIMENSIONS = 64

_ROW = ("name", "shape", "status", "reason")
_COUNTS = {"every": 1, "layers_per_sample": 0, "layers": 0, "tile_stride": 1, "full_coverage_steps": 0}
"""Whole numbers of a sampling report, and the least of each."""
_RATIOS = ("budget", "overhead_ratio")

Row = Mapping[str, Any]


def read_coverage(reader: Reader) -> tuple[dict[str, Any], ...] | None:
    """The rows of a sample's `coverage`; None where the sample says nothing of it."""
    wire = reader.body.get("coverage")
    if wire is None:
        return None
    if not isinstance(wire, (list, tuple)):
        reader.fault("/coverage", f"coverage is a list of rows, not {quoted(wire)}")
        return None
    if len(wire) > MAX_ROWS:
        reader.fault(
            "/coverage", f"coverage has {len(wire)} rows; at most {MAX_ROWS} are taken: see fitting()"
        )
        return None
    listed = itertools.takewhile(lambda placed: not reader.full, enumerate(wire))
    return tuple(_read_row(reader, f"/coverage/{place}", row) for place, row in listed)


def read_sampling(reader: Reader) -> dict[str, Any] | None:
    """A sample's `sampling` with the fields that it gives; None where it says nothing of it."""
    wire = reader.body.get("sampling")
    if wire is None:
        return None
    if not isinstance(wire, Mapping):
        reader.fault("/sampling", f"sampling is an object of numbers, not {quoted(wire)}")
        return None
    fields: dict[str, Any] = {name: _ratio(reader, wire, name) for name in _RATIOS}
    for name, least in _COUNTS.items():
        fields[name] = reader.count_in(wire, "/sampling", name, None, least=least)
    return {name: value for name, value in fields.items() if value is not None}


def coverage_to_wire(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as they travel in either encoding."""
    return [
        {**{name: row[name] for name in _ROW}, "shape": [int(size) for size in row["shape"]]} for row in rows
    ]


def fitting(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as a server takes them: texts cut at MAX_TEXT, and of more than MAX_ROWS what is not observed first."""
    cut = [{**row, **{name: _cut(row[name]) for name in ("name", "reason")}} for row in rows]
    if len(cut) <= MAX_ROWS:
        return cut
    return sorted(cut, key=lambda row: -STATUSES.index(row["status"]))[:MAX_ROWS]


def merged(reports: Iterable[Iterable[Row]]) -> list[dict[str, Any]]:
    """One row a matrix from the reports of several ranks or groups, in the order in which they are first named.

    The best status wins, with the reason that goes with it: under pipeline or expert parallelism every rank lacks the
    matrices of the others.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in itertools.chain.from_iterable(reports):
        known = found.get(row["name"])
        if known is None or STATUSES.index(row["status"]) < STATUSES.index(known["status"]):
            found[row["name"]] = dict(row)
    return list(found.values())


def _read_row(reader: Reader, pointer: str, wire: Any) -> dict[str, Any]:
    if not isinstance(wire, Mapping):
        reader.fault(pointer, f"a row of coverage is an object, not {quoted(wire)}")
        return {}
    status = wire.get("status")
    if not isinstance(status, str) or status not in STATUSES:
        reader.fault(f"{pointer}/status", f"status {quoted(status)} is not one of {', '.join(STATUSES)}")
    return {
        "name": _text(reader, pointer, "name", wire.get("name")),
        "shape": _shape(reader, f"{pointer}/shape", wire.get("shape")),
        "status": status,
        "reason": "" if wire.get("reason") is None else _text(reader, pointer, "reason", wire["reason"]),
    }


def _text(reader: Reader, pointer: str, name: str, value: Any) -> str | None:
    at = f"{pointer}/{name}"
    text = reader.checked_text(at, name, value)
    if text is not None and len(text) > MAX_TEXT:
        reader.fault(at, f"{name} has {len(text)} characters; at most {MAX_TEXT} are taken: see fitting()")
    return text


def _shape(reader: Reader, pointer: str, wire: Any) -> list[int]:
    sizes = wire if isinstance(wire, (list, tuple)) else None
    if sizes is None or len(sizes) > MAX_DIMENSIONS or not all(map(is_count, sizes)):
        reader.fault(
            pointer, f"shape is a list of up to {MAX_DIMENSIONS} sizes from 0 upward, not {quoted(wire)}"
        )
        return []
    return list(sizes)


def _ratio(reader: Reader, wire: Mapping[str, Any], name: str) -> float | None:
    at = f"/sampling/{name}"
    value = reader.checked_number(at, name, wire.get(name), finite=True)
    if value is not None and value < 0:
        reader.fault(at, f"{name} is a share of the training time, from 0 upward, not {value}")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"
