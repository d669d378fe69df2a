"""Writes everything stored of a run to a file or a pipe."""

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from fp8_safeguard.cli.options import ReadFrom, Run, Server, Token
from fp8_safeguard.cli.output import fail, say
from fp8_safeguard.cli.read import asking


class Form(StrEnum):
    """What the export looks like."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"


KEYS = ("attempt", "group", "step", "layer", "operand", "layout", "gemm", "expert", "variant", "emulated")
"""What names one line of the CSV form."""


def export(
    run: Run = None,
    form: Annotated[
        Form, typer.Option("--format", help="jsonl and json hold everything, csv the statistics.")
    ] = Form.JSONL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, whole or not at all.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
) -> None:
    """Write everything stored of a run: its samples, decisions and alerts.

    jsonl has one object a line, each with its "type"; json is one object;
    both hold samples that can be posted again. csv has one line a slot and
    step, with the raw columns and the derived metrics.

    Examples:
        fp8-safeguard export my-run --output my-run.jsonl
        fp8-safeguard export my-run --format csv | gzip > my-run.csv.gz
    """
    if output is not None and output.exists() and not force:
        fail(f"{output} exists. Choose another name, or replace it with --force.")
    wanted = "json" if form is Form.JSON else "jsonl"
    with (
        asking(server, database_url, token, run) as (asked, name),
        asked.export(name, wanted) as pieces,
        destination(output) as out,
    ):
        for piece in as_csv(lines(pieces)) if form is Form.CSV else pieces:
            out.write(piece)
    if output is not None:
        say(f"{name}: {output.stat().st_size / 2**20:.1f} MiB in {output}")


@contextmanager
def destination(output: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that takes its name only once it is whole and on disk."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        handle, part = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.", suffix=".part")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets nobody else read; an export is an ordinary file.
        Path(part).chmod(0o666 & ~_umask())
        Path(part).replace(output)
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    finally:
        Path(part).unlink(missing_ok=True)


def lines(pieces: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of JSON lines, however it is cut."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, filter(None, whole))
    if rest:
        yield json.loads(rest)


def as_csv(records: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """The samples among the records as CSV, one line a slot; null is empty."""
    from fp8_safeguard.monitor.metrics import COLUMNS, DERIVED_METRICS

    text = io.StringIO()
    writer = csv.DictWriter(text, [*KEYS, *COLUMNS, *DERIVED_METRICS], lineterminator="\n")
    writer.writeheader()
    for record in records:
        if record["type"] == "sample":
            writer.writerows(slot_rows(record))
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


def slot_rows(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each slot of a sample."""
    from fp8_safeguard.monitor.metrics import COLUMNS, DERIVED_METRICS

    metrics = derived(sample["columns"])
    whole = {"attempt": sample["attempt"]["id"], "group": sample["group"], "step": sample["step"]}
    for place, slot in enumerate(sample["slots"]):
        names = {name: slot.get(name) for name in KEYS if name in slot}
        columns = {name: sample["columns"][name][place] for name in COLUMNS if name in sample["columns"]}
        yield {**whole, **names, **columns, **{name: metrics[name][place] for name in DERIVED_METRICS}}


def derived(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The derived metrics of a sample's slots; null stays null, a measured NaN stays NaN."""
    import numpy as np

    from fp8_safeguard.monitor.metrics import DERIVED_METRICS, HISTOGRAM, HISTOGRAM_BINS, derive, undefined
    from fp8_safeguard.monitor.numbers import decode_number

    slots = len(columns["count"])
    arrays: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    for name, values in columns.items():
        if name == HISTOGRAM:
            absent = [None] * HISTOGRAM_BINS
            arrays[name] = np.array([row or absent for row in values], dtype=np.float64).reshape(slots, -1)
        else:
            arrays[name] = np.array([np.nan if v is None else decode_number(v) for v in values], np.float64)
        nulls[name] = np.array([value is None for value in values])
    found = {}
    for metric in DERIVED_METRICS:
        values, missing = derive(metric, arrays), undefined(metric, arrays, nulls)
        found[metric] = [
            None if gone else value for gone, value in zip(missing, values.tolist(), strict=True)
        ]
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
