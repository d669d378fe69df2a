"""Applies the server's plan to our layers, at step boundaries only."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.kernels import LinearPrecision
from fp8_safeguard.monitor.plan import Plan, PlanEntry

_GEMMS = ("fprop", "dgrad", "wgrad")
_OPERANDS = ("x", "w", "dy")
_FORMAT_FIELD = {"scale_multiplier": "multiplier", "scale_rounding": "scale", "format": "fmt"}
STEPS_AHEAD = 2
"""A reply handled while step s is the last completed one takes effect with step s + 2: on every rank at once."""


class Controls:
    """The plan in force, the one that waits, and the precision that each layer was configured with."""

    def __init__(self, layers: list[ObservedLayer], mode: str, once: OnceLog) -> None:
        self.plan = Plan()
        """What is applied now."""
        self.effective_step: int | None = None
        """First step that ran with it; None before any plan."""
        self._layers = {layer.name: layer for layer in layers}
        self._configured = {
            layer.name: module.precision for layer in layers if (module := layer.fp8_module()) is not None
        }
        self._observe_only = mode == "observe"
        self._once = once
        self._lock = threading.Lock()
        self._waiting: tuple[Plan, int] | None = None
        self._completed = -1
        self._timed: set[int] = set()
        """Steps at which an entry of the plan begins or expires."""

    def receive(self, wire: Any) -> None:
        """A reply's plan (None: nothing newer). Called on the sender's thread; only takes note."""
        if wire is None or self._observe_only:
            return
        plan = Plan.from_wire(wire)
        with self._lock:
            newest = self.plan if self._waiting is None else self._waiting[0]
            if plan.version > newest.version:
                self._waiting = (plan, self._completed + STEPS_AHEAD)

    def at_boundary(self, next_step: int) -> None:
        """Between two steps: let a waiting plan, or an entry whose time has come, take effect."""
        with self._lock:
            self._completed = next_step - 1
            due = self._waiting is not None and next_step >= self._waiting[1]
            if due and self._waiting is not None:
                self.plan, self.effective_step = self._waiting[0], next_step
                self._waiting = None
                self._timed = {
                    step
                    for entry in self.plan.entries
                    for step in (entry.not_before_step, entry.expires_step)
                    if step is not None and step > next_step
                }
        if due or any(step <= next_step for step in self._timed):
            self._timed = {step for step in self._timed if step > next_step}
            self._apply(next_step)

    def restore(self) -> None:
        """Give every layer the precision that it was configured with."""
        for name, precision in self._configured.items():
            self._set(name, precision)

    def load(self, wire: Mapping[str, Any], effective_step: int | None, next_step: int) -> None:
        """Take up a plan from a checkpoint."""
        if self._observe_only:
            return
        with self._lock:
            self._waiting = (Plan.from_wire(wire), next_step)
        self.at_boundary(next_step)
        self.effective_step = effective_step

    def _apply(self, step: int) -> None:
        wanted = dict(self._configured)
        for entry in self.plan.entries:
            expired = entry.expires_step is not None and step >= entry.expires_step
            if step < entry.not_before_step or expired:
                continue
            if entry.layer not in wanted:
                self._refuse(entry)
                continue
            try:
                wanted[entry.layer] = _with_entry(wanted[entry.layer], entry)
            except ValueError as error:
                self._once.warning(
                    f"entry {entry.place}", "plan entry %s is not applied: %s", entry.place, error
                )
        for name, precision in wanted.items():
            self._set(name, precision)

    def _set(self, name: str, precision: LinearPrecision) -> None:
        module = self._layers[name].fp8_module()
        if module is not None and module.precision != precision:
            module.precision = precision

    def _refuse(self, entry: PlanEntry) -> None:
        what = (
            "is only observed: its GEMMs are not ours to switch"
            if entry.layer in self._layers
            else "is unknown here"
        )
        self._once.warning(
            f"entry {entry.layer}", "plan entry %s %s is not applied: layer %s %s",
            entry.action, entry.target.key, entry.layer, what,
        )  # fmt: skip


def _with_entry(precision: LinearPrecision, entry: PlanEntry) -> LinearPrecision:
    """The precision with one deviation. Raises ValueError for what this client cannot do."""
    target = entry.target
    if entry.action == "bf16_fallback":
        if target.operand is not None:
            raise ValueError("bf16_fallback switches a gemm or a layer, not an operand")
        gemms = _GEMMS if target.gemm is None else (target.gemm,)
        fallen_back: dict[str, Any] = dict.fromkeys(gemms, "bf16")
        return replace(precision, **fallen_back)
    if entry.action not in _FORMAT_FIELD:
        raise ValueError(f"action {entry.action} is not supported by block-scaled layers")
    if target.gemm is not None:
        raise ValueError(f"{entry.action} changes an operand or a layer, not a gemm")
    # A layer has one format an operand, whatever the layout: both layouts change together.
    operands = _OPERANDS if target.operand is None else (target.operand,)
    changes = {_FORMAT_FIELD[entry.action]: entry.value}
    return replace(precision, **{name: replace(getattr(precision, name), **changes) for name in operands})
