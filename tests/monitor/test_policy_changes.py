"""What the policy does: scales, fallbacks, budget, restores, and what people change."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.plan import Decision, Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.wire import Sample, parse_sample, sample_to_wire

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"


def test_saturation_gets_a_neutral_multiplier_first_and_a_fallback_if_that_does_not_help(
    observation: Any, make_slots: Any, follow: Any, asked: Any
) -> None:
    """With nothing recomputed, as in a trainer that only shows its operands."""
    slots = make_slots(4, ())
    ill = {(LAYER, f"x {layout}"): {"saturated": 20_000, "sqnr_db": 15.0} for layout in ("row", "col")}
    _, decisions = follow(observation(step, slots, ill) for step in range(7))
    assert asked(decisions) == [
        (LAYER, "x row", "scale_multiplier"),
        (LAYER, "fprop", "bf16_fallback"),
        (LAYER, "wgrad", "bf16_fallback"),
    ]
    assert [made.step for made in decisions] == [0, 4, 4]
    assert decisions[0].value == 1.0
    assert "which block scales never do" in decisions[0].reason
    assert decisions[0].rule == "saturation"


def test_a_scale_that_helps_needs_no_fallback(
    make_slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    slots = make_slots(4, ())
    ill = {(LAYER, "dy row"): {"rows_flushed": 1000}}
    state, decisions = follow([observation(0, slots, ill), observation(1, slots, ill)])
    state, more = follow((observation(step, slots) for step in range(2, 300)), state=state)
    assert asked([*decisions, *more]) == [(LAYER, "dy row", "scale_multiplier")]
    assert state.plan.entries[0].value == 1.0


def test_saturation_whose_results_are_healthy_needs_nothing(
    slots: Any, observation: Any, follow: Any
) -> None:
    ill = {(LAYER, "x row"): {"saturated": 20_000}}
    state, decisions = follow(observation(step, slots, ill) for step in range(9))
    assert decisions == []
    assert {alert.rule for alert in state.alerts.values()} == {"saturation"}


def test_the_budget_holds_and_what_it_refuses_becomes_advice_once(
    slots: Any, observation: Any, follow: Any
) -> None:
    layers = sorted({slot.layer for slot in slots})
    ill = {(layer, gemm): {"error": 0.5} for layer in layers for gemm in ("fprop", "dgrad")}
    state, decisions = follow(observation(step, slots, ill) for step in range(20))
    fallen = [made for made in decisions if made.action == "bf16_fallback"]
    advice = [made for made in decisions if made.action == "advice"]
    # 10 of 72 gemms are 13.9 %, 11 would be 15.3 %; fprop before dgrad.
    assert len(fallen) == 10
    assert {made.target.gemm for made in fallen} == {"fprop"}
    assert len(advice) == 2 * len(layers) - 10
    assert policy.budget_used_ratio(state, ENFORCE) == pytest.approx(10 / 72 / 0.15)
    assert "beyond the budget of 15 %" in advice[0].reason
    assert {made.state for made in advice} == {"proposed"}


def test_the_worst_layers_get_the_budget(slots: Any, observation: Any, follow: Any) -> None:
    layers = sorted({slot.layer for slot in slots})
    ill = {(layer, "fprop"): {"error": 0.2 + 0.01 * at} for at, layer in enumerate(layers)}
    _, decisions = follow(observation(step, slots, ill) for step in range(4))
    fallen = [(made.step, made.layer) for made in decisions if made.action == "bf16_fallback"]
    # BF16 within the budget is no cure for all of them: the look, which might show one, is waited for.
    assert fallen == [(3, layer) for layer in layers[:-11:-1]]


def test_operations_come_from_the_statistics(slots: Any, observation: Any, follow: Any) -> None:
    state, _ = follow([observation(0, slots)])
    tokens, width = 1024, 256
    assert set(state.costs.layers.values()) == {2.0 * tokens * width * width}
    wide = {("blocks.0.o", f"dy {layout}"): {"count": 3 * tokens * width} for layout in ("row", "col")}
    state, _ = follow([observation(0, slots, wide)])
    assert state.costs.of("blocks.0.o") == 2.0 * tokens * width * 3 * width
    assert state.costs.share([("blocks.0.o", "fprop")]) == pytest.approx(3 / (3 * 26))


def test_restore_after_the_dwell_and_healthy_samples_and_twice_as_late_the_next_time(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    ill = {(LAYER, "x row"): {"underflow_ratio": 0.25}, (LAYER, "w tile"): {"underflow_ratio": 0.03}}
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    state, first = follow((observation(step, slots, ill) for step in range(3)), config)
    assert len(first) == 2
    state, second = follow((observation(step, slots) for step in range(3, 20)), config, state)
    assert asked(second) == [(LAYER, "dgrad", "restore"), (LAYER, "fprop", "restore")]
    assert {made.step for made in second} == {10}
    assert state.plan.entries == ()
    assert second[0].rule == "probation"
    assert second[0].evidence["healthy_samples"] >= 5
    # Ill again while the spot still rests: the fallback waits for step 20, the restore for 20 steps more.
    state, third = follow((observation(step, slots, ill) for step in range(20, 23)), config, state)
    assert [made.step for made in third] == [20, 20]
    state, fourth = follow((observation(step, slots) for step in range(23, 60)), config, state)
    assert {made.step for made in fourth} == {40}


def test_what_a_fallback_reads_must_be_healthy_before_it_is_restored(
    slots: Any, observation: Any, follow: Any
) -> None:
    ill = {(LAYER, "x row"): {"underflow_ratio": 0.25}, (LAYER, "w tile"): {"underflow_ratio": 0.03}}
    still = {(LAYER, "w tile"): {"underflow_ratio": 0.0012}}
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    state, _ = follow([observation(0, slots, ill)], config)
    state, more = follow((observation(step, slots, still) for step in range(1, 100)), config, state)
    assert more == []
    assert len(state.plan.entries) == 2


def test_a_fault_that_only_the_result_showed_is_not_restored_by_itself(
    slots: Any, observation: Any, follow: Any
) -> None:
    """A stale scale inside the gemm leaves its operands healthy, so their health says nothing about it. Nor does a result
    that is not emulated: it is BF16's."""
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    state, _ = follow([observation(0, slots, {(LAYER, "fprop"): {"error": 7.0}})], config)
    state, more = follow((observation(step, slots) for step in range(1, 60)), config, state)
    assert more == []
    assert len(state.plan.entries) == 1


def in_fallback(slots: Any, gemm: str = "fprop") -> tuple[Slot, ...]:
    """The slots as a client lists them while that gemm of LAYER runs in BF16."""
    return tuple(
        dataclasses.replace(slot, emulated=True) if (slot.layer, slot.gemm) == (LAYER, gemm) else slot
        for slot in slots
    )


def test_a_fault_that_only_the_result_showed_ends_with_the_emulated_results_health(
    slots: Any, observation: Any, follow: Any, asked: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    ill = {(LAYER, "fprop"): {"error": 7.0}}
    state, _ = follow([observation(0, slots, ill)], config)
    marked = in_fallback(slots)
    course = [observation(step, marked, ill if step < 20 else {}) for step in range(1, 40)]
    state, made = follow(course, config, state)
    # The dwell is over at step 10; the fifth healthy sample in a row is that of step 24.
    assert (asked(made), [decision.step for decision in made]) == ([(LAYER, "fprop", "restore")], [24])
    assert "its emulated result and all that it reads" in made[0].reason
    assert made[0].evidence["values"][f"{LAYER} fprop relative_error"] == pytest.approx(0.039)
    assert state.plan.entries == ()
    state, _ = follow([observation(40, slots, ill)], config, state)
    course = [observation(step, marked, ill if step < 42 else {}) for step in range(41, 80)]
    _, again = follow(course, config, state)
    assert [(decision.step, decision.action) for decision in again] == [(60, "restore")]


def test_samples_without_the_emulated_result_neither_help_nor_harm_its_restore(
    slots: Any, observation: Any, follow: Any
) -> None:
    """Weight gradients are recomputed in turn, not in every sample."""
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    state, _ = follow([observation(0, slots, {(LAYER, "wgrad"): {"error": 0.95}})], config)
    marked = in_fallback(slots, "wgrad")
    bare = tuple(slot for slot in slots if (slot.layer, slot.gemm) != (LAYER, "wgrad"))
    turns = (
        observation(
            step, bare if step % 10 else marked, {(LAYER, "wgrad"): {"error": 0.95}} if step == 10 else {}
        )
        for step in range(1, 100)
    )
    made = follow(turns, config, state)[1]
    assert [(decision.step, decision.action) for decision in made] == [(60, "restore")]


def test_what_a_non_finite_origin_or_a_person_put_to_bf16_a_person_restores(
    slots: Any, observation: Any, follow: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    ill = {(LAYER, "fprop"): {"nan": 3}}
    fallen, decisions = follow((observation(step, slots, ill) for step in range(2)), config)
    assert [decision.rule for decision in decisions] == ["non-finite"]
    pinned = dataclasses.replace(decisions[0], rule="pin", evidence={}, actor="ada")
    theirs = policy.approve(PolicyState(), pinned, 1)
    for state in (fallen, theirs):
        after, more = follow(
            (observation(step, in_fallback(slots), {}) for step in range(2, 60)), config, state
        )
        assert more == []
        assert len(after.plan.entries) == 1


def test_observe_and_advise_propose_once_and_leave_the_plan_alone(
    slots: Any, observation: Any, follow: Any, drift: Any
) -> None:
    for mode in ("observe", "advise"):
        config = dataclasses.replace(ENFORCE, mode=mode)
        state, decisions = follow((observation(step, slots, drift(20)) for step in range(10)), config)
        assert len(decisions) == 6
        assert {(made.state, made.mode, made.step) for made in decisions} == {("proposed", mode, 0)}
        assert (state.plan.version, len(state.proposals)) == (0, 6)


def test_proposals_count_against_the_budget(slots: Any, observation: Any, follow: Any) -> None:
    layers = sorted({slot.layer for slot in slots})
    ill = {(layer, "fprop"): {"error": 0.5} for layer in layers}
    config = dataclasses.replace(ENFORCE, mode="advise")
    _, decisions = follow((observation(step, slots, ill) for step in range(4)), config)
    assert sum(made.action == "bf16_fallback" for made in decisions) == 10


def test_a_proposal_expires_once_nothing_asks_for_it(slots: Any, observation: Any, follow: Any) -> None:
    config = dataclasses.replace(ENFORCE, mode="observe", dwell_steps=10)
    ill = {(LAYER, "fprop"): {"error": 0.5}}
    state, _ = follow((observation(step, slots, ill) for step in range(30)), config)
    assert len(state.proposals) == 1
    state, _ = follow((observation(step, slots) for step in range(30, 41)), config, state)
    assert state.proposals == {}
    state, again = follow([observation(41, slots, ill)], config, state)
    assert [made.id for made in again] == ["r-2"]


def test_people_approve_reject_and_revert(slots: Any, observation: Any, follow: Any) -> None:
    config = dataclasses.replace(ENFORCE, mode="advise")
    ill = {(LAYER, "fprop"): {"error": 0.5}}
    proposed, (made,) = follow([observation(0, slots, ill)], config)

    approved = policy.approve(proposed, made, 1)
    assert [entry.decision_id for entry in approved.plan.entries] == [made.id]
    assert approved.proposals == {}
    assert follow((observation(step, slots, ill) for step in range(2, 60)), config, approved)[1] == []

    rejected = policy.reject(proposed, made, 1)
    assert (rejected.plan.version, rejected.proposals) == (0, {})
    _, again = follow((observation(step, slots, ill) for step in range(2, 60)), config, rejected)
    assert [decision.step for decision in again] == [51]

    reverted = policy.revert(approved, made, 5)
    assert reverted.plan.entries == ()
    _, again = follow((observation(step, slots, ill) for step in range(6, 60)), config, reverted)
    assert [decision.step for decision in again] == [55]

    killed = policy.kill(approved, 5)
    assert (killed.plan.entries, killed.plan.version) == ((), 2)
    _, again = follow((observation(step, slots, ill) for step in range(6, 60)), config, killed)
    assert [decision.step for decision in again] == [55]


def test_turning_to_enforce_decides_afresh_what_was_proposed(
    slots: Any, observation: Any, follow: Any
) -> None:
    ill = {(LAYER, "fprop"): {"error": 0.5}}
    state, _ = follow([observation(0, slots, ill)], dataclasses.replace(ENFORCE, mode="observe"))
    state, decisions = follow([observation(1, slots, ill)], ENFORCE, state)
    assert [(made.id, made.state) for made in decisions] == [("r-2", "sent")]
    assert (len(state.plan.entries), state.proposals) == (1, {})


def test_an_entry_that_a_person_made_is_theirs(slots: Any, observation: Any, follow: Any) -> None:
    theirs = Decision(
        id="p-1",
        run="r",
        step=0,
        layer=LAYER,
        target=Target(),
        action="bf16_fallback",
        rule="person",
        reason="to be safe",
        mode="enforce",
        state="sent",
        actor="ada",
        not_before_step=1,
    )
    state = dataclasses.replace(PolicyState(), plan=PolicyState().plan.with_decision(theirs))
    config = dataclasses.replace(ENFORCE, dwell_steps=5)
    ill = {(LAYER, "fprop"): {"error": 0.5}}
    state, decisions = follow(
        (observation(step, slots, ill if step < 10 else {}) for step in range(60)), config, state
    )
    assert decisions == []
    assert [entry.decision_id for entry in state.plan.entries] == ["p-1"]


def test_pinned_layers_alert_but_stay_as_they_are(slots: Any, observation: Any, follow: Any) -> None:
    config = dataclasses.replace(ENFORCE, pins=frozenset({LAYER}))
    ill = {(LAYER, "fprop"): {"error": 0.5}, (LAYER, "dy row"): {"saturated": 20_000}}
    state, decisions = follow((observation(step, slots, ill) for step in range(5)), config)
    assert decisions == []
    assert {alert.rule for alert in state.alerts.values()} == {"gemm-error", "saturation"}


def test_older_steps_are_never_decided_on(slots: Any, observation: Any, follow: Any, drift: Any) -> None:
    state, _ = follow([observation(10, slots)])
    for step in (10, 9, 0):
        assert decide(state, observation(step, slots, drift(30)), ENFORCE) == (state, ())


def test_decide_leaves_its_arguments_alone(slots: Any, observation: Any, follow: Any, drift: Any) -> None:
    state, _ = follow(observation(step, slots, drift(12)) for step in range(3))
    before, seen = (
        json.dumps(state.to_dict()),
        observation(3, slots, {(LAYER, "fprop"): {"nan": 3, "error": 9.0}}),
    )
    columns = {name: values.copy() for name, values in seen.stats.columns.items()}
    decide(state, seen, ENFORCE)
    assert json.dumps(state.to_dict()) == before
    for name, values in columns.items():
        np.testing.assert_array_equal(seen.stats.columns[name], values)


def test_state_survives_json_in_the_middle_of_everything(slots: Any, observation: Any, drift: Any) -> None:
    rng = np.random.default_rng(5)
    course = [observation(step, slots, rng=rng) for step in range(12)]
    course += [observation(12 + at, slots, drift(at), rng, run={"loss_scale": 8.0}) for at in range(14)]
    course += [observation(26 + at, slots, {(LAYER, "dy row"): {"nan": at}}, rng) for at in range(4)]
    for mode in ("enforce", "advise"):
        config = dataclasses.replace(ENFORCE, mode=mode)
        straight, stored = PolicyState(), PolicyState()
        for seen in course:
            straight, left = decide(straight, seen, config)
            stored = PolicyState.from_dict(json.loads(json.dumps(stored.to_dict(), allow_nan=False)))
            stored, right = decide(stored, seen, config)
            assert left == right
            assert stored == straight
        assert straight.alerts


def test_groups_are_observed_as_one(slots: Any, observation: Any) -> None:
    halves = [observation(7, slots, {(LAYER, "fprop"): {"error": error}}) for error in (0.3, 0.01)]
    samples = [
        Sample(
            step=7,
            group=str(at),
            groups=2,
            slots=half.slots if at else half.slots[::-1],
            columns={name: values if at else values[::-1] for name, values in half.stats.columns.items()},
            nulls={name: mask if at else mask[::-1] for name, mask in half.stats.nulls.items()},
            run={"loss": 2.0 + at, "tokens": None if at == 0 else 5.0},
            plan_version=3 - at,
        )
        for at, half in enumerate(halves)
    ]
    seen = policy.observe(samples)
    assert (seen.step, seen.plan_version, dict(seen.run)) == (7, 2, {"loss": 3.0, "tokens": 5.0})
    at = seen.slots.index(Slot(LAYER, gemm="fprop"))
    assert seen.stats.stats(at).relative_error == pytest.approx(math.sqrt((0.09 + 0.0001) / 2))
    again = policy.observe(samples[::-1])
    assert again.slots == seen.slots


def test_a_sample_from_the_wire_is_observed(slots: Any, observation: Any, asked: Any, drift: Any) -> None:
    seen = observation(3, slots, drift(30))
    sample = Sample(step=3, slots=slots, columns=seen.stats.columns, nulls=seen.stats.nulls)
    received = policy.observe([parse_sample(sample_to_wire(sample, binary=True))])
    assert asked(decide(PolicyState(), received, ENFORCE)[1]) == asked(
        decide(PolicyState(), seen, ENFORCE)[1]
    )
    assert received.indices == tuple(range(len(slots)))


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "auto"}, {"hysteresis": 0}, {"dwell_steps": -1}, {"budget_ratio": 1.5}, {"preset": "x"}],
)
def test_settings_outside_their_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        PolicyConfig(**wrong)
