"""Replay: the same policy gives the same, another differs where it must, and only the certain is called so."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from fp8_safeguard.monitor.baseline import learn
from fp8_safeguard.monitor.inforce import in_force, reasons
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.policy import PolicyConfig
from fp8_safeguard.monitor.policyfile import PolicyFileError, policy_from
from fp8_safeguard.monitor.replay import Replay, alarms, compare_alerts, compare_decisions, counts, replay
from fp8_safeguard.monitor.thresholds import FLOOR, get_preset

BASE = PolicyConfig(run="r", mode="enforce")
SICK = "blocks.1.o"
Observe = Callable[..., StepObservation]


@pytest.fixture
def history(observation: Observe, make_slots: Any) -> list[StepObservation]:
    """30 steps of a model of three blocks; one fprop is 4.5 % wrong from step 10, 12 % from step 15."""
    slots = make_slots(3)
    errors = {**dict.fromkeys(range(10, 15), 0.045), **dict.fromkeys(range(15, 30), 0.12)}
    return [
        observation(step, slots, {(SICK, "fprop"): {"error": errors[step]}} if step in errors else {})
        for step in range(30)
    ]


def stored(running: Replay) -> list[dict[str, Any]]:
    """The decisions as an API would show them."""
    return [json.loads(json.dumps(decision.to_wire())) for decision in running.decisions]


def stored_alerts(running: Replay) -> list[dict[str, Any]]:
    return [{**vars(alert), "id": number} for number, alert in enumerate(running.alerts)]


def test_without_changes_everything_is_the_same(history: list[StepObservation]) -> None:
    first, again = replay(history, BASE), replay(iter(history), BASE)
    assert first.decisions
    differences, known = compare_decisions(stored(first), again.decisions)
    assert known is None
    assert {each.status for each in differences} == {"same"}
    assert all(each.certain for each in differences)
    assert {each.status for each in compare_alerts(stored_alerts(first), again.alerts, known)} == {"same"}
    assert [each.stored_id for each in differences] == [decision.id for decision in first.decisions]


def test_a_stricter_level_acts_earlier_and_what_follows_is_uncertain(history: list[StepObservation]) -> None:
    plain = replay(history, BASE)
    (made,) = [each for each in plain.decisions if each.target.gemm == "fprop"]
    assert made.step >= 15
    assert made.action == "bf16_fallback"
    strict = policy_from({"thresholds": {"gemm-error fprop": {"act": 0.042, "act_over_median": "off"}}}, BASE)
    other = replay(history, strict)
    differences, known = compare_decisions(stored(plain), other.decisions)
    (moved,) = [each for each in differences if each.what["target"] == {"gemm": "fprop"}]
    assert (moved.status, moved.stored_step) == ("earlier", made.step)
    assert moved.step is not None
    assert 10 <= moved.step < 15
    assert moved.shift_steps == moved.step - made.step
    assert known == moved.step
    assert moved.certain
    assert counts(differences)["earlier"] == 1
    alerts = compare_alerts(stored_alerts(plain), other.alerts, known)
    for each in alerts:
        step = each.step if each.step is not None else each.stored_step
        assert each.certain == (step is not None and step <= known)
    turned, back = compare_decisions(stored(other), plain.decisions)
    (shift,) = [each.shift_steps for each in turned if each.what["target"] == {"gemm": "fprop"}]
    assert shift == -moved.shift_steps
    assert back == moved.step


def test_what_one_side_alone_decided_is_told_and_proposals_change_no_history(
    history: list[StepObservation],
) -> None:
    plain = replay(history, BASE)
    blind = policy_from({"thresholds": {"gemm-error": {"act": "off"}}}, BASE)
    differences, known = compare_decisions(stored(plain), replay(history, blind).decisions)
    assert {each.status for each in differences} == {"only_stored"}
    assert known == plain.decisions[0].step
    watching = policy_from({"mode": "observe"}, BASE)
    nothing, none = compare_decisions([], replay(history, watching).decisions)
    assert {each.status for each in nothing} == {"only_here"}
    assert none is None


def test_pairs_of_one_place_meet_at_the_same_step_first() -> None:
    """Restores and fallbacks come again and again: the third of one side need not be the third of the other."""
    item = {"layer": "a", "target": {"gemm": "fprop"}, "action": "advice", "value": None, "rule": "x", "reason": "",
            "state": "proposed", "mode": "observe", "run": "r", "not_before_step": 1}  # fmt: skip
    there = [{**item, "id": f"r-{step}", "step": step} for step in (10, 60, 120)]
    here = [{**item, "id": f"r-{step}", "step": step} for step in (60, 115)]
    from fp8_safeguard.monitor.plan import Decision

    differences, _ = compare_decisions(there, [Decision.from_wire(each) for each in here])
    assert [(each.status, each.step, each.stored_step) for each in differences] == [
        ("same", 60, 60),
        ("later", 115, 10),
        ("only_stored", None, 120),
    ]


def test_an_alert_that_comes_back_within_the_cool_down_is_one(observation: Observe, make_slots: Any) -> None:
    slots = make_slots(2)
    ill = {("blocks.0.o", "x row"): {"underflow_ratio": 0.02}}

    def seen(step: int) -> StepObservation:
        return observation(step, slots, ill if (step % 20 < 2 and step < 60) or step in (150, 151) else {})

    running = replay((seen(step) for step in range(160)), BASE)
    found = [(alert.rule, alert.step, alert.times) for alert in running.alerts]
    assert found == [("underflow", 1, 3), ("underflow", 151, 1)]


def test_alarms_count_by_rule_and_layer_over_the_steps_that_are_kept(history: list[StepObservation]) -> None:
    running = replay(history, BASE)
    whole = alarms(running, lambda step: True)
    assert whole.alerts == len(running.alerts)
    assert whole.decisions == len(running.decisions)
    assert sum(whole.by_rule.values()) == sum(whole.by_layer.values()) == whole.alerts + whole.decisions
    assert alarms(running, lambda step: step < 10).by_layer == {}


def test_a_baseline_silences_its_own_window(observation: Observe, make_slots: Any) -> None:
    slots = make_slots(2)
    ill = {("blocks.0.o", "dy row"): {"underflow_ratio": 0.3}}
    steps = [observation(step, slots, ill) for step in range(25)]
    assert alarms(replay(steps, BASE), lambda step: True).by_rule == {"underflow": 1}
    learned = policy_from({"baseline": 7}, BASE, lambda named: learn(steps) if named == 7 else None)
    assert alarms(replay(steps, learned), lambda step: True).alerts == 0


def test_a_file_changes_what_it_names_and_nothing_else() -> None:
    document = {
        "preset": "floor",
        "mode": "advise",
        "dwell_steps": 20,
        "budget_ratio": 1,
        "pins": ["a", "b"],
        "ttl_steps": "off",
        "thresholds": {
            "gemm-error": {"act": 0.04},
            "gemm-error wgrad": {"instant": "off"},
            "saturation": {"remedy": "none"},
        },
    }
    config = policy_from(document, BASE)
    assert (config.run, config.mode, config.dwell_steps, config.budget_ratio) == ("r", "advise", 20, 1)
    assert (config.pins, config.ttl_steps) == (frozenset({"a", "b"}), None)
    assert config.hysteresis == BASE.hysteresis
    changed = [
        (old.rule, old.gemm or old.operand)
        for old, new in zip(FLOOR.rules, config.thresholds.rules, strict=True)
        if old != new
    ]
    assert changed == [
        *(("gemm-error", gemm) for gemm in ("fprop", "dgrad", "wgrad")),
        *(("saturation", operand) for operand in ("x", "w", "dy")),
    ]
    wgrad = next(rule for rule in config.thresholds.rules if rule.gemm == "wgrad")
    assert (wgrad.act, wgrad.instant) == (0.04, None)
    assert [rule.instant for rule in config.thresholds.rules if rule.gemm in ("fprop", "dgrad")] == [
        0.15,
        0.15,
    ]
    assert policy_from({}, BASE).thresholds == get_preset("floor")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "a table of settings, not list"),
        ({"dwel_steps": 3}, "'dwel_steps' is no setting of a policy; there are preset, mode"),
        ({"run": "x"}, "'run' is no setting"),
        ({"dwell_steps": 2.5}, "dwell_steps is a whole number, not 2.5"),
        ({"dwell_steps": True}, "dwell_steps is a whole number, not True"),
        ({"dwell_steps": -1}, "from 0 upward, not -1"),
        ({"ttl_steps": "x"}, 'ttl_steps is a whole number or "off"'),
        ({"budget_ratio": float("inf")}, "budget_ratio is a number"),
        ({"mode": "act"}, "mode 'act' is not one of"),
        ({"preset": "flor"}, "thresholds 'flor' are not known"),
        ({"pins": "a"}, "pins is a list of names"),
        ({"thresholds": {"gem-error": {}}}, "preset floor has no rule 'gem-error'; it has gemm-error, gemm-error fprop"),
        ({"thresholds": {"gemm-error": {"act": "0.04"}}}, 'act of gemm-error is a number or "off"'),
        ({"thresholds": {"gemm-error": {"level": 1}}}, "'level' of gemm-error cannot be set; watch, act"),
        ({"thresholds": {"gemm-error": {"min_count": -1}}}, "whole number from 0"),
        ({"thresholds": {"gemm-error": {"remedy": "pray"}}}, "is one of fallback"),
        ({"thresholds": {"gemm-error": 3}}, "a table of levels"),
        ({"thresholds": 3}, "a table of rules"),
    ],
)  # fmt: skip
def test_a_file_that_says_no_policy_is_refused_with_the_way_out(document: Any, said: str) -> None:
    with pytest.raises(PolicyFileError, match=r".") as raised:
        policy_from(document, BASE)
    assert said in str(raised.value)


def decision(
    number: int, step: int, action: str = "bf16_fallback", state: str = "applied", **more: Any
) -> dict[str, Any]:
    base = {"id": f"r-{number}", "step": step, "layer": "a", "target": {"gemm": "fprop"}, "action": action}
    return {
        **base,
        "state": state,
        "not_before_step": step + 1,
        "effective_step": None,
        "history": [],
        **more,
    }


def act(what: str, step: int) -> dict[str, Any]:
    return {"what": what, "step": step}


@pytest.mark.parametrize(
    ("items", "held"),
    [
        ([decision(1, 10)], ["r-1"]),
        ([decision(1, 900)], []),
        ([decision(1, 10, "advice", "proposed")], []),
        ([decision(1, 10, state="proposed")], []),
        ([decision(1, 10, state="rejected")], []),
        ([decision(1, 10), decision(2, 80, "restore", effective_step=90)], []),
        # The restore takes effect within the window, or is about another gemm.
        ([decision(1, 10), decision(2, 80, "restore", effective_step=150)], ["r-1"]),
        ([decision(1, 10), decision(2, 80, "restore", target={"gemm": "dgrad"})], ["r-1"]),
        ([decision(1, 10), decision(2, 80, "restore"), decision(3, 120)], ["r-3"]),
        ([decision(1, 10, state="reverted", history=[{"what": "reverted", "step": 50}])], []),
        ([decision(1, 10, state="reverted", history=[{"what": "reverted", "step": 150}])], ["r-1"]),
        ([decision(1, 10, state="reverted")], ["r-1"]),
        ([decision(1, 10, state="expired")], []),
        ([decision(1, 10, state="expired", history=[{"what": "sent", "step": 10}, {"what": "expired", "step": 120}])], ["r-1"]),
        # A person's word holds nothing of the steps before it, whatever the evidence is of.
        ([decision(1, 10, state="approved", history=[act("proposed", 10), act("approved", 300)])], []),
        ([decision(1, 10, state="approved", history=[act("proposed", 10), act("approved", 150)])], ["r-1"]),
        ([decision(1, 10, effective_step=230, history=[act("approved", 150), act("applied", 230)])], []),
        # Taken back before the trainer had it, and after.
        ([decision(1, 10, state="reverted", history=[act("approved", 60), act("reverted", 60)])], []),
        ([decision(1, 10, state="reverted", effective_step=62, history=[act("approved", 60), act("reverted", 61)])], []),
        ([decision(1, 10, state="reverted", effective_step=102, history=[act("approved", 60), act("reverted", 61)])], ["r-1"]),
    ],
)  # fmt: skip
def test_decisions_in_force_between_steps_100_and_200(items: list[dict[str, Any]], held: list[str]) -> None:
    assert [item["id"] for item in in_force(list(reversed(items)), 100, 200)] == held


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (decision(1, 10, effective_step=13), "was in force from step 13"),
        (decision(1, 10, state="expired", history=[act("sent", 10)]), "was in force from step 11"),
        (
            decision(1, 10, state="approved", history=[act("approved", 120)]),
            "was decided to hold from step 121, and the trainer has not said since when it does",
        ),
    ],
)
def test_why_a_window_is_no_healthy_one(made: dict[str, Any], words: str) -> None:
    (reason,) = reasons([made], 0, 200)
    assert reason.startswith(f"decision r-1 (bf16_fallback of a) {words}; choose steps before it")
