"""The trainer's side of the monitor: attach, report each step, lockstep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from fp8_safeguard import hooks
from fp8_safeguard.hooks.notices import TRAINER
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.monitor.plan import Plan, PlanEntry
from fp8_safeguard.trainer import smoothing
from fp8_safeguard.trainer.attempts import Attempt
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.model import LanguageModel

logger = logging.getLogger("fp8_safeguard")


def _runs_in_fp8(module: nn.Module, name: str) -> bool:
    """Embedding, head and routers are float32 by design: what FP8 would do to them is no question here."""
    return isinstance(module, Fp8Linear | Fp8GroupedLinear)


class Monitoring:
    """A guard on the model when the config names a server; otherwise nothing at all."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        self._config = config
        self._late = False
        self._silent_since: int | None = None
        """Samples that the server had taken when a reply came too late; None while replies come in time."""
        self.guard: hooks.Guard | None = None
        if config.server is not None:
            self.guard = hooks.attach(
                model,
                server=config.server,
                token=config.token,
                run=config.run,
                attempt=config.attempt,
                every=config.every,
                mode=config.mode,
                thresholds=config.thresholds,
                filter=_runs_in_fp8,
            )
            self.guard.carries_out(smoothing.ACTION)

    def begin(self, step: int, attempt: Attempt, saved: dict[str, Any] | None) -> None:
        """Count from `step` on; continue the `saved` guard of the attempt's parent, plan included, if there is one."""
        if self.guard is None:
            return
        own = saved is not None and saved.get("run") == self._config.run
        parent = attempt.id if attempt.parent is None else attempt.parent
        fresh = {"step": step, "plan": Plan().to_wire(), "attempt": parent}
        self.guard.load_state_dict(saved if own and saved is not None else fresh)

    def report(self, model: LanguageModel, values: dict[str, float]) -> None:
        """Loss, gradient norm, learning rate, tokens of the step in progress; routers' load and attention's logits."""
        if self.guard is None:
            return
        self.guard.log(**values)
        found = {name: router.load_scalars() for name, router in model.routers().items()}
        found |= {name: attention.logit_scalars() for name, attention in model.attentions().items()}
        for name, scalars in found.items():
            for key, value in scalars.items():
                self.guard.log_scalar(name, key, value)

    def end_step(self, step: int, skipped_steps: int) -> None:
        """Step `step` has ended. In lockstep, wait for the reply to it, but never longer than configured."""
        if self.guard is None:
            return
        self.guard.log_scalar(TRAINER, "skipped_steps", skipped_steps)
        self.guard.step(step)
        if self._config.lockstep and step % self._config.every == 0:
            self._wait(self.guard, step)

    def _wait(self, guard: hooks.Guard, step: int) -> None:
        """Wait for the reply, unless the server has taken no sample at all since the last one came too late."""
        if self._silent_since == guard.delivered:
            return
        seconds = self._config.lockstep_seconds
        self._silent_since = None if guard.flush(seconds) else guard.delivered
        if self._silent_since is not None and not self._late:
            self._late = True
            logger.warning(
                "lockstep: no reply to step %d within %g s; training goes on and waits again once the server has answered: "
                "a plan may take effect later than in a run whose server answers in time",
                step,
                seconds,
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing inside the block (validation is not training)."""
        with nullcontext() if self.guard is None else self.guard.paused():
            yield

    def state(self) -> dict[str, Any] | None:
        """The guard's state for a checkpoint."""
        return None if self.guard is None else self.guard.state_dict()

    def plan_entries(self) -> tuple[PlanEntry, ...]:
        """Entries of the plan in force; none in observe."""
        return () if self.guard is None else self.guard.plan.entries

    def fallbacks(self) -> int:
        """How many there are."""
        return len(self.plan_entries())

    def close(self, *, finished: bool) -> None:
        """Send what is left and take the guard off the model; `finished` if the run has ended by itself."""
        if self.guard is None:
            return
        self.guard.detach(finished=finished)
