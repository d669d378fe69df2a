"""Plans and decisions: applying twice changes nothing, and everything survives JSON."""

import json
import math
from typing import Any

import pytest

from fp8_safeguard.monitor.plan import Decision, Plan, PlanEntry, PlanError, Target


def decision(**changes: Any) -> Decision:
    fields = {
        "id": "r-1",
        "run": "r",
        "step": 10,
        "layer": "blocks.3.qkv",
        "target": Target(gemm="fprop"),
        "action": "bf16_fallback",
        "rule": "gemm-error",
        "reason": "because",
        "evidence": {"value": math.inf, "limits": [0.05, math.nan]},
        "mode": "enforce",
        "state": "sent",
        "not_before_step": 11,
    }
    return Decision(**{**fields, **changes})


def test_a_decision_adds_its_entry_and_a_version() -> None:
    plan = Plan().with_decision(decision())
    assert (plan.version, len(plan.entries)) == (1, 1)
    assert plan.entries[0].to_wire() == {
        "layer": "blocks.3.qkv",
        "target": {"gemm": "fprop"},
        "action": "bf16_fallback",
        "value": None,
        "decision_id": "r-1",
        "not_before_step": 11,
        "expires_step": None,
    }


def test_applying_twice_changes_nothing() -> None:
    once = Plan().with_decision(decision())
    assert once.with_decision(decision()) is once
    both = once.with_decision(decision(id="r-2", target=Target(gemm="wgrad")))
    assert both.with_decision(decision()) is both
    assert once.without_decision("r-99") is once
    assert Plan().emptied() == Plan()


def test_a_later_decision_replaces_the_entry_at_its_place() -> None:
    target = Target(operand="dy", layout="row")
    plan = Plan().with_decision(decision(target=target, action="scale_multiplier", value=0.5))
    plan = plan.with_decision(decision(id="r-2", target=target, action="scale_multiplier", value=1.0))
    assert [entry.value for entry in plan.entries] == [1.0]
    assert plan.version == 2
    assert plan.find("blocks.3.qkv", target, "scale_multiplier").decision_id == "r-2"
    assert plan.find("blocks.3.qkv", target, "format") is None


def test_restore_drops_all_of_its_target_and_nothing_else() -> None:
    plan = Plan().with_decision(decision()).with_decision(decision(id="r-2", target=Target(gemm="dgrad")))
    restored = plan.with_decision(decision(id="r-3", action="restore"))
    assert [entry.target.gemm for entry in restored.entries] == ["dgrad"]
    assert restored.version == 3
    assert restored.with_decision(decision(id="r-4", action="restore")) is restored


def test_advice_changes_nothing() -> None:
    plan = Plan()
    assert plan.with_decision(decision(action="advice")) is plan


def test_undoing_a_decision_and_the_kill_switch() -> None:
    plan = Plan().with_decision(decision()).with_decision(decision(id="r-2", target=Target()))
    assert [entry.decision_id for entry in plan.without_decision("r-1").entries] == ["r-2"]
    assert plan.emptied() == Plan(3, ())


def test_plan_order_does_not_depend_on_the_order_of_decisions() -> None:
    one, two = decision(), decision(id="r-2", layer="a")
    assert Plan().with_decision(one).with_decision(two) == Plan().with_decision(two).with_decision(one)


@pytest.mark.parametrize(
    ("target", "wire"),
    [
        (Target(gemm="dgrad"), {"gemm": "dgrad"}),
        (Target(operand="dy", layout="row"), {"operand": "dy", "layout": "row"}),
        (Target(), {"layer": True}),
    ],
)
def test_targets_on_the_wire(target: Any, wire: Any) -> None:
    assert target.to_wire() == wire
    assert Target.from_wire(wire) == target


@pytest.mark.parametrize(
    "wire", [{}, {"gemm": "bprop"}, {"operand": "x"}, {"gemm": "fprop", "operand": "x", "layout": "row"}, 3]
)
def test_targets_that_are_none(wire: Any) -> None:
    with pytest.raises(PlanError):
        Target.from_wire(wire)


def test_plan_and_decision_survive_strict_json() -> None:
    made = decision(effective_step=12, outcome="gap 0.1 %")
    plan = Plan().with_decision(made).with_decision(decision(id="r-2", target=Target()))
    assert Plan.from_wire(json.loads(json.dumps(plan.to_wire(), allow_nan=False))) == plan
    wire = json.loads(json.dumps(made.to_wire(), allow_nan=False))
    assert wire["evidence"] == {"value": "Infinity", "limits": [0.05, "NaN"]}
    assert set(wire) == {
        *("id", "run", "step", "layer", "target", "action", "value", "rule", "reason", "evidence", "mode"),
        *("state", "actor", "not_before_step", "effective_step", "outcome"),
    }
    assert Decision.from_wire(wire).to_wire() == wire


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("layer", 3),
        ("decision_id", None),
        ("value", [1.0]),
        ("value", True),
        ("value", math.nan),
        ("value", 10**400),
        ("not_before_step", -1),
        ("not_before_step", "11"),
        ("not_before_step", 1.0),
        ("not_before_step", None),
        ("expires_step", -1),
        ("expires_step", True),
        ("expires_step", "12"),
    ],
)
def test_entries_with_values_of_another_type_are_refused(field: str, bad: Any) -> None:
    wire = decision().entry().to_wire()
    assert PlanEntry.from_wire({**wire, "value": 0.5, "expires_step": 12}).expires_step == 12
    with pytest.raises(PlanError, match=field):
        PlanEntry.from_wire({**wire, field: bad})


@pytest.mark.parametrize("bad", [{"version": "1"}, {"version": True}, {"entries": 3}, {"entries": "x"}])
def test_plans_with_values_of_another_type_are_refused(bad: Any) -> None:
    with pytest.raises(PlanError, match=next(iter(bad))):
        Plan.from_wire({"version": 1, "entries": [], **bad})


def test_unknown_actions_and_states_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'panic'.*bf16_fallback"):
        decision(action="panic")
    with pytest.raises(PlanError, match=r"'done'.*proposed"):
        decision(state="done")
    with pytest.raises(PlanError, match="restore"):
        PlanEntry(layer="a", target=Target(), action="restore", decision_id="r-1", not_before_step=1)
    with pytest.raises(PlanError, match="lacks entries"):
        Plan.from_wire({"version": 1})
