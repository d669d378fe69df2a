"""The decision list in words."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.decisions import decision_rows


def decision(**changes: Any) -> dict[str, Any]:
    return {
        "id": "run-1", "step": 208, "layer": "blocks.3.qkv", "target": {"gemm": "dgrad"},
        "action": "bf16_fallback", "value": None, "state": "applied", "effective_step": 210, "actor": "policy",
        "reason": "blocks.3.qkv: 2.67 % of x vanish; dgrad goes to BF16",
        "evidence": {
            "signals": [
                {"metric": "underflow_ratio", "slot": {"operand": "x", "layout": "row"}, "value": 0.0267,
                 "threshold": 0.005, "first_step": 202},
                {"metric": "sqnr_db", "slot": {"gemm": "dgrad"}, "value": "NaN", "threshold": 28.5, "first_step": 1204},
            ],
            "budget": {"before": 0.0, "after": 0.0222, "limit": 0.15},
        },
    } | changes  # fmt: skip


def test_a_decision_tells_what_why_when_and_who() -> None:
    (row,) = decision_rows([decision()], mode="enforce")
    assert (row.layer, row.what) == ("blocks.3.qkv", "dgrad to BF16")
    # A number and its unit stay on one line.
    assert row.reason == "2.67\u00a0% of x vanish; dgrad goes to BF16"
    assert row.when == "decided at step 208, effective from step 210"
    assert (row.state_words, row.actor) == ("in force", "policy")


@pytest.mark.parametrize(
    ("action", "state", "asks", "words"),
    [
        ("bf16_fallback", "proposed", True, "waits for a person’s approval"),
        ("bf16_fallback", "applied", False, "in force"),
        ("advice", "proposed", False, "for people, no answer is needed"),
        ("advice", "approved", False, "taken up"),
        ("advice", "rejected", False, "rejected"),
    ],
)
def test_advice_waits_for_no_answer(action: str, state: str, asks: bool, words: str) -> None:
    (row,) = decision_rows([decision(action=action, state=state)], mode="advise")
    assert (row.asks, row.state_words) == (asks, words)


@pytest.mark.parametrize(
    ("action", "mode", "ended", "told"),
    [
        ("advice", "observe", False, ("advice", "for people, no answer is needed", "given at step 208")),
        ("advice", "advise", False, ("advice", "for people, no answer is needed", "given at step 208")),
        (
            "bf16_fallback",
            "observe",
            False,
            (
                "proposed",
                "proposed only: the run is observed, so nothing comes of it; set its mode to advise to approve it",
                "proposed at step 208",
            ),
        ),
        (
            "bf16_fallback",
            "advise",
            True,
            ("proposed", "proposed only: the run has ended", "proposed at step 208"),
        ),
    ],
)
def test_what_does_not_happen_by_itself_does_not_sound_as_if_it_did(
    action: str, mode: str, ended: bool, told: tuple[str, ...]
) -> None:
    item = decision(action=action, state="proposed", effective_step=None)
    (row,) = decision_rows([item], mode=mode, ended=ended)
    assert (row.standing, row.state_words, row.when) == told
    assert row.acts == ()


def test_evidence_is_told_with_limits_and_first_steps() -> None:
    (row,) = decision_rows([decision()], mode="enforce")
    assert row.evidence == (
        "underflow x row 2.67 %, limit ≤ 0.5 %, since step 202",
        "SQNR dgrad NaN, limit ≥ 28.5 dB, since step 1,204",
        "fallback budget used then 2.22 % of GEMM FLOPs, limit 15 %",
    )


def test_long_evidence_says_how_much_more_there_is() -> None:
    signals = decision()["evidence"]["signals"] * 3
    (row,) = decision_rows([decision(evidence={"signals": signals})], mode="enforce")
    assert row.evidence[-1] == "and 3 more signals"
    (row,) = decision_rows([decision(evidence={"signals": signals[:4]})], mode="enforce")
    assert row.evidence[-1] == "and 1 more signal"


@pytest.mark.parametrize(
    ("state", "action", "mode", "acts"),
    [
        ("proposed", "bf16_fallback", "advise", ("approve", "reject")),
        ("proposed", "bf16_fallback", "enforce", ("approve", "reject")),
        ("proposed", "bf16_fallback", "observe", ()),
        ("proposed", "advice", "advise", ()),
        ("applied", "bf16_fallback", "enforce", ("revert",)),
        ("sent", "scale_multiplier", "advise", ("revert",)),
        ("applied", "restore", "enforce", ()),
        ("applied", "bf16_fallback", "observe", ()),
        ("reverted", "bf16_fallback", "enforce", ()),
    ],
)
def test_only_what_can_be_done_is_offered(state: str, action: str, mode: str, acts: tuple[str, ...]) -> None:
    (row,) = decision_rows([decision(state=state, action=action)], mode=mode)
    assert row.acts == acts
    # Nobody takes anything up once the trainer is gone.
    (row,) = decision_rows([decision(state=state, action=action)], mode=mode, ended=True)
    assert row.acts == ()


def test_what_has_left_the_plan_is_over_and_can_be_reverted_no_more() -> None:
    restore = decision(id="run-2", action="restore")
    items = [decision(), decision(id="run-3"), restore, decision(id="run-4", state="rejected")]
    rows = decision_rows(items, mode="enforce", plan={"run-3"})
    assert [row.standing for row in rows] == ["over", "applied", "applied", "rejected"]
    assert [row.acts for row in rows] == [(), ("revert",), (), ()]
    assert rows[0].state_words == "no longer in force: it was restored or replaced"
    assert rows[0].tone == "ended"


def test_a_decision_without_its_trimmings_is_still_told() -> None:
    bare = {"id": "r-2", "step": 5, "layer": None, "target": None, "action": "new_thing", "state": "strange"}
    (row,) = decision_rows([bare], mode="enforce")
    assert (row.what, row.state_words, row.when, row.evidence) == (
        "whole layer new thing",
        "strange",
        "decided at step 5",
        (),
    )


def paired(number: int, **changes: Any) -> dict[str, Any]:
    remedy = {"id": "run-1", "name": "bf16-fprop-dgrad", "entries": 2}
    return decision(id=f"run-{number}", state="proposed", evidence={"remedy": remedy}) | changes


def test_the_parts_of_a_remedy_stand_together_and_are_approved_together() -> None:
    items = [paired(3), decision(id="run-2", state="proposed"), paired(1)]
    rows = decision_rows(items, mode="advise")
    assert [(row.id, row.waiting) for row in rows] == [("run-3", 2), ("run-1", 0), ("run-2", 0)]
    assert [row.remedy for row in rows] == [*["one of 2 parts of the remedy bf16-fprop-dgrad"] * 2, ""]
    # Observed only, or one of them gone: there is nothing to approve together.
    assert [row.waiting for row in decision_rows(items, mode="observe")] == [0, 0, 0]
    approved = [paired(3, state="approved"), paired(1)]
    assert [row.waiting for row in decision_rows(approved, mode="advise")] == [0, 0]


def test_a_decision_tells_its_cause_its_outcome_and_its_history() -> None:
    named = {"name": "norm-gain", "kind": "not-fp8", "layer": None, "summary": "the gain is 4.1"}
    at = "2026-11-30T07:00:00.000Z"
    history = [
        {"what": "sent", "actor": "policy", "at": at, "step": 208, "facts": {}},
        {"what": "graded", "actor": "policy", "at": at, "step": None, "facts": {"outcome": "loss recovered"}},
    ]
    item = decision(layer="(run)", evidence={"cause": named}, outcome="loss recovered", history=history)
    (row,) = decision_rows([item], mode="enforce")
    assert row.cause is not None
    assert (row.layer, row.cause.title, row.outcome) == ("", "norm gain too large", "loss recovered")
    assert row.history == (
        "2026-11-30 07:00:00 UTC: sent at step 208 by policy",
        "2026-11-30 07:00:00 UTC: graded by policy: loss recovered",
    )
