"""Where non-finite values began stays where they began, whatever one poisoned update does to the layers."""

import math
from typing import Any

import pytest

from fp8_safeguard.monitor.alerts import is_held
from fp8_safeguard.monitor.policy import PolicyState

FIRST, LATER = "blocks.0.qkv", "blocks.2.qkv"


def poisoned(slots: Any) -> dict[tuple[str, str], dict[str, int]]:
    """One update after a NaN loss: every weight, and with it every result, is NaN; inputs of the first layer are not."""
    return {
        (slot.layer, slot.gemm or f"{slot.operand} {slot.layout}"): {"nan": 16384}
        for slot in slots
        if not (slot.layer == FIRST and slot.operand == "x")
    }


def test_one_nan_in_a_batch_is_blamed_on_the_batch_after_the_update_too(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    state, decisions = follow([observation(30, slots, {(FIRST, "x row"): {"nan": 1}})])
    state, decisions = follow((observation(at, slots, poisoned(slots)) for at in range(31, 50)), state=state)
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    shown = alert.to_wire()
    assert (shown["layer"], shown["slot"]) == (FIRST, {"layer": FIRST, "operand": "x", "layout": "row"})
    assert (shown["first_step"], shown["value"], shown["severity"]) == (30, 1, "act")
    listed = {signal.slot.label: signal.value for signal in alert.signals if signal.slot is not None}
    assert listed[f"{FIRST} x row"] == 1
    wanted = ("w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad")
    assert {name: listed.get(f"{FIRST} {name}") for name in wanted} == dict.fromkeys(wanted, 16384)
    assert asked(decisions) == [(FIRST, "layer", "advice")]
    assert decisions[0].reason == (
        "a non-finite value begins in the input of layer 'blocks.0.qkv' at step 30, and in 23 other layers after it; "
        "no precision helps: look at the batch, or at what comes before this layer; its weight holds them by now, too: "
        "go back to a checkpoint before step 30"
    )
    assert len(decisions[0].evidence["signals"]) == 1 + len(wanted)


@pytest.mark.parametrize("fprop", [0, 7], ids=["alone", "with its result"])
def test_a_non_finite_input_asks_for_no_precision(
    slots: Any, observation: Any, follow: Any, asked: Any, fprop: int
) -> None:
    ill = {(LATER, "x row"): {"nan": 2}, (LATER, "fprop"): {"nan": fprop}}
    _, decisions = follow(observation(step, slots, ill) for step in range(4))
    assert asked(decisions) == [(LATER, "layer", "advice")]
    assert decisions[0].reason.endswith("look at the batch, or at what comes before this layer")


def test_a_nan_in_a_weight_stays_that_weights_after_the_update(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LATER, "w tile"): {"nan": 1}, (LATER, "fprop"): {"nan": 64}, (FIRST, "dy row"): {"nan": 9}}
    state, _ = follow([observation(30, slots, ill)])
    state, decisions = follow((observation(at, slots, poisoned(slots)) for at in (32, 34)), state=state)
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert (alert.layer, alert.first_step) == (LATER, 30)
    assert alert.worst.slot is not None
    assert alert.worst.slot.label == f"{LATER} w tile"
    # The count may rise; the place stays.
    assert alert.worst.value == 16384
    assert asked(decisions) == [(LATER, "layer", "advice")]
    assert "the weight of layer 'blocks.2.qkv' holds them: go back to a checkpoint before step 30" in (
        decisions[0].reason
    )


def test_a_result_whose_operands_are_clean_is_the_gemms_own(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LATER, "fprop"): {"nan": 3}, (LATER, "dy row"): {"nan": 4}}
    state, decisions = follow(observation(step, slots, ill) for step in range(2))
    assert asked(decisions) == [(LATER, "fprop", "bf16_fallback")]
    (alert,) = state.alerts.values()
    assert alert.worst.slot is not None
    assert alert.worst.slot.label == f"{LATER} fprop"
    assert is_held(alert.signals, alert.rule, state.plan)


def test_once_it_is_gone_the_next_origin_is_found_afresh(slots: Any, observation: Any, follow: Any) -> None:
    state, _ = follow(
        [
            observation(0, slots, {(LATER, "fprop"): {"nan": 3}}),
            *(observation(step, slots) for step in range(1, 4)),
        ]
    )
    assert state == PolicyState.from_dict(state.to_dict())
    assert not state.alerts
    ill = {(FIRST, "fprop"): {"nan": 1}, (LATER, "fprop"): {"nan": 1}}
    state, _ = follow([observation(9, slots, ill)], state=state)
    assert [alert.layer for alert in state.alerts.values()] == [FIRST]


def _norms(slots: Any, **bad: float) -> dict[tuple[str, str], float]:
    """Norms of all weight gradients, one of them per layer but for `bad`."""
    found = {(slot.layer, "wgrad_norm"): 1.0 for slot in slots}
    return found | {(layer.replace("__", "."), "wgrad_norm"): norm for layer, norm in bad.items()}


def test_b96_a_weight_gradient_that_is_no_number_falls_back_with_every_operand_clean(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    bad = _norms(slots, blocks__1__o=math.inf)
    steps = [observation(0, slots, scalars=_norms(slots)), observation(1, slots, scalars=bad)]
    state, decisions = follow(steps)
    assert decisions == []
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert (alert.to_wire()["layer"], alert.to_wire()["severity"]) == ("blocks.1.o", "watch")
    state, decisions = follow([observation(2, slots, scalars=bad)], state=state)
    assert asked(decisions) == [("blocks.1.o", "wgrad", "bf16_fallback")]
    assert decisions[0].reason.startswith("a non-finite value begins in 'blocks.1.o' wgrad at step 1")
    state, decisions = follow(
        (observation(at, slots, scalars=_norms(slots)) for at in range(3, 6)), state=state
    )
    assert not any(alert.rule == "non-finite" for alert in state.alerts.values())


def test_b96_of_several_weight_gradients_the_one_that_the_backward_reaches_first_is_named(
    slots: Any, observation: Any, follow: Any
) -> None:
    bad = _norms(slots, blocks__0__qkv=math.nan, blocks__2__qkv=math.nan, blocks__1__o=math.nan)
    state, _ = follow([observation(0, slots, scalars=bad)])
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert alert.to_wire()["layer"] == "blocks.2.qkv"


def test_what_an_operand_shows_comes_before_the_gradients_that_follow_from_it(
    slots: Any, observation: Any, follow: Any
) -> None:
    bad = dict.fromkeys(_norms(slots), math.nan)
    state, _ = follow([observation(0, slots, {("blocks.1.o", "dgrad"): {"nan": 3}}, scalars=bad)])
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert (alert.to_wire()["layer"], alert.to_wire()["value"]) == ("blocks.1.o", 3)


def test_one_poisoned_update_leaves_the_blame_with_the_gradient_that_it_was_made_of(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    state, _ = follow([observation(30, slots, scalars=_norms(slots, blocks__1__o=math.nan))])
    ill = {
        (slot.layer, slot.gemm or f"{slot.operand} {slot.layout}"): {"nan": 9}
        for slot in slots
        if slot.layer >= "blocks.1.o"
    }
    state, decisions = follow((observation(at, slots, ill) for at in range(31, 33)), state=state)
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert (alert.to_wire()["layer"], alert.to_wire()["first_step"]) == ("blocks.1.o", 30)
    assert asked(decisions) == [("blocks.1.o", "layer", "advice")]
    assert "go back to a checkpoint before step 30" in decisions[0].reason


SPARSE = "between step 30 (last clean sample) and step 40"


def _weight(layer: str) -> dict[tuple[str, str], dict[str, int]]:
    return {(layer, "w tile"): {"nan": 5}}


def test_what_began_between_two_samples_is_not_told_as_the_next_samples_own(
    slots: Any, observation: Any, follow: Any
) -> None:
    state, _ = follow(observation(at, slots) for at in (20, 30))
    assert state == PolicyState.from_dict(state.to_dict())
    state, decisions = follow([observation(at, slots, _weight(LATER)) for at in (40, 50)], state=state)
    assert decisions[0].reason == (
        f"5 non-finite values begin in the weight of layer 'blocks.2.qkv' {SPARSE}; no precision helps: "
        "the weight of layer 'blocks.2.qkv' holds them: go back to a checkpoint of step 30 or earlier"
    )
    cause = decisions[0].evidence["cause"]
    assert SPARSE in cause["summary"]
    assert cause["advice"].endswith("a checkpoint of step 30 or earlier")
    (alert,) = state.alerts.values()
    assert (alert.to_wire()["first_step"], alert.to_wire()["clean_step"]) == (40, 30)
    assert "clean_step" not in alert.to_wire()["slots"][0]
    assert PolicyState.from_dict(state.to_dict()) == state


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_a_sample_whose_loss_or_norm_is_no_number_is_not_clean(
    slots: Any, observation: Any, follow: Any, name: str
) -> None:
    steps = [observation(20, slots, run={name: 2.0}), observation(30, slots, run={name: math.inf})]
    state, _ = follow([*steps, observation(40, slots, _weight(FIRST), run={name: 2.0})])
    (alert,) = (alert for alert in state.alerts.values() if alert.rule == "non-finite")
    assert (alert.first_step, alert.clean_step, state.clean_step) == (40, 20, 20)


def test_samples_of_every_step_leave_nothing_open(slots: Any, observation: Any, follow: Any) -> None:
    state, _ = follow([observation(39, slots), observation(40, slots, _weight(LATER))])
    _, decisions = follow([observation(41, slots, _weight(LATER))], state=state)
    assert "'blocks.2.qkv' at step 40;" in decisions[0].reason
    assert decisions[0].reason.endswith("go back to a checkpoint before step 40")


def test_another_fault_has_no_last_clean_sample(slots: Any, observation: Any, follow: Any) -> None:
    ill = {(LATER, "fprop"): {"error": 0.5}}
    state, _ = follow([observation(0, slots), observation(10, slots, ill), observation(20, slots, ill)])
    assert {alert.clean_step for alert in state.alerts.values()} == {None}
