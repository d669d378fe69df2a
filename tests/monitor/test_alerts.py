"""Alerts of a rule and layer: joined, ranked, over, held, stored."""

import dataclasses
import json
import math
from typing import Any

import pytest

from fp8_safeguard.monitor.alerts import Alert, is_held, join_alerts
from fp8_safeguard.monitor.plan import Plan, PlanEntry, Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.slots import Slot

ENFORCE = PolicyConfig(run="r", mode="enforce")
OBSERVE = PolicyConfig(run="r")
LAYER = "blocks.0.o"


def ill(**places: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(LAYER, place.replace("_", " ")): how for place, how in places.items()}


def plan(*gemms: str, step: int = 1) -> Plan:
    return Plan(
        1,
        tuple(
            PlanEntry(
                layer=LAYER,
                target=Target(gemm=gemm) if gemm != "layer" else Target(),
                action="bf16_fallback",
                decision_id="r-1",
                not_before_step=step,
            )
            for gemm in gemms
        ),
    )


def test_signals_of_one_rule_and_layer_are_one_alert_with_the_worst_first(
    slots: Any, observation: Any
) -> None:
    wrong = ill(fprop={"error": 0.2}, dgrad={"error": 0.4}, x_row={"underflow_ratio": 0.01})
    state, _ = decide(PolicyState(), observation(0, slots, wrong), OBSERVE)
    state, _ = decide(state, observation(1, slots, wrong), OBSERVE)
    assert sorted(state.alerts) == [f"gemm-error|{LAYER}", f"underflow|{LAYER}"]
    alert = state.alerts[f"gemm-error|{LAYER}"]
    assert [signal.slot.gemm for signal in alert.signals] == ["dgrad", "fprop"]
    assert (alert.severity, alert.worst.value) == ("act", pytest.approx(0.4))


def test_a_signal_that_cleared_is_over_and_last_until_the_alert_is(slots: Any, observation: Any) -> None:
    state = PolicyState()
    course = [ill(fprop={"error": 0.2}, dgrad={"error": 0.4})] + [ill(fprop={"error": 0.2})] * 4
    for step, wrong in enumerate(course):
        state, _ = decide(state, observation(step, slots, wrong), OBSERVE)
    (alert,) = state.alerts.values()
    assert [(signal.slot.gemm, signal.over) for signal in alert.signals] == [
        ("fprop", False),
        ("dgrad", True),
    ]
    assert [signal.slot.gemm for signal in alert.live] == ["fprop"]
    # dgrad again: a new breach of the same alert.
    state, _ = decide(state, observation(5, slots, ill(dgrad={"error": 0.4})), OBSERVE)
    (alert,) = state.alerts.values()
    assert [(signal.slot.gemm, signal.first_step) for signal in alert.live] == [("dgrad", 5), ("fprop", 0)]
    for step in range(6, 9):
        state, _ = decide(state, observation(step, slots), OBSERVE)
    assert state.alerts == {}


def test_a_state_with_alerts_survives_json(slots: Any, observation: Any) -> None:
    state = PolicyState()
    for step in range(3):
        seen = observation(
            step, slots, ill(x_row={"nan": 3}, dy_col={"sqnr_db": 9.0}), run={"loss": math.nan}
        )
        state, _ = decide(state, seen, OBSERVE)
    assert {alert.rule for alert in state.alerts.values()} == {"non-finite", "sqnr", "nonfinite-loss"}
    text = json.dumps(state.to_dict(), allow_nan=False)
    again = PolicyState.from_dict(json.loads(text))
    assert again.to_dict() == state.to_dict()
    loss = again.alerts["nonfinite-loss|"]
    assert (loss.layer, loss.worst.slot, loss.worst.threshold) == (None, None, None)
    assert math.isnan(loss.worst.value)
    json.dumps(loss.to_wire(), allow_nan=False)


def test_alerts_of_the_first_version_are_read_and_joined() -> None:
    def stored(gemm: str, step: int, severity: str) -> dict[str, Any]:
        return {
            "rule": "gemm-error", "severity": severity, "slot": {"layer": LAYER, "gemm": gemm},
            "metric": "relative_error", "value": 0.5, "threshold": 0.05, "origin": "o",
            "first_step": step, "step": step, "last_step": step + 3, "layer": LAYER,
        }  # fmt: skip

    joined = join_alerts(
        Alert.from_dict(item) for item in (stored("fprop", 4, "watch"), stored("dgrad", 6, "act"))
    )
    (alert,) = joined.values()
    assert (alert.key, alert.severity, alert.step) == (f"gemm-error|{LAYER}", "act", 4)
    assert (alert.first_step, alert.last_step) == (4, 9)
    assert [signal.key for signal in alert.signals] == [
        f"gemm-error|{Slot(LAYER, gemm=gemm).family}" for gemm in ("dgrad", "fprop")
    ]


@pytest.mark.parametrize(
    ("place", "gemms", "held"),
    [
        ({"gemm": "dgrad"}, ("dgrad",), True),
        ({"gemm": "dgrad"}, ("fprop",), False),
        ({"operand": "x", "layout": "row"}, ("fprop",), True),
        ({"operand": "x", "layout": "row"}, ("dgrad", "wgrad"), False),
        ({"operand": "w", "layout": "tile"}, ("fprop",), False),
        ({"operand": "w", "layout": "tile"}, ("fprop", "dgrad"), True),
        ({"operand": "dy", "layout": "col"}, ("wgrad",), True),
        ({"operand": "dy", "layout": "col"}, ("layer",), True),
        ({"operand": "x", "layout": "row"}, (), False),
    ],
)
def test_a_fallback_holds_what_it_covers(
    slots: Any, observation: Any, place: Any, gemms: Any, held: bool
) -> None:
    state, _ = decide(PolicyState(), observation(0, slots, ill(fprop={"error": 0.4})), OBSERVE)
    (alert,) = state.alerts.values()
    signals = [dataclasses.replace(alert.worst, slot=Slot(LAYER, **place))]
    assert is_held(signals, "gemm-error", plan(*gemms)) is held
    # An uncovered one beside it, unless it is over.
    other = dataclasses.replace(alert.worst, slot=Slot("blocks.1.o", gemm="fprop"))
    assert is_held([*signals, other], "gemm-error", plan(*gemms)) is False
    assert is_held([*signals, dataclasses.replace(other, over=True)], "gemm-error", plan(*gemms)) is held


def test_non_finite_values_that_go_on_in_bf16_are_held_no_longer(slots: Any, observation: Any) -> None:
    state = PolicyState()
    for step in range(2):
        state, made = decide(state, observation(step, slots, ill(fprop={"nan": 3})), ENFORCE)
    assert [decision.target.gemm for decision in made] == ["fprop"]
    held = []
    for step in range(2, 9):
        (alert,) = state.alerts.values()
        held.append(is_held(alert.signals, alert.rule, state.plan))
        state, _ = decide(state, observation(step, slots, ill(fprop={"nan": 3})), ENFORCE)
    # The fallback of step 1 begins at step 2, and has four steps to show that it helps.
    assert held == [True, True, True, True, True, False, False]


def emulated(slots: Any, *gemms: str, layer: str = LAYER) -> Any:
    return tuple(
        dataclasses.replace(slot, emulated=True) if slot.layer == layer and slot.gemm in gemms else slot
        for slot in slots
    )


WRONG = ill(fprop={"error": 0.4}, x_row={"sqnr_db": 12.0})


def test_a_layer_configured_to_bf16_is_reported_and_left_alone(slots: Any, observation: Any) -> None:
    state = PolicyState()
    for step in range(3):
        seen = observation(step, emulated(slots, "fprop", "dgrad", "wgrad"), WRONG)
        state, made = decide(state, seen, ENFORCE)
        assert made == ()
    assert {alert.rule for alert in state.alerts.values()} == {"gemm-error", "sqnr"}
    assert all(signal.what_if for alert in state.alerts.values() for signal in alert.signals)
    assert all(is_held(alert.signals, alert.rule, state.plan) for alert in state.alerts.values())


def test_non_finite_values_of_a_layer_in_bf16_are_real(slots: Any, observation: Any) -> None:
    state, decisions = PolicyState(), []
    for step in range(3):
        seen = observation(step, emulated(slots, "fprop", "dgrad", "wgrad"), ill(fprop={"nan": 4}))
        state, made = decide(state, seen, ENFORCE)
        decisions += made
    (alert,) = state.alerts.values()
    assert (alert.worst.what_if, is_held(alert.signals, alert.rule, state.plan)) == (False, False)
    assert [decision.action for decision in decisions] == ["advice"]
    assert "runs in BF16 already" in decisions[0].reason


def test_a_layer_in_fp8_beside_it_is_judged_as_ever(slots: Any, observation: Any) -> None:
    seen = observation(0, emulated(slots, "fprop", "dgrad", "wgrad", layer="blocks.1.o"), WRONG)
    state, made = decide(PolicyState(), seen, ENFORCE)
    assert [(decision.layer, decision.target.gemm) for decision in made] == [(LAYER, "fprop")]
    assert not any(signal.what_if for alert in state.alerts.values() for signal in alert.signals)
