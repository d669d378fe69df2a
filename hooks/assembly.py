"""Puts a guard together, from the layers of a model to who sends their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks import compiled, functional
from fp8_safeguard.hooks.capture import ForwardHook, PassHook, hook_of
from fp8_safeguard.hooks.client import Client
from fp8_safeguard.hooks.clock import OptimizerHook
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.coverage import Coverage, Filter, discover
from fp8_safeguard.hooks.emergency import Emergency
from fp8_safeguard.hooks.errors import AlreadyAttachedError
from fp8_safeguard.hooks.guard import Guard
from fp8_safeguard.hooks.layers import ObservedLayer, rows_of
from fp8_safeguard.hooks.notices import tell_alerts
from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.sample import SampleBuilder
from fp8_safeguard.hooks.session import Session
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.kernels import backend

if TYPE_CHECKING:
    from fp8_safeguard.hooks.ranks import Ranks


def assemble(model: nn.Module, optimizer: Optimizer | None, keep: Filter, options: Options) -> Guard:
    """The guard that `attach` gives, with its hooks on the model. Raises AlreadyAttachedError and HookError."""
    model = compiled.unwrapped(model)
    rank, size = _place_in_group(own_group=options.groups > 1)
    _refuse_second(model)
    compiled.prepare(ForwardHook, PassHook, OptimizerHook)
    layers, left_out = discover(model, keep)
    functional_layers, refused = functional.find(model, layers, keep, rows_of(layers))
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
