"""The decision lane: a marker per decision at its step, periods, alerts."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.figures import timeline_figure
from fp8_safeguard.dashboards.timeline import Period, describe_target, periods


def decision(**changes: Any) -> dict[str, Any]:
    return {
        "id": "run-1",
        "step": 209,
        "layer": "blocks.3.mlp.down",
        "target": {"gemm": "dgrad"},
        "action": "bf16_fallback",
        "value": None,
        "reason": "dgrad error 12 % is above 5 %",
        "mode": "enforce",
        "state": "applied",
        "effective_step": 211,
    } | changes


def lane(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def test_a_decision_is_a_marker_at_its_step_with_action_target_and_reason() -> None:
    marker = lane(timeline_figure([decision()]), "BF16 fallback")
    assert (marker.x, marker.y) == ((209,), ("BF16 fallback",))
    for part in ("bf16_fallback", "blocks.3.mlp.down", "dgrad", "dgrad error 12 % is above 5 %", "step 211"):
        assert part in marker.hovertext[0]


def test_every_decision_has_its_own_marker_and_a_shared_hover() -> None:
    marker = lane(
        timeline_figure([decision(layer="a"), decision(layer="b"), decision(layer="c", step=300)]),
        "BF16 fallback",
    )
    assert marker.x == (209, 209, 300)
    assert marker.text == ("×2", "", "")
    assert marker.hovertext[0] == marker.hovertext[1]
    assert "“a” ·" in marker.hovertext[0]
    assert "“b” ·" in marker.hovertext[0]


def test_a_long_list_of_decisions_is_cut_with_its_number() -> None:
    marker = lane(timeline_figure([decision(layer=str(n)) for n in range(11)]), "BF16 fallback")
    assert marker.hovertext[0].endswith("<b>and 3 more</b>")


@pytest.mark.parametrize(
    ("state", "symbol"),
    [("applied", "diamond"), ("sent", "diamond"), ("proposed", "diamond-open"), ("reverted", "diamond-open")],
)
def test_only_what_is_in_force_is_filled(state: str, symbol: str) -> None:
    assert lane(timeline_figure([decision(state=state)]), "BF16 fallback").marker.symbol == (symbol,)


def test_what_was_restored_is_in_force_no_longer_though_it_was_applied() -> None:
    restore = decision(id="run-2", action="restore", step=298, effective_step=300)
    other = decision(id="run-3", target={"gemm": "fprop"})
    again = decision(id="run-4", step=400, effective_step=402)
    figure = timeline_figure([decision(), other, again, restore])
    assert lane(figure, "BF16 fallback").marker.symbol == ("diamond-open", "diamond", "diamond")
    assert lane(figure, "restore").marker.symbol == ("circle",)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"gemm": "dgrad"}, "dgrad"),
        ({"operand": "dy", "layout": "row"}, "dy row"),
        ({"layer": True}, "whole layer"),
    ],
)
def test_targets_in_words(target: dict[str, Any], words: str) -> None:
    assert describe_target(target) == words


def test_periods_end_at_the_restore_of_the_same_target() -> None:
    restore = decision(action="restore", step=298, effective_step=300)
    other = decision(target={"gemm": "fprop"})
    found = periods([decision(), restore, other], last_step=400)
    expected = [("bf16_fallback", 211, 300), ("bf16_fallback", 211, 400)]
    assert found == [Period(action=a, layer="blocks.3.mlp.down", start=s, end=e) for a, s, e in expected]


def test_a_second_fallback_after_a_restore_is_its_own_period() -> None:
    story = [
        decision(),
        decision(action="restore", step=298, effective_step=300),
        decision(step=348, effective_step=350),
    ]
    assert [(period.start, period.end) for period in periods(story, last_step=400)] == [
        (211, 300),
        (350, 400),
    ]


def test_what_never_took_effect_has_no_period() -> None:
    assert periods([decision(effective_step=None), decision(action="advice")], last_step=400) == []


def test_overlapping_periods_are_one_bar() -> None:
    figure = timeline_figure([decision(), decision(layer="b", step=218, effective_step=220)], last_step=300)
    bars = [trace.x for trace in figure.data if trace.mode == "lines"]
    assert bars == [(211, 300)]


def test_no_decisions_is_said() -> None:
    assert timeline_figure([]).layout.annotations[0].text == "no decisions yet"


def test_an_unknown_action_is_still_shown() -> None:
    assert lane(timeline_figure([decision(action="new_thing")]), "other").x == (209,)


def test_text_of_layers_and_reasons_is_never_markup() -> None:
    figure = timeline_figure(
        [decision(layer="<b>x</b>", reason="<a href='https://example.org'>click</a>")],
        alerts=[{"first_step": 1, "severity": "act", "layer": "<i>y</i>", "rule": "<u>"}],
    )
    text = figure.to_json()
    for raw in ("<b>x", "<a ", "<i>", "<u>"):
        assert raw not in text


def test_alerts_stand_at_their_first_step() -> None:
    figure = timeline_figure(
        [], alerts=[{"first_step": 207, "severity": "act", "layer": "a", "rule": "gemm-error"}]
    )
    alerts = lane(figure, "alerts")
    assert (alerts.x, alerts.y) == ((207,), ("alerts",))
    assert "gemm-error" in alerts.hovertext[0]
    assert "layer “a”" in alerts.hovertext[0]
