"""The Guard owns the monitor on a model, its steps and plan."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fp8_safeguard.hooks.aside import aside
from fp8_safeguard.hooks.capture import ForwardHook, LayerObserver, PassHook
from fp8_safeguard.hooks.clock import OptimizerHook, checked_step
from fp8_safeguard.hooks.coverage import CoverageRow
from fp8_safeguard.hooks.errors import OptionError
from fp8_safeguard.hooks.farewell import EXIT_SECONDS, Farewell
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.session import Session
from fp8_safeguard.hooks.values import Number, number
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.wire import Attempt, sample_to_wire

if TYPE_CHECKING:
    from fp8_safeguard.hooks.client import Client
    from fp8_safeguard.hooks.ranks import Ranks


_LASTING = frozenset({"loss", "gradient_norm"})
"""Values that are measured: one that is no number is news, whatever comes after it."""
STATE_SECONDS = 2.0
"""Longest that a state waits for the other ranks' word on the last step."""


class Guard:
    """What attach() returns: the steps, the plan, and the way off the model."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles = _install(session)
        self._clock = OptimizerHook(session.on_optimizer_step, session.on_inner_step)
        # The session outlives this object where attach()'s result is thrown away, but not the model's hooks.
        keeps = session.options.server or session.options.spool_dir or session.controls.ranks
        self._farewell = Farewell(session) if keeps else None
        self._gone = weakref.finalize(session, _forget, session.client, self._farewell)
        self._gone.atexit = False

    def __repr__(self) -> str:
        session = self._session
        options, client = session.options, session.client
        state = "" if session.active else "detached, "
        return (
            f"<Guard of run {options.run!r}, attempt {options.attempt!r}: {state}{len(session.layers)} layers, "
            f"next step {session.clock.step}, {session.samples} samples, {client.waiting} waiting, "
            f"server {options.address}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach(finished=kind is None)

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._session.builder.options.run

    @property
    def plan(self) -> Plan:
        """What is applied now."""
        return self._session.controls.plan

    def carries_out(self, *actions: str) -> None:
        """Say that the trainer does what these actions of a plan ask for, reading `plan.entries`: they are none of ours."""
        self._session.controls.elsewhere |= frozenset(actions)

    @property
    def sampling(self) -> bool:
        """Whether the step in progress, or the next one between two steps, is due to be sampled."""
        return self._session.due()

    @property
    def delivered(self) -> int:
        """Samples of this attempt that the server has taken so far."""
        return self._session.client.delivered

    @property
    def spent_seconds(self) -> float:
        """Time spent inside our own code on the training thread since attach()."""
        return self._session.spent_seconds

    @property
    def sampling_plan(self) -> dict[str, Any]:
        """What the overhead budget makes of the sampling now, and what coverage that buys.

        `budget` (None: no limit), `every` (steps from sample to sample), `overhead_ratio` (our share of
        the time so far, ours and the training's, without the first three steps; None until eight have passed), `layers_per_sample` of
        `layers` (measured in full, in turn), `judged_per_sample` (whose GEMMs are recomputed), `tile_stride` (of the
        other layers one tile in so many is read; 1: all are measured in full), `full_coverage_steps` (in so many steps
        each layer is measured in full), `idle_step_seconds` (our time in a step that is not sampled), `hook_seconds`
        (what one hook takes there, which no account contains), `device_seconds` (of a GPU; an upper bound).
        """
        with self._session.lock:
            return self._session.accounts.plan()

    def step(self, n: int | None = None) -> None:
        """Step n has just ended (None: the next number).

        Needed with optimizers that are not torch.optim's, with steps that GradScaler or the trainer skips, and to number
        steps as the trainer does. From the first call on steps end here and no longer at `optimizer.step()`.
        """
        self._session.step(checked_step(n))

    def log(
        self,
        *,
        loss: Number | None = None,
        gradient_norm: Number | None = None,
        learning_rate: Number | None = None,
        tokens: Number | None = None,
        loss_scale: Number | None = None,
    ) -> None:
        """Values of the step in progress, or of the one just ended if the next has not begun.

        Of several values in one step the last counts, but a loss or norm that is not finite stays: a trainer that skips
        iterations by itself goes on to the next in the same step. Tensors are copied on their device and read later. Statistics of gradients are divided by `loss_scale`;
        it is found by itself where a torch GradScaler steps the optimizer. Raises OptionError for what is no number.
        """
        given = {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}
        given |= {"tokens": tokens, "loss_scale": loss_scale}
        values = {k: number(k, v) for k, v in given.items() if v is not None}
        with self._session.lock:
            noted = self._session.notes().values
            for name, value in values.items():
                before = noted.get(name) if name in _LASTING else None
                noted[name] = value if before is None else _lasting(before, value)

    def log_scalar(self, layer: str, name: str, value: Number) -> None:
        """A number of the trainer's own about one layer, such as a router's entropy. Raises OptionError."""
        for what, text in (("layer", layer), ("name", name)):
            if not isinstance(text, str) or (what == "name" and not text):
                raise OptionError(
                    f"{what} is {text!r}: give a text" + (", not empty" if what == "name" else "")
                )
        scalar = (layer, name, number(name, value))
        with self._session.lock:
            self._session.notes().scalars.append(scalar)

    def coverage(self) -> list[CoverageRow]:
        """What is observed and what is not, and why; after the first sample it says what was really seen."""
        return self._session.coverage.rows(self._session.samples)

    def last_sample(self) -> dict[str, Any] | None:
        """The last committed sample as the wire's JSON document; None before the first.

        Of several ranks that report together it is the last one that all of them have added to.
        """
        self._session.deliver()
        ranks = self._session.controls.ranks
        record = ranks.newest if ranks is not None and ranks.together else self._session.last
        return None if record is None else sample_to_wire(self._session.builder.build(record), binary=False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing inside the block; steps are still counted."""
        self._session.paused += 1
        try:
            yield
        finally:
            self._session.paused -= 1

    def flush(self, timeout: float = EXIT_SECONDS) -> bool:
        """Wait until every sample has arrived and its reply is handled; False if `timeout` seconds were too few."""
        return self._session.flush(timeout)

    def detach(self, timeout: float = EXIT_SECONDS, *, finished: bool = True) -> None:
        """Flush, then remove every trace from the model, the optimizer and the process. Twice is once.

        The server is told that the run has ended, unless it is not `finished`, an exception is on its way, or SIGTERM
        has come.
        """
        session, self._handles, handles = self._session, [], self._handles
        if not session.active:
            return
        stopped = self._farewell is not None and self._farewell.signalled
        session.finish(timeout, clean=finished and sys.exc_info()[0] is None and not stopped)
        for handle in handles:
            handle.remove()
        self._clock.remove()
        for layer in session.layers:
            _remove_observer(layer, session)
        session.close()
        self._gone()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the step, the rotation, the row sampler, the plan in force and one that waits."""
        session = self._session
        session.deliver()
        if session.controls.ranks is not None:
            # A plan announced with the last step is part of every rank's state, or of none's.
            session.controls.ranks.catch_up(STATE_SECONDS)
        return {
            "run": self.run,
            "attempt": session.builder.attempt.id,
            "parent": session.builder.attempt.parent,
            "from_step": session.builder.attempt.from_step,
            "step": session.clock.step,
            "rotation": session.rotation,
            "sampler": session.sampler.generator.get_state(),
            **session.controls.state(),
            "local_decisions": [] if session.client.emergency is None else session.client.emergency.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where that state was taken; another attempt id than the saved one becomes its child.

        The child's `from_step` is the first step that it produces itself: its parent's steps below it are shared.
        """
        session = self._session
        if "step" not in state or "plan" not in state:
            raise OptionError(f"state has the keys {sorted(state)}: pass what Guard.state_dict() returned")
        session.deliver()
        session.clock.step = checked_step(state["step"]) or 0
        session.rotation = int(state.get("rotation", 0))
        if "sampler" in state:
            session.sampler.generator.set_state(state["sampler"])
        session.controls.load(state, session.clock.step)
        if session.client.emergency is not None:
            session.client.emergency.load(state.get("local_decisions", ()))
        saved, mine = state.get("attempt"), session.builder.attempt.id
        if saved is None or saved == mine:
            parent, from_step = state.get("parent"), int(state.get("from_step", 0))
            session.own_steps = None
        else:
            parent, from_step = saved, session.clock.step
            session.own_steps = 0
        session.builder.attempt = Attempt(id=mine, parent=parent, from_step=from_step)


def _lasting(before: Number, value: Number) -> Number:
    """The new value, unless the one before is not finite: of a tensor that is decided on its device."""
    if not isinstance(before, Tensor):
        return value if math.isfinite(before) else before
    with aside():
        if isinstance(value, Tensor):
            later = value.to(before.device, non_blocking=True).reshape(before.shape)
        else:
            later = torch.full_like(before, value, dtype=torch.float64)
        return torch.where(before.isfinite(), later, before)


def _forget(client: Client | Ranks, farewell: Farewell | None) -> None:
    """What is left to do when a guard's session ends or is collected with its model."""
    client.abandon()
    if farewell is not None:
        farewell.cancel()


def _install(session: Session) -> list[Any]:
    """Hooks on every layer; the handles that take them off."""
    from fp8_safeguard.hooks import functional

    handles = functional.install(session, [layer for layer in session.layers if layer.functional])
    for layer in session.layers:
        if layer.functional:
            continue
        module, fp8_module = layer.module(), layer.fp8_module()
        if fp8_module is not None:
            observer = LayerObserver(session, layer)
            if fp8_module.observer is not None and not isinstance(fp8_module.observer, LayerObserver):
                observer.paused = fp8_module.observer
                session.once.warning(
                    "observer", "layer %s has an observer of its own: it is paused until detach()", layer.name
                )
            fp8_module.observer = observer
            pass_hook = PassHook(session, layer, observer)
            handles.append(fp8_module.register_forward_pre_hook(pass_hook, prepend=True))
        elif module is not None:
            hook = ForwardHook(session, layer)
            handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
    return handles


def _remove_observer(layer: ObservedLayer, session: Session) -> None:
    module = layer.fp8_module()
    if (
        module is not None
        and isinstance(module.observer, LayerObserver)
        and module.observer.session is session
    ):
        module.observer = module.observer.paused
