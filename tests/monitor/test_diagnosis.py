"""Each FP8 fault is named by its cause at its earliest place, and stays the same while it lasts."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from fp8_safeguard.monitor.cause import Diagnosis
from fp8_safeguard.monitor.diagnosis import cause_of, diagnose
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState
from fp8_safeguard.monitor.trends import Trends
from fp8_safeguard.monitor.view import look

OBSERVE = PolicyConfig(run="r", mode="observe")
TOKENS, COUNT = 1024, 1024 * 256
LINEARS = ("qkv", "o", "shared_up", "shared_down", "expert_up", "expert_down")
EVERY = [f"blocks.{block}.{linear}" for block in range(4) for linear in LINEARS]
DRIFTING = ["blocks.3.qkv", "blocks.3.shared_up", "blocks.3.expert_up"]
FEEDS = ["blocks.1.shared_up", "blocks.1.expert_up"]


def flushed(**left: float) -> dict[str, Any]:
    """dy of which next to nothing is left."""
    ill = {"underflow_ratio": 1.0, "rows_flushed": TOKENS, "sqnr_db": 0.0, "sum_sq_q": 0.0, "amax": 1e-4}
    return {**ill, **left}


SATURATED = {"saturated": round(0.8 * COUNT), "sqnr_db": 1.8, "sum_sq_q": 0.4 * COUNT, "amax": 45.0}
TOO_LARGE = flushed(sum_sq_q=0.08 * COUNT, sqnr_db=0.35, rows_flushed=round(0.99 * TOKENS), amax=1.0)
EIGHTFOLD = {"error": 7.0, "sum_sq_q": 64e4}
NEXT_LINEAR = {"underflow_ratio": 0.27, "amax": 76.0}

FP8: dict[str, tuple[dict[Any, Any], tuple[str, str]]] = {
    "C outliers at once": (
        {
            (layer, part): {"underflow_ratio": ratio, "amax": amax}
            for layer in DRIFTING
            for part, ratio, amax in (("x row", 0.86, 4e5), ("w tile", 0.063, 1.0))
        }
        | {(layer, "fprop"): {"error": 0.74} for layer in DRIFTING},
        ("outlier-channels", "blocks.3.qkv"),
    ),
    "D amax floor": (
        {(layer, "dy row"): flushed(amax=1.0) for layer in EVERY},
        ("flushed-gradients", "blocks.3.expert_down"),
    ),
    "D some blocks are spared": (
        {(layer, "dy row"): {"underflow_ratio": 0.7, "rows_flushed": 700} for layer in EVERY},
        ("flushed-gradients", "blocks.3.expert_down"),
    ),
    "F dy scale too large": (
        {(layer, "dy row"): TOO_LARGE for layer in EVERY},
        ("scale-too-large", "blocks.3.expert_down"),
    ),
    "F2 dy scale too small": (
        {(layer, "dy row"): SATURATED for layer in EVERY},
        ("scale-too-small", "blocks.3.expert_down"),
    ),
    "G x scale too small": (
        {(layer, "x row"): SATURATED for layer in EVERY}
        | {(layer, "fprop"): {"error": 0.82} for layer in EVERY},
        ("scale-too-small", "blocks.0.qkv"),
    ),
    "H stale inverse scale": (
        {(layer, "fprop"): EIGHTFOLD for layer in FEEDS}
        | {("blocks.1.shared_down", "x row"): NEXT_LINEAR, ("blocks.1.shared_down", "fprop"): {"error": 0.3}},
        ("stale-inverse-scale", "blocks.1.shared_up"),
    ),
    "H in dgrad": (
        {(layer, "dgrad"): EIGHTFOLD for layer in FEEDS},
        ("stale-inverse-scale", "blocks.1.expert_up"),
    ),
    "J NaN from one expert": (
        {("blocks.1.expert_up", "fprop"): {"nan": 64}, ("blocks.2.qkv", "x row"): {"nan": 1000}},
        ("nonfinite-origin", "blocks.1.expert_up"),
    ),
}


@pytest.mark.parametrize("name", FP8)
def test_an_abrupt_fp8_fault_is_named_at_its_first_sample_and_stays_the_same(
    course: Any, name: str, followed: Any, causes: Any
) -> None:
    ill, expected = FP8[name]
    state, told, decisions = followed(course([ill] * 12))
    assert told == [(8, *expected)]
    (said,) = causes(state)
    assert said["kind"] == "fp8"
    # Every decision about what the fault does says so.
    named = {
        made.evidence["cause"]["name"] for made in decisions if made.step == 8 and made.evidence["signals"]
    }
    assert named <= {expected[0]}
    assert state == PolicyState.from_dict(json.loads(json.dumps(state.to_dict())))


def test_a_constant_factor_is_told_from_other_wrong_results(course: Any, followed: Any, causes: Any) -> None:
    (said,) = causes(followed(course([FP8["H stale inverse scale"][0]]))[0])
    assert said["evidence"]["factor"] == pytest.approx(8.0)
    assert "8 times the right result" in said["summary"]
    state, told, _ = followed(course([{("blocks.1.expert_up", "fprop"): {"error": 17.6, "sum_sq_q": 1e6}}]))
    assert told == [(8, "stale-inverse-scale", "blocks.1.expert_up")]
    (said,) = causes(state)
    assert "factor" not in said["evidence"]
    assert "times the right result" not in said["summary"]


def test_a_scale_that_does_not_follow_its_amax_is_stuck(course: Any, followed: Any) -> None:
    ill = {(layer, "dy row"): flushed() for layer in EVERY}
    kept = {(layer, "dy_scale"): 1e-4 / 448 for layer in EVERY}
    memory = {(layer, "dy_history_amax"): 1e-4 for layer in EVERY}
    stuck = {(layer, "dy_scale"): 1.0 for layer in EVERY}
    healthy = {"scalars": kept | memory}
    # What its history asks for tells at once.
    _, told, _ = followed(course([ill] * 3, healthy, {"scalars": stuck | memory}))
    assert told == [(8, "stuck-scale", "blocks.3.expert_down")]
    # A sample later where the scale and its history come only then.
    late = course([ill] * 3, {}, {"scalars": stuck | memory})
    late[8] = replace(late[8], scalars={})
    _, told, _ = followed(late)
    assert told == [
        (8, "flushed-gradients", "blocks.3.expert_down"),
        (9, "stuck-scale", "blocks.3.expert_down"),
    ]
    # Without a history it has to stand still for a while.
    _, told, _ = followed(course([ill] * 3, {"scalars": kept}, {"scalars": stuck}))
    assert told[0][1] == "flushed-gradients"
    assert told[1] == (10, "stuck-scale", "blocks.3.expert_down")
    # What has been told for long stays as it is.
    turned = course([ill] * 8, {"scalars": kept}, {"scalars": {}})
    turned[12:] = [replace(seen, scalars=stuck | memory) for seen in turned[12:]]
    assert [cause for _, cause, _ in followed(turned)[1]] == ["flushed-gradients"]
    _, told, _ = followed(course([ill] * 3, {"scalars": stuck}, {"scalars": stuck}))
    assert told == [(8, "stuck-scale", "blocks.3.expert_down")]
    # A stuck scale that is too small saturates.
    small = {(layer, "x row"): SATURATED for layer in EVERY}
    slow = {"scalars": {(layer, "x_scale"): 1.0 / 448 for layer in EVERY}}
    assert followed(course([small] * 2, slow, slow))[1] == [(8, "stuck-scale", "blocks.0.qkv")]
    # One that fits saturates for a sample when its amax jumps: that is no stuck one.
    jump = {(layer, "x row"): {"saturated": 30, "amax": 6.0} for layer in EVERY}
    fits = {"scalars": {(layer, "x_scale"): 1.0 / 448 for layer in EVERY}}
    _, told, _ = followed(course([jump, {}, {}], fits, fits))
    assert told == []


@pytest.mark.parametrize("every", [1, 5])
def test_a_drift_is_named_before_the_decision_and_the_decisions_of_all_its_layers_say_so(
    slots: Any, observation: Any, drift: Any, every: int, followed: Any, causes: Any
) -> None:
    steps = range(0, 11, every)
    healthy = [observation(at - 40, slots) for at in range(0, 40, every)]
    ill = [
        {**drift(at), ("blocks.3.qkv", "x row"): {**drift(at)["blocks.3.qkv", "x row"], "amax": 2e3}}
        for at in steps
    ]
    seen = [observation(at, slots, each) for at, each in zip(steps, ill, strict=True)]
    enforce = PolicyConfig(run="r", mode="enforce")
    state, told, decisions = followed([*healthy, *seen], config=enforce)
    ((step, cause, layer),) = told
    assert (cause, layer) == ("outlier-channels", "blocks.3.qkv")
    assert step <= 10
    assert causes(state)[0]["evidence"]["amax_growth"] > 100
    assert {made.evidence["cause"]["name"] for made in decisions} <= {"outlier-channels"}


def test_a_fault_upstream_speaks_for_the_layers_behind_it() -> None:
    def cause(name: str, layer: str | None, *reaches: str) -> Diagnosis:
        return Diagnosis(cause=name, kind="fp8", layer=layer, summary="", reaches=frozenset(reaches))

    first, second, third = cause("a", "l0", "l0", "l5"), cause("b", "l5"), cause("c", None)
    assert cause_of([first], "l5") is first
    assert cause_of([first, second], "l5") is second
    assert cause_of([first, replace(second, layer="l0")], "l0", "b").cause == "b"  # type: ignore[union-attr]
    assert cause_of([first, second], "l6") is None
    assert cause_of([third], "(run)") is third
    wavering = cause("fluctuating", "l5", "l5")
    assert cause_of([wavering, first], "l5") is first
    assert cause_of([wavering, first], "l5", "fluctuating") is wavering
    assert cause_of([wavering], "l5") is wavering


def test_gradients_that_come_and_go_are_fluctuating_and_their_layers_named(
    course: Any, followed: Any, causes: Any
) -> None:
    noisy = {(layer, "dy row"): {"sqnr_db": 16.0, "sum_sq_q": 0.96 * COUNT} for layer in FEEDS}
    swinging = [noisy, {}, noisy, {}, noisy, {}]
    state, told, _ = followed(course(swinging))
    assert "fluctuating" in [cause for _, cause, _ in told]
    said = next(said for said in causes(state) if said["name"] == "fluctuating")
    assert said["evidence"]["layers"] == FEEDS
    # With a fault of FP8 that comes and goes they have another cause.
    faulty = FP8["F2 dy scale too small"][0]
    told = followed(course([faulty, {}, faulty, {}, faulty, {}, faulty, *[{}] * 6]))[1]
    assert [cause for _, cause, _ in told] == ["scale-too-small"]
    lasting = followed(course([noisy] * 6))[1]
    assert "fluctuating" not in [cause for _, cause, _ in lasting]


def test_a_cause_ends_after_clear_samples_and_samples_without_its_slots_say_nothing(
    course: Any, slots: Any, observation: Any, followed: Any, causes: Any
) -> None:
    ill, _ = FP8["H stale inverse scale"]
    state, *_ = followed(course([ill]))
    others = tuple(slot for slot in slots if not slot.layer.startswith("blocks.1."))
    state, *_ = followed([observation(9 + at, others) for at in range(10)], state)
    assert [said["name"] for said in causes(state)] == ["stale-inverse-scale"]
    state, *_ = followed([observation(19 + at, slots) for at in range(2)], state)
    assert len(causes(state)) == 1
    state, *_ = followed([observation(21, slots)], state)
    assert causes(state) == []


GAINS = {("blocks.1.mlp_norm", "gain_amax"): 1.1, ("blocks.1.mlp_norm", "gain_median"): 1.0}
HIGH_GAINS = {("blocks.1.mlp_norm", "gain_amax"): 132.0, ("blocks.1.mlp_norm", "gain_median"): 1.0}
DOWN = {("blocks.1.shared_down", "x row"): {"underflow_ratio": 0.3, "amax": 180.0}}
RAISED = {("blocks.1.shared_up", "fprop"): {"sum_sq": 3e6, "sum_sq_q": 3e6, "sum_sq_err": 3e6 * 0.035**2}}


def router(share: float) -> dict[str, Any]:
    return {"scalars": {("blocks.2.router", "load_min"): share, ("blocks.2.router", "entropy"): 0.9}}


def test_the_order_of_slots_and_scalars_changes_nothing(course: Any, followed: Any) -> None:
    ill = FP8["C outliers at once"][0]
    seen = course([ill, DOWN, ill], {"scalars": GAINS | router(0.1)["scalars"]}, {"scalars": HIGH_GAINS})
    shuffled = []
    for number, step in enumerate(seen):
        order = random.Random(number).sample(range(len(step.slots)), len(step.slots))
        table = type(step.stats)(
            {name: values[order] for name, values in step.stats.columns.items()},
            {name: values[order] for name, values in step.stats.nulls.items()},
        )
        scalars = dict(random.Random(number).sample(list(step.scalars.items()), len(step.scalars)))
        shuffled.append(
            replace(
                step,
                slots=tuple(step.slots[at] for at in order),
                indices=tuple(step.indices[at] for at in order),
                stats=table,
                scalars=scalars,
            )
        )
    left, right = followed(seen), followed(shuffled)
    assert left[1] == right[1]
    assert left[0].trends == right[0].trends


def test_every_preset_has_the_same_causes(course: Any, followed: Any) -> None:
    for name, preset in itertools.product(("C outliers at once", "G x scale too small"), ("seed", "floor")):
        ill, expected = FP8[name]
        config = PolicyConfig(run="r", mode="observe", preset=preset)
        assert followed(course([ill] * 2), config=config)[1] == [(8, *expected)]


def test_diagnose_says_what_the_trends_hold_and_a_diagnosis_comes_back_from_its_wire_form(
    course: Any, followed: Any
) -> None:
    *before, last = course([FP8["G x scale too small"][0]])
    state, *_ = followed(before)
    view = look(state, last, OBSERVE)
    trends = state.trends.added(view)
    (cause,) = diagnose(view, trends)
    assert cause.reaches == frozenset(EVERY)
    assert Diagnosis.from_wire(json.loads(json.dumps(cause.to_wire()))) == replace(cause, reaches=frozenset())
    assert diagnose(view, Trends()) == ()
