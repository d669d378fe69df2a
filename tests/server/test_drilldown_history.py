"""Precision history of a layer from its decisions, against a replay."""

import json
from typing import Any

import numpy as np

from fp8_safeguard.server.drilldown import in_force_spans, precision_history


def decision(number: int, action: str, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"r-{number}", "action": action, "value": None, "target": {"gemm": "dgrad"}, "state": "applied",
        "effective_step": step, "plan_version": number, "reason": "why", "actor": "policy", **changes,
    }  # fmt: skip


def history_of(decisions: list[dict[str, Any]], now: dict[str, str] | None = None) -> list[tuple[Any, ...]]:
    # Nothing is reverted here, so the store is not asked.
    spans = in_force_spans(None, None, decisions)  # type: ignore[arg-type]
    found = precision_history(spans, 0, now or dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8"))
    return [
        (item["from_step"], item["to_step"], item["precision"], item["decision_id"])
        for item in found
        if item["gemm"] == "dgrad"
    ]


def by_walking(decisions: list[dict[str, Any]], last: int) -> list[str]:
    """Precision of dgrad at each step, by replaying the decisions one step at a time."""
    shown: list[str] = []
    held: set[str] = set()
    for step in range(last + 1):
        for made in decisions:
            if made["effective_step"] == step:
                key = json.dumps(made["target"])
                held = held - {key} if made["action"] == "restore" else held | {key}
        shown.append("bf16" if held else "fp8")
    return shown


def test_precision_history_equals_a_replay_step_by_step() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        steps = sorted(rng.choice(np.arange(1, 30), size=6, replace=False).tolist())
        targets = [{"gemm": "dgrad"}, {"layer": True}]
        made = [
            decision(at, str(rng.choice(["bf16_fallback", "restore"])), step, target=targets[rng.integers(2)])
            for at, step in enumerate(steps)
        ]  # fmt: skip
        shown: list[str] = []
        for first, last, precision, _ in history_of(made):
            assert first == len(shown), "no gap and no overlap"
            shown += [precision] * ((30 if last is None else last) - first + 1)
        assert shown == by_walking(made, 30), made


def test_precision_history_names_the_decision_that_began_each_period() -> None:
    made = [decision(1, "bf16_fallback", 10), decision(2, "restore", 20), decision(3, "advice", 25)]
    assert history_of(made) == [(0, 9, "fp8", None), (10, 19, "bf16", "r-1"), (20, None, "fp8", "r-2")]
    again = [decision(1, "bf16_fallback", 10), decision(2, "bf16_fallback", 15)]
    assert history_of(again) == [(0, 9, "fp8", None), (10, 14, "bf16", "r-1"), (15, None, "bf16", "r-2")]
    assert history_of([decision(1, "bf16_fallback", 5, effective_step=None)]) == [(0, None, "fp8", None)]
    assert history_of([], {"dgrad": "high"}) == [(0, None, "high", None)]
