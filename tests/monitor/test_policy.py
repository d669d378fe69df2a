"""What the policy sees: measured courses of faults, of health, and of faults that are not FP8's."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide
from fp8_safeguard.monitor.slots import Slot

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"
DRIFTING = ("blocks.3.qkv", "blocks.3.shared_up", "blocks.3.expert_up")


@pytest.mark.parametrize("history", [0, 20])
@pytest.mark.parametrize("every", [1, 5])
def test_fast_drift_alerts_by_5_steps_and_falls_back_where_no_look_comes(
    slots: Any, observation: Any, every: int, history: Any, follow: Any, asked: Any, drift: Any
) -> None:
    rng = np.random.default_rng(every)
    state, early = follow(observation(step, slots, rng=rng) for step in range(history))
    assert (early, state.alerts) == ([], {})
    first_alert, decisions = None, []
    for after in range(0, 30, every):
        state, made = decide(state, observation(history + after, slots, drift(after), rng), ENFORCE)
        decisions += made
        if state.alerts and first_alert is None:
            first_alert = after
    # The second sample in breach at the latest: step 4 or 5 if every step is sampled.
    assert first_alert <= (5 if every == 1 else 10)
    # Four samples from the first breach: a look would have come by then.
    assert {made.step - history for made in decisions} == {20 if every == 5 else 9}
    assert sorted(asked(decisions)) == sorted(
        (layer, gemm, "bf16_fallback") for layer in DRIFTING for gemm in ("fprop", "dgrad")
    )
    assert {alert.layer for alert in state.alerts.values()} == set(DRIFTING)
    assert state.costs.share(fallbacks(state.plan)) == pytest.approx(6 / 72)


def test_the_decision_says_why_with_its_numbers(
    slots: Any, observation: Any, follow: Any, drift: Any
) -> None:
    state, decisions = follow(observation(100 + at, slots, drift(at)) for at in (0, 5, 6, 7, 10))
    made = decisions[0]
    assert made.id == "r-1"
    assert (made.run, made.step, made.not_before_step, made.mode, made.state) == (
        "r",
        110,
        111,
        "enforce",
        "sent",
    )
    assert made.rule == "weight-underflow"
    assert made.reason == (
        f"'{made.layer}': 0.45 % of w and 2.8 % of x vanish in quantisation (limits together: 0.3 % and 0.5 %); "
        "fprop goes to BF16"
    )
    x, w = made.evidence["signals"]
    assert (x["metric"], x["value"], x["threshold"]) == (
        "underflow_ratio",
        pytest.approx(0.028, rel=1e-3),
        0.005,
    )
    assert (w["slot"], w["first_step"]) == ({"layer": made.layer, "operand": "w", "layout": "tile"}, 105)
    assert made.evidence["first_step"] == 105
    assert made.evidence["budget"]["limit"] == 0.15
    json.dumps(made.to_wire(), allow_nan=False)
    assert state.plan.find(made.layer, made.target, "bf16_fallback").decision_id == made.id


@pytest.mark.parametrize("steps", [2000])
def test_health_raises_nothing_over_thousands_of_steps(make_slots: Any, observation: Any, steps: Any) -> None:
    """From the first sample, without any history, and with it."""
    slots, rng = make_slots(1), np.random.default_rng(0)
    tables = [observation(0, slots, rng=rng).stats for _ in range(97)]
    state = PolicyState()
    for step in range(steps):
        seen = StepObservation(step=step, slots=slots, stats=tables[rng.integers(97)])
        state, decisions = decide(state, seen, ENFORCE)
        assert (decisions, dict(state.alerts)) == ((), {})
    assert state.plan.version == 0


def test_health_at_its_maximum_raises_nothing(slots: Any, observation: Any, follow: Any) -> None:
    state, decisions = follow(observation(step, slots) for step in range(20))
    assert (decisions, state.alerts, state.evidence) == ([], {}, {})


@pytest.mark.parametrize(
    ("gemm", "errors", "decided_at"),
    [
        ("fprop", [0.06] * 4, 3),
        ("dgrad", [0.06, 0.03, *[0.06] * 4], 5),
        ("fprop", [0.16], 0),
        ("dgrad", [math.inf], 0),
        ("wgrad", [0.07] * 5, None),
        ("wgrad", [0.2] * 4, 3),
        ("wgrad", [0.95], 0),
        ("fprop", [0.049] * 5, None),
    ],
)
def test_the_recomputed_gemm_judges(
    slots: Any, observation: Any, gemm: Any, errors: Any, decided_at: Any, follow: Any, asked: Any
) -> None:
    def ill(error: float) -> dict[tuple[str, str], dict[str, float]]:
        return {(LAYER, gemm): {"sum_sq_err": math.inf} if math.isinf(error) else {"error": error}}

    _, decisions = follow(observation(step, slots, ill(error)) for step, error in enumerate(errors))
    expected = [] if decided_at is None else [(LAYER, gemm, "bf16_fallback")]
    assert asked(decisions) == expected
    assert [made.step for made in decisions] == ([] if decided_at is None else [decided_at])


def test_a_wgrad_with_flushed_rows_needs_one_sample(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, budget_ratio=1.0)
    ill = {(LAYER, "wgrad"): {"error": 0.3}, (LAYER, "dy row"): {"rows_flushed": 900}}
    _, decisions = follow([observation(0, slots, ill)], config)
    assert asked(decisions) == [(LAYER, "wgrad", "bf16_fallback")]


@pytest.mark.parametrize(
    "ill",
    [
        {("blocks.1.qkv", "dy col"): {"underflow_ratio": 0.57}},
        {
            ("blocks.1.qkv", "x row"): {"underflow_ratio": 0.16},
            ("blocks.1.qkv", "x col"): {"underflow_ratio": 0.3},
        },
        {("blocks.1.qkv", "x row"): {"underflow_ratio": 0.9}},
        {("blocks.1.qkv", "w tile"): {"underflow_ratio": 0.02}},
        {
            ("blocks.1.qkv", "w tile"): {"underflow_ratio": 0.02},
            ("blocks.2.qkv", "x row"): {"underflow_ratio": 0.5},
        },
        {("blocks.1.qkv", "dy row"): {"underflow_ratio": 0.23, "rows_flushed": 25}},
        {("blocks.1.qkv", "x row"): {"amax": 1e6, "sum_4th": 1e12}},
        {("blocks.1.qkv", "fprop"): {"error": 0.048}},
    ],
    ids=[
        "qk-gain",
        "raw-gain",
        "x alone",
        "w alone",
        "two layers",
        "token-weights",
        "spike",
        "gemm below act",
    ],
)
def test_what_is_not_fp8s_fault_alerts_at_most(slots: Any, observation: Any, ill: Any, follow: Any) -> None:
    healthy = [observation(step, slots) for step in range(8)]
    state, decisions = follow([*healthy, *(observation(8 + step, slots, ill) for step in range(6))])
    assert [made for made in decisions if made.action != "advice"] == []
    assert {alert.severity for alert in state.alerts.values()} <= {"watch"}


def test_gross_underflow_of_x_needs_less_of_w(slots: Any, observation: Any, follow: Any, asked: Any) -> None:
    ill = {(LAYER, "x row"): {"underflow_ratio": 0.25}, (LAYER, "w tile"): {"underflow_ratio": 0.002}}
    _, decisions = follow([observation(0, slots, ill)])
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback"), (LAYER, "dgrad", "bf16_fallback")]


def test_a_watch_breach_alerts_with_its_second_sample_and_resolves_after_three_clear_ones(
    slots: Any, observation: Any
) -> None:
    ill = {("blocks.0.o", "dy row"): {"underflow_ratio": 0.006}}
    course = [ill, {}, ill, ill, {}, {}, ill, {}, {}, {}]
    state, seen = PolicyState(), []
    for step, wrong in enumerate(course):
        state, _ = decide(state, observation(step, slots, wrong), ENFORCE)
        seen.append(len(state.alerts))
        if step == 6:
            (alert,) = state.alerts.values()
    assert seen == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]
    assert (alert.rule, alert.severity, alert.worst.metric) == ("underflow", "watch", "underflow_ratio")
    assert (alert.first_step, alert.step, alert.last_step, alert.worst.threshold) == (2, 3, 6, 0.005)
    assert alert.worst.slot == Slot("blocks.0.o", operand="dy", layout="row")
    assert alert.worst.value == pytest.approx(0.006, rel=1e-3)


def test_a_slot_that_was_not_sampled_neither_resolves_nor_extends(
    slots: Any, observation: Any, follow: Any
) -> None:
    ill = {("blocks.0.o", "wgrad"): {"error": 0.2}}
    without = tuple(slot for slot in slots if slot.gemm != "wgrad")
    state, decisions = follow(
        [
            observation(0, slots, ill),
            *(observation(step, without) for step in range(1, 9)),
            observation(9, slots, ill),
        ]
    )
    assert [alert.rule for alert in state.alerts.values()] == ["gemm-error"]
    # Rotating wgrads: its second sample is the second of a row, however many samples lie between.
    assert [made.step for made in decisions] == [9]


def test_an_act_breach_alerts_at_once(slots: Any, observation: Any, follow: Any) -> None:
    state, _ = follow([observation(0, slots, {("blocks.0.o", "fprop"): {"error": 0.06}})])
    assert [(alert.rule, alert.severity) for alert in state.alerts.values()] == [("gemm-error", "act")]


def test_one_isolated_non_finite_sample_alerts_and_two_in_a_row_fall_back(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LAYER, "fprop"): {"nan": 3}}
    config = dataclasses.replace(ENFORCE, clear_samples=1)
    state, decisions = follow([observation(0, slots, ill)], config)
    assert decisions == []
    assert [(alert.rule, alert.severity, alert.worst.value) for alert in state.alerts.values()] == [
        ("non-finite", "watch", 3)
    ]
    state, decisions = follow([observation(1, slots), observation(2, slots, ill)], config, state)
    assert decisions == []
    state, decisions = follow([observation(3, slots, ill)], config, state)
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback")]
    assert "3 non-finite values begin in 'blocks.3.qkv' fprop at step 2" in decisions[0].reason
    assert [alert.severity for alert in state.alerts.values()] == ["act"]


def test_non_finite_values_everywhere_are_blamed_on_where_they_begin(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    """One expert's NaN fills everything after it and, through the loss, the whole backward pass."""
    first = next(
        at for at, slot in enumerate(slots) if slot.layer == "blocks.2.expert_up" and slot.gemm == "fprop"
    )
    ill = {
        (slot.layer, slot.gemm or f"{slot.operand} {slot.layout}"): {"nan": 100}
        for at, slot in enumerate(slots)
        if slot.operand != "w" and (at >= first or slot.operand == "dy" or slot.gemm in ("dgrad", "wgrad"))
    }
    state, decisions = follow(observation(step, slots, ill) for step in range(2))
    assert asked(decisions) == [("blocks.2.expert_up", "fprop", "bf16_fallback")]
    assert "23 other layers" in decisions[0].reason
    assert len(state.alerts) == 1


def test_a_clean_forward_pass_blames_the_last_layer_of_the_backward(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {
        ("blocks.1.qkv", "dy row"): {"inf": 1},
        ("blocks.3.o", "dgrad"): {"nan": 5},
        ("blocks.2.o", "dy row"): {"nan": 5},
    }
    _, decisions = follow(observation(step, slots, ill) for step in range(2))
    assert asked(decisions) == [("blocks.3.o", "dgrad", "bf16_fallback")]


def test_without_indices_layer_names_order_the_layers_with_numbers_as_numbers(
    make_slots: Any, observation: Any, follow: Any
) -> None:
    slots = tuple(
        Slot(name, gemm="fprop") for name in ("blocks.10.a", "blocks.9.a", "blocks.²", "blocks.9.b")
    )
    ill = {(slot.layer, "fprop"): {"nan": 1} for slot in slots}
    state, _ = follow([observation(0, slots, ill, indices=())])
    assert [alert.layer for alert in state.alerts.values()] == ["blocks.9.a"]


def test_non_finite_weights_are_nobodys_precision(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    _, decisions = follow(observation(step, slots, {(LAYER, "w tile"): {"nan": 1}}) for step in range(9))
    assert asked(decisions) == [(LAYER, "layer", "advice")]
    assert "go back to a checkpoint" in decisions[0].reason


def test_non_finite_values_that_outlive_the_fallback_are_not_fp8s(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=5)
    _, decisions = follow(
        (observation(step, slots, {(LAYER, "fprop"): {"nan": 1}}) for step in range(20)), config
    )
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback"), (LAYER, "fprop", "advice")]
    assert "not FP8" in decisions[1].reason


def test_a_gradient_scaler_that_looks_for_its_scale_is_no_fault(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LAYER, "dy row"): {"inf": 7}, (LAYER, "dgrad"): {"nan": 7}}
    falling = [observation(step, slots, ill, run={"loss_scale": 2.0 ** (16 - step)}) for step in range(6)]
    state, decisions = follow(falling)
    assert decisions == []
    assert {alert.severity for alert in state.alerts.values()} == {"watch"}
    steady = [observation(step, slots, ill, run={"loss_scale": 2.0**10}) for step in range(6, 9)]
    assert asked(follow(steady, state=state)[1]) == [(LAYER, "dgrad", "bf16_fallback")]


def test_low_sqnr_falls_back_only_where_no_recomputed_result_judges(
    slots: Any, make_slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LAYER, "dy row"): {"sqnr_db": 18.0}}
    state, decisions = follow(observation(step, slots, ill) for step in range(4))
    assert decisions == []
    assert [alert.rule for alert in state.alerts.values()] == ["sqnr"]
    _, decisions = follow(observation(step, make_slots(4, ()), ill) for step in range(4))
    assert asked(decisions) == [(LAYER, "dgrad", "bf16_fallback")]
    assert [made.step for made in decisions] == [1]


def test_preset_seed_falls_back_what_reads_a_slot_beyond_its_pair(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, preset="seed")
    ill = {(LAYER, "dy col"): {"underflow_ratio": 0.006}, ("blocks.0.o", "fprop"): {"sum_sq_err": 300.0}}
    state, decisions = follow((observation(step, slots, ill) for step in range(2)), config)
    assert sorted(asked(decisions)) == [
        ("blocks.0.o", "fprop", "bf16_fallback"),
        (LAYER, "wgrad", "bf16_fallback"),
    ]
    assert {alert.rule for alert in state.alerts.values()} == {"seed-underflow", "seed-cosine"}


def test_e5m2_has_its_own_noise_floor(slots: Any, observation: Any, follow: Any) -> None:
    """Healthy E5M2 gemms are 5 to 6 % off: no fault, if the slot says that it is E5M2."""
    marked = tuple(
        dataclasses.replace(slot, fmt="e5m2") if slot.gemm == "dgrad" or slot.operand == "dy" else slot
        for slot in slots
    )
    ill = {(slot.layer, "dgrad"): {"error": 0.06} for slot in slots}
    ill |= {(slot.layer, f"dy {layout}"): {"sqnr_db": 25.5} for slot in slots for layout in ("row", "col")}
    state, decisions = follow(observation(step, marked, ill) for step in range(12))
    assert (decisions, state.alerts) == ([], {})
    assert follow(observation(step, slots, ill) for step in range(12))[1] != []


def test_a_slow_creep_does_not_teach_its_own_threshold(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    _, decisions = follow(
        observation(step, slots, {(LAYER, "fprop"): {"error": 0.03 * 1.02**step}}) for step in range(120)
    )
    assert asked(decisions) == [(LAYER, "fprop", "bf16_fallback")]
    # 0.03 * 1.02^61 passes 10 %, twice the level that the own median may relax; then the look is waited for.
    assert decisions[0].step <= 61 + 4


def test_a_lasting_jump_becomes_the_new_normal(slots: Any, observation: Any, follow: Any) -> None:
    jump = {("blocks.0.o", "x row"): {"amax": 1000.0}}
    state, _ = follow(observation(step, slots) for step in range(8))
    state, decisions = follow((observation(step, slots, jump) for step in range(8, 30)), state=state)
    assert [alert.rule for alert in state.alerts.values()] == ["amax-jump"]
    state, more = follow((observation(step, slots, jump) for step in range(30, 60)), state=state)
    assert (decisions, more, state.alerts) == ([], [], {})


def test_a_fault_at_the_act_level_never_becomes_a_normal(slots: Any, observation: Any, follow: Any) -> None:
    ill = {("blocks.0.o", "fprop"): {"error": 0.09}}
    state, _ = follow(observation(step, slots, ill if step > 8 else {}) for step in range(80))
    assert [alert.severity for alert in state.alerts.values()] == ["act"]


def test_what_a_non_finite_step_measured_is_no_norm(slots: Any, observation: Any, follow: Any) -> None:
    """Seven steps with a NaN somewhere, in which this slot's amax was high, do not excuse the same amax later."""
    jump = {("blocks.0.o", "x row"): {"amax": 1000.0}}
    sick = {**jump, (LAYER, "wgrad"): {"nan": 1}}
    state, _ = follow(observation(step, slots, sick) for step in range(7))
    state, _ = follow((observation(step, slots) for step in range(7, 11)), state=state)
    state, _ = follow((observation(step, slots, jump) for step in range(11, 13)), state=state)
    assert [alert.rule for alert in state.alerts.values()] == ["amax-jump"]


def test_a_dead_layer_is_no_reference_for_jumps(slots: Any, observation: Any, follow: Any) -> None:
    dead = {("blocks.0.o", "x row"): {"amax": 0.0, "sum_sq": 0.0, "sum_sq_q": 0.0, "sum_sq_err": 0.0}}
    state, _ = follow(observation(step, slots, dead if step < 10 else {}) for step in range(13))
    assert state.alerts == {}


def test_the_worst_expert_is_followed_whoever_it_is(
    slots: Any, observation: Any, asked: Any, with_stats: Any
) -> None:
    layer = "blocks.0.expert_up"
    state, decisions = PolicyState(), []
    for step in range(2):
        expert = Slot(layer, gemm="fprop", expert=step)
        state, made = decide(state, observation(step, (*slots, expert), {}), ENFORCE)
    assert (made, state.alerts) == ((), {})
    for step in range(2, 6):
        expert = Slot(layer, gemm="fprop", expert=step)
        seen = with_stats(observation(step, slots), expert, error=0.08)
        state, made = decide(state, seen, ENFORCE)
        decisions += made
    assert asked(decisions) == [(layer, "fprop", "bf16_fallback")]
    assert [alert.worst.slot.expert for alert in state.alerts.values()] == [5]


def test_an_expert_with_a_handful_of_tokens_is_too_noisy_to_judge(
    slots: Any, observation: Any, follow: Any, with_stats: Any
) -> None:
    expert = Slot("blocks.0.expert_up", gemm="fprop", expert=1)
    seen = (with_stats(observation(step, slots), expert, 0.5, count=256) for step in range(4))
    state, decisions = follow(seen)
    assert (decisions, state.alerts) == ([], {})


def test_what_ifs_take_no_part(slots: Any, observation: Any, follow: Any, with_stats: Any) -> None:
    variant = Slot(LAYER, gemm="fprop", variant="pow2")
    state, decisions = follow(with_stats(observation(step, slots), variant, 9.0) for step in range(4))
    assert (decisions, state.alerts) == ([], {})


def test_chance_in_a_small_tensor_is_no_underflow(slots: Any, observation: Any, follow: Any) -> None:
    few = {"count": 200, "underflow": 7, "zeros": 7, "rows": 2}
    state, _ = follow(observation(step, slots, {("blocks.0.o", "x row"): few}) for step in range(4))
    assert state.alerts == {}
