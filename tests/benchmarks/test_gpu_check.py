"""gpu_check.py in a checkout with torch, Triton and numpy only."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Checkout

TIMEOUT = 240
"""Seconds after which something hangs; on a quiet machine everything here together takes half a minute."""
SAMPLE = (
    "device", "control", "re-block", "gemm dgrad", "gemm grouped wgrad ragged", "capture wgrad", "time fprop", "time grouped wgrad",
    "time quantize_row", "moe routing", "moe topk", "moe swiglu_backward", "moe rms_norm_backward", "moe fast_moe",
    "time rms_norm_backward", "time fp8_linear", "LogFMT",
)  # fmt: skip
"""Every function of the script's own runs in one of these."""
ROW = {"case", "value", "unit", "ratio", "low", "high", "goal"}
SABOTAGE = '''

_sound = cases


def cases(*, tune: bool = False) -> list[Case]:
    """The real cases, and some that go wrong."""
    import os, time

    def raising(bench: Bench) -> list[Row]:
        raise RuntimeError("out of luck")

    made = {
        "sabotage raises": raising,
        "sabotage dies": lambda bench: os.kill(os.getpid(), 11),
        "sabotage is wrong": lambda bench: [mismatches("sabotage is wrong", 3)],
        "sabotage is sound": lambda bench: [mismatches("sabotage is sound", 0)],
        "sabotage hangs": lambda bench: time.sleep(1000),
    }
    found = [Case(name=name, kind="check", run=run, seconds=1, interpreted=True) for name, run in made.items()]
    lacking = Case(name="sabotage lacks", kind="check", run=raising, seconds=1, needs=("nothing",), interpreted=True)
    long = Case(name="sabotage is long", kind="check", run=raising, seconds=1e6, interpreted=True)
    return [*_sound(tune=tune), *found[:4], lacking, long, found[4]]
'''


@pytest.fixture(scope="module")
def sabotaged(checkout: Checkout) -> Checkout:
    """The same with cases that fail."""
    folder = checkout.folder.with_name("sabotaged")
    shutil.copytree(checkout.folder, folder, symlinks=True)
    catalogue = folder / "benchmarks" / "gpu" / "catalogue.py"
    catalogue.write_text(catalogue.read_text() + SABOTAGE)
    return Checkout(folder, checkout.packages)


@pytest.fixture(scope="module")
def runs(checkout: Checkout, sabotaged: Checkout) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Every run of this file, side by side."""
    where = checkout.folder.parent
    only = [argument for name in SAMPLE for argument in ("--only", name)]
    started = {
        "dry": checkout.start("--dry-run"),
        "sample": checkout.start("--interpret", *only, "--json", str(where / "sample.json")),
        "killed": sabotaged.start("--interpret", "--only", "sabotage", "--json", str(where / "killed.json")),
        "wrong": sabotaged.start("--interpret", "--only", "is wrong", "--json", str(where / "wrong.json")),
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=TIMEOUT)
    return output


def report(checkout: Checkout, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkout.folder.parent / name).read_text())
    return found


def test_a_kill_leaves_what_was_measured(
    checkout: Checkout, runs: dict[str, "subprocess.Popen[str]"]
) -> None:
    """While the last case hangs: the one that raised, the one that took its process along and the wrong one are there."""
    file = checkout.folder.parent / "killed.json"
    end = time.monotonic() + TIMEOUT
    while not (file.exists() and len(report(checkout, "killed.json")["not_run"]) == 2):
        assert time.monotonic() < end, ended(runs["killed"])
        time.sleep(0.2)
    runs["killed"].kill()
    ended(runs["killed"])  # its worker ends too: it would hold this pipe open
    found = report(checkout, "killed.json")
    assert {row["case"]: row["passed"] for row in found["rows"]} == {
        "sabotage raises": False, "sabotage dies": False, "sabotage is wrong": False, "sabotage is sound": True,
    }  # fmt: skip
    errors = {failure["case"]: failure["error"] for failure in found["failures"]}
    assert "out of luck" in errors["sabotage raises"]
    assert "signal 11" in errors["sabotage dies"]
    assert "3 mismatches" in errors["sabotage is wrong"]
    reasons = {case["case"]: case["reason"] for case in found["not_run"]}
    assert "kernels/nothing.py" in reasons["sabotage lacks"]
    assert "budget" in reasons["sabotage is long"]


def test_a_wrong_number_is_exit_status_1(runs: dict[str, "subprocess.Popen[str]"]) -> None:
    output = ended(runs["wrong"])
    assert runs["wrong"].returncode == 1, output
    assert "FAILED  sabotage is wrong" in output


def test_dry_run_plans_every_timing(runs: dict[str, "subprocess.Popen[str]"]) -> None:
    output = ended(runs["dry"])
    assert runs["dry"].returncode == 0, output
    assert "not run: kernels" not in output
    launches = {line[:52].strip(): line.split()[-1] for line in output.splitlines() if " timing " in line}
    assert [name for name, number in launches.items() if number == "0"] == ["control"]
    assert "cannot run" not in output
    for m in (4096, 8192):
        for shape in (
            "24576x1536",
            "7168x16384",
            "7168x2048",
            "4096x7168",
            "2112x7168",
            "18432x7168",
            "8192x8192",
            "18432x8192",
        ):
            assert f"time fprop {m}x{shape} " in output
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert f"time grouped {gemm} 32768x2048x7168 E8 " in output
        assert f"time grouped {gemm} 32768x2048x8192 E64 " in output


def test_the_cases_run_small(checkout: Checkout, runs: dict[str, "subprocess.Popen[str]"]) -> None:
    output = ended(runs["sample"])
    found = report(checkout, "sample.json")
    assert (runs["sample"].returncode, found["failures"], found["not_run"]) == (0, [], []), output
    assert {"benchmark", "commit", "machine", "control", "rows"} <= found.keys()
    assert (found["benchmark"], found["commit"]) == ("gpu_check", "unknown")
    assert all(row.keys() >= ROW for row in found["rows"])
    names = " ".join(row["case"] for row in found["rows"])
    wanted = {name.removeprefix("time ") for name in SAMPLE}
    assert not [name for name in wanted if name not in names]
    assert all(row["passed"] for row in found["rows"] if row["kind"] == "check")
    # An interpreter's times are no measurement: nothing is chosen, nothing is compared with a goal.
    assert found["choices"] == []
    assert not [row for row in found["rows"] if row["kind"] == "timing" and row["goal"] is not None]


def test_only_what_is_linked_can_be_imported(checkout: Checkout) -> None:
    """The environment is as bare as it claims."""
    names = {path.name for path in Path(checkout.packages).iterdir()}
    assert {"torch", "triton", "numpy"} <= names
    assert not names & {"fp8_safeguard", "msgpack", "pydantic", "numba", "httpx2", "typer"}
