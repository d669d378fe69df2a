"""What the policy remembers: restored whole, no larger with time, and nobody else's to change."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide

PERIOD = 40
OUTLIERS = {
    "fprop": {"fp8": 0.4, "e5m2": 0.036, "pow2": 0.5},
    "dgrad": {"fp8": 0.4, "e5m2": 0.036, "pow2": 0.5},
}


def stored(state: PolicyState) -> str:
    return json.dumps(state.to_dict(), allow_nan=False)


@pytest.fixture
def faults(make_slots: Any, observation: Any, looked: Any) -> Any:
    """A course that repeats every 40 steps: faults that scales, formats, BF16 and nothing at all help against."""
    slots = make_slots(1)
    kinds: list[tuple[range, dict[Any, Any]]] = [
        (range(4, 10), {("blocks.0.qkv", "dgrad"): {"error": 0.4}, ("blocks.0.qkv", "fprop"): {"error": 0.4}}),
        (range(14, 20), {("blocks.0.o", "x row"): {"saturated": 9000}}),
        (range(22, 26), {("blocks.0.shared_up", "dgrad"): {"nan": 3}}),
        (range(28, 32), {("blocks.0.o", "w tile"): {"underflow_ratio": 0.05},
                         ("blocks.0.o", "x row"): {"underflow_ratio": 0.3}}),
    ]  # fmt: skip

    def course(steps: int, first: int = 0) -> Iterator[StepObservation]:
        for step in range(first, steps):
            at = step % PERIOD
            ill: dict[Any, Any] = {}
            for when, what in kinds:
                ill |= what if at in when else {}
            run = {"loss": 9.0 if at in (34, 35) else 2.0, "gradient_norm": 1.0, "loss_scale": 1.0}
            norms = {("blocks.0.norm", "gain_amax"): 1.0 + 20.0 * (at > 30)}
            seen = observation(step, slots, ill, run=run, scalars=norms)
            yield looked(seen, "blocks.0.qkv", OUTLIERS) if at in (5, 6) else seen

    return course


def followed(
    course: Iterator[StepObservation], config: PolicyConfig, state: PolicyState | None = None
) -> Iterator[tuple[PolicyState, tuple[Decision, ...]]]:
    """The state after each step and its decisions; each plan is in force with the next step."""
    state = state or PolicyState()
    for seen in course:
        state, made = decide(state, dataclasses.replace(seen, plan_version=state.plan.version), config)
        yield state, made


def test_b100_what_is_stored_is_no_larger_after_1000_steps(faults: Any) -> None:
    """At the same place of the course, after a few decisions of each spot and after many."""
    config = PolicyConfig(run="r", mode="enforce", dwell_steps=6, restore_samples=2, budget_ratio=0.5)
    sizes, decisions = {}, 0
    for step, (state, made) in enumerate(followed(faults(1000), config)):
        decisions += len(made)
        if step + 1 in (200, 1000):
            sizes[step + 1] = len(stored(state))
    assert decisions > 50
    assert sizes[1000] == pytest.approx(sizes[200], rel=0.05)


def test_b99_a_restored_policy_goes_on_as_if_it_had_never_stopped(faults: Any) -> None:
    """In a new process after any of the steps: each later state and decision is the same."""
    config = PolicyConfig(run="r", mode="enforce", dwell_steps=6, restore_samples=2, budget_ratio=0.5)
    whole = list(followed(faults(2 * PERIOD), config))
    assert sum(len(made) for _, made in whole) > 6
    for stop in (6, 24, 30, 41):
        again = PolicyState.from_dict(json.loads(stored(whole[stop - 1][0])))
        rest = followed(faults(2 * PERIOD, first=stop), config, again)
        for (state, made), (wanted, decided) in zip(rest, whole[stop:], strict=True):
            assert (state, made) == (wanted, decided)


def test_b99_a_history_is_that_of_the_slots_that_are_still_there(
    make_slots: Any, observation: Any, slots: Any
) -> None:
    """Amax of 1 to 5, then 20 times as much: a jump for a slot with a history, and nothing for a layer that is new."""
    config = PolicyConfig(run="r")
    old, new = make_slots(2), make_slots(3)[len(make_slots(1)) :]
    kept, late = "blocks.1.o", "blocks.2.o"
    state = PolicyState()
    for step in range(5):
        ill = {(layer, "x row"): {"amax": step + 1.0} for layer in ("blocks.0.o", kept)}
        state, _ = decide(state, observation(step, old, ill), config)
    state = PolicyState.from_dict(json.loads(stored(state)))
    for step in (5, 6):
        ill = {(layer, "x row"): {"amax": 60.0} for layer in (kept, late)}
        state, made = decide(state, observation(step, new, ill), config)
        assert made == ()
    assert [(alert.rule, alert.layer) for alert in state.alerts.values()] == [("amax-jump", kept)]
    # The median of 1 to 5, sixteen times.
    assert next(iter(state.alerts.values())).worst.threshold == pytest.approx(48.0)


def wreck(value: Any) -> None:
    """Change everything that can be changed in it."""
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        wreck(item)
    if isinstance(value, (dict, list)):
        value.clear()


@pytest.mark.parametrize("mode", ["enforce", "advise"])
def test_b103_what_was_handed_out_is_a_copy(faults: Any, mode: str) -> None:
    """Both ways: later steps do not change it, and what its holder does to it changes no later step."""
    config = PolicyConfig(run="r", mode=mode, dwell_steps=6, restore_samples=2, budget_ratio=0.5)
    seen_places = set()
    for state, made in islice(followed(faults(PERIOD), config), 3, None, 4):
        text = stored(state)
        seen_places |= {name for name, value in state.to_dict().items() if value}
        handed, source = state.to_dict(), json.loads(text)
        again = PolicyState.from_dict(source)
        for each in (handed, source, *(one.to_wire() for one in made)):
            wreck(each)
        assert stored(state) == stored(again) == text
        told = [(one, json.dumps(one.to_wire())) for one in made]
        list(followed(faults(PERIOD + 8, first=PERIOD), config, state))
        assert stored(state) == text
        assert all(json.dumps(one.to_wire()) == before for one, before in told)
        wreck([dict(one.evidence) for one in made])
        assert stored(state) == text
    expected = {"changes", "plan", "probation"} if mode == "enforce" else {"proposals"}
    assert seen_places >= {*expected, "alerts", "evidence", "looks", "costs", "outcomes", "trends"}


def test_b103_a_history_can_be_read_and_not_written(faults: Any) -> None:
    *_, (state, _) = followed(faults(8), PolicyConfig(run="r"))
    for values in (state.history.values, state.trends.series.values):
        assert values.size
        with pytest.raises(ValueError, match="read-only"):
            values[...] = 0.0
    again = PolicyState.from_dict(json.loads(stored(state)))
    with pytest.raises(ValueError, match="read-only"):
        again.history.values[...] = 0.0
    window = state.trends.series.window("loss", "(run)")
    window[...] = 0.0
    assert state.trends.series.window("loss", "(run)").all()


def test_b103_a_step_s_arrays_may_be_used_again(faults: Any) -> None:
    """Whoever owns the buffers of a sample may fill them with the next one."""
    kept, fresh, config = PolicyState(), PolicyState(), PolicyConfig(run="r", mode="enforce")
    for seen in faults(12):
        columns = {name: values.copy() for name, values in seen.stats.columns.items()}
        nulls = {name: mask.copy() for name, mask in seen.stats.nulls.items()}
        kept, _ = decide(kept, dataclasses.replace(seen, stats=StatsTable(columns, nulls)), config)
        for values in columns.values():
            values[...] = 7
        for mask in nulls.values():
            mask[...] = np.logical_not(mask)
        fresh, _ = decide(fresh, seen, config)
        assert stored(kept) == stored(fresh)
