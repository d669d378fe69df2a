"""Cutting a heatmap answer to what a page shows."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.slices import UnknownSlotError, cut_heatmap, fill_gaps, slot_filter, strictest


def answer(steps: list[int], **changes: Any) -> dict[str, Any]:
    values = [[float(row * 100 + step) for step in steps] for row in range(3)]
    return {"layers": ["a.x", "b.X", "c.y"], "steps": steps, "values": values, "nonfinite": []} | changes


@pytest.mark.parametrize(
    ("steps", "filled"),
    [
        ([], []),
        ([7], [7]),
        ([0, 1, 2], [0, 1, 2]),
        ([0, 10, 20, 60, 70], [0, 10, 20, 30, 50, 60, 70]),
        ([0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5]),
        ([5, 1000], [5, 1000]),
    ],
)
def test_pauses_in_sampling_get_empty_columns_at_the_sampling_distance(
    steps: list[int], filled: list[int]
) -> None:
    assert fill_gaps(steps)[0] == filled


def test_added_columns_are_empty_and_the_others_keep_their_values() -> None:
    part = cut_heatmap(answer([0, 10, 20, 60, 70]))
    assert part.values[1] == [100.0, 110.0, 120.0, None, None, 160.0, 170.0]


def test_filter_ignores_case_and_moves_the_marks_along() -> None:
    part = cut_heatmap(
        answer([0, 1, 2, 10, 11], nonfinite=[[0, 1, 5, 0], [1, 3, 0, 2], [2, 0, 1, 1]]), contains=".x"
    )
    assert part.layers == ["a.x", "b.X"]
    assert part.steps == [0, 1, 2, 3, 9, 10, 11]
    assert part.nonfinite == [(0, 1, 5, 0), (1, 5, 0, 2)]


@pytest.mark.parametrize(
    ("agg", "order"), [("max", ["b.X", "c.y", "a.x", "none"]), ("min", ["b.X", "a.x", "c.y", "none"])]
)
def test_worst_first_ranks_by_the_bad_side_with_nan_on_top(agg: str, order: list[str]) -> None:
    values = [[0.1, None], ["NaN", 0.2], [0.3, 0.4], [None, None]]
    part = cut_heatmap(
        answer(
            [0, 1], layers=["a.x", "b.X", "c.y", "none"], values=values, agg=agg, nonfinite=[[1, 0, 3, 0]]
        ),
        worst_first=True,
    )
    assert part.layers == order
    assert part.nonfinite == [(0, 0, 3, 0)]


def test_slots_become_the_api_s_filters() -> None:
    assert slot_filter("") == {}
    assert slot_filter("dgrad") == {"gemm": "dgrad"}
    assert slot_filter("dy col") == {"operand": "dy", "layout": "col"}
    with pytest.raises(UnknownSlotError, match="'dy' is unknown"):
        slot_filter("dy")


def test_the_lowest_threshold_of_each_severity_is_kept() -> None:
    lines = [
        {"value": 0.08, "severity": "act", "origin": "wgrad"},
        {"value": 0.05, "severity": "act", "origin": "dgrad"},
        {"value": 0.03, "severity": "watch", "origin": "median"},
    ]
    assert strictest(lines) == [lines[2], lines[1]]
