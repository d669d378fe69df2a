"""Every decision is graded once, by its signal and by the loss."""

import dataclasses
import json
from typing import Any

import pytest

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.outcomes import (
    FAILED_SAMPLES,
    GRADE_SAMPLES,
    GRADE_WITHIN,
    MOST_PENDING,
    Outcomes,
)
from fp8_safeguard.monitor.plan import Decision, Plan, Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"
ILL = {(LAYER, "fprop"): {"error": 0.74}}
LOOK = {
    "fprop": {"fp8": 0.74, "x_multiplier_2^4": 0.03, "x_e5m2": 0.05},
    "wgrad": {"fp8": 0.03, "x_multiplier_2^4": 0.03, "x_e5m2": 0.05},
}
ONSET = 10


def course(observation: Any, slots: Any, looked: Any, after: Any, *, loss: Any = lambda step: 2.0) -> Any:
    """Health, then a fault that a look shows a scale for, and what that makes of it: `after` step by step."""
    for step in range(ONSET):
        yield observation(step, slots, run={"loss": loss(step)})
    yield looked(observation(ONSET, slots, ILL, run={"loss": loss(ONSET)}), LAYER, LOOK)
    yield observation(ONSET + 1, slots, ILL, run={"loss": loss(ONSET + 1)})
    for at, ill in enumerate(after):
        step = ONSET + 2 + at
        yield observation(step, slots, ill, run={"loss": loss(step)})


def graded(
    observations: Any, config: PolicyConfig = ENFORCE
) -> tuple[PolicyState, list[tuple[int, str, str]]]:
    """The state after all of them, and (step, decision, grade) of every grade given."""
    state, grades, versions = PolicyState(), [], {}
    for seen in observations:
        in_force = max((held for step, held in versions.items() if step + 2 <= seen.step), default=0)
        state, _ = decide(state, dataclasses.replace(seen, plan_version=in_force), config)
        versions[seen.step] = state.plan.version
        grades += [(seen.step, name, grade) for name, grade in state.grades.items()]
    return state, grades


def error(value: float) -> Any:
    return {(LAYER, "fprop"): {"error": value}}


@pytest.mark.parametrize(
    ("after", "grade"),
    [
        (0.031, "signal recovered (GEMM error 74 % -> 3.1 %); loss recovered"),
        (0.3, "signal better (GEMM error 74 % -> 30 %); loss recovered"),
        (0.7, "signal unchanged (GEMM error 74 % -> 70 %); loss unknown"),
        (1.5, "signal worse (GEMM error 74 % -> 150 %); loss unknown"),
    ],
)
def test_a_scale_is_graded_by_what_its_signal_became(
    slots: Any, observation: Any, looked: Any, after: float, grade: str
) -> None:
    config = dataclasses.replace(ENFORCE, budget_ratio=0.0)
    _, grades = graded(course(observation, slots, looked, [error(after)] * 20), config)
    failed = "unchanged" in grade or "worse" in grade
    # In force from the second step after its evidence on.
    step = ONSET + 1 + (FAILED_SAMPLES if failed else GRADE_SAMPLES)
    assert grades == [(step, "r-1", grade)]


@pytest.mark.parametrize(
    ("later", "word"),
    [(1.9, "recovered"), (2.2, "recovered"), (2.21, "not recovered"), (float("nan"), "unknown"), (None, "unknown")],
)  # fmt: skip
def test_the_loss_is_held_against_what_it_was_before_the_fault(
    slots: Any, observation: Any, looked: Any, later: Any, word: str
) -> None:
    def loss(step: int) -> Any:
        before = 2.0 + 0.1 * (step % 3)
        return before if step < ONSET else 5.0 if step < ONSET + 2 else later

    _, ((_, _, grade),) = graded(course(observation, slots, looked, [{}] * 12, loss=loss))
    assert grade.endswith(f"; loss {word}")


def test_a_fallback_is_graded_once_the_trainer_runs_with_it(slots: Any, observation: Any) -> None:
    fallen = [observation(step, slots, ILL if step > 4 else {}, run={"loss": 2.0}) for step in range(30)]
    _, grades = graded(fallen)
    assert grades == [
        (6 + GRADE_SAMPLES, "r-1", "signal recovered (GEMM error 74 % -> BF16); loss recovered")
    ]
    state, none = PolicyState(), []
    for seen in fallen:
        state, _ = decide(state, seen, ENFORCE)
        none += list(state.grades)
    assert none == []
    assert list(state.outcomes.pending) == ["r-1"]


def test_a_restore_is_graded_by_whether_the_layer_stays_healthy(slots: Any, observation: Any) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    ill = {(LAYER, "x row"): {"underflow_ratio": 0.25}, (LAYER, "w tile"): {"underflow_ratio": 0.03}}
    for back, word in (({}, "stayed healthy"), (ill, "back")):
        # A step before the dwell is over again the fault is back, so that nothing can be done yet.
        seen = [observation(0, slots, ill), *(observation(step, slots) for step in range(1, 12))]
        seen += [observation(step, slots, back) for step in range(12, 20)]
        _, grades = graded(seen, config)
        assert {grade.split(";")[0] for _, name, grade in grades if name in ("r-3", "r-4")} == {
            f"signal {word}"
        }


def test_a_decision_whose_entry_is_gone_gets_no_grade(slots: Any, observation: Any, follow: Any) -> None:
    state, (made,) = follow([observation(0, slots, ILL)])
    state = policy.revert(state, made, 3)
    state, _ = follow((observation(step, slots) for step in range(4, 40)), state=state)
    assert (state.outcomes.pending, state.grades) == ({}, {})


def test_what_a_person_approves_is_graded_from_then_on(slots: Any, observation: Any, follow: Any) -> None:
    config = dataclasses.replace(ENFORCE, mode="advise")
    state, (made,) = follow([observation(0, slots, ILL)], config)
    assert state.outcomes.pending == {}
    state = policy.approve(state, made, 5)
    grades: list[tuple[int, str]] = []
    for step in range(6, 30):
        seen = dataclasses.replace(observation(step, slots, ILL), plan_version=1 if step > 9 else 0)
        state, _ = decide(state, seen, config)
        grades += [(step, grade) for grade in state.grades.values()]
    assert grades == [(9 + GRADE_SAMPLES, "signal recovered (GEMM error 74 % -> BF16); loss unknown")]


def test_a_signal_that_is_never_seen_again_is_unknown(slots: Any, observation: Any, looked: Any) -> None:
    bare = tuple(slot for slot in slots if slot.layer != LAYER)
    seen = list(course(observation, slots, looked, []))
    seen += [observation(ONSET + 2 + at, bare, run={"loss": 2.0}) for at in range(GRADE_WITHIN)]
    _, grades = graded(seen)
    assert grades == [(ONSET + 1 + GRADE_WITHIN, "r-1", "signal unknown; loss recovered")]


def test_a_failed_remedy_is_remembered_with_its_layer(slots: Any, observation: Any, looked: Any) -> None:
    state, _ = graded(course(observation, slots, looked, [ILL] * 6))
    assert state.outcomes.has_failed(LAYER, "scale_multiplier=16.0: x")
    assert not state.outcomes.has_failed("blocks.0.qkv", "scale_multiplier=16.0: x")
    assert not state.outcomes.has_failed(LAYER, "format=e5m2: x")


def test_what_waits_for_its_grade_is_bounded_and_survives_json(
    slots: Any, observation: Any, looked: Any
) -> None:
    made = [
        Decision(
            id=f"r-{at}", run="r", step=at, layer=f"l{at}", target=Target(gemm="fprop"), action="bf16_fallback",
            rule="gemm-error", reason="", mode="enforce", state="sent", not_before_step=at + 1,
        )
        for at in range(MOST_PENDING + 9)
    ]  # fmt: skip
    kept = Outcomes().noted(made, Plan())
    assert list(kept.pending) == [decision.id for decision in made[9:]]
    state, _ = graded(course(observation, slots, looked, [ILL] * 2))
    assert state.outcomes.pending
    again = PolicyState.from_dict(json.loads(json.dumps(state.to_dict(), allow_nan=False)))
    assert again.outcomes == state.outcomes
    assert Outcomes.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept
