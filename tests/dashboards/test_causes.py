"""Causes in words: each known one, and what a decision says of its own."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.causes import CAUSES, KIND_WORDS, cause_of, cause_view, cause_words, remedy_of


def cause(**changes: Any) -> dict[str, Any]:
    return {
        "name": "norm-gain", "kind": "not-fp8", "layer": "blocks.3.norm", "slot": None, "value": 0.5,
        "summary": "the gain is 4.1", "advice": "set the gain to 0.5", "evidence": {},
    } | changes  # fmt: skip


def test_a_cause_tells_whose_fault_it_is_and_what_to_do() -> None:
    view = cause_view(cause())
    assert (view.title, view.kind_words, view.tone) == ("norm gain too large", "not FP8", "watch")
    assert (view.place, view.summary, view.advice) == (
        "'blocks.3.norm'",
        "the gain is 4.1",
        "set the gain to 0.5",
    )
    assert (view.value, view.href) == ("proposed value 0.5", "/causes#norm-gain")
    slot = {"layer": "a.b", "operand": "dy", "layout": "row"}
    assert cause_view(cause(slot=slot, layer="a.b")).place == "'a.b' dy row"
    assert cause_words(cause(name="one-rank", kind="hardware")) == "one rank alone (hardware)"


@pytest.mark.parametrize(
    "strange", [{"slot": "x"}, {"value": "NaN"}, {"kind": 7}, {"layer": 3}, {"summary": None}]
)
def test_a_cause_from_elsewhere_is_told_as_far_as_it_goes(strange: dict[str, Any]) -> None:
    """A client decides alone while the server is away: its words are not checked."""
    view = cause_view(cause(name="new-thing", **strange))
    assert (view.title, view.href) == ("new thing", "/causes")


def test_decisions_without_a_cause_or_a_remedy_have_none() -> None:
    assert cause_of({"evidence": None}) is cause_of({}) is cause_of({"evidence": {"cause": {}}}) is None
    assert remedy_of({"step": 3, "evidence": {}}) is None
    remedy = {"id": "r-7", "name": "bf16", "entries": 2}
    assert remedy_of({"step": 3, "evidence": {"remedy": remedy}}) == (3, "r-7")


def test_every_cause_says_how_it_shows_and_what_helps() -> None:
    assert {text.kind for text in CAUSES.values()} == set(KIND_WORDS)
    for text in CAUSES.values():
        assert len(text.fingerprint) > 30
        assert len(text.helps) > 20
