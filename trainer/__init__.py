"""A small FP8 mixture-of-experts trainer: exact, monitored, breakable on purpose."""

from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    RecoveryError,
    TrainerError,
)
from fp8_safeguard.trainer.faults import OutlierDrift
from fp8_safeguard.trainer.interrupt import Interruption, run_interruptible
from fp8_safeguard.trainer.progress import progress
from fp8_safeguard.trainer.train import StepReport, Trainer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorpusError",
    "Interruption",
    "OutlierDrift",
    "RecoveryError",
    "StepReport",
    "TrainConfig",
    "Trainer",
    "TrainerError",
    "progress",
    "run_interruptible",
]
