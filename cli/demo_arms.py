"""The four training runs of the demo, each in a process of its own."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fp8_safeguard.trainer import Trainer

ARMS = ("protected", "healthy", "unprotected", "bf16_with_fault")
ArmName = Literal["protected", "healthy", "unprotected", "bf16_with_fault"]


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """What one arm needs to know; it travels to the arm's process."""

    name: ArmName
    """Which of the four runs."""
    run: str
    """The run's id on the server."""
    server: str
    """The server's address."""
    checkpoint: Path
    """Where the protected run leaves the state that the other three start from."""
    fault_step: int
    """First step with the fault."""
    steps: int
    """Steps of the whole run."""
    seed: int
    """Seed of weights, data order and fault."""


@dataclass(frozen=True, kw_only=True)
class ArmMessage:
    """One line from an arm to the coordinator."""

    arm: ArmName
    kind: Literal["step", "forked", "done", "failed"]
    step: int = 0
    loss: float = 0.0
    text: str = ""


def start(spec: ArmSpec, messages: "Queue[ArmMessage]") -> SpawnProcess:
    """Run one arm in a fresh process, which reports to `messages`."""
    process = get_context("spawn").Process(target=run_arm, args=(spec, messages), name=spec.name, daemon=True)
    process.start()
    return process


def message_queue() -> "Queue[ArmMessage]":
    """The queue that all arms report to."""
    return get_context("spawn").Queue()


def run_arm(spec: ArmSpec, messages: "Queue[ArmMessage]") -> None:
    """Train one arm to its end; a failure is reported, not raised into the void."""
    # Everything that the demo writes stays in its folder.
    os.environ.setdefault("FP8_SAFEGUARD_SPOOL_DIR", str(spec.checkpoint.parent / "spool"))
    try:
        _train(spec, messages.put)
    except BaseException as error:
        messages.put(ArmMessage(arm=spec.name, kind="failed", text=f"{type(error).__name__}: {error}"))
        raise
    messages.put(ArmMessage(arm=spec.name, kind="done"))


def _train(spec: ArmSpec, report: Callable[[ArmMessage], None]) -> None:
    from fp8_safeguard.trainer import StepReport

    def on_step(done: StepReport) -> None:
        report(ArmMessage(arm=spec.name, kind="step", step=done.step, loss=done.loss))

    with _trainer(spec) as trainer:
        if spec.name == "protected":
            trainer.run(spec.fault_step, on_step=on_step)
            trainer.save(spec.checkpoint)
            report(ArmMessage(arm=spec.name, kind="forked", step=spec.fault_step))
        trainer.run(spec.steps, on_step=on_step)


def _trainer(spec: ArmSpec) -> "Trainer":
    """A fresh trainer for the protected run, one forked from its checkpoint for the others."""
    from fp8_safeguard.trainer import OutlierDrift, TrainConfig, Trainer

    fault = None if spec.name == "healthy" else OutlierDrift(start_step=spec.fault_step, seed=spec.seed)
    watched = {"run": spec.run, "server": spec.server, "fault": fault}
    if spec.name == "protected":
        return Trainer(TrainConfig.demo(seed=spec.seed, mode="enforce", **watched))
    precision = "bf16" if spec.name == "bf16_with_fault" else "fp8"
    return Trainer.load(spec.checkpoint, mode="observe", precision=precision, **watched)
