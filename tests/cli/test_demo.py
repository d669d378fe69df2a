"""The whole loop in real processes: server, four training runs, fault, detection, decision, recovery."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.cli.api import Api
from fp8_safeguard.cli.demo import TAIL_STEPS
from fp8_safeguard.cli.server_process import ServerProcess

pytestmark = pytest.mark.slow
LIMIT_SECONDS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    command = [sys.executable, "-m", "fp8_safeguard.cli.main", "demo", "--headless", "--port", "0"]
    where = ["--json", str(folder / "out.json"), "--folder", str(folder)]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def figures(output: str, folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return read


@pytest.fixture(scope="module")
def api(figures: dict[str, Any], folder: Path) -> Iterator[Api]:
    """A second server on the database that the demo left behind."""
    with ServerProcess(folder / "demo.db", 0, folder / "second.log") as server, Api(server.url) as api:
        yield api


def test_the_address_comes_first_and_the_summary_last(output: str, figures: dict[str, Any]) -> None:
    lines = output.splitlines()
    assert re.fullmatch(r"Live page: http://127\.0\.0\.1:\d+/runs/\S+", lines[0])
    assert "FP8, fault, safeguard on" in output
    assert f"{figures['loss_protected']:.4f}" in output


def test_the_last_lines_show_the_run_again(output: str, figures: dict[str, Any], folder: Path) -> None:
    run = figures["run_ids"]["protected"]
    state, serve, page = output.splitlines()[-3:]
    assert state.startswith("The run's state again: ")
    done = subprocess.run(
        shlex.split(state.partition(": ")[2]), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"{run}: ")
    assert f"sqlite:///{folder / 'demo.db'}" in serve
    assert page.strip() == f"and then {output.splitlines()[0].removeprefix('Live page: ')}"


def test_the_fault_is_seen_decided_and_acted_on_in_time(figures: dict[str, Any]) -> None:
    onset = figures["fault_step"]
    assert figures["steps"] - onset == TAIL_STEPS
    assert onset <= figures["detected_step"] <= onset + 5
    assert figures["detected_step"] <= figures["decided_step"] <= onset + 12
    assert figures["effective_step"] == figures["decided_step"] + 2
    assert figures["layer"].startswith("blocks.3.")


def test_the_safeguard_saves_the_loss(figures: dict[str, Any]) -> None:
    healthy, protected = figures["loss_healthy"], figures["loss_protected"]
    assert protected == pytest.approx(healthy, rel=0.005)
    assert figures["loss_bf16_with_fault"] == pytest.approx(healthy, rel=0.005)
    assert figures["loss_unprotected"] >= 1.05 * protected


def test_the_healthy_run_stays_quiet(figures: dict[str, Any], api: Api) -> None:
    run = figures["run_ids"]["healthy"]
    assert figures["alerts_in_healthy_run"] == 0
    assert api.items(f"/runs/{run}/alerts") == []
    assert api.items(f"/runs/{run}/decisions") == []


def test_no_alert_in_the_protected_run_before_the_fault(figures: dict[str, Any], api: Api) -> None:
    alerts = api.items(f"/runs/{figures['run_ids']['protected']}/alerts")
    assert min(alert["first_step"] for alert in alerts) >= figures["fault_step"]


def test_every_figure_can_be_read_again(figures: dict[str, Any], api: Api) -> None:
    runs, steps = figures["run_ids"], figures["steps"]
    for arm, run in runs.items():
        series = api.get(f"/runs/{run}/series", metric="loss", from_step=steps - 20, to_step=steps - 1)
        assert series["steps"] == list(range(steps - 20, steps))
        assert sum(series["values"]) / 20 == pytest.approx(figures[f"loss_{arm}"], rel=1e-12)
    decisions = {item["id"]: item for item in api.items(f"/runs/{runs['protected']}/decisions")}
    made = decisions[figures["decision_id"]]
    assert (made["step"], made["effective_step"], made["layer"]) == (
        figures["decided_step"],
        figures["effective_step"],
        figures["layer"],
    )
    assert made["not_before_step"] == made["step"] + 1
    opened = [alert["step"] for alert in api.items(f"/runs/{runs['protected']}/alerts")]
    assert min(opened) == figures["detected_step"]


def test_only_the_protected_run_left_its_configured_precision(figures: dict[str, Any], api: Api) -> None:
    plans = {arm: api.get(f"/runs/{run}/plan")["entries"] for arm, run in figures["run_ids"].items()}
    assert plans["protected"]
    assert plans["healthy"] == plans["unprotected"] == plans["bf16_with_fault"] == []


def test_the_fault_is_plain_to_see_in_the_default_heatmap(figures: dict[str, Any], api: Api) -> None:
    heatmap = api.get(f"/runs/{figures['run_ids']['unprotected']}/heatmap")
    assert heatmap["metric"] == "gradient_distortion"
    last = heatmap["steps"][-1]
    assert last == figures["steps"] - 1
    final = dict(zip(heatmap["layers"], (row[-1] for row in heatmap["values"]), strict=True))
    ill = {
        layer
        for layer in final
        if layer.endswith(("attention.qkv", "gate_up")) and layer.startswith("blocks.3.")
    }
    assert min(final[layer] for layer in ill) > 10 * max(
        value for layer, value in final.items() if not layer.startswith("blocks.3.")
    )


def test_the_protected_run_was_sampled_at_every_step(figures: dict[str, Any], api: Api) -> None:
    heatmap = api.get(f"/runs/{figures['run_ids']['protected']}/heatmap", max_cols=1000)
    assert heatmap["steps"] == list(range(figures["steps"]))
