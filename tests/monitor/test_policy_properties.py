"""What holds for the policy on any course of faults."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide, observe
from fp8_safeguard.monitor.wire import Sample, parse_sample, sample_to_wire

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
LOOKS: list[dict[str, dict[str, float]]] = [
    # Outliers that E5M2 for x and w cures, a scale that a multiplier does, a fault that is not in the operands, and one that
    # nothing but BF16 helps against.
    {
        "fprop": {"fp8": 0.4, "e5m2": 0.056, "x_e5m2": 0.2, "w_e5m2": 0.3, "pow2": 0.5},
        "dgrad": {"fp8": 0.4, "e5m2": 0.056, "dy_e5m2": 0.4, "w_e5m2": 0.05, "pow2": 0.5},
        "wgrad": {"fp8": 0.2, "e5m2": 0.056, "dy_e5m2": 0.2, "x_e5m2": 0.05, "pow2": 0.2},
    },
    {
        gemm: {"fp8": 0.5, **{f"{operand}_multiplier_2^4": 0.03 for operand in operands}, "pow2": 0.5}
        for gemm, operands in (("fprop", ("x",)), ("dgrad", ("dy",)), ("wgrad", ("x", "dy")))
    },
    {gemm: {"fp8": 0.027, "pow2": 0.028, "e5m2": 0.056} for gemm in ("fprop", "dgrad", "wgrad")},
    {gemm: {"fp8": 0.5, "pow2": 0.6, "e5m2": 0.4} for gemm in ("fprop", "dgrad", "wgrad")},
]

one_illness = st.sampled_from([(place, how) for place, hows in ILLNESSES.items() for how in range(len(hows))])
spells = st.lists(
    st.tuples(st.sampled_from(LAYERS), one_illness, st.integers(0, 25), st.integers(1, 12)), max_size=8
)
close_looks = st.lists(
    st.tuples(st.integers(0, 29), st.sampled_from(LAYERS), st.integers(0, len(LOOKS) - 1)), max_size=16
)
configs = st.builds(
    PolicyConfig,
    run=st.just("r"),
    preset=st.sampled_from(["floor", "seed"]),
    mode=st.sampled_from(["enforce", "enforce", "advise"]),
    dwell_steps=st.just(DWELL),
    restore_samples=st.integers(1, 3),
    budget_ratio=st.sampled_from([0.0, 0.06, 0.15, 0.5]),
    ttl_steps=st.sampled_from([None, None, 8]),
)
STEPS = 30


@pytest.fixture
def course(make_slots: Any, observation: Any, looked: Any) -> Callable[..., Iterator[StepObservation]]:
    """Makes the observations of a course of spells (layer, illness, first step, length) and looks (step, layer, which)."""
    slots = make_slots(1)

    def make(spell_list: Any, look_list: Any = ()) -> Iterator[StepObservation]:
        for step in range(STEPS):
            ill = {}
            for layer, (place, how), first, length in spell_list:
                if first <= step < first + length:
                    ill[layer, place] = ILLNESSES[place][how]
            seen = observation(step, slots, ill, np.random.default_rng(step), run={"loss": 2.0 - step / 100})
            for layer, which in {layer: which for at, layer, which in look_list if at == step}.items():
                seen = looked(seen, layer, LOOKS[which])
            yield seen

    return make


def any_course(test: Callable[..., None], examples: int = 20) -> Callable[..., None]:
    """Runs a test on many courses, the same ones each time."""
    settled = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return settled(given(spells=spells, looks=close_looks, config=configs)(test))


def closed_loop(observations: Any, config: PolicyConfig) -> Iterator[tuple[Any, Any, Any]]:
    """(observation, state after it, decisions), each plan in force two steps after its evidence."""
    state, versions = PolicyState(), [0, 0]
    for seen in observations:
        seen = dataclasses.replace(seen, plan_version=versions[-2])
        state, made = decide(state, seen, config)
        versions.append(state.plan.version)
        yield seen, state, made


@any_course
def test_never_above_budget_and_one_change_a_spot_within_the_dwell(
    course: Any, spells: Any, looks: Any, config: Any
) -> None:
    last: dict[tuple[str, str], int] = {}
    for seen, state, decisions in closed_loop(course(spells, looks), config):
        assert state.costs.share(fallbacks(state.plan)) <= config.budget_ratio + 1e-9
        waiting = {
            (made.layer, made.gemm) for made in state.proposals.values() if made.action == "bf16_fallback"
        }
        assert state.costs.share(fallbacks(state.plan) | waiting) <= config.budget_ratio + 1e-9
        for made in decisions:
            if made.action == "advice":
                continue
            spot = (made.layer, made.target.key)
            # An entry that expired has had its time, however short.
            assert seen.step - last.get(spot, -DWELL) >= DWELL or made.rule == "expired"
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
    course: Any, spells: Any, looks: Any, config: Any
) -> None:
    one, two, other = PolicyState(), PolicyState(), np.random.default_rng(9)
    for seen in course(spells, looks):
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
def test_ids_count_up_and_alerts_follow_their_steps(
    course: Any, spells: Any, looks: Any, config: Any
) -> None:
    state, ids = PolicyState(), []
    for seen in course(spells, looks):
        state, decisions = decide(state, seen, config)
        ids += [made.id for made in decisions]
        for alert in state.alerts.values():
            assert alert.first_step <= alert.step <= alert.last_step <= seen.step
            assert seen.step - alert.last_step < config.clear_samples
    assert ids == [f"r-{at + 1}" for at in range(len(ids))]


@partial(any_course, examples=6)
def test_stored_inputs_replayed_through_json_give_the_stored_decisions(
    course: Any, spells: Any, looks: Any, config: Any
) -> None:
    """Samples as the wire carries them, and the state as the server stores it, at every step."""
    again = PolicyState()
    for seen, state, decisions in closed_loop(course(spells, looks), config):
        sample = sample_of(seen, range(len(seen.slots)))
        stored = json.loads(json.dumps(sample_to_wire(sample, binary=False)))
        again = PolicyState.from_dict(json.loads(json.dumps(again.to_dict(), allow_nan=False)))
        again, repeated = decide(again, observe([parse_sample(stored)]), config)
        assert [made.to_wire() for made in repeated] == [made.to_wire() for made in decisions]
        assert again == state


@partial(any_course, examples=6)
def test_groups_may_report_in_any_order(course: Any, spells: Any, looks: Any, config: Any) -> None:
    one, two, whole, rng = PolicyState(), PolicyState(), PolicyState(), np.random.default_rng(3)
    layers = sorted({slot.layer for slot in next(course([])).slots})
    group_of = dict(zip(layers, rng.integers(0, 3, len(layers)).tolist(), strict=True))
    for seen in course(spells, looks):
        parts = [
            [at for at, slot in enumerate(seen.slots) if group_of[slot.layer] == group] for group in range(3)
        ]
        samples = [sample_of(seen, part, group=str(group)) for group, part in enumerate(parts)]
        one, left = decide(one, observe(samples), config)
        two, right = decide(two, observe([samples[at] for at in rng.permutation(3)]), config)
        whole, straight = decide(whole, seen, config)
        assert [made.to_wire() for made in left] == [made.to_wire() for made in right]
        assert left == straight
        assert one == two


def sample_of(seen: StepObservation, part: Sequence[int], group: str = "0") -> Sample:
    """The sample of those of its slots."""
    at = np.array(list(part), dtype=np.intp)
    return Sample(
        step=seen.step,
        group=group,
        groups=1,
        slots=tuple(seen.slots[place] for place in at),
        indices=tuple(seen.indices[place] for place in at),
        columns={name: values[at] for name, values in seen.stats.columns.items()},
        nulls={name: mask[at] for name, mask in seen.stats.nulls.items()},
        run=dict(seen.run),
        plan_version=seen.plan_version,
    )


def changes(decisions: Sequence[Decision]) -> list[Decision]:
    return [made for made in decisions if made.action not in ("advice", "restore")]


SEVERITIES: dict[str, list[dict[str, dict[str, float]]]] = {
    "fprop": [{"fprop": {"error": error}} for error in (0.052, 0.07, 0.12, 0.2, 0.8, 7.0)],
    "dgrad": [{"dgrad": {"error": error}} for error in (0.052, 0.07, 0.12, 0.2, 0.8, 7.0)],
    "wgrad": [{"wgrad": {"error": error}} for error in (0.085, 0.2, 0.5, 0.89, 0.95, 2.0)],
    "vanishing": [
        {"x row": {"underflow_ratio": x}, "w tile": {"underflow_ratio": w}}
        for x, w in ((0.006, 0.0032), (0.03, 0.0032), (0.03, 0.01), (0.25, 0.01), (0.8, 0.06))
    ],
    "flushed": [
        {"dy row": {"rows_flushed": rows}, "dgrad": {"error": error}, "wgrad": {"error": error}}
        for rows, error in ((520, 0.09), (600, 0.2), (900, 0.5), (1024, 1.0))
    ],
}


@given(
    kind=st.sampled_from(sorted(SEVERITIES)),
    levels=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    length=st.integers(1, 12),
    every=st.sampled_from([1, 3]),
    looked_at=st.sets(st.integers(0, 11), max_size=3),
    budget=st.sampled_from([0.04, 0.15]),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_worse_step_never_leads_to_a_weaker_or_later_reaction(
    make_slots: Any,
    observation: Any,
    looked: Any,
    kind: Any,
    levels: Any,
    length: Any,
    every: Any,
    looked_at: Any,
    budget: Any,
) -> None:
    """The same course with the same looks at the same places, milder and worse: every gemm that the milder one took out of
    FP8's harm, the worse one does, too, and no later."""
    slots = make_slots(1)
    config = PolicyConfig(run="r", mode="enforce", budget_ratio=budget)

    def mended(level: int) -> dict[str, int]:
        illness = SEVERITIES[kind][min(level, len(SEVERITIES[kind]) - 1)]
        errors = {place: how["error"] for place, how in illness.items() if "error" in how}

        def observed() -> Iterator[StepObservation]:
            for at in range(length):
                ill = {(LAYERS[0], place): how for place, how in illness.items()}
                seen = observation(every * at, slots, ill)
                yield looked(seen, LAYERS[0], shown(errors)) if at in looked_at else seen

        found: dict[str, int] = {}
        for seen, _, decisions in closed_loop(observed(), config):
            for made in changes(decisions):
                for gemm in (
                    [made.target.gemm]
                    if made.target.gemm
                    else made.evidence.get("what_if", {}).get("remedy", ())
                ):
                    found.setdefault(gemm, seen.step)
        return found

    mild, worse = mended(min(levels)), mended(max(levels))
    for gemm, step in mild.items():
        assert worse.get(gemm, 10**9) <= step or not_ill(kind, gemm)


def shown(errors: dict[str, float]) -> dict[str, dict[str, float]]:
    """A look at a layer with those errors: E5M2 cures it, and so does a scale."""
    look = {
        gemm: {"fp8": errors.get(gemm, 0.027), "e5m2": 0.056, "pow2": 0.9}
        for gemm in ("fprop", "dgrad", "wgrad")
    }
    for gemm, operands in (("fprop", "x w"), ("dgrad", "dy w"), ("wgrad", "dy x")):
        for operand in operands.split():
            look[gemm][f"{operand}_e5m2"] = 0.05
    look["dgrad"]["dy_multiplier_2^-12"] = look["wgrad"]["dy_multiplier_2^-12"] = 0.03
    return look


def not_ill(kind: str, gemm: str) -> bool:
    """Whether a gemm is only touched because it reads an operand that is changed for others."""
    ill = {"vanishing": ("fprop", "dgrad"), "flushed": ("dgrad", "wgrad")}.get(kind, (kind,))
    return gemm not in ill
