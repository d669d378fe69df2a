"""Tells the trainer's own log what the server has noticed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.settings import Options


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


def _place(alert: Mapping[str, Any]) -> str:
    """The layer and the slot, in words."""
    layer, slot = alert.get("layer"), alert.get("slot")
    if layer is None:
        return "the run"
    parts = slot if isinstance(slot, Mapping) else {}
    words = [str(parts[name]) for name in ("operand", "layout", "gemm") if parts.get(name)]
    return f"layer {layer!r}" + (f" ({' '.join(words)})" if words else "")
