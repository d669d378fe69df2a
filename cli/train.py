"""One training run from the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8_safeguard.trainer import ConfigError, TrainConfig, Trainer, progress


def run_training(
    steps: int,
    *,
    preset: str | None,
    config: Path | None,
    resume: Path | None,
    save: Path | None,
    changes: Mapping[str, Any],
) -> None:
    """Train until `steps` are complete, with progress on standard error. Raises TrainerError."""
    with start_trainer(preset=preset, config=config, resume=resume, changes=changes) as trainer:
        log_every = trainer.config.log_every
        with progress(steps, start_step=trainer.step, log_every=log_every) as show:
            trainer.run(steps, on_step=show)
        if save is not None:
            trainer.save(save)


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
