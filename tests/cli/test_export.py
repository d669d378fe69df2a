"""Export to files and pipes: whole or not at all, and what the CSV form holds."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli import export as exporting
from fp8_safeguard.cli.api import ApiError


def test_jsonl_is_the_servers_own_export(service: Any, process: Callable[..., Any]) -> None:
    served = httpx2.get(f"{service.url}/api/v1/runs/sick-7b/export", params={"format": "jsonl"}).text
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        said = process("export", "sick-7b", *where)
        assert (said.code, said.err) == (0, "")
        assert said.out == served


def test_a_file_is_written_whole_and_never_replaced_unasked(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    target = tmp_path / "run.json"
    question = ("export", "sick-7b", "--format", "json", "--server", service.url, "--output", str(target))
    said = cli(*question)
    assert (said.code, said.out) == (0, "")
    assert {"run", "plan", "attempts", "decisions", "alerts", "samples"} <= json.loads(
        target.read_text()
    ).keys()
    assert target.stat().st_mode & 0o044 == 0o044
    target.write_text("mine")
    refused = cli(*question)
    assert refused.code == 1
    assert "--force" in refused.err
    assert target.read_text() == "mine"
    assert cli(*question, "--force").code == 0
    assert target.read_text() != "mine"


def test_a_stream_that_breaks_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"

    def write_half() -> None:
        with exporting.destination(target) as out:
            out.write(b"half a line")
            raise ApiError("the server went away")

    with pytest.raises(ApiError):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["missing/run.jsonl", "."])
def test_a_place_that_cannot_be_written_is_one_line(
    service: Any, cli: Callable[..., Any], target: str
) -> None:
    said = cli("export", "sick-7b", "--server", service.url, "--output", target)
    assert (said.code, said.out) == (1, "")
    assert said.err.count("\n") == 1


def test_an_unknown_run_leaves_no_file(service: Any, cli: Callable[..., Any], tmp_path: Path) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        said = cli("export", "sik-7b", *where, "--output", str(tmp_path / "run.jsonl"))
        assert said.code == 1
        assert "Did you mean sick-7b" in said.err
    assert list(tmp_path.iterdir()) == []


def test_csv_has_a_line_a_slot_and_step_and_the_servers_values(
    service: Any, process: Callable[..., Any]
) -> None:
    said = process("export", "sick-7b", "--format", "csv", "--server", service.url)
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert len(rows) == 6 * 4
    layer = 'blocks.1/a "b"\n\x1b[31m%'
    (row,) = [row for row in rows if (row["layer"], row["step"], row["gemm"]) == (layer, "5", "dgrad")]
    series = service.get(
        "/runs/sick-7b/series", layer=layer, metric="relative_error", gemm="dgrad", from_step=5
    )
    assert float(row["relative_error"]) == series["values"][-1]
    # Columns that a recomputed GEMM has not are empty, and so is what follows from them.
    assert (row["zeros"], row["kurtosis"], row["tile_sqnr_p01_db"]) == ("", "", "")
    (operand,) = [row for row in rows if (row["layer"], row["step"], row["operand"]) == (layer, "5", "x")]
    assert float(operand["underflow_ratio"]) == 4000 / 65536
    assert operand["tile_sqnr_p01_db"] == "30.0"


def test_a_measured_nan_is_not_an_empty_field() -> None:
    columns = {name: [1.0, None] for name in ("zeros", "underflow", "saturated", "rows", "rows_flushed")}
    columns |= {"count": [4, 4], "nan": [1, 0], "inf": [0, 0], "tile_sqnr_hist": [None, None]}
    columns |= {name: ["NaN", 1.0] for name in ("amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")}
    found = exporting.derived(columns)
    assert found["underflow_ratio"] == [0.25, None]
    assert str(found["relative_error"]) == "[nan, 1.0]"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_lines_are_put_together_however_the_stream_is_cut(size: int) -> None:
    text = "".join(json.dumps({"type": "sample", "layer": "ü\n"}) + "\n" for _ in range(5)).encode()
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    assert list(exporting.lines(pieces)) == [{"type": "sample", "layer": "ü\n"}] * 5
