"""The outage benchmark: its rows, and whether an outage was one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


class Trained:
    """Turns of a training process that has ended."""

    def __init__(self, worker: ModuleType, name: str, wall: list[list[float]], cpu: list[float]) -> None:
        self.scenario = worker.Scenario(name=name, server="", spool="")
        self.turns = [worker.Turn(steps, spent) for steps, spent in zip(wall, cpu, strict=True)]


def test_each_turn_is_held_against_the_healthy_one_of_its_round(
    script: Callable[[str], ModuleType],
) -> None:
    outage, worker = script("outage_overhead"), script("overhead.worker")
    healthy = Trained(worker, "healthy", [[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]], [3.0, 6.0])
    again = Trained(worker, "healthy_again", [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]], [3.0, 6.0])
    slow = Trained(worker, "slow_server", [[3.0, 3.0, 90.0], [6.0, 6.0, 6.0]], [6.0, 12.0])
    outcomes = {name: worker.Outcome(6, 0, 6, 0) for name in ("healthy_again", "slow_server")}
    found = {row["case"]: row for row in outage.rows([healthy, again, slow], outcomes)}
    assert list(found) == ["healthy_again_wall", "healthy_again_cpu", "slow_server_wall", "slow_server_cpu"]
    row = found["slow_server_wall"]
    assert (row["ratio"], row["value"]) == pytest.approx((1.5, 4500.0))
    assert row["slowest_step_ms"] == pytest.approx(90_000)
    assert (row["reached"], found["healthy_again_wall"]["reached"]) == (False, True)
    assert found["slow_server_cpu"]["ratio"] == pytest.approx(2.0)
    assert found["slow_server_cpu"]["value"] == pytest.approx(1e3 * (2.0 + 4.0) / 2)
    assert (row["steps"], row["waiting"]) == (6, 6)


@pytest.mark.parametrize(
    ("name", "delivered"),
    [
        ("healthy", 9),
        ("slow_server", 10),
        ("server_down", 10),
        ("disk_full", 0),
        ("disk_full_server_down", 10),
    ],
)
def test_an_outage_that_was_none_is_no_result(
    name: str, delivered: int, script: Callable[[str], ModuleType]
) -> None:
    outage, worker = script("outage_overhead"), script("overhead.worker")
    good = {"healthy": 10, "slow_server": 3, "server_down": 0, "disk_full": 9, "disk_full_server_down": 0}
    outcomes = {n: worker.Outcome(10, number, 10 - number, 0) for n, number in good.items()}
    outage.check_outcomes(outcomes)
    outcomes[name] = worker.Outcome(10, delivered, 0, 0)
    with pytest.raises(SystemExit, match=f"{name} was not what it is meant to be"):
        outage.check_outcomes(outcomes)


def test_there_is_a_server_that_takes_samples_and_one_training_process_for_each_scenario(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    scenarios: list[Any] = script("outage_overhead").scenarios("http://good", "http://slow", tmp_path)
    assert len({one.name for one in scenarios}) == len({one.spool for one in scenarios}) == len(scenarios)
    assert {one.name for one in scenarios if one.disk_full} == {"disk_full", "disk_full_server_down"}
    assert [one.server for one in scenarios[:3]] == ["http://good", "http://good", "http://slow"]
    accepted = script("overhead.servers")._accepted
    assert accepted({"step": 1})["accepted"] is True
    assert len(accepted({"samples": [{}, {}]})["results"]) == 2
