"""What the trainer tells the monitor, and what it waits for."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from fp8_safeguard import hooks
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.trainer import Trainer

MakeTrainer = Callable[..., Trainer]
URL = "http://127.0.0.1:9"


class RecordingGuard:
    """Stands for hooks.Guard: keeps every call in order."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.calls: list[tuple[str, Any]] = []
        self.answers = True
        self.delivered = 0
        self.plan = SimpleNamespace(entries=())

    def carries_out(self, *actions: str) -> None:
        self.calls.append(("carries out", actions))

    def log(self, **values: float) -> None:
        self.calls.append(("log", values))

    def log_scalar(self, layer: str, name: str, value: float) -> None:
        self.calls.append(("scalar", (layer, name, value)))

    def step(self, n: int) -> None:
        self.calls.append(("step", n))

    def flush(self, timeout: float) -> bool:
        self.calls.append(("flush", timeout))
        self.delivered += self.answers
        return self.answers

    def detach(self, *, finished: bool) -> None:
        self.calls.append(("detach", finished))

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.options["run"], "step": 4, "plan": {"version": 3, "entries": []}, "mark": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(("load", state))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.calls.append(("paused", None))
        yield

    def named(self, kind: str) -> list[Any]:
        return [value for name, value in self.calls if name == kind]


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[RecordingGuard]:
    made: list[RecordingGuard] = []

    def attach(model: object, **options: Any) -> RecordingGuard:
        made.append(RecordingGuard(options))
        return made[-1]

    monkeypatch.setattr(hooks, "attach", attach)
    return made


def test_without_a_server_nothing_is_attached(
    make_trainer: MakeTrainer, guards: list[RecordingGuard]
) -> None:
    make_trainer().run(1)
    assert guards == []


def test_a_server_attaches_every_step_in_enforce_mode(
    make_trainer: MakeTrainer, guards: list[RecordingGuard]
) -> None:
    trainer = make_trainer(server=URL, token="t", run="r1")
    observed = guards[0].options.pop("filter")
    kept = [name for name, module in trainer.model.named_modules() if observed(module, name)]
    assert "blocks.0.attention.qkv" in kept
    assert not any(name.endswith("router") or name in ("", "embedding") for name in kept)
    assert guards[0].options == {
        "server": URL,
        "token": "t",
        "run": "r1",
        "attempt": "0",
        "every": 1,
        "mode": "enforce",
        "thresholds": "floor",
    }


def test_each_step_is_logged_before_it_ends(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    reports = make_trainer(server=URL).run(2)
    assert guards[0].named("step") == [0, 1]
    assert guards[0].named("log")[1] == {
        "loss": reports[1].loss,
        "gradient_norm": reports[1].gradient_norm,
        "learning_rate": reports[1].learning_rate,
        "tokens": 128.0,
    }
    kinds = [name for name, _ in guards[0].calls if name in ("log", "step", "scalar")]
    assert kinds == ["log", *["scalar"] * 9, "step"] * 2
    scalars = guards[0].named("scalar")
    assert {(layer, name) for layer, name, _ in scalars} == {
        ("trainer", "skipped_steps"),
        *((f"blocks.{i}.mlp.router", name) for i in range(2) for name in ("entropy", "load_max", "load_min")),
        *((f"blocks.{i}.attention", "qk_logit_max") for i in range(2)),
    }
    assert all(0.0 < value <= 1.0 for _, name, value in scalars if name == "entropy")


def test_a_skipped_step_is_reported_too(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    trainer = make_trainer(server=URL)
    trainer.model.head.register_hook(lambda g: g * math.nan)
    trainer.run(2)
    assert guards[0].named("step") == [0, 1]
    assert math.isnan(guards[0].named("log")[0]["gradient_norm"])
    counted = [value for layer, name, value in guards[0].named("scalar") if name == "skipped_steps"]
    assert counted == [1, 2]


def test_lockstep_waits_bounded_after_each_sampled_step(
    make_trainer: MakeTrainer, guards: list[RecordingGuard], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(server=URL, lockstep=True, lockstep_seconds=0.5, every=2)
    trainer.run(3)
    order = [call for call in guards[0].calls if call[0] in ("step", "flush")]
    assert order == [("step", 0), ("flush", 0.5), ("step", 1), ("step", 2), ("flush", 0.5)]
    guards[0].answers = False
    with caplog.at_level(logging.WARNING, logger="fp8_safeguard"):
        trainer.run(7)
    assert caplog.text.count("lockstep: no reply to step 4 within 0.5 s") == 1
    assert caplog.text.count("lockstep") == 1


def test_lockstep_waits_once_for_a_server_that_is_away_and_again_once_it_has_answered(
    make_trainer: MakeTrainer, guards: list[RecordingGuard]
) -> None:
    trainer = make_trainer(server=URL, lockstep=True, lockstep_seconds=0.5)
    guard = guards[0]
    trainer.run(2)
    guard.answers = False
    trainer.run(6)
    assert guard.named("flush") == [0.5] * 3  # two in time, one too late, and none of the next three
    guard.delivered += 1  # the sender has got something through
    trainer.run(8)
    assert guard.named("flush") == [0.5] * 4
    guard.delivered += 1
    guard.answers = True
    trainer.run(10)
    assert guard.named("flush") == [0.5] * 6


def test_without_lockstep_nothing_waits(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    make_trainer(server=URL).run(2)
    assert guards[0].named("flush") == []


def test_validation_is_not_measured(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    trainer = make_trainer(server=URL)
    trainer.evaluate(4)
    assert guards[0].named("paused") == [None]
    assert guards[0].named("step") == []


def test_a_resume_takes_up_the_guard_and_a_fork_starts_without_a_plan(
    make_trainer: MakeTrainer, guards: list[RecordingGuard], tmp_path: Path
) -> None:
    trainer = make_trainer(server=URL, run="r1")
    trainer.run(4)
    path = trainer.save(tmp_path / "a.pt")
    Trainer.load(path)
    Trainer.load(path, run="r2")
    (resumed,), (forked,) = guards[1].named("load"), guards[2].named("load")
    assert resumed["mark"] == 1
    assert resumed["plan"]["version"] == 3
    assert forked["step"] == 4
    assert (forked["plan"]["version"], forked["plan"]["entries"]) == (0, [])


def test_leaving_the_block_detaches(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    with make_trainer(server=URL) as trainer:
        trainer.run(1)
        assert guards[0].named("detach") == []
    assert guards[0].named("detach") == [True]


def test_a_block_that_fails_has_not_finished(make_trainer: MakeTrainer, guards: list[RecordingGuard]) -> None:
    def fail() -> None:
        with make_trainer(server=URL):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert guards[0].named("detach") == [False]


def test_a_real_server_sees_every_step_of_run_and_fork(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'm.db'}", port=0)
    with running_server(settings) as url:
        with make_trainer(server=url, run="parent", lockstep=True, lockstep_seconds=20.0) as trainer:
            reports = trainer.run(3)
            path = trainer.save(tmp_path / "a.pt")
        with Trainer.load(path, run="child") as child:
            child.run(5)
        series = {
            run: httpx2.get(f"{url}/api/v1/runs/{run}/series", params={"metric": "loss"}).json()
            for run in ("parent", "child")
        }
    assert series["parent"]["steps"] == [0, 1, 2]
    assert series["parent"]["values"] == pytest.approx([r.loss for r in reports])
    assert series["child"]["steps"] == [3, 4]


def test_monitoring_changes_no_number(
    make_trainer: MakeTrainer, same_state: Callable[[Trainer, Trainer], bool], tmp_path: Path
) -> None:
    plain = make_trainer()
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'm.db'}", port=0)
    with running_server(settings) as url, make_trainer(server=url, mode="observe") as watched:
        assert [r.loss for r in watched.run(4)] == [r.loss for r in plain.run(4)]
        assert same_state(watched, plain)
