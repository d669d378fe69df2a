"""attach() puts the monitor on a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks import compiled
from fp8_safeguard.hooks.capture import ForwardHook, PassHook, hook_of
from fp8_safeguard.hooks.clock import OptimizerHook
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.coverage import Coverage, Filter, discover
from fp8_safeguard.hooks.errors import AlreadyAttachedError, OptionError
from fp8_safeguard.hooks.guard import Guard
from fp8_safeguard.hooks.layers import ObservedLayer, rows_of
from fp8_safeguard.hooks.notices import tell_alerts
from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.sample import SampleBuilder
from fp8_safeguard.hooks.session import Session
from fp8_safeguard.hooks.settings import RANK_TIMEOUT_SECONDS, resolve
from fp8_safeguard.kernels import backend

if TYPE_CHECKING:
    from fp8_safeguard.hooks.ranks import Ranks


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
    shadow: bool = False,
    rank_timeout: float = RANK_TIMEOUT_SECONDS,
) -> Guard:
    """Observe every linear layer of the model from now on.

    Samples are taken at the steps with step % every == 0. A background thread keeps each in a file of `spool_dir`
    and sends it to `server`; an outage, or the death of this process, loses none: the next start of the run sends
    what is left first. Without a server they stay in the files, until a guard of the same run and folder names one;
    with neither server nor folder the guard only keeps the last one.

    `server`, `token`, `spool_dir` and `run` default to FP8_SAFEGUARD_SERVER, _TOKEN, _SPOOL_DIR and _RUN; run and
    attempt to torchrun's or Slurm's job and restart count, else to a new id and "0"; with a server the folder to
    fp8-safeguard/spool in the user's state folder (XDG_STATE_HOME), an empty one keeps samples in memory only.
    `overhead_budget` is the largest share of the training time that this may take, 0.01 for one percent: from what it
    takes on the run itself it decides how many of those steps are sampled, how many layers are measured in full each
    time and in tiles otherwise; `Guard.sampling_plan` and every sample say what that buys.
    `shadow` measures on a BF16 run what FP8 would do to the forward too, so that `report` can tell which layers are
    ready for it.
    Under torch.distributed the ranks report together, as one process with all their batches: attach() belongs on every
    rank, and so do detach(), state_dict() and load_state_dict(). Rank 0 sends, and a plan takes effect at the same step
    on all of them. Where they do not hear each other for `rank_timeout` seconds each goes on by itself. Ranks that
    measure different layers (pipeline, experts) take a `group` each, and `groups` for their number.
    Convert and wrap the model first, attach last, but before the first call of a compiled model: later, it compiles
    again. An `observer` of your own on one of our layers is paused until detach(). Raises OptionError,
    AlreadyAttachedError, and HookError where compiling again is forbidden.
    """
    # Not before there is a model: they would be a fifth of what importing the hooks loads.
    from fp8_safeguard.hooks import functional
    from fp8_safeguard.hooks.client import Client
    from fp8_safeguard.hooks.emergency import Emergency

    _check_types(model, optimizer, filter)
    model = compiled.unwrapped(model)
    options = resolve(
        server=server, token=token, run=run, attempt=attempt, group=group, groups=groups, every=every,
        recompute=recompute, overhead_budget=overhead_budget, mode=mode, thresholds=thresholds, spool_dir=spool_dir,
        shadow=shadow, rank_timeout=rank_timeout,
    )  # fmt: skip
    rank, size = _place_in_group(own_group=groups > 1)
    _refuse_second(model)
    compiled.prepare(ForwardHook, PassHook, OptimizerHook)
    layers, left_out = discover(model, filter)
    functional_layers, refused = functional.find(model, layers, filter, rows_of(layers))
    layers, left_out = functional.in_order(model, layers + functional_layers), left_out + refused
    _say_what_is_observed(model, layers)
    once = OnceLog()
    controls = Controls(layers, options.mode, once)
    builder = SampleBuilder(layers, options, once)
    emergency = Emergency(options, controls, once)

    def on_reply(reply: Mapping[str, Any]) -> None:
        if emergency.hear(reply):
            controls.receive(reply.get("plan"))
        tell_alerts(reply.get("alerts"), options, once)
        builder.flags.hear(reply)

    client: Client | Ranks
    if size == 1:
        client = Client(options, builder, on_reply, once, emergency)
    else:
        from fp8_safeguard.hooks.joining import join

        client = join(options, layers, builder, controls, on_reply, once, emergency, rank=rank, size=size)
    session = Session(
        model,
        layers,
        options,
        controls=controls,
        client=client,
        builder=builder,
        once=once,
        optimizer=optimizer,
        coverage=Coverage(model, layers, left_out, once),
    )
    if options.server is None and rank == 0:
        where = f"written to {options.spool_dir}" if options.spool_dir else "kept one at a time and not sent"
        logger.warning("no server: samples of run %s are %s", options.run, where)
    return Guard(session)


def _place_in_group(*, own_group: bool) -> tuple[int, int]:
    """Rank and number of those that report together with this process."""
    if own_group or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


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
