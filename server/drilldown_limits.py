"""What a layer's slots are judged by, and what is beyond it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.levels import Healthy
from fp8_safeguard.monitor.metrics import worst
from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.monitor.signals import EXPERT_MIN_COUNT, HISTORY_METRICS
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import (
    Threshold,
    act_level,
    get_preset,
    thresholds_for,
    watch_level,
)
from fp8_safeguard.server.branch import live_branch
from fp8_safeguard.server.policystore import load_state
from fp8_safeguard.server.tables import attempts

Medians = Mapping[str, float]
"""Own medians of a slot by metric."""


def limits_of(
    preset: str, slot: Slot, metric: str, median: float | None = None, learned: Baseline | None = None
) -> list[dict[str, Any]]:
    """The levels in force for a slot: value, severity, origin (a sentence) and source (a few words for the line).

    learned: the baseline that the run is judged by.
    """
    fixed = thresholds_for(preset, slot, metric)
    plain = median is None and learned is None
    lines = fixed if plain else thresholds_for(preset, slot, metric, median=median, baseline=learned)
    return [
        {**line, "source": preset if line in fixed else _source(preset, slot, line, median, learned)}
        for line in lines
    ]


def _source(
    preset: str, slot: Slot, line: Mapping[str, Any], median: float | None, learned: Baseline | None
) -> str:
    """Which part of a rule that knows the slot's own median decided."""
    if learned is not None and line["origin"] == learned.origin:
        return f"learned from {learned.run}"
    severity: Literal["watch", "act"] = "watch" if line["severity"] == "watch" else "act"
    for rule in get_preset(preset).matching(slot):
        fixed = rule.level(severity, slot.fmt)
        factor = rule.watch_over_median if severity == "watch" else rule.act_over_median
        if fixed is not None and math.isclose(line["value"], fixed):
            return preset
        if factor is not None and median is not None and math.isclose(line["value"], factor * median):
            return f"own median ×{factor:g}"
    return f"twice {preset}, the cap on own median"


def breaches_of(
    preset: str, slot: Slot, metrics: Mapping[str, Any], medians: Medians, learned: Baseline | None = None
) -> dict[str, str]:
    """The metrics that are beyond a level now, as the policy judges one sample, with the severity."""
    found: dict[str, str] = {}
    for rule in get_preset(preset).matching(slot):
        healthy = None if learned is None else learned.healthy(slot, rule.metric)
        severity = _severity(rule, slot, metrics, medians.get(rule.metric), healthy)
        names = (rule.metric, "cosine_distortion") if rule.metric == "cosine" else (rule.metric,)
        for name in names if severity is not None else ():
            found[name] = "act" if found.get(name) == "act" else str(severity)
    return found


def _severity(
    rule: Threshold, slot: Slot, metrics: Mapping[str, Any], median: float | None, healthy: Healthy | None
) -> str | None:
    value = decode_number(metrics.get(rule.metric))
    fewest = max(rule.min_count, EXPERT_MIN_COUNT if slot.expert is not None else 0)
    if value is None or (metrics.get("count") or 0) < fewest:
        return None
    if rule.min_underflow > (metrics.get("underflow") or 0):
        return None
    usable = median if median is not None and median > 0 else None
    levels = (
        ("act", act_level(rule, slot.fmt, usable, healthy)),
        ("watch", watch_level(rule, slot.fmt, usable, healthy)),
    )
    for severity, level in levels:
        if level is not None and (value > level if rule.above else value < level):
            return severity
    return None


def own_medians(conn: Connection, row: Row[Any], slots: Sequence[Slot]) -> dict[str, Medians]:
    """What the policy remembers as each slot's own median, by slot key and metric."""
    newest = live_branch(conn, row.id)[:1]
    if not newest or not slots:
        return {}
    attempt = conn.execute(select(attempts).where(attempts.c.id == newest[0].attempt_id)).one()
    if attempt.policy_state is None:
        return {}
    table = load_state(row, attempt).history.medians([slot.key for slot in slots])
    found: dict[str, Medians] = {}
    for slot, values in zip(slots, table.tolist(), strict=True):
        names = HISTORY_METRICS["operand" if slot.gemm is None else "gemm"]
        kept = zip(names, values, strict=True)
        found[slot.key] = {name: value for name, value in kept if not np.isnan(value)}
    return found


def worst_reading(
    preset: str, slots: Sequence[tuple[Slot, Mapping[str, Any]]], learned: Baseline | None = None
) -> dict[str, Any] | None:
    """The value that is farthest over its fixed or learned limit, or nearest to it, as the list of layers ranks them.

    `slots` are a layer's slots with what was read of them, `step` and `metrics`.
    """
    found: tuple[float, dict[str, Any]] | None = None
    for metric in slots[0][1]["metrics"] if slots else ():
        for slot, reading in slots:
            value = decode_number(reading["metrics"][metric])
            lines = limits_of(preset, slot, metric, learned=learned)
            if value is None or not lines:
                continue
            first = (max if worst(metric) == "min" else min)(lines, key=lambda line: float(line["value"]))
            excess = _excess(metric, value, float(first["value"]))
            if found is None or excess > found[0]:
                found = (
                    excess,
                    {
                        "metric": metric,
                        "operand": slot.operand,
                        "layout": slot.layout,
                        "gemm": slot.gemm,
                        "value": reading["metrics"][metric],
                        "threshold": first["value"],
                        "step": reading["step"],
                        **_passed(metric, value, lines, first),
                    },
                )
    return None if found is None else found[1]


def _passed(
    metric: str, value: float, lines: Sequence[Mapping[str, Any]], first: Mapping[str, Any]
) -> dict[str, Any]:
    """The farthest level that the value is beyond, or the first one where it is beyond none."""
    beyond = [line for line in lines if _excess(metric, value, float(line["value"])) > 1]
    shown = next((line for line in beyond if line["severity"] == "act"), first)
    names = ("severity", "origin", "source")
    return {"limit": shown["value"], "beyond": bool(beyond), **{name: shown[name] for name in names}}


def _excess(metric: str, value: float, limit: float) -> float:
    """Value over limit, the inverse where lower is worse: 1 is at the limit."""
    if math.isnan(value):
        return math.inf
    above, below = (limit, value) if worst(metric) == "min" else (value, limit)
    return above / below if below > 0 else (math.inf if above > 0 else 0.0)
