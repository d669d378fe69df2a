"""Rows of the overhead report, from arms that ran in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from overhead.arms import Counters, Observed, Plain, Tally
from overhead.peers import Peer
from overhead.rounds import Spent, cpu, ratio_of_totals, run, wall

DEFAULT_GOAL, ACCOUNTED_GOAL = 1.05, 0.02
EVERY_STEP_GOALS = {"fp32": 1.15, "bf16": 1.30}
TENSOR_GOAL = 0.2
"""Cost of a tensor over that of the cheapest peer which observes activations."""

Row = dict[str, Any]


@dataclass
class Phase:
    """Arms that run in turns with the same training twice without any: the baseline, and the control."""

    name: str
    dtype: str
    arms: Sequence[Plain]
    rounds: int
    steps: int
    control: dict[str, float] = field(default_factory=dict)
    """A against A: ratio, low, high."""

    def run(self) -> list[Row]:
        """Measure all, take all off, and give their rows."""
        plain = Plain(f"plain_{self.dtype}", self.dtype, self.steps)
        again = Plain(f"plain_again_{self.dtype}", self.dtype, self.steps)
        everyone = [plain, *self.arms, again]
        before: dict[str, Counters] = {}
        turns = run(everyone, self.rounds, lambda: before.update({a.name: a.counters() for a in everyone}))
        counted = {arm.name: arm.counters().since(before[arm.name]) for arm in everyone}
        tallies = {arm.name: arm.count() for arm in everyone}
        for arm in everyone:
            arm.end()
        base = _mean(turns[plain.name], turns[again.name])
        found = ratio_of_totals(cpu(turns[again.name]), cpu(turns[plain.name]))
        self.control = {"ratio": found.ratio, "low": found.low, "high": found.high}
        rows = []
        for arm in self.arms:
            row = _times(arm, turns[arm.name], base) | {
                "baseline": plain.name, "control": self.name, "cycles": self.rounds
            }  # fmt: skip
            row |= _looked_at(arm, tallies[arm.name], row["extra_ms_per_step"])
            row |= _accounts(arm, turns[arm.name], counted[arm.name])
            rows.append(row | _reached(row, self.control))
        return rows + _cost_of_a_tensor(self.dtype, rows)


def _mean(first: Sequence[Spent], second: Sequence[Spent]) -> list[Spent]:
    """Both of the unwatched trainings, round by round: a steadier baseline than one."""
    return [
        Spent((a.cpu_seconds + b.cpu_seconds) / 2, (a.wall_seconds + b.wall_seconds) / 2)
        for a, b in zip(first, second, strict=True)
    ]


def _times(arm: Plain, turns: Sequence[Spent], base: Sequence[Spent]) -> Row:
    """CPU milliseconds a step and their ratio to the baseline's; wall beside it, which a busy machine blurs."""
    found, elapsed = ratio_of_totals(cpu(turns), cpu(base)), ratio_of_totals(wall(turns), wall(base))
    baseline_ms = 1e3 * statistics.fmean(cpu(base))
    return {
        "case": arm.name, "value": found.milliseconds, "unit": "ms", "ratio": found.ratio, "low": found.low,
        "high": found.high, "goal": _goal(arm), "baseline_ms": baseline_ms, "steps": arm.steps * len(turns),
        "extra_ms_per_step": found.milliseconds - baseline_ms, "wall_ratio": elapsed.ratio,
    }  # fmt: skip


def _goal(arm: Plain) -> float | None:
    if not isinstance(arm, Observed):
        return None
    kind = arm.name.removesuffix(f"_{arm.dtype}")
    return {"default": DEFAULT_GOAL, "every_step": EVERY_STEP_GOALS[arm.dtype]}.get(kind)


def _looked_at(arm: Plain, tally: Tally, extra_ms: float) -> Row:
    """What a sampled step shows it, and what one tensor of that costs."""
    observes, activations, every = "x, w and dy of every linear layer, in all layouts", True, 1
    if isinstance(arm, Peer):
        observes, activations = arm.observes, arm.activations
    elif isinstance(arm, Observed):
        every = arm.every
    row: Row = {
        "observes": observes, "activations": activations, "tensors": tally.tensors, "elements": tally.elements
    }  # fmt: skip
    if every > arm.steps or not tally.tensors:
        return row | {"us_per_tensor": None, "ns_per_element": None}  # nothing was sampled
    extra = extra_ms * every
    return row | {
        "us_per_tensor": 1e3 * extra / tally.tensors,
        "ns_per_element": 1e6 * extra / tally.elements,
    }


def _accounts(arm: Plain, turns: Sequence[Spent], counted: Counters) -> Row:
    """Ours: shares of the time inside our own code. A peer's: what its child processes took besides."""
    if not isinstance(arm, Observed):
        return {"child_cpu_ms_per_step": 1e3 * counted.elsewhere / (arm.steps * len(turns))}
    return {
        "accounted_ratio": counted.spent / (arm.steps * sum(wall(turns))),
        "sender_ratio": counted.sender / (arm.steps * sum(cpu(turns))),
    }


def _reached(row: Row, control: dict[str, float]) -> Row:
    """Whether the row keeps what is promised; None where nothing is."""
    case: str = row["case"]
    if case.startswith("default"):
        kept = row["high"] <= row["goal"] and row["accounted_ratio"] <= ACCOUNTED_GOAL
        return {"goal_is_for": f"high, and accounted_ratio at most {ACCOUNTED_GOAL}", "reached": kept}
    if case.startswith("every_step"):
        return {"goal_is_for": "ratio", "reached": row["ratio"] <= row["goal"]}
    if case.startswith("off"):
        kept = row["low"] <= control["high"]
        return {"goal_is_for": "low, against the control's high", "reached": kept}
    return {"reached": None}


def _cost_of_a_tensor(dtype: str, rows: Sequence[Row]) -> list[Row]:
    """Ours over the cheapest peer that observes activations too; no row without peers."""
    peers = [row for row in rows if "child_cpu_ms_per_step" in row and row["activations"]]
    if not peers:
        return []
    ours = next(row for row in rows if row["case"].startswith("every_step"))
    cheapest = min(peers, key=lambda row: float(row["us_per_tensor"]))
    against = {row["case"]: _over(ours["us_per_tensor"], row["us_per_tensor"]) for row in peers}
    ratio = against[cheapest["case"]]
    return [{
        "case": f"cost_per_tensor_{dtype}", "value": ours["us_per_tensor"], "unit": "us", "ratio": ratio, "low": None,
        "high": None, "goal": TENSOR_GOAL, "reached": ratio is not None and ratio <= TENSOR_GOAL,
        "baseline": cheapest["case"], "against": against,
    }]  # fmt: skip


def _over(cost: float, other: float) -> float | None:
    """The ratio of two costs; None where the other one was lost in the noise."""
    return cost / other if other > 0 else None
