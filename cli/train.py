"""One training run from the command line."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fp8_safeguard.trainer import (
    ConfigError,
    Interruption,
    TrainConfig,
    Trainer,
    progress,
    run_interruptible,
)


def run_training(
    steps: int,
    *,
    preset: str | None,
    config: Path | None,
    resume: Path | None,
    save: Path | None,
    changes: Mapping[str, Any],
) -> Interruption | None:
    """Train until `steps` are complete, with progress on standard error; what ended it earlier, if a signal did.

    Raises TrainerError.
    """
    with start_trainer(preset=preset, config=config, resume=resume, changes=changes) as trainer:
        log_every = trainer.config.log_every
        # Of several ranks, which all see the same, the first one shows it.
        first = trainer.replicas.rank == 0
        shown = progress(steps, start_step=trainer.step, log_every=log_every) if first else nullcontext(None)
        with shown as show:
            interruption = run_interruptible(trainer, steps, show, save=save)
        if save is not None and interruption is None:
            trainer.save(save)
    return interruption


def start_trainer(
    *, preset: str | None, config: Path | None, resume: Path | None, changes: Mapping[str, Any]
) -> Trainer:
    """The trainer that exactly one of the three sources describes; none of them: the defaults."""
    given = [
        name
        for name, value in (("--preset", preset), ("--config", config), ("--resume", resume))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each describe a whole run; give one of them")
    if resume is not None:
        return Trainer.load(resume, **changes)
    if config is not None:
        return Trainer(TrainConfig.from_file(config, **changes))
    return Trainer(TrainConfig.preset(preset, **changes) if preset else TrainConfig(**changes))
