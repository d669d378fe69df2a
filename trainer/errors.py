"""The mistakes a user of the trainer can make, as exceptions."""

from __future__ import annotations


class TrainerError(ValueError):
    """Something given to the trainer cannot work; the message says what to do instead."""


class ConfigError(TrainerError):
    """A field of TrainConfig is out of range, unknown, or contradicts another."""


class CorpusError(TrainerError):
    """The text to train on is missing or too short."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, damaged, or belongs to another model or corpus."""


class RecoveryError(TrainerError):
    """Training failed again after the allowed number of rollbacks, or there was nothing to roll back to."""
