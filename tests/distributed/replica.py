"""One rank of the trainer: trains, is lost and goes back, and is stopped, with the other one."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_safeguard.trainer import ConfigError, StepReport, TrainConfig, Trainer, run_interruptible


def config(text: str, **changes: Any) -> TrainConfig:
    return TrainConfig.tiny(corpus=text, sequences_per_step=4, **changes)


def numbers(reports: list[StepReport]) -> list[list[Any]]:
    return [[r.step, r.loss, r.gradient_norm, r.skipped] for r in reports]


def bit_by_bit(rank: int, text: str, folder: Path) -> dict[str, Any]:
    """Six steps, with router loads; on from the checkpoint of the fourth; a file that all have named."""
    trainer = Trainer(config(text, checkpoint_dir=str(folder / "exact"), checkpoint_every=4))
    trained = numbers(trainer.run(6))
    saved = trainer.save(folder / "saved.pt")
    resumed = Trainer.load(folder / "exact")
    again = numbers(resumed.run(6))
    torch.save(resumed.model.state_dict(), folder / f"resumed.{rank}.pt")
    attempts = [trainer.attempt.id, resumed.attempt.id]
    return {"trained": trained, "resumed": again, "saved": saved.exists(), "attempts": attempts}


def delayed(rank: int, text: str, folder: Path) -> dict[str, Any]:
    """Six steps whose scales follow what all ranks have seen."""
    trainer = Trainer(config(text, scaling="delayed", amax_history=3))
    trained = numbers(trainer.run(6))
    histories = {name: layer.scaling.state().tolist() for name, layer in trainer.model.linears().items()}
    return {"trained": trained, "histories": histories}


def lost(rank: int, text: str, folder: Path) -> dict[str, Any]:
    """A loss that is not finite on the second rank alone, for two steps: all skip them, and go back together."""
    chosen = config(text, checkpoint_dir=str(folder / "lost"), checkpoint_every=2, recover=True, skip_limit=2)
    trainer = Trainer(chosen)
    trainer.run(4)
    if rank == 1:
        whole = trainer.model.loss

        def broken(*arguments: Tensor) -> Tensor:
            return whole(*arguments) * math.nan

        trainer.model.loss = broken  # type: ignore[method-assign]
    skipped = numbers(trainer.run(6, stop=lambda: trainer.attempt.id != "0"))
    if rank == 1:
        del trainer.model.loss
    after = numbers(trainer.run(6))
    return {"skipped": [row[::3] for row in skipped], "after": after, "attempt": trainer.attempt.id}


def stopped(rank: int, text: str, folder: Path) -> dict[str, Any]:
    """The signal comes to the second rank alone."""
    trainer = Trainer(config(text, checkpoint_dir=str(folder / "stopped")))

    def on_step(report: StepReport) -> None:
        if rank == 1 and report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    interruption = run_interruptible(trainer, 50, on_step)
    assert interruption is not None
    return {"step": interruption.step, "code": interruption.exit_code, "path": str(interruption.checkpoint)}


def refused(rank: int, text: str, folder: Path) -> dict[str, Any]:
    """Three sequences for two ranks."""
    try:
        Trainer(TrainConfig.tiny(corpus=text, sequences_per_step=3))
    except ConfigError as error:
        return {"said": str(error)}
    return {"said": None}


SCENARIOS = {each.__name__: each for each in (bit_by_bit, delayed, lost, stopped, refused)}


def main() -> None:
    """Run a scenario on the text beside its results."""
    rank, size, folder, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = SCENARIOS[name](rank, str(folder / "text.txt"), folder)
    (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
