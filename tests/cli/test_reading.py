"""The reading commands against a real server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from fp8_safeguard.cli.main import app
from fp8_safeguard.cli.read import alert_note, plan_line
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

COUNTS = {
    "count": 4096,
    "zeros": 8,
    "underflow": 8,
    "saturated": 0,
    "nan": 0,
    "inf": 0,
    "rows": 32,
    "rows_flushed": 0,
}
SUMS = {"amax": 3.0, "sum_sq": 4096.0, "sum_sq_q": 4095.0, "sum_sq_err": 2.7, "sum_4th": 12288.0}


def sample(step: int, *, underflow: int = 8) -> dict[str, object]:
    """One slot's statistics, healthy unless told otherwise."""
    numbers = {**COUNTS, **SUMS, "underflow": underflow, "zeros": underflow}
    columns = {name: [value] for name, value in numbers.items()}
    return {
        "schema": 1,
        "batch_id": f"b{step}",
        "attempt": {"id": "0", "parent": None, "from_step": 0},
        "group": "0",
        "groups": 1,
        "step": step,
        "mode": "observe",
        "plan_version": 0,
        "slots": [{"index": 0, "layer": "blocks.0/a b", "operand": "x", "layout": "row"}],
        "columns": {**columns, "tile_sqnr_hist": [[0] * 13 + [32, 0, 0]]},
        "run": {"loss": 2.5},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = tmp_path_factory.mktemp("cli") / "test.db"
    with running_server(Settings(database_url=f"sqlite:///{database}")) as url:
        for step in range(3):
            body = sample(step, underflow=400)
            assert httpx2.post(f"{url}/api/v1/runs/r1/samples", json=body).status_code == 200
        yield url


def ask(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_status_names_the_latest_run_and_its_verdict(server: str) -> None:
    code, out, _ = ask("status", "--server", server)
    assert code == 0
    assert out.startswith("r1: WATCH\n")


def test_status_json_is_what_the_server_says(server: str) -> None:
    code, out, _ = ask("status", "r1", "--server", server, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["last_step"] == 2
    assert said["mode"] == "observe"


def test_layers_shows_any_layer_name(server: str) -> None:
    code, out, _ = ask("layers", "--server", server, "--json")
    assert code == 0
    assert [item["layer"] for item in json.loads(out)["items"]] == ["blocks.0/a b"]


def test_alerts_lists_the_open_alert(server: str) -> None:
    code, out, _ = ask("alerts", "--server", server, "--json")
    assert code == 0
    assert [(item["rule"], item["layer"]) for item in json.loads(out)["items"]] == [
        ("underflow", "blocks.0/a b")
    ]


def test_an_alert_says_that_it_began_between_two_samples() -> None:
    item = {"first_step": 40, "clean_step": 30, "occurrences": 2}
    assert alert_note(item) == "began after step 30, the last clean sample, 2 times"
    assert alert_note({**item, "clean_step": 39, "occurrences": 1}) == ""
    assert alert_note({}) == ""


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (["scale_multiplier"], "1 scale change"),
        (["scale_multiplier", "margin"], "2 scale changes"),
        (["format", "bf16_fallback"], "1 layer in BF16 and 1 format change"),
        (
            ["bf16_fallback", "format", "format", "gradient_smoothing"],
            "1 layer in BF16, 2 format changes and 1 smoothed gradient",
        ),
    ],
)
def test_a_plan_says_what_it_changes_and_how_often(actions: list[str], words: str) -> None:
    entries = [{"layer": "blocks.0", "action": action} for action in actions]
    assert plan_line({"version": 3, "entries": entries}, None) == f"version 3, {words}"


@pytest.mark.parametrize("command", ["status", "layers", "alerts", "decisions"])
def test_plain_output_needs_no_terminal(server: str, command: str) -> None:
    code, out, err = ask(command, "--server", server)
    assert (code, err) == (0, "")
    assert out.strip()


def test_a_table_names_its_run_and_an_empty_one_is_a_sentence(server: str) -> None:
    assert ask("alerts", "--server", server)[1].splitlines()[0].strip() == "r1: alerts"
    assert ask("decisions", "--server", server)[1] == "r1: no decisions.\n"


def test_serve_on_a_taken_port_names_the_way_out(server: str, tmp_path: Path) -> None:
    port = server.rsplit(":", 1)[1]
    code, out, err = ask("serve", "--port", port, "--database-url", f"sqlite:///{tmp_path}/x.db")
    # Nothing is promised that is not served.
    assert (code, out) == (1, "")
    assert f"Port {port} is taken" in err
    assert "--port" in err


def test_unknown_run_is_one_line_and_exit_code_1(server: str) -> None:
    code, out, err = ask("status", "nope", "--server", server)
    assert (code, out) == (1, "")
    assert "nope" in err
    assert "404" in err


def test_no_server_says_how_to_start_one() -> None:
    code, _, err = ask("status", "--server", "http://127.0.0.1:9")
    assert code == 1
    assert "fp8-safeguard serve" in err


def test_db_upgrade_makes_the_schema(tmp_path: Path) -> None:
    code, out, _ = ask("db", "upgrade", "--database-url", f"sqlite:///{tmp_path}/new.db")
    assert code == 0
    assert "is at revision" in out
    assert (tmp_path / "new.db").exists()


def test_serve_refuses_a_public_address_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FP8_SAFEGUARD_TOKEN", raising=False)
    code, _, err = ask(
        "serve", "--host", "0.0.0.0", "--port", "0", "--database-url", f"sqlite:///{tmp_path}/x.db"
    )
    assert code == 1
    assert "token" in err


def test_doctor_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = ask("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["training"]["kernel_backend"] in {"native", "numba", "reference"}


ODD = ["model.layers.0/attn", "a%2Fb", "a/b", "a?b#c", "..", "ü", "a[/b]", "[red]c", "d[0]", "e\\[x]"]


@pytest.mark.parametrize("command", ["layers", "alerts"])
def test_b62_any_layer_name_is_printed_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal library must not take a name for its own markup."""
    monkeypatch.setenv("COLUMNS", "300")
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/test.db")) as url:
        for step in range(3):
            body = sample(step, underflow=400)
            body["slots"] = [
                {"index": n, "layer": name, "operand": "x", "layout": "row"} for n, name in enumerate(ODD)
            ]
            columns: Any = body["columns"]
            body["columns"] = {name: values * len(ODD) for name, values in columns.items()}
            assert httpx2.post(f"{url}/api/v1/runs/odd/samples", json=body).status_code == 200
        code, out, err = ask(command, "--server", url)
    assert (code, err) == (0, "")
    cells = {cell.strip() for line in out.splitlines() for cell in re.split(r"\s{2,}", line)}
    assert set(ODD) <= cells
