"""A loss that jumps is worth watching, whichever layer is to blame; one that learns, wobbles or spikes once is not."""

import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide

JUMP = "loss-jump|"


@pytest.fixture
def losses(slots: Any, observation: Any, follow: Any) -> Any:
    """Follows a healthy model with these losses, one a step."""

    def losses(values: Any, state: PolicyState | None = None, first: int = 0) -> PolicyState:
        seen = (observation(first + at, slots, run={"loss": float(value)}) for at, value in enumerate(values))
        after, decisions = follow(seen, state=state)
        # People are told why; nothing is changed.
        assert {(made.action, made.rule) for made in decisions} <= {("advice", "loss-spike")}
        assert after == PolicyState.from_dict(after.to_dict())
        return after

    return losses


def test_a_loss_that_explodes_is_watched_and_resolved_once_it_is_back(losses: Any) -> None:
    state = losses([0.5] * 8 + [7.7e9])
    assert not state.alerts
    state = losses([7.8e9, 7.9e9], state, 9)
    (alert,) = state.alerts.values()
    shown = alert.to_wire()
    assert (alert.key, shown["severity"], shown["scope"], shown["layer"]) == (JUMP, "watch", "run", None)
    assert (shown["value"], shown["threshold"], shown["first_step"], shown["step"]) == (7.9e9, 1.5, 8, 9)
    # What the jump brought is no new normal, and one good sample does not end it.
    state = losses([7.9e9] * 40 + [0.6, 0.6], state, 11)
    assert JUMP in state.alerts
    assert not losses([0.6], state, 53).alerts


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(8.0, 0.01, 60) * np.random.default_rng(7).uniform(0.6, 1.4, 60),
        [0.5] * 12 + [9.0] + [0.5] * 12,
        [0.5] * 6 + [9.0] * 2,
        [-5.0] * 30,
        [0.0] * 30,
        np.geomspace(0.1, 2.0, 60),
    ],
    ids=["learning", "one spike", "too early", "negative", "zero", "slowly rising"],
)
def test_a_loss_that_does_not_jump_is_no_alert(losses: Any, values: Any) -> None:
    assert not losses(values).alerts


def test_b95_the_raw_loss_is_what_is_acted_on(slots: Any, observation: Any) -> None:
    # A trainer's log shows the running mean where the loss is NaN; what is told here is the loss itself.
    state, alerts = PolicyState(), []
    for step, loss in enumerate([2.0, 2.0, 2.0, math.nan, 2.0, 2.0]):
        state, _ = decide(state, observation(step, slots, run={"loss": loss}), PolicyConfig(run="r"))
        alerts.append({alert.rule: alert.last_step for alert in state.alerts.values()})
    assert alerts[2] == {}
    assert all(shown == {"nonfinite-loss": 3} for shown in alerts[3:])
    assert state.trends.nonfinite_steps == 1
    assert len(state.trends.series.window("loss", "(run)")) == 5


@pytest.mark.parametrize("loss_scale", [None, 1.0], ids=["no scaler", "a scaler that stays"])
def test_b96_a_nan_gradient_is_counted_without_a_loss_scaler_and_its_layer_named(
    slots: Any, observation: Any, loss_scale: float | None
) -> None:
    ill = {("blocks.2.o", "dy row"): {"nan": 1}, ("blocks.2.o", "dgrad"): {"nan": 5},
           ("blocks.1.qkv", "dy row"): {"nan": 7}}  # fmt: skip
    state, config, made = PolicyState(), PolicyConfig(run="r", mode="enforce"), []
    for step, broken in enumerate([False, False, True, True, False]):
        run = {"loss": 2.0, "gradient_norm": math.nan if broken else 1.0, "loss_scale": loss_scale}
        state, decisions = decide(state, observation(step, slots, ill if broken else {}, run=run), config)
        made.append(decisions)
        assert state.trends.nonfinite_steps == min(max(step - 1, 0), 2)
    assert made[2] == ()
    (cause,) = [lasting.said for lasting in state.trends.causes.values()]
    assert (cause["name"], cause["layer"]) == ("nonfinite-origin", "blocks.2.o")
    assert {(act.layer, act.action) for act in made[3]} == {("blocks.2.o", "bf16_fallback")}
    assert all(act.evidence["cause"]["name"] == "nonfinite-origin" for act in made[3])
    assert "nonfinite-gradient-norm|" in state.alerts


def test_a_gradient_scaler_that_looks_for_its_scale_is_not_counted(slots: Any, observation: Any) -> None:
    state = PolicyState()
    for step, scale in enumerate([65536.0, 32768.0, 16384.0]):
        run = {"loss": 2.0, "gradient_norm": math.inf if step else 1.0, "loss_scale": scale}
        state, _ = decide(state, observation(step, slots, run=run), PolicyConfig(run="r"))
    assert state.trends.nonfinite_steps == 0


@pytest.mark.parametrize("broken", ["loss", "forward", "both"])
def test_b96_a_falling_loss_scale_hides_no_loss_and_no_forward_pass(
    slots: Any, observation: Any, broken: str
) -> None:
    """Where every step overflows the scaler halves its scale in each: that explains gradients, and nothing before them."""
    state, config, made = PolicyState(), PolicyConfig(run="r", mode="enforce"), []
    ill = {} if broken == "loss" else {("blocks.1.o", "fprop"): {"nan": 3}}
    for step in range(6):
        loss = 2.0 if broken == "forward" else math.nan
        run = {"loss": loss, "gradient_norm": math.nan, "loss_scale": 65536.0 / 2**step}
        state, decisions = decide(state, observation(step, slots, ill, run=run), config)
        made += [(act.step, act.layer, act.action) for act in decisions]
        assert state.trends.nonfinite_steps == step + 1
    assert made == ([] if broken == "loss" else [(1, "blocks.1.o", "bf16_fallback")])
    assert ("nonfinite-loss|" in state.alerts) == (broken != "forward")


def test_b96_a_scaler_that_has_nothing_left_to_find_hides_no_gradient(slots: Any, observation: Any) -> None:
    """Gradients that are no number at any scale: 65536 has fallen to 1 by step 16, and goes on falling."""
    state, config, made = PolicyState(), PolicyConfig(run="r", mode="enforce"), []
    ill = {("blocks.1.o", "dgrad"): {"inf": 3}}
    for step in range(22):
        run = {"loss": 2.0, "gradient_norm": math.inf, "loss_scale": 65536.0 / 2**step}
        state, decisions = decide(state, observation(step, slots, ill, run=run), config)
        made += [(act.step, act.layer, act.target.gemm, act.action) for act in decisions]
        # The first sample has no earlier scale to compare with.
        assert state.trends.nonfinite_steps == 1 + max(step - 16, 0)
    assert made == [(17, "blocks.1.o", "dgrad", "bf16_fallback")]
    assert "nonfinite-gradient-norm|" in state.alerts
