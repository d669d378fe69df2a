"""What the policy does where samples are rare, entries end, and people and faults act at the wrong moment."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from fp8_safeguard.monitor.outcomes import MOST_PENDING
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policy import (
    PolicyConfig,
    PolicyState,
    StepObservation,
    approve,
    decide,
    reject,
    revert,
)

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.0.qkv"
WRONG = {(LAYER, "fprop"): {"error": 0.4}}
VANISHING = {(LAYER, "x row"): {"underflow_ratio": 0.3}, (LAYER, "w tile"): {"underflow_ratio": 0.05}}

Ill = Mapping[tuple[str, str], Mapping[str, Any]]


@pytest.fixture
def see(make_slots: Any, observation: Any) -> Callable[..., StepObservation]:
    """Makes the observation of a step of one block."""
    slots = make_slots(1)
    return lambda step, ill=None, **fields: observation(step, slots, ill, **fields)


@pytest.mark.parametrize("every", [1, 51, 1000])
@pytest.mark.parametrize(
    "config",
    [PolicyConfig(run="r", mode="advise"), PolicyConfig(run="r", mode="enforce", budget_ratio=0.0)],
    ids=["proposal", "advice"],
)
def test_what_lasts_is_said_once_however_rare_the_samples(see: Any, every: int, config: PolicyConfig) -> None:
    said: list[Decision] = []
    state = PolicyState()
    for at in range(20):
        state, made = decide(state, see(every * at, WRONG), config)
        said += made
    assert len(said) == 1
    # And again once it had gone for three samples and the dwell.
    gone = 20 + max(4, 52 // every)
    for at in range(20, gone):
        state, made = decide(state, see(every * at), config)
        assert made == ()
    for at in range(gone, gone + 5):
        state, made = decide(state, see(every * at, WRONG), config)
        said += made
    assert len(said) == 2


@pytest.mark.parametrize("later", [{"mode": "advise"}, {"mode": "observe"}, {"pins": frozenset({LAYER})}])
def test_an_entry_ends_with_its_time_whatever_people_have_set_since(see: Any, later: Any) -> None:
    """The trainer ends it then: a plan that went on holding it would hide the fault when it comes back."""
    config = dataclasses.replace(ENFORCE, ttl_steps=8, dwell_steps=6)
    state, made = decide(PolicyState(), see(0, WRONG), config)
    assert [entry.expires_step for entry in state.plan.entries] == [8]
    config = dataclasses.replace(config, **later)
    for step in range(1, 9):
        state, made = decide(state, see(step, plan_version=1), config)
    assert state.plan.entries == ()
    assert [(each.action, each.rule, each.state) for each in made] == [("restore", "expired", "sent")]
    for step in range(9, 30):
        state, made = decide(state, see(step, plan_version=2), config)
        assert made == ()
    state, made = decide(state, see(30, WRONG, plan_version=2), config)
    proposed = [(each.action, each.state) for each in made]
    assert proposed == ([] if config.pins else [("bf16_fallback", "proposed")])


def test_what_a_person_approved_for_a_time_is_proposed_again_after_it(see: Any) -> None:
    config = PolicyConfig(run="r", mode="advise", ttl_steps=8, dwell_steps=6)
    state, (made,) = decide(PolicyState(), see(0, WRONG), config)
    state = approve(state, made, 1)
    for step in range(2, 20):
        state, later = decide(state, see(step, plan_version=1), config)
        assert [each.rule for each in later] == (["expired"] if step == 9 else [])
    state, (again,) = decide(state, see(20, WRONG, plan_version=2), config)
    assert (again.target, again.action, again.state) == (made.target, "bf16_fallback", "proposed")


def test_nothing_but_people_changes_a_plan_that_is_only_observed(see: Any) -> None:
    config = dataclasses.replace(ENFORCE, ttl_steps=8)
    state, _ = decide(PolicyState(), see(0, WRONG), config)
    before = state.plan
    for step in range(1, 8):
        state, _ = decide(state, see(step, WRONG), dataclasses.replace(config, mode="observe"))
        assert state.plan == before


def test_a_late_revert_leaves_what_the_spot_holds_by_now_to_the_policy(see: Any) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=6, restore_samples=2)
    course = {0: VANISHING, 20: VANISHING}
    state, fallen = PolicyState(), []
    for step in range(21):
        state, made = decide(state, see(step, course.get(step)), config)
        fallen += [each for each in made if each.action == "bf16_fallback"]
    old, new = fallen[0], next(each for each in fallen if each.step == 20)
    assert (old.step, old.target) == (0, new.target)
    state = revert(state, old, 20)
    assert state.plan.find(LAYER, new.target, new.action) is not None
    restored = []
    for step in range(21, 60):
        state, made = decide(state, see(step), config)
        restored += [each.target for each in made if each.action == "restore"]
    assert new.target in restored
    assert state.plan.entries == ()


def told(
    observations: Iterator[StepObservation], config: PolicyConfig
) -> tuple[list[Decision], dict[str, str]]:
    """The decisions that were sent and every outcome, where a plan is in force two steps after its evidence."""
    outcomes: dict[str, str] = {}
    state, sent, versions = PolicyState(), [], [0, 0]
    for seen in observations:
        state, made = decide(state, dataclasses.replace(seen, plan_version=versions[-2]), config)
        versions.append(state.plan.version)
        sent += [each for each in made if each.state == "sent"]
        assert not set(state.grades) & set(outcomes)
        outcomes.update(state.grades)
    return sent, outcomes


@pytest.mark.parametrize("ttl_steps", [None, 6])
def test_every_decision_is_graded_or_says_why_not(see: Any, ttl_steps: int | None) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=4, restore_samples=1, ttl_steps=ttl_steps)
    course = (see(step, VANISHING if step < 120 and step % 9 < 2 else None) for step in range(200))
    sent, outcomes = told(course, config)
    assert len(sent) > 8
    assert set(outcomes) == {each.id for each in sent}
    unknown = {outcome for outcome in outcomes.values() if not outcome.startswith("signal ")}
    assert unknown <= {f"not graded: its entry left the plan after {n} samples in force" for n in range(2, 8)}
    assert unknown


def test_an_entry_that_never_was_in_force_says_so(see: Any) -> None:
    state, (made,) = decide(PolicyState(), see(0, WRONG), ENFORCE)
    state, _ = decide(revert(state, made, 0), see(1), ENFORCE)
    assert state.grades == {made.id: "not graded: its entry left the plan after no samples in force"}


def test_more_decisions_than_can_wait_for_a_grade_say_so(make_slots: Any, observation: Any) -> None:
    slots = make_slots(44, ("fprop",))
    layers = sorted({slot.layer for slot in slots})
    ill = {(layer, "fprop"): {"error": 0.4} for layer in layers}
    config = dataclasses.replace(ENFORCE, budget_ratio=1.0)
    state, made = decide(PolicyState(), observation(0, slots, ill), config)
    assert len(made) == len(layers) > MOST_PENDING
    waiting = set(state.outcomes.pending)
    assert len(waiting) == MOST_PENDING
    assert set(state.grades) == {each.id for each in made} - waiting
    assert set(state.grades.values()) == {"not graded: more than 256 later decisions wait for a grade"}


def test_the_stored_text_of_a_restore_does_not_depend_on_the_order_of_the_slots(
    make_slots: Any, observation: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=4, restore_samples=1)

    def stored(slots: Any, indices: Any) -> str:
        state, texts = PolicyState(), []
        for step in range(12):
            seen = observation(step, slots, VANISHING if step < 2 else None, indices=indices)
            state, made = decide(state, seen, config)
            texts += [each.to_wire() for each in made]
        assert "restore" in {text["action"] for text in texts}
        return json.dumps(texts)

    slots = make_slots(1)
    backwards = tuple(reversed(range(len(slots))))
    assert stored(slots, tuple(range(len(slots)))) == stored(tuple(reversed(slots)), backwards)


def test_the_signals_of_a_non_finite_origin_stand_in_one_order(make_slots: Any, observation: Any) -> None:
    ill = {(LAYER, place): {"nan": 1} for place in ("x row", "x col", "dy row", "fprop", "wgrad")}

    def stored(slots: Any, indices: Any) -> str:
        state, texts = PolicyState(), []
        for step in range(2):
            state, made = decide(state, observation(step, slots, ill, indices=indices), ENFORCE)
            texts += [each.to_wire() for each in made]
        assert len(texts[-1]["evidence"]["signals"]) == len(ill)
        return json.dumps(texts)

    slots = make_slots(1)
    backwards = tuple(reversed(range(len(slots))))
    assert stored(slots, tuple(range(len(slots)))) == stored(tuple(reversed(slots)), backwards)


def test_a_rejected_proposal_rests_however_rare_the_samples(see: Any) -> None:
    config = PolicyConfig(run="r", mode="advise")
    state, (made,) = decide(PolicyState(), see(0, WRONG), config)
    state = reject(state, made, 0)
    for step in (10, 20, 30, 40):
        state, later = decide(state, see(step, WRONG), config)
        assert later == ()
