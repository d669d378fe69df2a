"""What gpu_check.py does with a CUDA device, on a stand-in."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import ROOT


class Device:
    """A clock that calls move, and the part of torch.cuda that the script uses."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.modes: list[str] = []
        self.captured: Callable[[], None] = lambda: None

    def works(self, milliseconds: float) -> Callable[[], None]:
        """A call that takes so long."""

        def call() -> None:
            self.milliseconds += milliseconds

        return call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device, empty = self, torch.empty

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.milliseconds

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                device.captured()

        @contextmanager
        def graph(_: Graph) -> Iterator[None]:
            yield

        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "synchronize": lambda: None}
        fakes |= {"_sleep": lambda cycles: None, "set_sync_debug_mode": self.modes.append}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: empty(*shape, **more))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("gpu.timing")
    monkeypatch.setattr(found, "CACHE_BYTES", 16)
    return found


BENCH = SimpleNamespace(device="cuda", small=False, quick=False)


def test_contenders_are_timed_in_turn(device: Device, timing: ModuleType) -> None:
    def broken() -> None:
        raise ValueError("no such kernel")

    order: list[str] = []

    def noted(name: str, milliseconds: float) -> Callable[[], None]:
        call = device.works(milliseconds)
        return lambda: (order.append(name), call())[1]

    contenders = {"ours": noted("ours", 2.0), "bf16": noted("bf16", 4.0), "broken": broken}
    timed = timing.race(BENCH, contenders)
    assert timed.median("ours") == pytest.approx(2e-3)
    assert timed.ratio("ours", "bf16") == pytest.approx((0.5, 0.5, 0.5))
    assert timed.errors == {"broken": "ValueError: no such kernel"}
    assert order[-4:] in (["ours", "bf16", "bf16", "ours"], ["bf16", "ours", "ours", "bf16"])


def test_a_slow_contender_gets_fewer_rounds(device: Device, timing: ModuleType) -> None:
    fast = timing.race(BENCH, {"ours": device.works(1.0)})
    slow = timing.race(BENCH, {"ours": device.works(100.0)})
    assert (len(fast.seconds["ours"]), len(slow.seconds["ours"])) == (timing.ROUNDS, 5)


def test_rows_have_throughput_and_choices(device: Device, timing: ModuleType, floors: ModuleType) -> None:
    work = floors.Work(reads=1, writes=1, tensor=4_000_000_000)
    timed = timing.race(BENCH, {"ours": device.works(2.0), "bf16": device.works(4.0)})
    shape = {"gemm": "fprop", "m": 8, "n": 16, "k": 32}
    rows = timing.rows_of("case", timed, ours="ours", baseline="bf16", work=work, goal=0.67, shape=shape)
    assert {row["case"]: (row["value"], row["ratio"], row["goal"]) for row in rows} == {
        "case ours": (pytest.approx(2.0), pytest.approx(0.5), 0.67),
        "case bf16": (pytest.approx(4.0), pytest.approx(1.0), None),
    }
    assert rows[0]["tflops"] == pytest.approx(2.0)
    report = importlib.import_module("gpu.report")
    chosen = {"precision": "fp8", "ratio": 0.5, "low": 0.5, "high": 0.5, "fastest": "triton"}
    assert report.choices(rows) == [
        shape
        | {
            key: pytest.approx(value) if key in ("ratio", "low", "high") else value
            for key, value in chosen.items()
        }
    ]
    slower = timing.race(BENCH, {"ours": device.works(5.0), "bf16": device.works(4.0)})
    rows = timing.rows_of("case", slower, ours="ours", baseline="bf16", work=work, shape=shape)
    assert report.choices(rows)[0]["precision"] == "bf16"


def test_workers_that_cannot_start_fail_every_case(
    timing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device is another process's: nothing is tried, nothing passes, nothing hangs."""
    supervisor, case = (importlib.import_module(f"gpu.{name}") for name in ("supervisor", "case"))
    script = tmp_path / "gpu_check.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(supervisor, "SCRIPT", script)
    cases = [
        case.Case(name=name, kind=kind, run=list, seconds=1)
        for name, kind in (("a", "check"), ("b", "check"), ("c", "timing"))
    ]
    report = importlib.import_module("gpu.report").Report(None)
    supervisor.run(cases, {"device": "cuda", "small": False, "quick": False, "tune": False}, report, 100.0)
    assert {failure["case"] for failure in report.failures} == {"a", "b", "c"}
    assert all(
        "no worker starts: its process ended with status 3" in failure["error"] for failure in report.failures
    )
    assert not report.passed()


@pytest.mark.parametrize(("replayed", "wrong"), [(1.0, 0), (2.0, 3)])
def test_a_graph_must_give_the_same_bits(
    replayed: float, wrong: int, device: Device, timing: ModuleType
) -> None:
    """The result is overwritten between capture and replay: a replay that computes nothing is seen."""
    checks: Any = importlib.import_module("gpu.system_checks")
    out = torch.zeros(3)
    device.captured = lambda: out.fill_(replayed)  # type: ignore[assignment,return-value]
    rows = checks.captured(BENCH, "case", lambda bench: lambda: out.fill_(1.0))
    # 1.0 and 2.0 differ in two of their four bytes.
    assert [row["value"] for row in rows] == [2 * wrong]
    assert device.modes == ["error", "default"]


def test_a_replay_that_does_nothing_is_wrong(device: Device, timing: ModuleType) -> None:
    checks: Any = importlib.import_module("gpu.system_checks")
    out = torch.zeros(3)
    rows = checks.captured(BENCH, "case", lambda bench: lambda: out.fill_(1.0))
    assert rows[0]["value"] == 12
    assert not rows[0]["passed"]
