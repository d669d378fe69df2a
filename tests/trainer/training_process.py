"""One training process for the crash tests: reports each step on standard output, and may kill itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from fp8_safeguard.trainer import OutlierDrift, StepReport, TrainConfig, Trainer, run_interruptible


def poisoned(trainer: Trainer, steps: list[int]) -> Trainer:
    """The trainer, with a NaN in the head's gradient in those steps."""
    trainer.model.head.register_hook(lambda g: g * float("nan") if trainer.step in steps else g)
    return trainer


def kill_during(step: int, delay: float, done: StepReport) -> None:
    """Once the step before it is done, let a thread end this process as kill -9 does, somewhere in the step."""
    if done.step == step - 1:
        threading.Thread(
            target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()


def main() -> None:
    order = json.loads(sys.argv[1])
    fault = OutlierDrift(**order["fault"]) if order.get("fault") else None
    trainer = poisoned(
        Trainer(TrainConfig.from_mapping({**order["config"], "fault": fault})), order.get("skip", [])
    )

    def on_step(done: StepReport) -> None:
        sys.stdout.write(json.dumps({"step": done.step, "loss": done.loss.hex()}) + "\n")
        sys.stdout.flush()
        if order.get("kill"):
            kill_during(order["kill"], order["delay"], done)

    with trainer:
        stopped = run_interruptible(trainer, order["until"], on_step)
    if stopped is not None:
        sys.stderr.write(stopped.message + "\n")
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
