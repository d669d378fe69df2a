"""Keeps account of a session's own time, and asks its budget about samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fp8_safeguard.hooks.budget import Budget
from fp8_safeguard.hooks.meter import Meter
from fp8_safeguard.hooks.once import OnceLog

_ROUNDS = 64


class Accounts:
    """What every step took, and what of it was ours."""

    def __init__(self, layers: Sequence[str], every: int, limit: float | None, once: OnceLog) -> None:
        self.meter = Meter()
        self.budget = Budget(layers, every, limit)
        self.hook_seconds: float | None = None
        """What one hook takes in a step that is not sampled, and what no account contains: measured once."""
        self._once = once
        self._begun: float | None = None
        self._ended: float | None = None
        self._spent_at_end = self._late = 0.0
        self._sample_at: float | None = None
        self._spent_at_sample = 0.0

    def open_step(self) -> None:
        """The first forward of a step was seen."""
        if self._begun is None:
            self._begun = self._sample_at = time.perf_counter()
        self.budget.amend(self.meter.collect())

    def affords(self, step: int, urgent: Callable[[], Collection[str]]) -> bool:
        """Whether that step is one to sample and the budget allows it; says once that it left one out."""
        budget = self.budget
        if step % budget.every:
            return False
        if budget.due(step) and budget.admits(urgent()):
            return True
        self._once.warning(
            "overhead budget",
            "whole samples every %d steps take more than overhead_budget=%g of the time: there are fewer of them, and "
            "they measure less; Guard.sampling_plan says what",
            budget.every,
            budget.limit,
        )
        return False

    def begin_sample(self, picked: Collection[str], *, on_device: bool) -> None:
        """A sample begins; picked: layers whose weight gradient it recomputes."""
        self.meter.new_sample()
        self.meter.on_device = on_device
        self.budget.begin(picked)

    def delivered(self, seconds: float) -> None:
        """A sample took so many seconds after its step, when it was handed over."""
        self._late += seconds

    def sample_ratio(self) -> float:
        """Share of the time since the last sample that went into our code; 0 to 1."""
        now, spent = time.perf_counter(), self.meter.now
        elapsed, ours = now - (self._sample_at or now), spent - self._spent_at_sample
        self._sample_at, self._spent_at_sample = now, spent
        return min(1.0, ours / elapsed) if elapsed > 0 else 0.0

    def end_step(self, *, sampled: bool, idle_hook: Callable[[], object]) -> None:
        """A step is over; `idle_hook` does what a hook does where nothing is measured."""
        now, spent = time.perf_counter(), self.meter.now
        since = self._begun if self._ended is None else self._ended
        if since is not None:
            layers = self.meter.layers if sampled else None
            self.budget.end_step(now - since, spent - self._spent_at_end, layers, late=self._late)
        self._ended, self._spent_at_end, self._late = now, spent, 0.0
        if self.hook_seconds is None and not sampled:
            begun = time.perf_counter()
            for _ in range(_ROUNDS):
                idle_hook()
            self.hook_seconds = (time.perf_counter() - begun) / _ROUNDS

    def plan(self) -> dict[str, Any]:
        """The budget's report, and what it leaves out: a hook's way past, the device, and who is judged."""
        budget = self.budget
        judged = len(budget.names) if budget.schedule.judged else budget.schedule.layers
        return {
            **budget.report(),
            "judged_per_sample": judged,
            "idle_step_seconds": budget.idle,
            "hook_seconds": self.hook_seconds,
            "device_seconds": self.meter.device_seconds,
        }
