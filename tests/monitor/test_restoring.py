"""A fault that is not in the operands: no emulation says when it is over."""

import dataclasses
import json
from typing import Any

import pytest

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState
from fp8_safeguard.monitor.slots import Slot

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"


def in_fallback(slots: Any, gemm: str = "fprop") -> tuple[Slot, ...]:
    """The slots as a client lists them while that gemm of LAYER runs in BF16."""
    return tuple(
        dataclasses.replace(slot, emulated=True) if (slot.layer, slot.gemm) == (LAYER, gemm) else slot
        for slot in slots
    )


@pytest.mark.parametrize("look", [None, 0.027])
def test_an_emulation_that_never_showed_the_fault_does_not_end_it(
    look: float | None, slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    """A stale inverse scale is not in the operands, so what is emulated from them is healthy while it lasts."""
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    seen = observation(0, slots, {(LAYER, "fprop"): {"error": 15.0}})
    if look is not None:
        seen = looked(seen, LAYER, {"fprop": {"fp8": look, "e5m2": 0.056}})
    state, (fallen,) = follow([seen], config)
    assert fallen.evidence["unshown"] > 0.0
    assert ("a person restores it" in fallen.reason) == (look is not None)
    # Healthy beside a real error of 1500 %, and the size of a mild error of FP8's own: neither shows it.
    marked = in_fallback(slots)
    mild = {(LAYER, "fprop"): {"error": 0.3}}
    course = [observation(step, marked, mild if step == 5 else {}) for step in range(1, 80)]
    state, made = follow(course, config, state)
    assert [(decision.action, decision.rule) for decision in made] == [("advice", "probation")]
    assert "never showed the fault" in made[0].reason
    assert len(state.plan.entries) == 1
    stored = json.loads(json.dumps(state.to_dict(), allow_nan=False))
    assert PolicyState.from_dict(stored).changes == state.changes


def test_a_healthy_look_beside_a_bad_result_outweighs_an_operand_that_is_a_little_ill(
    slots: Any, observation: Any, follow: Any, looked: Any
) -> None:
    """The operand's health would end a fault that it did not make."""
    config = dataclasses.replace(ENFORCE, dwell_steps=10)
    ill = {(LAYER, "fprop"): {"error": 15.0}, (LAYER, "x row"): {"underflow_ratio": 0.006}}
    healthy_look = {"fprop": {"fp8": 0.027, "e5m2": 0.056}}
    for look, ended in ((healthy_look, []), (None, ["restore"])):
        seen = observation(0, slots, ill)
        state, (fallen,) = follow([seen if look is None else looked(seen, LAYER, look)], config)
        assert fallen.evidence["restorable"] == (look is None)
        _, made = follow((observation(step, in_fallback(slots)) for step in range(1, 60)), config, state)
        assert [decision.action for decision in made if decision.action == "restore"] == ended
