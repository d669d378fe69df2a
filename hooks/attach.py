"""attach() puts the monitor on a model; the Guard owns it."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks.capture import ForwardHook, LayerObserver, PassHook, hook_of
from fp8_safeguard.hooks.client import Client
from fp8_safeguard.hooks.clock import OptimizerHook, checked_step
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.coverage import CoverageRow, Filter, discover, report
from fp8_safeguard.hooks.errors import AlreadyAttachedError, OptionError
from fp8_safeguard.hooks.farewell import EXIT_SECONDS, Farewell
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.notices import tell_alerts
from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.sample import SampleBuilder
from fp8_safeguard.hooks.session import Session
from fp8_safeguard.hooks.settings import Options, resolve
from fp8_safeguard.hooks.values import Number, number
from fp8_safeguard.kernels import backend
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.wire import Attempt, sample_to_wire


def attach(
    model: nn.Module,
    *,
    server: str | None = None,
    token: str | None = None,
    run: str | None = None,
    attempt: str | None = None,
    group: str = "0",
    groups: int = 1,
    optimizer: Optimizer | None = None,
    every: int = 10,
    recompute: int = 1,
    overhead_budget: float | None = None,
    filter: Filter = lambda module, name: True,
    mode: str = "observe",
    thresholds: str = "floor",
    spool_dir: str | os.PathLike[str] | None = None,
) -> Guard:
    """Observe every linear layer of the model from now on.

    Samples are taken at the steps with step % every == 0. A background thread keeps each in a file of `spool_dir`
    and sends it to `server`; an outage, or the death of this process, loses none: the next start of the run sends
    what is left first. Without a server they stay in the files, until a guard of the same run and folder names one;
    with neither server nor folder the guard only keeps the last one.

    `server`, `token`, `spool_dir` and `run` default to FP8_SAFEGUARD_SERVER, _TOKEN, _SPOOL_DIR and _RUN; run and
    attempt to torchrun's or Slurm's job and restart count, else to a new id and "0"; with a server the folder to
    fp8-safeguard/spool in the user's state folder (XDG_STATE_HOME), an empty one keeps samples in memory only.
    Convert and wrap the model first, attach last. An `observer` of your own on one of our layers is paused until
    detach(). Raises OptionError and AlreadyAttachedError.
    """
    _check_types(model, optimizer, filter)
    options = resolve(
        server=server, token=token, run=run, attempt=attempt, group=group, groups=groups, every=every,
        recompute=recompute, overhead_budget=overhead_budget, mode=mode, thresholds=thresholds, spool_dir=spool_dir,
    )  # fmt: skip
    options = _reporting(options, own_group=groups > 1)
    _refuse_second(model)
    layers, left_out = discover(model, filter)
    _say_what_is_observed(model, layers)
    once = OnceLog()
    controls = Controls(layers, options.mode, once)
    builder = SampleBuilder(layers, options, once)

    def on_reply(reply: Mapping[str, Any]) -> None:
        controls.receive(reply.get("plan"))
        tell_alerts(reply.get("alerts"), options, once)

    client = Client(options, builder, on_reply, once)
    session = Session(
        model,
        layers,
        options,
        controls=controls,
        client=client,
        builder=builder,
        once=once,
        optimizer=optimizer,
    )
    if options.server is None:
        where = f"written to {options.spool_dir}" if options.spool_dir else "kept one at a time and not sent"
        logger.warning("no server: samples of run %s are %s", options.run, where)
    return Guard(model, session, left_out)


class Guard:
    """What attach() returns: the steps, the plan, and the way off the model."""

    def __init__(self, model: nn.Module, session: Session, left_out: list[CoverageRow]) -> None:
        self._session = session
        self._left_out = left_out
        self._handles = _install(session)
        self._clock = OptimizerHook(session.on_optimizer_step)
        # The session outlives this object where attach()'s result is thrown away, but not the model's hooks.
        keeps = session.options.server or session.options.spool_dir
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
        return self._session.options.run

    @property
    def plan(self) -> Plan:
        """What is applied now."""
        return self._session.controls.plan

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

    def step(self, n: int | None = None) -> None:
        """Step n has just ended (None: the next number).

        Needed with optimizers that are not torch.optim's, with steps that GradScaler skips, and to number steps as
        the trainer does. From the first call on steps end here and no longer at `optimizer.step()`.
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

        Tensors are copied on their device and read later. Statistics of gradients are divided by `loss_scale`;
        it is found by itself where a torch GradScaler steps the optimizer. Raises OptionError for what is no number.
        """
        given = {"loss": loss, "gradient_norm": gradient_norm, "learning_rate": learning_rate}
        given |= {"tokens": tokens, "loss_scale": loss_scale}
        self._session.notes().values.update({k: number(k, v) for k, v in given.items() if v is not None})

    def log_scalar(self, layer: str, name: str, value: Number) -> None:
        """A number of the trainer's own about one layer, such as a router's entropy. Raises OptionError."""
        for what, text in (("layer", layer), ("name", name)):
            if not isinstance(text, str) or (what == "name" and not text):
                raise OptionError(
                    f"{what} is {text!r}: give a text" + (", not empty" if what == "name" else "")
                )
        self._session.notes().scalars.append((layer, name, number(name, value)))

    def coverage(self) -> list[CoverageRow]:
        """What is observed and what is not, and why; after the first sample it says what was really seen."""
        model = self._session.model()
        session = self._session
        return [] if model is None else report(model, session.layers, self._left_out, session.samples)

    def last_sample(self) -> dict[str, Any] | None:
        """The last committed sample as the wire's JSON document; None before the first."""
        self._session.deliver()
        record = self._session.last
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
        return {
            "run": session.options.run,
            "attempt": session.options.attempt,
            "parent": session.builder.attempt.parent,
            "from_step": session.builder.attempt.from_step,
            "step": session.clock.step,
            "rotation": session.rotation,
            "sampler": session.sampler.generator.get_state(),
            **session.controls.state(),
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
        saved, mine = state.get("attempt"), session.options.attempt
        if saved is None or saved == mine:
            parent, from_step = state.get("parent"), int(state.get("from_step", 0))
            session.own_steps = None
        else:
            parent, from_step = saved, session.clock.step
            session.own_steps = 0
        session.builder.attempt = Attempt(id=mine, parent=parent, from_step=from_step)


def _forget(client: Client, farewell: Farewell | None) -> None:
    """What is left to do when a guard's session ends or is collected with its model."""
    client.abandon()
    if farewell is not None:
        farewell.cancel()


def _install(session: Session) -> list[Any]:
    """Hooks on every layer; the handles that take them off."""
    handles: list[Any] = []
    for layer in session.layers:
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


def _reporting(options: Options, *, own_group: bool) -> Options:
    """Ranks that share a group are not merged yet: the first one reports, and no rank ever waits for another."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    if rank == 0 or own_group:
        return options
    logger.info("rank %d measures only: rank 0 reports for the group", rank)
    return replace(options, server=None, spool_dir=None)


def _refuse_second(model: nn.Module) -> None:
    for name, module in model.named_modules():
        session = hook_of(module)
        if session is not None and session.active:
            raise AlreadyAttachedError(
                f"module {name or '(the model)'!r} is already observed for run {session.options.run!r}: "
                "call detach() on that guard first, or attach to the other model"
            )


def _check_types(model: nn.Module, optimizer: Optimizer | None, keep: Filter) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {model!r} ({type(model).__name__}): give a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise OptionError(
            f"optimizer is of type {kind}: give a torch.optim.Optimizer; with another kind leave it out and call step()"
        )
    if not callable(keep):
        raise OptionError(
            f"filter is {keep!r}: give a function of a module and its name that says True to observe"
        )


def _say_what_is_observed(model: nn.Module, layers: list[ObservedLayer]) -> None:
    if not layers:
        logger.warning(
            "no layer of %s is observed: neither nn.Linear, Fp8Linear, Fp8GroupedLinear nor a Conv1D of GPT-2's kind "
            "was found that the filter lets pass; Guard.coverage() lists what there is and why it is left out",
            type(model).__name__,
        )
    elif backend() == "numba" and any(
        weight.device.type == "cpu" for layer in layers for weight in layer.trainable()
    ):
        logger.info("the CPU kernels are compiled in the first sampled step: it takes some seconds longer")
