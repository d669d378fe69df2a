"""A late NaN after a rise of underflow sends the last layers to BF16, and fluctuation smooths gradients by choice."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.cause import Diagnosis
from fp8_safeguard.monitor.lastlayers import UnderflowTrend, last_blocks
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.remedies import smoothing_candidates
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.view import look

ENFORCE = PolicyConfig(run="r", mode="enforce")
STEPS = 40


def rising(slots: Any, observation: Any, *, to: float, nan_from: int = STEPS - 2) -> Any:
    """Underflow of every layer's x and dy from 0.004 % to `to`, and a NaN loss at the end."""
    layers = sorted({slot.layer for slot in slots})
    for step in range(STEPS):
        level = 4e-5 * (to / 4e-5) ** (step / STEPS)
        ill = {(layer, f"{part} row"): {"underflow_ratio": level} for layer in layers for part in ("x", "dy")}
        loss = float("nan") if step >= nan_from else 2.0
        yield observation(step, slots, ill, run={"loss": loss})


def test_nan_in_the_loss_after_a_rise_sends_the_last_blocks_to_bf16_as_far_as_the_budget_goes(
    make_slots: Any, observation: Any, follow: Any
) -> None:
    slots = make_slots(8)
    state, made = follow(rising(slots, observation, to=0.004))
    assert {decision.rule for decision in made} == {"late-nan"}
    assert {decision.action for decision in made} == {"bf16_fallback"}
    assert {decision.step for decision in made} == {STEPS - 1}
    # 8 blocks of 6 linears of 3 gemms: 15 % are 21; fprop and dgrad of the last block, and most of the one before.
    assert len(made) == 21
    counted = {
        block: sum(decision.layer.startswith(f"blocks.{block}.") for decision in made) for block in range(8)
    }
    assert (counted[7], counted[6]) == (12, 9)
    assert {decision.target.gemm for decision in made} == {"fprop", "dgrad"}
    assert "underflow had risen from" in made[0].reason
    assert "'blocks.7', 'blocks.6', 'blocks.5', 'blocks.4', 'blocks.3'" in made[0].reason
    assert state.costs.share(fallbacks(state.plan)) <= 0.15


def test_a_person_restores_them(make_slots: Any, observation: Any, follow: Any) -> None:
    slots = make_slots(2)
    config = dataclasses.replace(ENFORCE, dwell_steps=5)
    state, made = follow(rising(slots, observation, to=0.004), config)
    marked = tuple(dataclasses.replace(slot, emulated=True) if slot.gemm else slot for slot in slots)
    state, more = follow((observation(step, marked) for step in range(STEPS, STEPS + 40)), config, state)
    assert made
    assert more == []


@pytest.mark.parametrize(
    ("to", "nan_from"), [(4e-5, STEPS - 2), (4e-4, STEPS - 2), (0.004, STEPS - 1), (0.004, STEPS)]
)
def test_without_a_rise_that_matters_or_a_second_sample_nothing_happens(
    slots: Any, observation: Any, follow: Any, to: float, nan_from: int
) -> None:
    _, made = follow(rising(slots, observation, to=to, nan_from=nan_from))
    assert [decision for decision in made if decision.rule == "late-nan"] == []


def test_an_advising_policy_proposes_them(slots: Any, observation: Any, follow: Any) -> None:
    config = dataclasses.replace(ENFORCE, mode="advise")
    state, made = follow(rising(slots, observation, to=0.004), config)
    assert {decision.state for decision in made if decision.rule == "late-nan"} == {"proposed"}
    assert state.plan.version == 0


def test_the_last_blocks_are_those_of_the_model_not_of_the_alphabet(observation: Any) -> None:
    names = ("embed", "blocks.9.a", "blocks.10.a", "blocks.10.b", "head")
    slots = tuple(Slot(name, gemm="fprop") for name in names)
    seen = observation(0, slots, indices=(0, 1, 2, 3, 4))
    assert last_blocks(look(PolicyState(), seen, ENFORCE)) == {
        "blocks.10": ["blocks.10.b", "blocks.10.a"],
        "blocks.9": ["blocks.9.a"],
    }


def test_the_trend_is_that_of_two_running_means(slots: Any, observation: Any) -> None:
    trend, levels = UnderflowTrend(), np.geomspace(1e-4, 5e-3, 30)
    for step, level in enumerate(levels):
        layers = {slot.layer for slot in slots}
        ill = {(layer, f"{part} row"): {"underflow_ratio": level} for layer in layers for part in ("x", "dy")}
        trend = trend.added(look(PolicyState(), observation(step, slots, ill), ENFORCE))
    logs = np.log(np.round(levels * 1024 * 256) / (1024 * 256))
    before = logs.mean()  # fewer than 64 samples: the plain mean
    recent = 0.0
    for count, level in enumerate(logs, 1):
        recent += (level - recent) / min(count, 8)
    assert (trend.before, trend.recent) == (pytest.approx(before), pytest.approx(recent))
    assert UnderflowTrend.from_list(json.loads(json.dumps(trend.to_list()))) == trend
    assert trend.rises


def fluctuating(**fields: Any) -> Diagnosis:
    return Diagnosis(cause="fluctuating", kind="fp8", summary="gradients come and go", **fields)


def test_fluctuating_gradients_are_smoothed_by_choice_and_named_otherwise() -> None:
    cause = fluctuating(layer="b", evidence={"layers": ["b", "a"]})
    offered = smoothing_candidates([cause], allowed=True)
    assert [(each.layer, each.target, each.action, each.value) for each in offered] == [
        ("a", Target(), "gradient_smoothing", 0.1),
        ("b", Target(), "gradient_smoothing", 0.1),
    ]
    advised = smoothing_candidates([cause], allowed=False)
    assert [(each.layer, each.action) for each in advised] == [("b", "advice")]
    assert smoothing_candidates([fluctuating(layer="c")], allowed=True)[0].layer == "c"


@pytest.mark.parametrize("allowed", [False, True])
def test_the_policy_takes_the_choice(
    slots: Any, observation: Any, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    cause = fluctuating(layer="blocks.0.o")
    monkeypatch.setattr("fp8_safeguard.monitor.policy.diagnose", lambda view, trends: (cause,))
    config = dataclasses.replace(ENFORCE, gradient_smoothing=allowed)
    state, made = decide(PolicyState(), observation(0, slots), config)
    state, again = decide(state, observation(1, slots), config)
    assert [decision.action for decision in made] == ["gradient_smoothing" if allowed else "advice"]
    assert again == ()
    assert [(entry.action, entry.value) for entry in state.plan.entries] == (
        [("gradient_smoothing", 0.1)] if allowed else []
    )
