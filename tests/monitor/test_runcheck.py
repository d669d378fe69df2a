"""A run against a reference: each comparison in closed form."""

import dataclasses
from typing import Any

import pytest

from fp8_safeguard.monitor.baseline import Baseline, Family
from fp8_safeguard.monitor.levels import Healthy
from fp8_safeguard.monitor.runcheck import (
    MOST_LISTED,
    Side,
    compare_alerts,
    compare_decisions,
    compare_numerics,
    compare_tokens,
    report_of,
)
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import FLOOR

DY = Slot("head", operand="dy", layout="row")
DGRAD = Slot("head", gemm="dgrad")


def learned(values: dict[tuple[Slot, str], float], **options: Any) -> Baseline:
    """A baseline in which every sample of a metric was that value."""
    families: dict[str, dict[str, Healthy]] = {}
    for (slot, metric), value in values.items():
        families.setdefault(slot.family, {})[metric] = Healthy(50, value, value, value)
    made = {name: Family(None, metrics) for name, metrics in families.items()}
    head = {"run": "r", "attempt": "0", "preset": "floor", "from_step": 0, "to_step": 49, "steps": 50}
    return Baseline(**{**head, **options}, families=made)


@pytest.mark.parametrize(
    ("slot", "metric", "reference", "run", "beyond"),
    [
        # Underflow: half as much again as the reference's worst, or the preset's 0.5 %, or 20 times what is quiet.
        (DY, "underflow_ratio", 0.45, 0.67, False),
        (DY, "underflow_ratio", 0.45, 0.68, True),
        (DY, "underflow_ratio", 0.001, 0.0049, False),
        (DY, "underflow_ratio", 0.001, 0.0051, True),
        (DY, "underflow_ratio", 0.0001, 0.0021, True),
        # GEMM error: the format's own floor of 4 %, or 1.3 times the reference's median.
        (DGRAD, "relative_error", 0.02, 0.039, False),
        (DGRAD, "relative_error", 0.02, 0.041, True),
        (DGRAD, "relative_error", 0.035, 0.045, False),
        (DGRAD, "relative_error", 0.035, 0.046, True),
        (DY, "saturation_ratio", 0.0, 0.0002, True),
        (DY, "rows_flushed_ratio", 0.0, 0.02, True),
        (DY, "nonfinite_count", 0.0, 1.0, True),
        (DY, "nonfinite_count", 2.0, 90.0, False),
        # Never a reason.
        (DY, "amax", 1.0, 1e9, False),
        (DY, "kurtosis", 3.0, 1e9, False),
    ],
)
def test_a_metric_is_held_against_the_references_range(
    slot: Slot, metric: str, reference: float, run: float, beyond: bool
) -> None:
    compared, found, notes = compare_numerics(
        learned({(slot, metric): run}), learned({(slot, metric): reference}), FLOOR
    )
    assert (compared, notes) == (1, [])
    assert [breach.kind for breach in found] == ["numerics"] * beyond
    assert all(slot.label in breach.said for breach in found)


def test_slots_that_only_one_side_has() -> None:
    both = {(DY, "underflow_ratio"): 0.001}
    more = {**both, (DGRAD, "relative_error"): 0.049}
    _, found, notes = compare_numerics(learned(more), learned(both), FLOOR)
    assert (found, notes) == ([], ["1 slots are not the reference's: held against the preset floor"])
    worse = {**both, (DGRAD, "relative_error"): 0.051}
    _, found, _ = compare_numerics(learned(worse), learned(both), FLOOR)
    assert "the reference lacks the slot" in found[0].said
    _, found, notes = compare_numerics(learned(both), learned(more), FLOOR)
    assert (found, notes) == ([], ["1 of the reference's 2 slots were not measured in the run"])
    other = {(dataclasses.replace(DY, layer="renamed"), "underflow_ratio"): 0.001}
    compared, found, _ = compare_numerics(learned(other), learned(both), FLOOR)
    assert compared == 0
    assert "none of the reference's slots" in found[0].said


def test_of_many_breaches_the_worst_come_first_and_the_rest_is_counted() -> None:
    slots = [dataclasses.replace(DY, layer=f"l{number:02}") for number in range(MOST_LISTED + 5)]
    run = {(slot, "underflow_ratio"): 0.01 * (1 + number) for number, slot in enumerate(slots)}
    _, found, _ = compare_numerics(
        learned(run), learned({(slot, "underflow_ratio"): 0.0 for slot in slots}), FLOOR
    )
    assert found[0].said.startswith("l24 dy row: underflow_ratio 25 %")
    assert len(found) == MOST_LISTED + 1
    assert found[-1].said == "and 5 more; the first 20 are shown"


def decision(step: int, layer: str = "a", action: str = "bf16_fallback") -> dict[str, Any]:
    return {"step": step, "layer": layer, "target": {"gemm": "fprop"}, "action": action, "rule": "gemm-error"}


def test_decisions_are_none_beyond_the_references() -> None:
    assert compare_decisions([decision(40), decision(90)], [decision(3)]) == []
    (found,) = compare_decisions([decision(90, "b"), decision(40, "b"), decision(5)], [decision(3)])
    assert found.said == (
        "bf16_fallback of b fprop at step 40 (gemm-error); the reference has no such decision"
    )


def test_alerts_are_none_beyond_the_references_and_none_worse() -> None:
    def alert(severity: str, step: int = 1, layer: str | None = "a") -> dict[str, Any]:
        return {"rule": "underflow", "layer": layer, "severity": severity, "step": step}

    assert compare_alerts([alert("watch")], [alert("watch")]) == []
    assert compare_alerts([alert("watch")], [alert("act")]) == []
    assert compare_alerts([alert("act")], [alert("watch"), alert("act")]) == []
    (worse,) = compare_alerts([alert("watch", 2), alert("act", 9)], [alert("watch")])
    assert worse.said == "act alert underflow of a at step 9; the reference has it as a watch alert"
    (fresh,) = compare_alerts([alert("watch", layer=None)], [alert("watch")])
    assert "of the run at step 1; the reference has no such alert" in fresh.said


def test_tokens_of_shared_steps_must_agree() -> None:
    assert compare_tokens({1: 4096.0, 2: 4096.0}, {2: 4096.0, 3: 1.0}) == []
    assert compare_tokens({}, {2: 4096.0}) == []
    (found,) = compare_tokens({1: 4096.0, 2: 512.0}, {1: 4096.0, 2: 4096.0})
    assert found.said.startswith("tokens differ at 1 of 2 steps: 512 against 4096 at step 2")


def test_a_run_passes_against_itself(observation: Any, make_slots: Any) -> None:
    slots = make_slots(1)
    ours, theirs = Side(), Side()
    for step in range(60):
        for side in (ours, theirs):
            side.add(observation(step, slots, run={"loss": 2.0 - step / 100, "tokens": 64.0}))
    report = report_of(
        run="a",
        reference="b",
        ours=ours,
        theirs=theirs,
        learned=None,
        raised=([], []),
        raised_before=([], []),
        preset="floor",
    )
    assert report.ok
    assert report.slots_compared == len({slot.family for slot in slots})
    assert report.to_dict()["loss"]["worst"]["gap_ratio"] == 0.0
