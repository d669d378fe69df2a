"""The training loop: exact, resumable, and safe against non-finite gradients."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fp8_safeguard.trainer import attempts, checkpoint, health
from fp8_safeguard.trainer.attempts import Attempt
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.data import Batch, ByteCorpus, load_text
from fp8_safeguard.trainer.distributed import Replicas
from fp8_safeguard.trainer.errors import CheckpointError, ConfigError
from fp8_safeguard.trainer.health import LossLevel
from fp8_safeguard.trainer.model import LanguageModel
from fp8_safeguard.trainer.monitoring import Monitoring
from fp8_safeguard.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    nonfinite_gradients,
    set_hyperparameters,
)
from fp8_safeguard.trainer.recovery import Recovery
from fp8_safeguard.trainer.smoothing import GradientSmoothing

logger = logging.getLogger("fp8_safeguard")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did."""

    step: int
    """Number of the step, from 0."""
    loss: float
    """Mean training loss of the step's tokens, nats."""
    gradient_norm: float
    """Global norm before clipping; NaN or inf if any gradient element was."""
    learning_rate: float
    """Rate of the update."""
    tokens: int
    """Tokens seen since the beginning of training, this step's included."""
    skipped: bool
    """Whether a loss or gradient that is not finite kept the update from being applied."""
    skipped_steps: int
    """Steps skipped so far."""
    fallbacks: int
    """Entries of the server's plan in force."""
    seconds: float
    """Wall time of the step."""


OnStep = Callable[[StepReport], None]


class Trainer:
    """One training run. Same config, same numbers: every result follows from the config alone."""

    def __init__(self, config: TrainConfig) -> None:
        """Start from the beginning. A `checkpoint_dir` that has seen this run gets a new attempt, not the old ones."""
        self._build(config, Replicas.join())
        self._watch(self._first_attempt(), None)

    def _build(self, config: TrainConfig, replicas: Replicas) -> None:
        replicas.check(config)
        self.config = config
        self.replicas = replicas
        """The ranks that train together."""
        name, text = load_text(config.corpus)
        self.corpus = ByteCorpus(
            name,
            text,
            sequence_length=config.sequence_length,
            validation_fraction=config.validation_fraction,
            seed=config.seed,
        )
        self.model = LanguageModel(config)
        self.optimizer = build_optimizer(self.model, config)
        self.smoothing = GradientSmoothing(self.model)
        self.step = 0
        """Completed steps, skipped ones included; also the number of the next step."""
        self.position = 0
        """Training sequences drawn so far, or passed over by a rollback."""
        self.updates = 0
        """Applied updates."""
        self.skipped_steps = 0
        """Steps whose update a non-finite loss or gradient prevented (nonfinite_steps_total)."""
        self.skipped_in_a_row = 0
        """Those of them that came last, without an applied one between."""
        self.last: StepReport | None = None
        """The newest step of this process."""
        self._level = LossLevel()
        self._recovery = Recovery(config=config)

    def _first_attempt(self) -> Attempt:
        run, wanted, folder = self.config.run, self.config.attempt, self.config.checkpoint_dir
        return self.replicas.first(lambda: attempts.first(run, wanted, folder))

    def _watch(self, attempt: Attempt, guard: dict[str, Any] | None) -> None:
        """Begin an attempt: from here on the monitor looks on, with the `guard` state of a checkpoint if it has one."""
        self.attempt = attempt
        """Which try of the run this is."""
        self.config = replace(self.config, attempt=attempt.id)
        self.monitoring = Monitoring(self.model, self.config)
        self.monitoring.begin(self.step, attempt, guard)

    def run(
        self, until_step: int, on_step: OnStep | None = None, *, stop: Callable[[], bool] = lambda: False
    ) -> list[StepReport]:
        """Train until `until_step` steps are complete; returns the reports of the steps done by this call.

        `stop` is asked between two steps. With `recover`, steps that a rollback repeats are reported again;
        RecoveryError once there were too many.
        """
        if until_step < self.step:
            raise ConfigError(f"until_step is {until_step}, but {self.step} steps are already complete")
        reports = []
        with _threads(self.config.threads):
            while self.step < until_step and not self.replicas.largest(stop()):
                reports.append(self._train_step())
                if on_step is not None:
                    on_step(reports[-1])
                self._end_step(reports[-1])
        return reports

    def evaluate(self, sequences: int = 32) -> float:
        """Mean validation loss in nats over `sequences` fixed sequences, in the precision in force now."""
        self.model.eval()
        total = 0.0
        try:
            with _threads(self.config.threads), torch.no_grad(), self.monitoring.paused():
                for part in self.corpus.validation_batch(sequences).split(self.config.sequences_per_step):
                    total += float(self.model.loss(part.tokens_NS, part.targets_NS)) * len(part.tokens_NS)
        finally:
            self.model.train()
        return total / sequences

    def save(self, path: str | Path) -> Path:
        """Write an exact checkpoint: a run loaded from it continues bit for bit. Atomic and durable."""
        state = self._state(self.ailments())
        return self.replicas.first(lambda: checkpoint.write(path, state))

    def save_at_stop(self, fallback: Path | None = None) -> Path | None:
        """Write a checkpoint now, in the run's folder, else to `fallback`; where to resume from.

        That is an older one if this state is not healthy. None where there is no healthy one, or no place for any.
        """
        if self.config.checkpoint_dir is None:
            return None if fallback is None else self.save(fallback)
        path, healthy = self._save_in(self.config.checkpoint_dir)
        return path if healthy else self._newest_healthy()

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Trainer:
        """Continue from a checkpoint, or from the newest healthy one of a folder, bit for bit as if never stopped.

        The run goes on as a new attempt: the child of the one that wrote the checkpoint, with an id that no attempt
        noted in that folder has. `overrides` are TrainConfig fields (FORK_FIELDS): with another `run` it is a fork,
        which starts under an empty plan and, unless it is given a checkpoint_dir, writes no periodic checkpoints;
        `precision`, `fault`, `mode` and `server` make the arms of a comparison from one start.
        """
        replicas, given = Replicas.join(), Path(path)
        path = replicas.first(lambda: checkpoint.latest(given) if given.is_dir() else given)
        state = checkpoint.read(path)
        if state["ailments"]:
            logger.warning("%s is not healthy: %s", path, "; ".join(state["ailments"]))
        saved = TrainConfig.from_mapping(state["config"])
        fork = overrides.get("run", saved.run) != saved.run
        changes = {"attempt": "0", "checkpoint_dir": None, **overrides} if fork else overrides
        trainer = cls.__new__(cls)
        # A checkpoint knows no token, so one given here belongs to the server given here or saved there.
        trainer._build(saved.fork(**changes), replicas)
        trainer._restore(state, path)
        if fork:
            trainer._watch(trainer._first_attempt(), None)
        else:
            trainer._watch(trainer._child(path, state, overrides.get("attempt")), state["guard"])
        torch.set_rng_state(state["rng"])
        return trainer

    def _child(self, path: Path, state: dict[str, Any], wanted: str | None = None) -> Attempt:
        """The attempt that goes on from a checkpoint."""
        parent = Attempt(**state["attempt"])
        run, folder, step = self.config.run, self.config.checkpoint_dir, self.step
        return self.replicas.first(
            lambda: attempts.child(path, run, parent, step, wanted=wanted, checkpoint_dir=folder)
        )

    def ailments(self) -> list[str]:
        """What makes the present state unfit to continue from; empty if it is healthy."""
        return health.ailments(
            self.model,
            self.optimizer,
            self._level,
            skipped_in_a_row=self.skipped_in_a_row,
            divergence_nats=self.config.divergence_nats,
        )

    def close(self, *, finished: bool = True) -> None:
        """Flush and detach the monitor. The trainer can still be saved and evaluated, as configured, without plan.

        `finished` says that the run has ended by itself: the server is told so.
        """
        self.monitoring.close(finished=finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _train_step(self) -> StepReport:
        started = time.perf_counter()
        config, step = self.config, self.step
        batch = self.corpus.batch(self.position, config.sequences_per_step)
        if config.fault is not None:
            config.fault.apply(self.model, config.layers, step)
            batch = config.fault.batch(batch, step)
        loss = self._backward(batch)
        self.smoothing.smooth(self.monitoring.plan_entries(), step, self.updates)
        norm = clip_gradients(self.model, config.clip_norm)
        rate = set_hyperparameters(self.optimizer, config, self.updates)
        tokens = (step + 1) * config.tokens_per_step
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "tokens": float(tokens)}
        self.monitoring.report(self.model, values)
        skipped = not self._update(loss, norm)
        self.step += 1
        self.position += config.sequences_per_step
        self.monitoring.end_step(step, self.skipped_steps)
        self.last = StepReport(
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            skipped=skipped,
            skipped_steps=self.skipped_steps,
            fallbacks=self.monitoring.fallbacks(),
            seconds=time.perf_counter() - started,
        )
        return self.last

    def _backward(self, batch: Batch) -> float:
        """Gradients of the mean loss over all micro-batches; returns that loss."""
        self.optimizer.zero_grad(set_to_none=True)
        mine = self.replicas.share(batch, self.config)
        parts = self.config.micro_batches * self.replicas.size
        total = 0.0
        for part in mine:
            loss = self.model.loss(part.tokens_NS, part.targets_NS, part.weights_NS) / parts
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return self.replicas.sum_step(self.model, total)

    def _update(self, loss: float, norm: float) -> bool:
        """Apply the update if loss and gradients are finite; else parameters, moments and biases stay as they are."""
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            self.optimizer.step()
            self.updates += 1
            self.skipped_in_a_row = 0
            self._level.add(loss)
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            names = nonfinite_gradients(self.model)
            logger.warning(
                "step %d skipped: loss %s, gradient norm %s, first non-finite gradient in %s (%d parameters); %d skipped "
                "so far",
                self.step,
                loss,
                norm,
                names[0] if names else "none",
                len(names),
                self.skipped_steps,
            )
        for router in self.model.routers().values():
            router.balance(apply=applied)
        self.optimizer.zero_grad(set_to_none=True)
        return applied

    def _end_step(self, report: StepReport) -> None:
        """Write the periodic checkpoint that is due; go back to an earlier one if the run is lost."""
        due = self.config.checkpoint_dir is not None and self.step % self.config.checkpoint_every == 0
        if due:
            self._save_periodic()
        # Looking through every tensor costs time: where it went wrong, a loss says so or a checkpoint finds out.
        not_finite = health.not_finite(self.model, self.optimizer) if due or report.skipped else []
        reason = self._recovery.reason(not_finite, self.skipped_in_a_row)
        if reason is not None:
            self._roll_back(reason)

    def _save_periodic(self) -> None:
        assert self.config.checkpoint_dir is not None
        try:
            _, healthy = self._save_in(self.config.checkpoint_dir)
        except OSError as error:
            # A full disk may be emptied; what is in memory would be lost for certain.
            logger.error("no checkpoint after step %d: %s. Training goes on", self.step, error)
            return
        if healthy:
            self._recovery.progressed()

    def _save_in(self, folder: str) -> tuple[Path, bool]:
        ailments = self.ailments()
        state = self._state(ailments)
        return self.replicas.first(lambda: self._write_in(folder, ailments, state))

    def _write_in(self, folder: str, ailments: list[str], state: dict[str, Any]) -> tuple[Path, bool]:
        path = checkpoint.periodic_path(folder, self.step, healthy=not ailments, attempt=self.attempt.number)
        checkpoint.write(path, state)
        if ailments:
            logger.warning("%s is marked unhealthy: %s", path, "; ".join(ailments))
        checkpoint.rotate(folder, self.config.keep_checkpoints, attempt=self.attempt.number)
        return path, not ailments

    def _newest_healthy(self) -> Path | None:
        """The checkpoint of this attempt's branch to go back to."""
        folder, number = self.config.checkpoint_dir, self.attempt.number
        assert folder is not None
        try:
            return self.replicas.first(lambda: checkpoint.latest(folder, attempt=number))
        except CheckpointError:
            return None

    def _roll_back(self, reason: str) -> None:
        """Take up the newest healthy checkpoint as a new attempt, with the data as it stands now."""
        target = self._newest_healthy()
        self._recovery.begin(reason, self.step, target)
        assert target is not None
        position, state = self.position, checkpoint.read(target)
        self._restore(state, target)
        self.position = position
        attempt = self._child(target, state)
        self.monitoring.close(finished=False)
        self._watch(attempt, state["guard"])
        torch.set_rng_state(state["rng"])

    def _state(self, ailments: list[str]) -> dict[str, Any]:
        return {
            "config": self.config.to_mapping(),
            "attempt": self.attempt.to_mapping(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "smoothing": self.smoothing.state(self.updates),
            "guard": self.monitoring.state(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "position": self.position,
            "updates": self.updates,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_level": self._level.to_mapping(),
            "corpus": {"name": self.corpus.name, "fingerprint": self.corpus.fingerprint},
            "healthy": not ailments,
            "ailments": ailments,
        }

    def _restore(self, state: dict[str, Any], path: str | Path) -> None:
        saved = state["corpus"]
        if saved["fingerprint"] != self.corpus.fingerprint:
            raise CheckpointError(
                f"{path} was trained on corpus {saved['name']!r} with another text than {self.corpus.name!r} has here; "
                "the data position would mean nothing. Install the same corpus"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.position, self.updates = state["step"], state["position"], state["updates"]
        self.skipped_steps, self.skipped_in_a_row = state["skipped_steps"], state["skipped_in_a_row"]
        self._level = LossLevel(**state["loss_level"])
        # Checkpoints of before it was there have none.
        self.smoothing.load(state.get("smoothing", {}))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run the block on `count` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
