"""The demo's summary says what the figures say, also when the demo fails."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fp8_safeguard.cli.demo import DemoError, DemoOptions, program, run_demo, ways_back
from fp8_safeguard.cli.demo_report import DemoReport, first, read_report, summary_lines
from fp8_safeguard.cli.server_process import ServerProcess

RUNS = {"protected": "p", "healthy": "h", "unprotected": "u", "bf16_with_fault": "b"}
GOOD = DemoReport(
    steps=270,
    fault_step=200,
    detected_step=204,
    decided_step=209,
    effective_step=211,
    detected_by="underflow",
    decision_id="p-1",
    layer="blocks.3.attention.qkv",
    run_ids=RUNS,
    loss_healthy=2.0,
    loss_protected=2.002,
    loss_unprotected=2.2,
    loss_bf16_with_fault=1.999,
    alerts_in_healthy_run=0,
)


class FakeApi:
    """Answers from a table; a missing page is a KeyError, so the report may ask for nothing else."""

    def __init__(self, series: dict[str, list[float | str | None]]) -> None:
        self.series = series

    def items(self, path: str, **_: object) -> list[dict[str, object]]:
        return {
            "/runs/p/alerts": [
                {"step": 90, "rule": "old"},
                {"step": 205, "rule": "gemm-error"},
                {"step": 204, "rule": "underflow"},
            ],
            "/runs/p/decisions": [{"step": 209, "id": "p-1", "layer": "l", "effective_step": 211}],
            "/runs/h/alerts": [],
        }[path]

    def get(self, path: str, **params: object) -> dict[str, object]:
        assert params == {"metric": "loss", "from_step": 250, "to_step": 269}
        return {"values": self.series[path.split("/")[2]]}


def test_report_takes_the_first_alert_after_the_fault_and_means_of_the_tail() -> None:
    api = FakeApi({"p": [1.0, 3.0], "h": [2.0, None], "u": [4.0], "b": [2.0]})
    report = read_report(api, RUNS, steps=270, fault_step=200)  # type: ignore[arg-type]
    assert (report.detected_step, report.detected_by) == (204, "underflow")
    assert (report.decided_step, report.effective_step, report.decision_id) == (209, 211, "p-1")
    assert (report.loss_protected, report.loss_healthy) == (2.0, 2.0)


def test_first_ignores_what_came_before() -> None:
    assert first([{"step": 3}, {"step": 9}, {"step": 7}], "step", 5) == {"step": 7}
    assert first([{"step": 3}], "step", 5) == {}


def test_first_of_several_at_one_step_is_the_one_made_first() -> None:
    newest_first = [{"step": 8, "id": 3}, {"step": 8, "id": 2}, {"step": 6, "id": 1}]
    assert first(newest_first, "step", 7) == {"step": 8, "id": 2}


def test_summary_tells_the_story_with_its_steps() -> None:
    text = "\n".join(summary_lines(GOOD, "http://127.0.0.1:1"))
    for expected in (
        "204 (+4)",
        "209 (+9)",
        "211 (+11)",
        "+10.00 %",
        "+0.10 %",
        "-0.05 %",
        "blocks.3.attention.qkv",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"detected_step": None}, "missed the fault"),
        ({"decided_step": None}, "No decision followed"),
        ({"effective_step": None}, "never applied"),
    ],
)
def test_summary_does_not_hide_a_failure(missing: dict[str, None], words: str) -> None:
    assert words in "\n".join(summary_lines(replace(GOOD, **missing), "http://127.0.0.1:1"))  # type: ignore[arg-type]


def test_too_few_steps_say_how_many_are_needed(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="at least 110"):
        run_demo(DemoOptions(steps=40, port=0, headless=True, folder=tmp_path))


def test_the_ways_back_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out of a folder with a space, for a server on a port of its own, and for a module that has no command."""
    folder = tmp_path / "my demo"
    folder.mkdir()
    server = ServerProcess(folder / "demo.db", 8999, folder / "server.log")
    monkeypatch.setattr(sys, "argv", ["/opt/my tools/fp8-safeguard", "demo"])
    state, serve, page = ways_back("demo-1", server, program())
    command = ["/opt/my tools/fp8-safeguard", "status", "demo-1", "--database-url", server.database_url]
    assert shlex.split(state.removeprefix("The run's state again: ")) == command
    served = shlex.split(serve.removeprefix("Its page again:"))
    assert served[1:] == ["serve", "--port", "8999", "--database-url", server.database_url]
    assert page.split()[-1] == "http://127.0.0.1:8999/runs/demo-1"
    monkeypatch.setattr(sys, "argv", [str(Path(sys.prefix) / "cli" / "main.py"), "demo"])
    called = subprocess.run([*shlex.split(program()), "--version"], capture_output=True, text=True)
    assert called.stdout.startswith("fp8-safeguard ")
