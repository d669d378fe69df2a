"""What the reading commands say of runs with nothing in them, and into outputs that take nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

REQUIRED = (
    *("count", "zeros", "underflow", "saturated", "nan", "inf"),
    *("amax", "sum_sq", "sum_sq_q", "sum_sq_err"),
)


@pytest.fixture(scope="module")
def empty(service: Any) -> Any:
    """The service with two runs whose only sample holds no layer, and a loss in each."""
    for run in ("empty", "empty-too"):
        body = {
            "schema": 1,
            "attempt": {"id": "0"},
            "group": "0",
            "step": 7,
            "slots": [],
            "run": {"loss": 2.0},
        }
        columns = {name: [] for name in REQUIRED}
        answer = httpx2.post(f"{service.url}/api/v1/runs/{run}/samples", json={**body, "columns": columns})
        assert answer.status_code == 200, answer.text
    return service


def test_a_run_of_which_nothing_was_measured_is_not_praised(empty: Any, cli: Callable[..., Any]) -> None:
    at = ("--server", empty.url)
    said = cli("status", "empty", "--exit-code", *at)
    assert said.code == 0
    assert "nothing was measured: no sample holds a layer" in said.out
    assert "look at which layers the hooks observe" in said.out
    assert "within its thresholds" not in said.out
    assert cli("top", "empty", *at).out == "empty: HEALTHY, step 7, loss 2; no layers\n"
    assert cli("top", "empty", "--json", *at).json["items"] == []
    assert httpx2.patch(f"{empty.url}/api/v1/runs/empty-too", json={"ended": True}).status_code == 200
    ended = cli("status", "empty-too", *at).out
    assert "ended with nothing measured: no sample holds a layer; last sample at step 7" in ended


def test_two_empty_runs_are_compared_without_an_empty_table(empty: Any, cli: Callable[..., Any]) -> None:
    said = cli("compare", "empty", "empty-too", "--server", empty.url)
    lines = said.out.splitlines()
    assert said.code == 0
    assert "loss: mean gap +0 % over the only shared step, 7, largest 0 %, last +0 %" in lines
    assert "layers: none in either, of steps 7 to 7" in lines


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["status", "top", "layers", "export"])
def test_a_full_disk_is_one_line(service: Any, command: str) -> None:
    words = [sys.executable, "-m", "fp8_safeguard.cli.main", command, "sick-7b", "--server", service.url]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"The answer cannot be written: {os.strerror(28)}.\n"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("top r --every 5000", "'--every': it must be at most 3600, not '5000'"),
        ("top r --limit 0", "'--limit': it must be 1 or more, not '0'"),
        ("layers --limit 1.5", "'--limit': it must be a whole number, not '1.5'"),
        ("serve --port 99999", "'--port': it must be at most 65535, not '99999'"),
        ("report r --format xml", "'--format': 'xml' is not one of 'table', 'csv', 'markdown', 'json'"),
        ("check r --baseline b --max-loss-gap much", "'--max-loss-gap': it must be a number, not 'much'"),
        ("baseline show zz", "it must be a whole number, not 'zz'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_quoted_beside_what_it_takes(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: str, refusal: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = cli(*words.split())
    assert (said.code, said.out) == (2, "")
    assert refusal in said.err
    assert "Input should" not in said.err
