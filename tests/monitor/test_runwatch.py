"""A loss that jumps is worth watching, whichever layer is to blame; one that learns, wobbles or spikes once is not."""

from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.policy import PolicyState

JUMP = "loss-jump|"


@pytest.fixture
def losses(slots: Any, observation: Any, follow: Any) -> Any:
    """Follows a healthy model with these losses, one a step."""

    def losses(values: Any, state: PolicyState | None = None, first: int = 0) -> PolicyState:
        seen = (observation(first + at, slots, run={"loss": float(value)}) for at, value in enumerate(values))
        after, decisions = follow(seen, state=state)
        assert decisions == []
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
