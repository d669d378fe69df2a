"""The overhead benchmarks run from beginning to end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = {"case", "value", "unit", "ratio", "low", "high", "goal"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_a_phase_measures_what_it_says(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    rows, arms, table = script("overhead.rows"), script("overhead.arms"), script("overhead.table")
    kinds = {"default_bf16": 2, "off_bf16": 10**9}
    observed = [
        arms.Observed(name, "bf16", 2, every=every, spool=str(tmp_path)) for name, every in kinds.items()
    ]
    phase = rows.Phase("default_bf16", "bf16", observed, rounds=2, steps=2)
    default, off = phase.run()
    table.print_phase(phase.name, phase.control, [default, off])
    assert set(default) >= CONTRACT
    assert (default["tensors"], default["steps"]) == (27, 4)
    assert 0 < off["accounted_ratio"] < default["accounted_ratio"] < 1
    assert default["sender_ratio"] > 0
    assert phase.control["low"] <= phase.control["ratio"] <= phase.control["high"]


def test_every_outage_happens_and_is_told(script: Callable[[str], ModuleType]) -> None:
    outage = script("outage_overhead")
    report: dict[str, Any] = outage.measure(rounds=3)
    found = {row["case"]: row for row in report["rows"]}
    assert len(found) == 2 * 5
    assert all(set(row) >= CONTRACT for row in found.values())
    steps = (2 + 3) * outage.STEPS
    assert found["server_down_wall"]["waiting"] == steps
    full = found["disk_full_server_down_cpu"]
    assert full["waiting"] + full["dropped"] == steps
    assert found["healthy_again_cpu"]["delivered"] == steps
