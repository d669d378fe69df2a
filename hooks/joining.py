"""Joins this process to the ranks that report together with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import distributed_c10d

from fp8_safeguard.hooks.client import Client
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.emergency import Emergency
from fp8_safeguard.hooks.flags import AgreedFlags, Flags
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.merging import Layout
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.ranks import Ranks
from fp8_safeguard.hooks.sample import SampleBuilder
from fp8_safeguard.hooks.settings import Options


def join(
    options: Options,
    layers: list[ObservedLayer],
    builder: SampleBuilder,
    controls: Controls,
    on_reply: Callable[[Mapping[str, Any]], None],
    once: OnceLog,
    emergency: Emergency,
    *,
    rank: int,
    size: int,
) -> Ranks:
    """This process as one of the `size` ranks of the default group that report together; waits for none of them."""
    builder.flags = AgreedFlags(layers, options.thresholds, lambda: controls.step)
    if rank == 0:
        client = Client(options, builder, on_reply, once, emergency)
    else:
        client = Client(replace(options, server=None, spool_dir=None), builder, on_reply, once)
    _joined.append(rank)
    return Ranks(
        options, Layout(layers), builder, controls, client, Flags(layers, options.thresholds), once,
        rank=rank, size=size, store=_own_store(f"fp8-safeguard/{len(_joined)}", once),
        connect=lambda alone: Client(alone, builder, lambda reply: None, once),
    )  # fmt: skip


def _own_store(name: str, once: OnceLog) -> Any:
    """A connection of ours to the store, for the trainer's own waits hold theirs; None where there is none to be had.

    A dry run's store (backend `fake`) gives no second one, nor does one whose host has gone.
    """
    try:
        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(name, store.clone())
    except Exception as error:
        once.failure("connecting to the process group's store", error)
        return None


_joined: list[int] = []
"""One entry a group that this process has joined: on every rank the same number names the same one."""
