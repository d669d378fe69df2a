"""What holds for the policy on any course of faults."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide

DWELL = 6

ILLNESSES = {
    "x row": [{"underflow_ratio": 0.01}, {"underflow_ratio": 0.3}, {"saturated": 9000}, {"nan": 4}],
    "w tile": [{"underflow_ratio": 0.002}, {"underflow_ratio": 0.05}],
    "dy row": [{"rows_flushed": 900}, {"inf": 1}, {"sqnr_db": 15.0}],
    "dy col": [{"underflow_ratio": 0.5}, {"sqnr_db": 10.0}],
    "fprop": [{"error": 0.06}, {"error": 0.4}, {"nan": 1}],
    "dgrad": [{"error": 0.06}, {"error": 0.4}],
    "wgrad": [{"error": 0.2}, {"error": 0.99}],
}
LAYERS = ("blocks.0.qkv", "blocks.0.o", "blocks.0.shared_up", "blocks.0.expert_down")

one_illness = st.sampled_from([(place, how) for place, hows in ILLNESSES.items() for how in range(len(hows))])
spells = st.lists(
    st.tuples(st.sampled_from(LAYERS), one_illness, st.integers(0, 25), st.integers(1, 12)), max_size=8
)
configs = st.builds(
    PolicyConfig,
    run=st.just("r"),
    preset=st.sampled_from(["floor", "seed"]),
    mode=st.sampled_from(["enforce", "enforce", "advise"]),
    dwell_steps=st.just(DWELL),
    restore_samples=st.integers(1, 3),
    budget_ratio=st.sampled_from([0.0, 0.06, 0.15, 0.5]),
)
STEPS = 30


@pytest.fixture
def course(make_slots: Any, observation: Any) -> Callable[..., Iterator[StepObservation]]:
    """Makes the observations of a course of spells (layer, illness, first step, length)."""
    slots = make_slots(1)

    def make(spell_list: Any) -> Iterator[StepObservation]:
        for step in range(STEPS):
            ill = {}
            for layer, (place, how), first, length in spell_list:
                if first <= step < first + length:
                    ill[layer, place] = ILLNESSES[place][how]
            yield observation(step, slots, ill, np.random.default_rng(step))

    return make


def any_course(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on many courses, the same ones each time."""
    settled = settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return settled(given(spells=spells, config=configs)(test))


@any_course
def test_never_above_budget_and_one_change_a_spot_within_the_dwell(
    course: Any, spells: Any, config: Any
) -> None:
    state, last = PolicyState(), {}
    for seen in course(spells):
        state, decisions = decide(state, seen, config)
        assert state.costs.share(fallbacks(state.plan)) <= config.budget_ratio + 1e-9
        waiting = {
            (made.layer, made.gemm) for made in state.proposals.values() if made.action == "bf16_fallback"
        }
        assert state.costs.share(fallbacks(state.plan) | waiting) <= config.budget_ratio + 1e-9
        for made in decisions:
            if made.action == "advice":
                continue
            spot = (made.layer, made.target.key)
            assert seen.step - last.get(spot, -DWELL) >= DWELL
            last[spot] = seen.step
            assert made.not_before_step == seen.step + 1
            assert made.reason.startswith(made.layer) or made.layer in made.reason
            json.dumps(made.to_wire(), allow_nan=False)
        if config.mode != "enforce":
            assert state.plan.version == 0


@example(
    # Restored at step 9, ill again at 14.
    lengths=[3, 2, 9, 4, 10],
    config=PolicyConfig(run="r", mode="enforce", dwell_steps=DWELL, restore_samples=2, budget_ratio=0.5),
)
@given(lengths=st.lists(st.integers(1, 14), min_size=3, max_size=8), config=configs)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_fault_that_comes_and_goes_changes_its_spots_once_a_dwell(
    make_slots: Any, observation: Any, lengths: Any, config: Any
) -> None:
    slots, state, last, step = make_slots(1), PolicyState(), {}, 0
    fault = {(LAYERS[0], "x row"): {"underflow_ratio": 0.3}, (LAYERS[0], "w tile"): {"underflow_ratio": 0.05}}
    for turn, length in enumerate(lengths):
        for _ in range(length):
            state, decisions = decide(state, observation(step, slots, fault if turn % 2 else {}), config)
            for made in decisions:
                if made.action != "advice":
                    assert step - last.get(made.target.key, -DWELL) >= DWELL
                    last[made.target.key] = step
            step += 1


@any_course
def test_the_order_of_the_slots_is_irrelevant_and_the_outcome_repeatable(
    course: Any, spells: Any, config: Any
) -> None:
    one, two, other = PolicyState(), PolicyState(), np.random.default_rng(9)
    for seen in course(spells):
        order = other.permutation(len(seen.slots))
        shuffled = dataclasses.replace(
            seen,
            slots=tuple(seen.slots[at] for at in order),
            indices=tuple(seen.indices[at] for at in order),
            stats=StatsTable(
                {name: values[order] for name, values in seen.stats.columns.items()},
                {name: mask[order] for name, mask in seen.stats.nulls.items()},
            ),
        )
        one, left = decide(one, seen, config)
        two, right = decide(two, shuffled, config)
        assert [made.to_wire() for made in left] == [made.to_wire() for made in right]
        assert dict(one.alerts) == dict(two.alerts)
        assert one.plan == two.plan


@any_course
def test_ids_count_up_and_alerts_follow_their_steps(course: Any, spells: Any, config: Any) -> None:
    state, ids = PolicyState(), []
    for seen in course(spells):
        state, decisions = decide(state, seen, config)
        ids += [made.id for made in decisions]
        for alert in state.alerts.values():
            assert alert.first_step <= alert.step <= alert.last_step <= seen.step
            assert seen.step - alert.last_step < config.clear_samples
    assert ids == [f"r-{at + 1}" for at in range(len(ids))]
