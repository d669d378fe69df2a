"""attach() puts the monitor on a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import nn
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks.errors import OptionError
from fp8_safeguard.hooks.settings import RANK_TIMEOUT_SECONDS, resolve

if TYPE_CHECKING:
    from fp8_safeguard.hooks.coverage import Filter
    from fp8_safeguard.hooks.guard import Guard


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
    # Not before there is a model: what measures it is ten times what a process needs that only imports the hooks.
    from fp8_safeguard.hooks.assembly import assemble

    _check_types(model, optimizer, filter)
    options = resolve(
        server=server, token=token, run=run, attempt=attempt, group=group, groups=groups, every=every,
        recompute=recompute, overhead_budget=overhead_budget, mode=mode, thresholds=thresholds, spool_dir=spool_dir,
        shadow=shadow, rank_timeout=rank_timeout,
    )  # fmt: skip
    return assemble(model, optimizer, filter, options)


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
