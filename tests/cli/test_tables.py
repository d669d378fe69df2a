"""Tables on a pipe: a title, a header, and a line an item that programs can cut."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from fp8_safeguard.cli.output import Columns, table_lines

TABLES = {
    ("runs",): ["run", "state", "step", "loss", "mode", "last report"],
    ("layers", "faulty"): ["layer", "state", "slot", "metric", "value", "limit", "note"],
    ("alerts", "faulty"): [
        *("id", "since", "severity", "state", "layer", "slot", "rule", "value", "limit", "cause", "note"),
    ],
    ("decisions", "faulty"): [
        *("id", "step", "layer", "target", "action", "value", "state", "effective", "cause", "outcome"),
    ],
    ("plan", "faulty"): ["layer", "target", "action", "value", "decision", "from step", "until step"],
    ("audit", "faulty"): ["when", "step", "who", "what", "decision", "facts"],
    ("report", "faulty"): [
        *("layer", "gemm", "verdict", "error", "worst", "at step", "limit", "underflow", "samples", "cause"),
        "remedy",
    ],
    ("replay", "faulty"): [
        *("compared", "step", "stored", "shift", "layer", "target", "action", "value", "severity", "rule"),
    ],
}


@pytest.mark.parametrize("command", TABLES, ids=lambda command: command[0])
def test_every_table_has_all_its_columns_in_every_line(
    recipes: Any, cli: Callable[..., Any], command: tuple[str, ...]
) -> None:
    """What stands in a table must not decide which column is the fifth."""
    said = cli(*command, "--server", recipes.url)
    assert said.code == 0, said.err
    lines = [re.split(r" {2,}", line) for line in said.out.splitlines()]
    at = lines.index(TABLES[command])
    rows = [line for line in lines[at + 1 :] if len(line) > 1]
    assert rows
    assert {len(row) for row in rows} <= {len(TABLES[command])}
    assert "" not in {cell for row in rows for cell in row}


def test_an_empty_cell_is_a_dash_and_an_empty_table_its_header() -> None:
    columns: Columns = {"layer": lambda item: item["layer"], "note": lambda item: item.get("note")}
    items = [{"layer": "a"}, {"layer": "long name", "note": "x\ty"}]
    assert table_lines("t", items, columns) == ["t", "layer      note", "a          -", "long name  x\\ty"]
    assert table_lines("t", [], columns) == ["t", "layer  note"]


def test_a_name_of_wide_letters_moves_no_column_and_one_of_spaces_makes_none() -> None:
    columns: Columns = {"layer": lambda item: item["layer"], "note": lambda item: "here"}
    names = ["層", "e\u0301", "abcd", " ", "a   b", " x "]
    lines = table_lines("t", [{"layer": name} for name in names], columns)[1:]
    assert [re.split(r" {2,}", line) for line in lines[1:]] == [
        ["層", "here"],
        ["e\u0301", "here"],
        ["abcd", "here"],
        [r"\x20", "here"],
        [r"a \x20\x20b", "here"],
        [r"\x20x\x20", "here"],
    ]
    assert {cell_len(line.partition("here")[0]) for line in lines[1:]} == {
        cell_len(lines[0].partition("note")[0])
    }
