"""The training loop: exact, resumable, and safe against non-finite gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fp8_safeguard.trainer import checkpoint
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.data import Batch, ByteCorpus, load_text
from fp8_safeguard.trainer.errors import CheckpointError, ConfigError
from fp8_safeguard.trainer.model import LanguageModel
from fp8_safeguard.trainer.monitoring import Monitoring
from fp8_safeguard.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    nonfinite_gradients,
    set_hyperparameters,
)

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
    """Whether a non-finite gradient kept the update from being applied."""
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
        self._build(config)
        self.monitoring.begin(0, None)

    def _build(self, config: TrainConfig) -> None:
        self.config = config
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
        self.step = 0
        """Completed steps, skipped ones included; also the number of the next step."""
        self.updates = 0
        """Applied updates."""
        self.skipped_steps = 0
        """Steps whose update a non-finite gradient prevented (nonfinite_steps_total)."""
        self.last: StepReport | None = None
        """The newest step of this process."""
        self.monitoring = Monitoring(self.model, config)

    @property
    def position(self) -> int:
        """Training sequences drawn so far."""
        return self.step * self.config.sequences_per_step

    def run(self, until_step: int, on_step: OnStep | None = None) -> list[StepReport]:
        """Train until `until_step` steps are complete; returns the reports of the steps done by this call."""
        if until_step < self.step:
            raise ConfigError(f"until_step is {until_step}, but {self.step} steps are already complete")
        reports = []
        with _threads(self.config.threads):
            while self.step < until_step:
                reports.append(self._train_step())
                if on_step is not None:
                    on_step(reports[-1])
                self._save_periodic()
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
        """Write an exact checkpoint: a run loaded from it continues bit for bit. Atomic."""
        return checkpoint.write(path, self._state())

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Trainer:
        """Continue from a checkpoint. Without overrides the run goes on as if it had never stopped.

        `overrides` are TrainConfig fields (FORK_FIELDS): with another `run` it is a fork, which starts under an
        empty plan; `precision`, `fault`, `mode` and `server` make the arms of a comparison from one start.
        """
        state = checkpoint.read(path)
        trainer = cls.__new__(cls)
        # A checkpoint knows no token, so one given here belongs to the server given here or saved there.
        trainer._build(TrainConfig.from_mapping(state["config"]).fork(**overrides))
        trainer._restore(state, path)
        return trainer

    def close(self) -> None:
        """Flush and detach the monitor. The trainer can still be saved and evaluated, as configured, without plan."""
        self.monitoring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _train_step(self) -> StepReport:
        started = time.perf_counter()
        config, step = self.config, self.step
        if config.fault is not None:
            config.fault.apply(self.model, config.layers, step)
        loss = self._backward(self.corpus.batch(self.position, config.sequences_per_step))
        norm = clip_gradients(self.model, config.clip_norm)
        rate = set_hyperparameters(self.optimizer, config, self.updates)
        tokens = (step + 1) * config.tokens_per_step
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "tokens": float(tokens)}
        self.monitoring.report(self.model, values)
        skipped = not self._update(norm)
        self.step += 1
        self.monitoring.end_step(step)
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
        parts = self.config.micro_batches
        total = 0.0
        for part in batch.split(self.config.sequences_per_step // parts):
            loss = self.model.loss(part.tokens_NS, part.targets_NS) / parts
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def _update(self, norm: float) -> bool:
        """Apply the update unless a gradient is not finite: then parameters, moments and biases stay as they are."""
        applied = bool(torch.isfinite(torch.tensor(norm)))
        if applied:
            self.optimizer.step()
            self.updates += 1
        else:
            self.skipped_steps += 1
            names = nonfinite_gradients(self.model)
            logger.warning(
                "step %d skipped: gradient norm %s, first non-finite gradient in %s (%d parameters); %d skipped so far",
                self.step,
                norm,
                names[0] if names else "none (the sum of squares overflowed)",
                len(names),
                self.skipped_steps,
            )
        for router in self.model.routers().values():
            router.balance(apply=applied)
        self.optimizer.zero_grad(set_to_none=True)
        return applied

    def _healthy(self) -> bool:
        """Whether this state is fit to resume from: finite parameters, and the last step was applied."""
        finite = all(bool(torch.isfinite(p).all()) for p in self.model.parameters())
        return finite and (self.last is None or not self.last.skipped)

    def _save_periodic(self) -> None:
        folder = self.config.checkpoint_dir
        if folder is None or self.step % self.config.checkpoint_every:
            return
        self.save(checkpoint.periodic_path(folder, self.step, healthy=self._healthy()))
        checkpoint.rotate(folder, self.config.keep_checkpoints)

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.config.to_mapping(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "guard": self.monitoring.state(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "updates": self.updates,
            "skipped_steps": self.skipped_steps,
            "corpus": {"name": self.corpus.name, "fingerprint": self.corpus.fingerprint},
            "healthy": self._healthy(),
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
        torch.set_rng_state(state["rng"])
        self.step, self.updates, self.skipped_steps = state["step"], state["updates"], state["skipped_steps"]
        self.monitoring.begin(self.step, state["guard"])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run the block on `count` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
