"""What is done where what-ifs are at hand, where they are waited for, and where one fault hits many layers."""

import dataclasses
import json
from typing import Any

import pytest

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.gate import SETTLE_STEPS
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState
from fp8_safeguard.monitor.prescribing import LOOK_WAIT

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"
X_AND_W = [(LAYER, "w tile", "format"), (LAYER, "x row", "format")]

HEALTHY = {
    "fprop": {"fp8": 0.027, "e5m2": 0.056, "x_e5m2": 0.045, "w_e5m2": 0.045, "pow2": 0.028, "x_multiplier_2^4": 0.027},
    "dgrad": {"fp8": 0.027, "e5m2": 0.056, "dy_e5m2": 0.045, "w_e5m2": 0.045, "pow2": 0.028},
    "wgrad": {"fp8": 0.027, "e5m2": 0.056, "dy_e5m2": 0.045, "x_e5m2": 0.045, "pow2": 0.028, "x_multiplier_2^4": 0.027},
}  # fmt: skip
"""What a close look at a layer shows while nothing is wrong."""

SATURATED = {
    "fprop": {"fp8": 0.82, "x_multiplier_2^4": 0.027, "x_multiplier_2^-4": 0.9, "x_e5m2": 0.05},
    "dgrad": {"fp8": 0.027},
    "wgrad": {"fp8": 0.81, "x_multiplier_2^4": 0.027, "x_multiplier_2^-4": 0.9, "x_e5m2": 0.05},
}
ILL = {(LAYER, "fprop"): {"error": 0.82}}
MODERATE = {
    "fprop": {"fp8": 0.09, "x_multiplier_2^4": 0.2, "x_e5m2": 0.05, "pow2": 0.091},
    "wgrad": {"fp8": 0.03, "x_multiplier_2^4": 0.2, "x_e5m2": 0.05},
}
MILD = {(LAYER, "fprop"): {"error": 0.09}}


def mild(how: Any, layer: str = LAYER) -> Any:
    return {(layer, "fprop"): {"error": how}}


def test_vanishing_weights_and_activations_get_e5m2_for_both_where_a_look_is_at_hand(
    slots: Any, observation: Any, follow: Any, asked: Any, drift: Any, looked: Any
) -> None:
    def seen(after: int) -> Any:
        each = observation(after, slots, drift(after))
        return looked(each, LAYER, HEALTHY) if after == 7 else each

    state, made = follow(seen(after) for after in range(10))
    own = [decision for decision in made if decision.layer == LAYER]
    assert sorted(asked(own)) == X_AND_W
    # At the first sample in which they vanish beyond their levels together, from a look two samples old.
    assert {decision.step for decision in own} == {9}
    assert {decision.value for decision in own} == {"e5m2"}
    assert [entry.value for entry in state.plan.entries if entry.layer == LAYER] == ["e5m2", "e5m2"]


def test_the_decisions_of_one_remedy_share_its_id_and_say_what_was_measured(
    slots: Any, observation: Any, follow: Any, drift: Any, looked: Any
) -> None:
    _, made = follow(looked(observation(after, slots, drift(after)), LAYER, HEALTHY) for after in (7, 8, 9))
    x, w = (decision for decision in made if decision.layer == LAYER)
    assert (
        x.evidence["remedy"]
        == w.evidence["remedy"]
        == {"id": x.id, "name": "format=e5m2: x, w", "entries": 2}
    )
    assert x.evidence["what_if"]["remedy"] == {"fprop": 0.056, "dgrad": 0.045, "wgrad": 0.045}
    assert x.reason.endswith(
        "x and w go to E5M2, the cheapest that what-ifs show to be healthy "
        "(fprop 2.7 % -> 5.6 %, dgrad 2.7 % -> 4.5 %, wgrad 2.7 % -> 4.5 %)"
    )
    json.dumps(x.to_wire(), allow_nan=False)


def test_an_error_beyond_the_instant_level_goes_to_bf16_at_once_without_a_look(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    _, made = follow([observation(0, slots, ILL)])
    assert asked(made) == [(LAYER, "fprop", "bf16_fallback")]


def test_with_a_look_it_gets_what_the_look_shows_to_be_the_cheapest(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    _, made = follow([looked(observation(0, slots, ILL), LAYER, SATURATED)])
    assert asked(made) == [(LAYER, "x row", "scale_multiplier")]
    assert made[0].value == 16.0
    assert "the scales of x go to 16 times what the amax asks for" in made[0].reason


def test_a_milder_error_waits_for_its_look_and_takes_what_it_shows(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    course = [observation(step, slots, MILD) for step in range(2)]
    course.append(looked(observation(2, slots, MILD), LAYER, MODERATE))
    _, made = follow(course)
    assert [(decision.step, decision.value) for decision in made] == [(2, "e5m2")]
    assert asked(made) == [(LAYER, "x row", "format")]


def test_it_waits_no_longer_than_four_samples(slots: Any, observation: Any, follow: Any, asked: Any) -> None:
    _, made = follow(observation(10 * at, slots, MILD) for at in range(9))
    assert [(decision.step, decision.action) for decision in made] == [
        (10 * (LOOK_WAIT - 1), "bf16_fallback")
    ]


def test_a_look_that_shows_nothing_cheaper_ends_the_waiting(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    hopeless = {gemm: dict.fromkeys(variants, 0.09) for gemm, variants in MODERATE.items()}
    course = [observation(0, slots, MILD), looked(observation(1, slots, MILD), LAYER, hopeless)]
    _, made = follow(course)
    assert [(decision.step, decision.action) for decision in made] == [(1, "bf16_fallback")]


def test_a_fault_that_the_operands_do_not_show_goes_to_bf16_whatever_the_what_ifs_say(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    """A stale inverse scale."""
    ill = mild(7.0)
    _, made = follow([looked(observation(0, slots, ill), LAYER, HEALTHY)])
    assert asked(made) == [(LAYER, "fprop", "bf16_fallback")]


def test_a_remedy_has_time_to_show_what_it_does_and_bf16_follows_where_it_does_not_help(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    course = [looked(observation(0, slots, ILL), LAYER, SATURATED)]
    course += [observation(step, slots, ILL) for step in range(1, 12)]
    state, made = follow(course)
    assert asked(made) == [(LAYER, "x row", "scale_multiplier"), (LAYER, "fprop", "bf16_fallback")]
    assert made[1].step == 4
    _, more = follow((observation(step, slots, ILL) for step in range(12, 49)), state=state)
    assert more == []


def test_a_remedy_that_did_not_help_leaves_the_plan_after_the_dwell_and_is_not_tried_again(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    course = [looked(observation(step, slots, ILL), LAYER, SATURATED) for step in range(130)]
    state, made = follow(course)
    told = [(decision.step, decision.target.key, decision.action, decision.rule) for decision in made]
    assert told[0] == (0, "x row", "scale_multiplier", "gemm-error")
    assert (50, "x row", "restore", "no-help") in told
    assert sum(action == "scale_multiplier" for _, _, action, _ in told) == 1
    assert state.outcomes.has_failed(LAYER, "scale_multiplier=16.0: x")


def test_what_did_not_help_is_replaced_by_the_next_remedy_after_the_dwell(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, budget_ratio=0.0)
    course = [looked(observation(step, slots, ILL), LAYER, SATURATED) for step in range(60)]
    state, made = follow(course, config)
    done = [(decision.step, decision.action) for decision in made if decision.action != "advice"]
    assert done == [(0, "scale_multiplier"), (50, "format")]
    assert made[-1].evidence["replaces"] == [made[0].id]
    assert made[-1].reason.endswith(", in the place of scale_multiplier, which did not help")
    assert [(entry.action, entry.value) for entry in state.plan.entries] == [("format", "e5m2")]


def test_a_layer_waits_for_the_scale_that_others_with_its_fault_get(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    """One layer of several saturates in a layout that is not looked at, or shows it a sample later."""
    layers = [f"blocks.3.{linear}" for linear in ("o", "shared_up", "expert_up")]
    ill = everywhere([LAYER, *layers], "fprop", 0.8)
    ill |= {(layer, "x row"): {"saturated": 200_000} for layer in layers}
    seen = observation(0, slots, ill)
    for layer in layers:
        seen = looked(seen, layer, SATURATED)
    state, made = follow([seen])
    assert sorted(asked(made)) == [(layer, "x row", "scale_multiplier") for layer in sorted(layers)]
    # The others are healthy when it shows what it needs.
    late = {(LAYER, "fprop"): {"error": 0.8}, (LAYER, "x row"): {"saturated": 200_000}}
    _, more = follow([looked(observation(1, slots, late), LAYER, SATURATED)], state=state)
    assert asked(more) == [(LAYER, "x row", "scale_multiplier")]
    # Where it never does, it waits no longer than a scale has to show its effect.
    course = [observation(step, slots, {(LAYER, "fprop"): {"error": 0.8}}) for step in range(1, 12)]
    _, alone = follow(course, state=state)
    assert [(decision.step, decision.layer, decision.action) for decision in alone] == [
        (SETTLE_STEPS, LAYER, "bf16_fallback")
    ]


def test_a_layer_with_another_fault_does_not_wait_for_a_scale_of_others(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    ill = {("blocks.3.o", "fprop"): {"error": 0.8}, (LAYER, "dgrad"): {"error": 0.8}}
    _, made = follow([looked(observation(0, slots, ill), "blocks.3.o", SATURATED)])
    assert sorted(asked(made)) == [
        ("blocks.3.o", "x row", "scale_multiplier"),
        (LAYER, "dgrad", "bf16_fallback"),
    ]


def test_an_ill_operand_asks_for_nothing_while_the_look_shows_its_gemm_to_be_healthy(
    make_slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    """Weight gradients are recomputed in turn: a look says in between what they are."""
    slots = make_slots(gemms=("fprop", "dgrad"))
    ill = {(LAYER, "dy col"): {"sqnr_db": 10.8}}
    fine = {"fprop": {"fp8": 0.02, "pow2": 0.02}, "wgrad": {"fp8": 0.035, "x_multiplier_2^4": 0.035}}
    bad = {**fine, "wgrad": {"fp8": 0.3, "x_multiplier_2^4": 0.3}}
    for look, expected in ((fine, []), (bad, [(LAYER, "wgrad", "bf16_fallback")])):
        _, made = follow(looked(observation(step, slots, ill), LAYER, look) for step in range(12))
        assert asked(made) == expected


def everywhere(layers: Any, gemm: str, error: float) -> Any:
    return {(layer, gemm): {"error": error} for layer in layers}


def test_one_fault_of_all_layers_gets_the_remedy_that_two_were_measured_with(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    layers = sorted({slot.layer for slot in slots})
    ill = everywhere(layers, "fprop", 0.09)
    seen = [observation(step, slots, ill) for step in range(2)]
    for layer in layers[:2]:
        seen[1] = looked(seen[1], layer, MODERATE)
    state, made = follow(seen)
    assert {(decision.layer, decision.target.key, decision.action) for decision in made} == {
        (layer, "x row", "format") for layer in layers
    }
    assert {decision.step for decision in made} == {1}
    others = [decision for decision in made if decision.layer not in layers[:2]]
    assert all(f"as measured on {layers[0]!r} and {layers[1]!r}" in decision.reason for decision in others)
    assert others[0].evidence["what_if"]["layers"] == layers[:2]
    assert state.plan.fallen == frozenset()


def test_a_fault_that_the_budget_holds_is_measured_layer_by_layer(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    layers = sorted({slot.layer for slot in slots})[:4]
    seen = [observation(step, slots, everywhere(layers, "fprop", 0.09)) for step in range(2)]
    for layer in layers[:2]:
        seen[1] = looked(seen[1], layer, MODERATE)
    _, made = follow(seen)
    assert {decision.layer for decision in made} == set(layers[:2])


def test_layers_whose_fault_began_at_another_time_are_another_case(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    layers = sorted({slot.layer for slot in slots})
    early, late = layers[:2], layers[2:]
    seen = [observation(step, slots, everywhere(early, "fprop", 0.09)) for step in range(1)]
    both = {**everywhere(early, "fprop", 0.09), **everywhere(late, "fprop", 0.09)}
    seen += [observation(step, slots, both) for step in (20, 21)]
    for layer in early:
        seen[-1] = looked(seen[-1], layer, MODERATE)
    _, made = follow(seen)
    assert {decision.layer for decision in made} == set(early)


def test_what_runs_in_bf16_is_given_back_what_costs_nothing_once_the_budget_is_short(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10, budget_ratio=2 / 72)
    state, first = follow([observation(0, slots, ILL)], config)
    assert asked(first) == [(LAYER, "fprop", "bf16_fallback")]
    course = [looked(observation(step, slots, ILL), LAYER, SATURATED) for step in range(1, 12)]
    state, made = follow(course, config, state)
    assert [(decision.step, decision.action) for decision in made] == [(10, "scale_multiplier")]
    assert "for as long as it runs in BF16" in made[0].reason
    roomy = dataclasses.replace(config, budget_ratio=0.15)
    _, none = follow(course, roomy, follow([observation(0, slots, ILL)], roomy)[0])
    assert none == []


def test_a_format_is_restored_once_looks_show_the_plain_configuration_to_be_healthy(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10, restore_samples=3)
    state, made = follow([looked(observation(0, slots, MILD), LAYER, MODERATE)], config)
    assert made == []
    state, made = follow([observation(1, slots, MILD)], config, state)
    assert asked(made) == [(LAYER, "x row", "format")]
    plain_ill = {"fprop": {"fp8": 0.05, "e4m3": 0.09, "pow2": 0.05}, "wgrad": {"fp8": 0.05, "e4m3": 0.03}}
    plain_fine = {"fprop": {"fp8": 0.05, "e4m3": 0.03, "pow2": 0.05}, "wgrad": {"fp8": 0.05, "e4m3": 0.03}}

    def course(steps: Any, shown: Any) -> Any:
        for step in steps:
            each = observation(step, slots)
            yield looked(each, LAYER, shown) if step % 4 == 0 else each

    state, made = follow(course(range(2, 40), plain_ill), config, state)
    assert made == []
    state, made = follow(course(range(40, 60), plain_fine), config, state)
    assert [(decision.step, decision.action, decision.rule) for decision in made] == [
        (48, "restore", "probation")
    ]
    assert "healthy in 3 close looks" in made[0].reason
    assert state.plan.entries == ()


def test_entries_with_a_time_to_live_are_renewed_while_they_are_asked_for_and_then_expire(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, ttl_steps=20)
    state, made = follow([observation(0, slots, ILL)], config)
    (entry,) = state.plan.entries
    assert (entry.expires_step, made[0].evidence["ttl_steps"]) == (20, 20)
    state, made = follow((observation(step, slots, ILL) for step in range(1, 31)), config, state)
    (entry,) = state.plan.entries
    assert (made, entry.expires_step) == ([], 50 if entry.expires_step == 50 else 40)
    state, made = follow((observation(step, slots) for step in range(31, 80)), config, state)
    assert [(decision.action, decision.rule) for decision in made] == [("restore", "expired")]
    assert made[0].step == entry.expires_step
    assert state.plan.entries == ()


def test_excluded_layers_are_never_touched(slots: Any, observation: Any, follow: Any, looked: Any) -> None:
    config = dataclasses.replace(ENFORCE, exclude=("blocks.3.*",))
    course = [looked(observation(step, slots, ILL), LAYER, SATURATED) for step in range(9)]
    state, made = follow(course, config)
    assert made == []
    assert [alert.rule for alert in state.alerts.values()] == ["gemm-error"]


def test_a_proposed_remedy_is_approved_one_entry_at_a_time_or_together(
    slots: Any, observation: Any, follow: Any, asked: Any, drift: Any, looked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, mode="advise")
    course = [looked(observation(after, slots, drift(after)), LAYER, HEALTHY) for after in range(7, 13)]
    state, made = follow(course, config)
    x, w = (decision for decision in made if decision.layer == LAYER)
    assert {x.state, w.state} == {"proposed"}
    assert {proposal.decision_id for proposal in state.proposals.values()} >= {x.id, w.id}
    one = policy.approve(state, x, 13)
    both = policy.approve(one, w, 13)
    own = [entry for entry in both.plan.entries if entry.layer == LAYER]
    assert [(entry.target.key, entry.value) for entry in own] == [("w tile", "e5m2"), ("x row", "e5m2")]
    # Nothing else is proposed for the layer while one of its entries waits.
    _, more = follow((observation(after, slots, drift(after)) for after in range(13, 40)), config, one)
    assert LAYER not in {decision.layer for decision in more}
    gone = policy.revert(policy.revert(both, x, 14), w, 14)
    assert LAYER not in {entry.layer for entry in gone.plan.entries}


def test_a_pinned_operand_spot_that_rests_leaves_the_remedy_to_bf16(
    slots: Any, observation: Any, follow: Any, asked: Any, looked: Any
) -> None:
    """A person has just reverted the scale: it is not put back within the dwell."""
    state, (made,) = follow([looked(observation(0, slots, ILL), LAYER, SATURATED)])
    state = policy.revert(state, made, 5)
    course = [looked(observation(step, slots, ILL), LAYER, {**SATURATED}) for step in range(6, 12)]
    _, more = follow(course, state=state)
    assert (LAYER, "x row", "scale_multiplier") not in asked(more)
    assert more[0].target in (Target(gemm="fprop"), Target(operand="x", layout="row"))


def test_a_look_from_before_the_plan_took_effect_says_nothing(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    state, made = follow([looked(observation(0, slots, ILL), LAYER, SATURATED)])
    assert made
    for step, version, known in ((1, 0, []), (2, 1, [LAYER])):
        seen = looked(observation(step, slots), LAYER, HEALTHY)
        state, _ = policy.decide(state, dataclasses.replace(seen, plan_version=version), ENFORCE)
        assert list(state.looks.looks) == known


@pytest.mark.parametrize("wrong", [{"ttl_steps": 0}, {"exclude": "blocks.*"}])
def test_wrong_settings_say_what_is_allowed(wrong: Any) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values()))).replace("*", r"\*")):
        PolicyConfig(**wrong)


def test_nothing_at_all_is_decided_on_looks_of_healthy_layers(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    state, made = follow(looked(observation(step, slots), LAYER, HEALTHY) for step in range(30))
    assert (made, state.plan.version) == ([], 0)
    assert PolicyState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False))) == state
