"""Tells the trainer's own log what the server and the hooks have noticed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.monitor.nonfinite import WGRAD_NORM
from fp8_safeguard.monitor.wire import Sample

if TYPE_CHECKING:
    from fp8_safeguard.hooks.clock import Clock
    from fp8_safeguard.hooks.sample import StepRecord

TRAINER, DISCARDED = "trainer", "discarded_iterations"
"""Layer name of scalars about the training loop itself, and one of them: iterations since the last sample whose
gradients were cleared though no optimizer step had used them."""
_WAY_OUT = "call guard.step(step) in every iteration, with or without optimizer.step(), and each is a step of its own"


def tell_alerts(alerts: Any, options: Options, once: OnceLog) -> None:
    """One line for each alert that a reply brings, and one more when it becomes severe: act is a warning, watch is INFO."""
    if not isinstance(alerts, Sequence):
        return
    for alert in alerts:
        if not isinstance(alert, Mapping):
            continue
        kind = f"alert {alert.get('id')} {alert.get('severity')}"
        once.counts[kind] = once.counts.get(kind, 0) + 1
        if once.counts[kind] == 1:
            level = logging.WARNING if alert.get("severity") == "act" else logging.INFO
            logger.log(
                level, "alert (%s): %s in %s since step %s; see %s/runs/%s",
                alert.get("severity"), alert.get("rule"), _place(alert), alert.get("first_step"),
                options.address, options.run,
            )  # fmt: skip


def tell_skipped(record: StepRecord | None, once: OnceLog) -> None:
    """A trainer has discarded gradients, and something in the step was not finite: it skips iterations by itself.

    Where the loss is scaled that is the scaler's ordinary business. Nothing is said of a sample not yet built.
    """
    sample = None if record is None else record.sample
    if sample is None or not sample.scalars or sample.scalars[-1]["name"] != DISCARDED:
        return
    if sample.run.get("loss_scale", 1.0) == 1.0 and _is_nonfinite(sample):
        once.warning(
            "skipped",
            "step %d: an iteration that was not finite was skipped without optimizer.step(); it is reported with the "
            "next one, and the trainer's step numbers run ahead of ours: %s",
            sample.step,
            _WAY_OUT,
        )


def tell_endless(once: OnceLog) -> None:
    """No optimizer step comes any more."""
    once.warning(
        "skipped",
        "no optimizer step is seen any more, though gradients come and are cleared: until there is one each iteration counts "
        "as a step; to have them numbered as the trainer does %s",
        _WAY_OUT,
    )


def tell_no_forward(clock: Clock, once: OnceLog) -> None:
    """Our optimizer stepped without a forward: the second one of a step, or one that nobody could see."""
    if not clock.ended_by_optimizer and not clock.manual:
        once.warning(
            "no forward",
            "an optimizer step without a forward of any observed layer: a graph compiled or captured before "
            "attach(), or layers called past their modules, hide it; nothing is measured in such steps",
        )


def tell_replays(once: OnceLog) -> None:
    """A CUDA graph is being captured: the hooks run now, and not when it is played back."""
    once.warning(
        "cuda graph",
        "a CUDA graph is captured with observed layers in it: its replays are not measured; with "
        'torch.compile(mode="reduce-overhead") they are, with another capture run the sampled steps without it',
    )


def _is_nonfinite(sample: Sample) -> bool:
    """Whether anything that was measured of the step, or its loss, is no number."""
    counts = (sample.columns[name][~sample.nulls[name]] for name in ("nan", "inf"))
    told = [*sample.run.values(), *(each["value"] for each in sample.scalars if each["name"] == WGRAD_NORM)]
    return any(bool((count > 0).any()) for count in counts) or not all(map(math.isfinite, told))


def _place(alert: Mapping[str, Any]) -> str:
    """The layer and the slot, in words."""
    layer, slot = alert.get("layer"), alert.get("slot")
    if layer is None:
        return "the run"
    parts = slot if isinstance(slot, Mapping) else {}
    words = [str(parts[name]) for name in ("operand", "layout", "gemm") if parts.get(name)]
    return f"layer {layer!r}" + (f" ({' '.join(words)})" if words else "")
