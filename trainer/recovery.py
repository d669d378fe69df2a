"""When a run is lost, and how often it may go back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.errors import RecoveryError

logger = logging.getLogger("fp8_safeguard")


@dataclass(kw_only=True)
class Recovery:
    """Counts the rollbacks that have brought nothing yet.

    A run is lost when a parameter or an optimizer moment is not finite, or after `skip_limit` skipped steps in a row.
    With `recover` the trainer then goes back to the newest healthy checkpoint, as a new attempt, and reads on where
    the data stood at the failure: what came between, the batch that killed it included, is skipped, and the step
    numbers are used again. Data is skipped, and the learning rate kept, because a batch that the checkpoint has not
    seen is the smaller change: the rest of the run stays the one that was configured. A failure that is not the
    data's comes back, and the limit ends it.
    """

    config: TrainConfig
    done: int = 0
    """Rollbacks since the last healthy checkpoint."""
    _told: bool = False

    def reason(self, not_finite: list[str], skipped_in_a_row: int) -> str | None:
        """Why the run is lost; None if it is not. Without `recover` a loss is only logged, once."""
        if not_finite:
            reason = "; ".join(not_finite)
        elif skipped_in_a_row >= self.config.skip_limit:
            reason = f"{skipped_in_a_row} steps in a row were skipped (skip_limit {self.config.skip_limit})"
        else:
            return None
        if self.config.recover:
            return reason
        if not self._told:
            self._told = True
            logger.error("run %s is lost: %s. Training goes on: recover is off", self.config.run, reason)
        return None

    def begin(self, reason: str, step: int, target: Path | None) -> None:
        """Count a rollback to `target`. RecoveryError if there were too many, or there is no target."""
        run, most = self.config.run, self.config.max_recoveries
        if target is None:
            raise RecoveryError(
                f"run {run} failed after {step} steps: {reason}. There is no healthy checkpoint in "
                f"{self.config.checkpoint_dir!r} to go back to; start again with a lower learning_rate, or with a "
                f"checkpoint_every below {self.config.checkpoint_every}"
            )
        if self.done >= most:
            raise RecoveryError(
                f"run {run} failed again after {step} steps: {reason}. {most} rollbacks (max_recoveries) have not "
                f"helped, so it is not the data. The last healthy checkpoint is {target}: resume it with a lower "
                "learning_rate or with precision 'bf16'"
            )
        self.done += 1
        logger.error(
            "run %s is lost after %d steps: %s. Rollback %d of %d, to %s",
            run,
            step,
            reason,
            self.done,
            most,
            target,
        )

    def progressed(self) -> None:
        """A healthy checkpoint was written: earlier rollbacks have helped."""
        self.done = 0
