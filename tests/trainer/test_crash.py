"""Training processes that are killed: the resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli.server_process import ServerProcess
from fp8_safeguard.trainer import OutlierDrift, TrainConfig, Trainer, checkpoint
from fp8_safeguard.trainer.attempts import recorded

SCRIPT = Path(__file__).with_name("training_process.py")
UNTIL = 18
# Harmful from its first step on: what-ifs of step 7 decide, and the plan that answers it takes effect with step 9.
FAULT: dict[str, Any] = {"start_step": 6, "initial_log2": 19.0}
SameState = Callable[[Trainer, Trainer], bool]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder / "m.db", 0, folder / "server.log") as process:
        yield process.url


@pytest.fixture
def settings(text_file: Path) -> Callable[..., dict[str, Any]]:
    """Fields of a config for both sides of a comparison."""

    def make(**changes: Any) -> dict[str, Any]:
        tiny = TrainConfig.tiny(corpus=str(text_file)).to_mapping()
        return {**tiny, "lockstep": True, "lockstep_seconds": 10.0, **changes}

    return make


def start(order: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), json.dumps(order)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed(order: dict[str, Any], *, between: tuple[int, int], seed: int) -> dict[int, float]:
    """Train until a kill -9 at a random moment of a random step; the losses of the steps that were reported."""
    draw = random.Random(seed)
    order = {**order, "until": UNTIL, "kill": draw.randint(*between), "delay": draw.uniform(0.0, 0.05)}
    process = start(order)
    told, errors = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL, errors
    lines = [json.loads(line) for line in told.splitlines()]
    return {line["step"]: float.fromhex(line["loss"]) for line in lines}


def straight(config: dict[str, Any], skip: tuple[int, ...] = ()) -> tuple[Trainer, list[float]]:
    """The run that nobody interrupts, in this process."""
    trainer = Trainer(TrainConfig.from_mapping(config))
    trainer.model.head.register_hook(lambda g: g * float("nan") if trainer.step in skip else g)
    with trainer:
        return trainer, [report.loss for report in trainer.run(UNTIL)]


@pytest.mark.parametrize(
    ("every", "between", "waits"),
    [(8, (9, 12), True), (5, (11, 14), False)],
    ids=["a plan received but not yet in effect", "in the middle of fallbacks"],
)
def test_a_watched_run_that_is_killed_goes_on_bit_for_bit(
    server: str,
    settings: Callable[..., dict[str, Any]],
    tmp_path: Path,
    same_state: SameState,
    every: int,
    between: tuple[int, int],
    waits: bool,
) -> None:
    run = f"killed-{every}"
    watched = {"server": server, "checkpoint_every": every}
    whole, losses = straight(settings(**watched, run=f"whole-{every}", fault=OutlierDrift(**FAULT)))
    config = settings(**watched, run=run, checkpoint_dir=str(tmp_path))
    seen = killed({"config": config, "fault": FAULT}, between=between, seed=every)
    newest = checkpoint.latest(tmp_path)
    guard = checkpoint.read(newest)["guard"]
    assert bool(guard["plan"]["entries"]) is not waits
    assert (guard["waiting_plan"] is not None) is waits
    with Trainer.load(newest) as resumed:
        begun = resumed.step
        assert 0 < begun <= len(seen) < UNTIL
        reports = resumed.run(UNTIL)
    assert [seen[step] for step in sorted(seen)] == losses[: len(seen)]
    assert [report.loss for report in reports] == losses[begun:]
    assert any(report.fallbacks for report in reports)
    assert same_state(resumed, whole)

    attempts = httpx2.get(f"{server}/api/v1/runs/{run}/attempts").json()["items"]
    assert [(a["id"], a["parent"], a["from_step"]) for a in attempts] == [("0", None, 0), ("1", "0", begun)]
    series = httpx2.get(f"{server}/api/v1/runs/{run}/series", params={"metric": "loss"}).json()
    assert series["steps"] == list(range(UNTIL))
    assert series["values"] == losses


def test_a_run_alone_with_micro_batches_and_skips_is_killed_and_goes_on(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, same_state: SameState
) -> None:
    parts = settings(micro_batches=2)
    whole, losses = straight(parts, skip=(1, 3))
    config = {**parts, "checkpoint_dir": str(tmp_path), "checkpoint_every": 1, "keep_checkpoints": 2}
    seen = killed({"config": config, "skip": [1, 3]}, between=(6, 14), seed=1)
    with Trainer.load(tmp_path) as resumed:
        begun, skipped = resumed.step, resumed.skipped_steps
        reports = resumed.run(UNTIL)
    # A kill in the middle of a write costs that checkpoint, never the one before.
    assert begun in (len(seen) - 1, len(seen), len(seen) + 1)
    assert (skipped, resumed.updates) == (2, UNTIL - 2)
    assert list(seen.values()) == losses[: len(seen)]
    assert [report.loss for report in reports] == losses[begun:]
    assert same_state(resumed, whole)
    assert {a.parent for a in recorded(tmp_path, "tiny").values()} == {None, "0"}


def test_sigterm_finishes_the_step_and_the_resumed_run_is_the_uninterrupted_one(
    server: str, settings: Callable[..., dict[str, Any]], tmp_path: Path, same_state: SameState
) -> None:
    whole, losses = straight(settings())
    config = settings(server=server, run="stopped", checkpoint_dir=str(tmp_path))
    process = start({"config": config, "until": 100_000})
    assert process.stdout is not None
    first = [json.loads(process.stdout.readline())["step"] for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    told, said = process.communicate(timeout=60)
    steps = [*first, *(json.loads(line)["step"] for line in told.splitlines())]
    assert process.returncode == 143
    newest = checkpoint.latest(tmp_path)
    assert f"Stopped by SIGTERM after {len(steps)} of 100000 steps." in said
    assert f"Resume with: fp8-safeguard train --resume {newest} --steps 100000" in said
    run = httpx2.get(f"{server}/api/v1/runs/stopped").json()
    series = httpx2.get(f"{server}/api/v1/runs/stopped/series", params={"metric": "loss"}).json()
    assert series["steps"] == steps == list(range(len(steps)))
    assert run["state"] != "ended"
    if len(steps) < UNTIL:
        with Trainer.load(newest) as resumed:
            assert [r.loss for r in resumed.run(UNTIL)] == losses[len(steps) :]
        assert same_state(resumed, whole)
        assert httpx2.get(f"{server}/api/v1/runs/stopped").json()["state"] == "ended"


def test_a_server_that_nobody_reaches_changes_no_number_and_holds_nobody_up(
    settings: Callable[..., dict[str, Any]], same_state: SameState
) -> None:
    whole, losses = straight(settings())
    alone = settings(server="http://127.0.0.1:9", run="alone")
    for lockstep in (False, True):
        trainer = Trainer(TrainConfig.from_mapping({**alone, "lockstep": lockstep, "lockstep_seconds": 0.05}))
        begun = time.monotonic()
        with trainer:
            assert [report.loss for report in trainer.run(UNTIL)] == losses
            # The wait that lockstep is documented to make, and nothing like a connection's time-out.
            assert time.monotonic() - begun < 10.0 + UNTIL * 0.05
            assert trainer.monitoring.guard is not None
            trainer.monitoring.guard.detach(0.1)
        assert same_state(trainer, whole)
