"""Whether non-finite values are told as FP8's follows what the samples show, the later ones included."""

import dataclasses
from typing import Any

import pytest

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.slots import Slot

LAYER = "blocks.2.qkv"
RESULT = {(LAYER, "fprop"): {"nan": 3}}
LOST = {(LAYER, "fprop"): {"nan": 16384, "sum_sq": 0.0, "sum_sq_q": 0.0, "sum_sq_err": 0.0}}


def emulated(slots: Any, *gemms: str) -> tuple[Slot, ...]:
    """The same slots where no layer gives an FP8 result of these gemms."""
    return tuple(dataclasses.replace(slot, emulated=slot.gemm in gemms) for slot in slots)


def exact(slots: Any) -> dict[tuple[str, str], dict[str, float]]:
    """Forward results that rounding to FP8 would not leave so near to the right ones."""
    return {(slot.layer, "fprop"): {"error": 1e-4} for slot in slots}


def kinds(state: PolicyState) -> list[str]:
    return [lasting.said["kind"] for lasting in state.trends.causes.values() if lasting.told]


def test_what_was_told_as_fp8s_is_not_once_a_weight_holds_it(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    state, decisions = follow(observation(at, slots, RESULT) for at in range(2))
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback")]
    assert kinds(state) == ["fp8"]
    poisoned = {**RESULT, (LAYER, "w tile"): {"nan": 9}}
    state, decisions = follow((observation(at, slots, poisoned) for at in (2, 3)), state=state)
    assert asked(decisions) == [(LAYER, "layer", "advice")]
    cause = decisions[0].evidence["cause"]
    assert (cause["kind"], cause["evidence"]["gemms"]) == ("not-fp8", [])
    assert cause["advice"].endswith("go back to a checkpoint before step 0")
    # A sample that leaves the weight open takes nothing back.
    state, _ = follow([observation(4, slots, RESULT)], state=state)
    assert kinds(state) == ["not-fp8"]


@pytest.mark.parametrize("before", [1, 9], ids=["a single sample before", "with a median"])
@pytest.mark.parametrize("ill", [RESULT, LOST], ids=["some", "all"])
def test_a_layer_in_high_precision_has_no_fault_of_fp8(
    slots: Any, observation: Any, follow: Any, asked: Any, before: int, ill: Any
) -> None:
    foreign, healthy = emulated(slots, "dgrad", "wgrad"), exact(slots)
    state, _ = follow(observation(at, foreign, healthy) for at in range(before))
    bad = healthy | {key: {**healthy[key], **values} for key, values in ill.items()}
    if ill is LOST:
        bad |= ill
    state, decisions = follow([observation(before, foreign, bad)], state=state)
    assert kinds(state) == ["not-fp8"]
    state, decisions = follow([observation(before + 1, foreign, bad)], state=state)
    # FP8 is not blamed, and must not come there either.
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback")]
    assert decisions[0].evidence["cause"]["kind"] == "not-fp8"


def test_a_layer_that_is_configured_in_bf16_has_none_either(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ours = emulated(slots, "fprop", "dgrad", "wgrad")
    state, decisions = follow(observation(at, ours, RESULT) for at in range(2))
    assert kinds(state) == ["not-fp8"]
    assert asked(decisions) == [(LAYER, "fprop", "advice")]
    assert decisions[0].reason.endswith("; the gemm runs in BF16 already, so the cause is not FP8")


def test_a_layer_of_which_nobody_knows_stays_fp8s(slots: Any, observation: Any, follow: Any) -> None:
    state, _ = follow([observation(0, emulated(slots, "dgrad", "wgrad"), LOST)])
    assert kinds(state) == ["fp8"]


@pytest.mark.parametrize("taken_up", [True, False])
def test_what_goes_on_in_bf16_by_the_plan_was_not_fp8s(
    slots: Any, observation: Any, follow: Any, taken_up: bool
) -> None:
    config = PolicyConfig(run="r", mode="enforce", dwell_steps=8)
    state, _ = follow((observation(at, slots, RESULT) for at in range(2)), config)
    assert state.plan.fallen == {(LAYER, "fprop")}
    version = state.plan.version if taken_up else 0
    fallen = tuple(
        dataclasses.replace(slot, emulated=taken_up and (slot.layer, slot.gemm) == (LAYER, "fprop"))
        for slot in slots
    )
    made = []
    for at in range(2, 14):
        state, decisions = decide(state, observation(at, fallen, RESULT, plan_version=version), config)
        made += decisions
        assert kinds(state) == ["not-fp8" if taken_up and at >= 6 else "fp8"], at
    # Nobody blames something else before the trainer has taken the plan up.
    assert any("persist with the gemm in BF16" in each.reason for each in made) == taken_up
