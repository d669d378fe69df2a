"""The report's advice is what the policy decides on the same samples; the policy itself is the oracle."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.readiness import Row, assess
from fp8_safeguard.monitor.readings import GemmReadings, OperandReadings
from fp8_safeguard.monitor.slots import Slot

LAYER = "blocks.3.qkv"
FP8_NOISE = {"fp8": 0.027, "e5m2": 0.056, "pow2": 0.028}
SATURATED = {
    "fprop": {"fp8": 0.82, "x_multiplier_2^4": 0.027, "x_multiplier_2^-4": 0.9, "x_e5m2": 0.05},
    "dgrad": {"fp8": 0.027},
    "wgrad": {"fp8": 0.81, "x_multiplier_2^4": 0.027, "x_multiplier_2^-4": 0.9, "x_e5m2": 0.05},
}
FLUSHED = {
    "fprop": FP8_NOISE,
    "dgrad": {
        **{"fp8": 0.97, "e5m2": 0.9, "dy_multiplier_2^-4": 0.9, "dy_multiplier_2^-12": 0.03},
        **{"dy_multiplier_2^-16": 0.031, "dy_multiplier_2^-20": 0.0275, "dy_e5m2": 0.07},
    },
    "wgrad": {
        **{"fp8": 0.97, "e5m2": 0.9, "dy_multiplier_2^-4": 0.9, "dy_multiplier_2^-12": 0.3},
        **{"dy_multiplier_2^-16": 0.034, "dy_multiplier_2^-20": 0.028, "dy_e5m2": 0.07},
    },
}
MODERATE = {
    "fprop": {"fp8": 0.09, "x_multiplier_2^4": 0.2, "x_e5m2": 0.05, "pow2": 0.091},
    "wgrad": {"fp8": 0.03, "x_multiplier_2^4": 0.2, "x_e5m2": 0.05},
}
HEALTHY = {
    "fprop": {**FP8_NOISE, "x_e5m2": 0.045, "w_e5m2": 0.045, "x_multiplier_2^4": 0.027},
    "dgrad": {**FP8_NOISE, "dy_e5m2": 0.045, "w_e5m2": 0.045},
    "wgrad": {**FP8_NOISE, "dy_e5m2": 0.045, "x_e5m2": 0.045, "x_multiplier_2^4": 0.027},
}
CASES: dict[str, tuple[dict[str, float], dict[str, dict[str, float]]]] = {
    "saturated activations": ({"fprop": 0.82, "wgrad": 0.81}, SATURATED),
    "flushed gradients": ({"dgrad": 0.97, "wgrad": 0.97}, FLUSHED),
    "a moderate error": ({"fprop": 0.09}, MODERATE),
    "stale inverse scale": ({"fprop": 7.0}, HEALTHY),
    "nothing helps": ({"fprop": 0.82}, {"fprop": {"fp8": 0.8, "x_e5m2": 0.4, "pow2": 0.8}}),
}


def reported(course: Iterable[StepObservation]) -> dict[str, Row]:
    """The report on the layer, from the observations alone, by GEMM."""
    errors: dict[Slot, list[tuple[int, float]]] = {}
    lost: dict[Slot, float] = {}
    for seen in course:
        held = seen.stats.columns
        for at, slot in enumerate(seen.slots):
            if slot.layer != LAYER:
                continue
            if slot.gemm is not None:
                error = float(np.sqrt(held["sum_sq_err"][at] / held["sum_sq"][at]))
                errors.setdefault(slot, []).append((seen.step, error))
            else:
                lost[slot] = max(lost.get(slot, 0.0), float(held["underflow"][at] / held["count"][at]))
    gemms = [
        GemmReadings(slot=slot, steps=np.array([step for step, _ in found]), errors=np.array([e for _, e in found]))
        for slot, found in errors.items()
    ]  # fmt: skip
    operands = [
        OperandReadings(slot=slot, underflow=ratio, sure_underflow=ratio, underflow_step=0)
        for slot, ratio in lost.items()
    ]
    return {row.gemm: row for row in assess(gemms, operands).rows}


def names(decision: Any) -> str:
    """The what-if that a decision on an operand puts into the plan."""
    value = (
        decision.value if isinstance(decision.value, str) else f"multiplier_2^{np.log2(decision.value):.0f}"
    )
    return f"{decision.target.operand}_{value}"


@pytest.mark.parametrize("case", CASES)
def test_the_report_advises_what_the_policy_decides(
    case: str, slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    ill, look = CASES[case]
    wrong = {(LAYER, gemm): {"error": error} for gemm, error in ill.items()}
    course = [looked(observation(step, slots, wrong), LAYER, look) for step in range(6)]
    _, made = follow(course)
    first = [decision for decision in made if decision.step == made[0].step]
    rows = reported(course)
    for gemm in ill:
        row = rows[gemm]
        assert row.verdict == "keep_bf16"
        if first[0].action == "bf16_fallback":
            assert row.remedy is None
            continue
        assert row.best is not None
        assert [row.best.variant] == [names(decision) for decision in first]
        assert row.remedy is not None


def test_the_report_advises_e5m2_for_what_vanishes_together_as_the_policy_decides(
    slots: Any, observation: Any, follow: Any, looked: Any, drift: Any
) -> None:
    course = [looked(observation(after, slots, drift(after)), LAYER, HEALTHY) for after in range(4, 12)]
    _, made = follow(course)
    assert {names(decision) for decision in made if decision.layer == LAYER} == {"x_e5m2", "w_e5m2"}
    rows = reported(course)
    assert {gemm: row.best and row.best.variant for gemm, row in rows.items()} == {
        "fprop": "e5m2",
        "dgrad": "w_e5m2",
        "wgrad": None,
    }
    assert rows["fprop"].remedy == "safe with e5m2"
    assert rows["dgrad"].remedy == "safe with e5m2 for w"
