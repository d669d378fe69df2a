"""Applies the server's plan to our layers, at step boundaries only."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.kernels import LinearPrecision
from fp8_safeguard.monitor.plan import Plan, PlanEntry, PlanError

if TYPE_CHECKING:
    from fp8_safeguard.hooks.ranks import Ranks

_GEMMS = ("fprop", "dgrad", "wgrad")
_OPERANDS = ("x", "w", "dy")
_FORMAT_FIELD = {
    "scale_multiplier": "multiplier",
    "scale_rounding": "scale",
    "format": "fmt",
    "amax_history": "amax_history",
    "margin": "margin",
}
_SCALINGS = {"amax_history": ("delayed",), "margin": ("delayed", "tensor")}
"""Actions for operands with these scalings alone: block scales follow their own amax."""
_UNITS = {"amax_history": "steps", "margin": "octaves"}
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
        self._given = dict(self._configured)
        """What each layer was last seen with or given: anything else on it is the user's doing."""
        self._observe_only = mode == "observe"
        self._once = once
        self._lock = threading.Lock()
        self._waiting: tuple[Plan, int] | None = None
        self._completed = -1
        self._timed: set[int] = set()
        """Steps at which an entry of the plan begins or expires."""
        self.elsewhere: frozenset[str] = frozenset()
        """Actions that the trainer carries out itself."""
        self.ranks: Ranks | None = None
        """The other ranks, where several take up a plan together."""

    @property
    def step(self) -> int:
        """The step in progress, or the next one."""
        return self._completed + 1

    @property
    def switchable(self) -> frozenset[str]:
        """Names of the layers that a plan can change."""
        return frozenset(self._configured)

    @property
    def newest(self) -> Plan:
        """The plan in force, or the one that waits for its step."""
        with self._lock:
            known = self.plan if self._waiting is None else self._waiting[0]
        proposed = None if self.ranks is None else self.ranks.proposed
        return known if proposed is None or proposed.version <= known.version else proposed

    def receive(self, wire: Any) -> bool:
        """A reply's plan (None: nothing newer). Called on the sender's thread; only takes note, never raises.

        Whether it is going to take effect: with the step after the next, with several ranks once all have heard it.
        """
        if wire is None or self._observe_only:
            return False
        try:
            plan = self._readable(wire)
            if plan.version <= self.newest.version:
                return False
            if self.ranks is not None:
                return self.ranks.propose(plan)
            with self._lock:
                self._waiting = (plan, self._completed + STEPS_AHEAD)
            return True
        except Exception as error:
            self._once.failure("a reply of the server", error)
            return False

    def agree(self, wire: Any, first_step: int, *, repairs: bool) -> None:
        """All ranks have heard this plan: it takes effect with that step. `repairs`: whatever this rank has now."""
        if self._observe_only:
            return
        plan = self._readable(wire)
        with self._lock:
            newest = self.plan if self._waiting is None else self._waiting[0]
            if repairs or plan.version > newest.version:
                self._waiting = (plan, first_step)

    def at_boundary(self, next_step: int) -> None:
        """Between two steps: let a waiting plan, or an entry whose time has come, take effect."""
        if self.ranks is not None:
            self.ranks.await_rounds()
        self._begin(next_step)
        if self.ranks is not None:
            self.ranks.open(next_step - 1, self.plan.version, self.effective_step)

    def _begin(self, next_step: int) -> None:
        with self._lock:
            self._completed = next_step - 1
            due = self._waiting is not None and next_step >= self._waiting[1]
            if due and self._waiting is not None:
                self._take_up(self._waiting[0], next_step, next_step)
                self._waiting = None
        if due or (self._timed and min(self._timed) <= next_step):
            self._timed = {step for step in self._timed if step > next_step}
            self._apply(next_step)

    def after_fork_in_child(self) -> None:
        """The lock may be held for ever by a thread that is not here."""
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Give every layer that a plan has changed the precision that it was configured with."""
        self._keep_changes()
        for name, precision in self._configured.items():
            self._set(name, precision)

    def _take_up(self, plan: Plan, effective_step: int | None, next_step: int) -> None:
        self.plan, self.effective_step = plan, effective_step
        self._timed = {
            step
            for entry in plan.entries
            for step in (entry.not_before_step, entry.expires_step)
            if step is not None and step > next_step
        }

    def state(self) -> dict[str, Any]:
        """The plan in force and the one that waits for its step, for a checkpoint."""
        with self._lock:
            waiting = None
            if self._waiting is not None:
                waiting = {"plan": self._waiting[0].to_wire(), "effective_step": self._waiting[1]}
            return {
                "plan": self.plan.to_wire(),
                "effective_step": self.effective_step,
                "waiting_plan": waiting,
            }

    def load(self, state: Mapping[str, Any], next_step: int) -> None:
        """Take up the plan of a checkpoint, and the one that waited: it takes effect with the step that it would have."""
        if self._observe_only:
            if self.ranks is not None:
                self.ranks.rewind()
            return
        plan, waiting = self._readable(state["plan"]), state.get("waiting_plan")
        later = None
        if waiting is not None:
            later = (self._readable(waiting["plan"]), int(waiting["effective_step"]))
        if self.ranks is not None:
            self.ranks.rewind()
        with self._lock:
            self._take_up(plan, state.get("effective_step"), next_step)
            self._waiting = later
        self._apply(next_step)
        self._begin(next_step)

    def _readable(self, wire: Any) -> Plan:
        """The plan without the entries that cannot be read. Raises PlanError where it is no plan at all."""
        items = wire.get("entries") if isinstance(wire, Mapping) else None
        whole = Plan.from_wire({**wire, "entries": ()} if isinstance(items, list | tuple) else wire)
        entries: list[PlanEntry] = []
        for item in items or ():
            try:
                entries.append(_checked_steps(PlanEntry.from_wire(item)))
            except Exception as error:
                self._once.warning(f"entry {item}", "plan entry %s is not applied: %s", item, error)
        return replace(whole, entries=tuple(entries))

    def _apply(self, step: int) -> None:
        self._keep_changes()
        wanted = dict(self._configured)
        for entry in self.plan.entries:
            expired = entry.expires_step is not None and step >= entry.expires_step
            if step < entry.not_before_step or expired or entry.action in self.elsewhere:
                continue
            # Whatever one entry is, the others have to be applied and the training has to go on.
            try:
                if entry.layer in wanted:
                    wanted[entry.layer] = _with_entry(wanted[entry.layer], entry)
                else:
                    self._refuse(entry)
            except Exception as error:
                self._once.warning(
                    f"entry {entry.place}", "plan entry %s is not applied: %s", entry.place, error
                )
        for name, precision in wanted.items():
            self._set(name, precision)

    def _keep_changes(self) -> None:
        """A precision that somebody else has set since is the one that the layer is configured with now."""
        for name, given in self._given.items():
            module = self._layers[name].fp8_module()
            if module is not None and module.precision != given:
                self._configured[name] = self._given[name] = module.precision

    def _set(self, name: str, precision: LinearPrecision) -> None:
        module = self._layers[name].fp8_module()
        if module is not None and module.precision != precision:
            module.precision = self._given[name] = precision

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


def _checked_steps(entry: PlanEntry) -> PlanEntry:
    """The entry, if its steps can be compared with one. Raises PlanError."""
    for step in (entry.not_before_step, *(() if entry.expires_step is None else (entry.expires_step,))):
        if isinstance(step, bool) or not isinstance(step, int):
            raise PlanError(f"step is {step!r}: not_before_step and expires_step are whole numbers")
    return entry


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
        raise ValueError(f"action {entry.action} is not supported by FP8 layers")
    # A layer has one format an operand, whatever the layout: both layouts change together.
    operands: tuple[str, ...] = _OPERANDS if target.operand is None else (target.operand,)
    changes: dict[str, Any] = {_FORMAT_FIELD[entry.action]: entry.value}
    if entry.action in _SCALINGS:
        operands = _with_scaling(precision, operands, entry)
        changes = {_FORMAT_FIELD[entry.action]: _whole(entry)}
    if target.gemm is not None:
        raise ValueError(f"{entry.action} changes an operand or a layer, not a gemm")
    return replace(precision, **{name: replace(getattr(precision, name), **changes) for name in operands})


def _with_scaling(precision: LinearPrecision, operands: tuple[str, ...], entry: PlanEntry) -> tuple[str, ...]:
    """Those of the operands that the action means something to. Raises ValueError where it is none."""
    wanted = _SCALINGS[entry.action]
    found = tuple(name for name in operands if getattr(precision, name).scaling in wanted)
    if not found:
        has = ", ".join(f"{name} {getattr(precision, name).scaling!r}" for name in operands)
        raise ValueError(
            f"{entry.action} is not supported by these scalings ({has}): it needs {' or '.join(map(repr, wanted))}; "
            "scale_multiplier is for all"
        )
    return found


def _whole(entry: PlanEntry) -> int:
    """The value as the whole number that it has to be."""
    value = entry.value
    if not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{entry.action} is {value!r}: it takes a whole number of {_UNITS[entry.action]}")
    return int(value)
