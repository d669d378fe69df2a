"""The drawer's figures: limits and their labels, amax bands, block histograms, precision lanes."""

import itertools
import math
from typing import Any

import pytest

from fp8_safeguard.dashboards.layer_amax import amax_figure, headroom
from fp8_safeguard.dashboards.layer_figures import (
    LABEL_COLUMNS,
    LABEL_PX,
    label_spots,
    merge_limits,
    metric_figure,
)
from fp8_safeguard.dashboards.layer_precision import precision_figure
from fp8_safeguard.dashboards.layer_tiles import bin_labels, histogram_figure, tiles_figure
from fp8_safeguard.dashboards.metrics import metric_view
from fp8_safeguard.dashboards.theme import get_theme
from fp8_safeguard.monitor.formats import E4M3, E5M2, block_scale, round_to_format
from fp8_safeguard.monitor.metrics import TILE_SQNR_EDGES_DB

THEMES = ("dark", "light")


def limit(value: float, severity: str = "act", source: str = "floor") -> dict[str, Any]:
    return {"value": value, "severity": severity, "source": source, "origin": "because"}


def line(slot: str = "dgrad", values: Any = (0.01, 0.02, 0.03), **changes: Any) -> dict[str, Any]:
    return {
        "slot": slot, "steps": list(range(len(values))), "values": list(values), "nonfinite": [],
        "thresholds": [limit(0.05), limit(0.04, "watch")], **changes,
    }  # fmt: skip


def trace(figure: Any, name: str) -> Any:
    return next(found for found in figure.data if found.name == name)


@pytest.mark.parametrize("theme", THEMES)
def test_each_limit_is_a_line_that_names_value_origin_and_slots(theme: str) -> None:
    figure = metric_figure(
        [line("fprop"), line("dgrad", thresholds=[limit(0.05), limit(0.039, "watch", "own median ×1.3")])],
        metric="relative_error",
        theme=theme,
    )
    colours = get_theme(theme)
    assert {(shape.y0, shape.y1, shape.line.color) for shape in figure.layout.shapes} == {
        (0.05, 0.05, colours.unstable),
        (0.04, 0.04, colours.watch),
        (0.039, 0.039, colours.watch),
    }
    assert sorted(note.text for note in figure.layout.annotations) == [
        "act 5 % · floor, fprop, dgrad",
        "watch 3.9 % · own median ×1.3, dgrad",
        "watch 4 % · floor, fprop",
    ]


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_values_and_limits_are_all_in_sight_and_labels_on_their_lines(scale: str) -> None:
    figure = metric_figure([line(values=(1e-3, 2e-2, 0.0))], metric="relative_error", scale=scale)
    low, high = figure.layout.yaxis.range
    place = math.log10 if scale == "log" else float
    for value in (1e-3, 2e-2, 0.04, 0.05):
        assert low < place(value) < high
    assert {note.y for note in figure.layout.annotations} == {place(0.04), place(0.05)}
    shown = trace(figure, "dgrad")
    # A zero lies on the lower edge of a log scale, and still says that it is one.
    assert shown.y[2] == (pytest.approx(10**low) if scale == "log" else 0)
    assert shown.customdata[2] == "0 %"


def test_decibels_have_no_log_scale() -> None:
    figure = metric_figure([line(values=(30.0, 31.0), thresholds=[])], metric="sqnr_db", scale="log")
    assert figure.layout.yaxis.type == "linear"


def test_pauses_are_gaps_and_odd_values_are_left_out_of_the_curve() -> None:
    values = [0.01, 0.01, 0.02, "NaN", 0.02, None]
    figure = metric_figure([line(values=values, steps=[0, 1, 2, 20, 21, 22])], metric="relative_error")
    shown = trace(figure, "dgrad")
    by_step = dict(zip(shown.x, shown.y, strict=True))
    assert [by_step[step] for step in (3, 19, 20)] == [None] * 3
    assert not shown.connectgaps


def test_nan_and_inf_elements_stand_on_the_upper_edge_in_the_heatmap_s_shapes() -> None:
    figure = metric_figure([line(nonfinite=[[1, 3, 0], [2, 0, 9]])], metric="relative_error")
    nan, inf = trace(figure, "NaN"), trace(figure, "Inf")
    assert (nan.x, nan.marker.symbol, nan.customdata) == ((1,), "x", ("dgrad: 3 NaN elements",))
    assert (inf.x, inf.marker.symbol, inf.customdata) == ((2,), "triangle-up", ("dgrad: 9 Inf elements",))
    assert {nan.marker.color, inf.marker.color} == {get_theme("light").nonfinite}


def test_alerts_and_decisions_are_marks_under_the_curves() -> None:
    made = {
        "id": "r-1", "action": "bf16_fallback", "step": 1, "effective_step": 2, "state": "applied",
        "target": {"gemm": "dgrad"},
    }  # fmt: skip
    alert = {"rule": "gemm-error", "severity": "act", "first_step": 0}
    waiting = made | {"id": "r-2", "state": "proposed", "effective_step": None}
    figure = metric_figure(
        [line(thresholds=[])], metric="relative_error", decisions=[made, waiting], alerts=[alert]
    )
    assert trace(figure, "alert").x == (0,)
    assert trace(figure, "decision").marker.symbol == ("diamond", "diamond-open")
    assert [(shape.x0, shape.line.dash) for shape in figure.layout.shapes] == [(1.5, "dot")]


def test_labels_of_close_lines_cover_none_of_each_other() -> None:
    heights = [10.0, 12.0, 14.0, 15.0, 80.0]
    spots = label_spots(heights)
    boxes = [(column, height + lift) for height, (column, lift) in zip(heights, spots, strict=True)]
    assert {column for column, _ in spots} == set(range(len(LABEL_COLUMNS)))
    for (one, low), (other, high) in itertools.combinations(boxes, 2):
        assert one != other or abs(high - low) >= LABEL_PX
    assert all(lift >= 0 for _, lift in spots)
    assert spots[-1][1] == 0


def test_hostile_names_are_no_markup() -> None:
    nasty = line("<b>x</b>", thresholds=[limit(0.05, source="<i>floor</i>")])
    figure = metric_figure([nasty], metric="relative_error")
    assert "<b>x</b>" not in figure.data[0].hovertemplate.replace("<b>%", "")
    assert "&lt;i&gt;" in figure.layout.annotations[0].text


def test_limits_of_several_slots_are_merged() -> None:
    found = merge_limits([line("fprop"), line("dgrad")], metric_view("relative_error"))
    assert [(each.value, each.severity) for each in found] == [(0.04, "watch"), (0.05, "act")]


def spread(**changes: Any) -> dict[str, Any]:
    return {
        "operand": "x", "format": "e4m3", "steps": [0, 1, 2], "amax": [4.0, 8.0, None], "rms": [0.5, 0.5, 0.5]
    } | changes  # fmt: skip


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_the_bands_are_what_the_format_can_hold_beside_the_amax(fmt: Any) -> None:
    """Against the quantiser itself: at the edge of the band a value survives, below it is zero."""
    figure = amax_figure([spread(format=fmt.name, amax=[4.0] * 3)])
    normal, flush = (2 ** trace(figure, name).y[0] for name in ("min normal", "to zero"))
    scale = float(block_scale(4.0, fmt))
    assert normal / scale == pytest.approx(fmt.min_normal)
    assert round_to_format(flush * 1.01 / scale, fmt) == fmt.min_subnormal
    assert round_to_format(flush * 0.99 / scale, fmt) == 0
    room = headroom(4.0, 0.5, fmt)
    assert room["above_normal"] == pytest.approx(math.log2(0.5 / normal))
    assert room["above_flush"] == pytest.approx(math.log2(0.5 / flush))
    assert room["to_max"] == pytest.approx(math.log2(fmt.max / 4.0))
    assert room["peak"] == 3


def test_amax_rms_and_the_format_s_maximum_are_drawn_in_binades() -> None:
    figure = amax_figure([spread(), spread(operand="dy", amax=[1e-9] * 3, rms=[1e-10] * 3)])
    assert trace(figure, "x amax").y == (2, 3, None)
    assert trace(figure, "x rms").y == (-1, -1, -1)
    assert trace(figure, "x amax").customdata == ("4", "8", None)
    (maximum,) = figure.layout.shapes
    assert (maximum.yref, maximum.y0) == ("y", math.log2(448))
    texts = [note.text for note in figure.layout.annotations]
    assert "E4M3 max 448 at scale 1" in texts
    assert any(text.startswith("↑ E4M3 max 448 at scale 1, 3") and text.endswith("away") for text in texts)
    first, second = figure.layout.yaxis.domain, figure.layout.yaxis2.domain
    assert second[1] < first[0]


def test_a_scale_multiplier_moves_the_bands_while_it_is_in_force() -> None:
    held = [{"operand": "x", "from_step": 1, "to_step": 1, "value": 0.5}]
    plain, moved = amax_figure([spread()]), amax_figure([spread()], multipliers=held)
    shift = [
        b - a for a, b in zip(trace(plain, "min normal").y, trace(moved, "min normal").y, strict=True) if a is not None
    ]  # fmt: skip
    assert shift == [0, -1]


def test_no_operand_says_so() -> None:
    (note,) = amax_figure([]).layout.annotations
    assert "no operand" in note.text


def bins(**held: int) -> list[int]:
    return [held.get(f"b{place}", 0) for place in range(16)]


def test_bins_are_named_by_the_monitor_s_edges() -> None:
    labels = bin_labels()
    assert len(labels) == len(TILE_SQNR_EDGES_DB) - 1
    assert (labels[0], labels[1], labels[-1]) == ("below 0", "0 to 4", "from 38")


@pytest.mark.parametrize("theme", THEMES)
def test_blocks_show_shares_and_mark_the_worst_hundredth(theme: str) -> None:
    history = {"steps": [0, 1], "bins": [bins(b12=100), bins(b3=2, b12=198)], "p01_db": [30.0, 8.0]}
    figure = tiles_figure(history, limits=[limit(24.0, "watch")], theme=theme)
    share, worst = figure.data
    assert [row[0] for row in share.z] == [None] * 12 + [0.0] + [None] * 3
    assert share.z[3][1] == pytest.approx(-2)
    assert share.text[3][1] == "1 %"
    assert worst.y == (11.5, 2.5)
    (line_,) = figure.layout.shapes
    assert line_.y0 == 8.5
    assert "watch 24 dB" in figure.layout.annotations[0].text


def test_histogram_compares_two_steps() -> None:
    now = {"step": 9, "bins": bins(b3=2, b12=98), "p01_db": 8.0}
    before = {"step": 1, "bins": bins(b12=50), "p01_db": 30.0}
    figure = histogram_figure(now, before)
    assert trace(figure, "step 9").y[3] == pytest.approx(0.02)
    assert trace(figure, "step 1").y[12] == 1
    assert figure.layout.shapes[0].x0 == 2.5
    assert figure.layout.annotations[0].text == "worst 1 % from 8 dB"
    assert len(histogram_figure(now, now).data) == 1
    assert "no block" in histogram_figure(None, None).layout.annotations[0].text


def test_precision_is_a_bar_a_period_named_by_its_decision() -> None:
    history = [
        {"gemm": "dgrad", "from_step": 0, "to_step": 9, "precision": "fp8", "decision_id": None},
        {"gemm": "dgrad", "from_step": 10, "to_step": None, "precision": "bf16", "decision_id": "run-a-3"},
        {"gemm": "wgrad", "from_step": 0, "to_step": None, "precision": "fp8", "decision_id": None},
    ]
    why = [{"id": "run-a-3", "reason": "dgrad <b>error</b>", "actor": "policy"}]
    scale = {
        "target": {"operand": "dy", "layout": "row"}, "action": "scale_multiplier", "value": 0.5,
        "from_step": 5, "to_step": 7, "decision_id": "run-a-2",
    }  # fmt: skip
    figure = precision_figure(history, adjustments=[scale], decisions=why, steps=(0, 20))
    bars = [(bar.y[0], bar.base[0], bar.x[0], bar.text[0]) for bar in figure.data]
    assert bars == [
        ("dgrad", -0.5, 10, "FP8"),
        ("dgrad", 9.5, 11, "BF16 #3"),
        ("wgrad", -0.5, 21, "FP8"),
        ("dy row", 4.5, 3, "scale multiplier 0.5 #2"),
    ]
    assert figure.data[1].customdata == ("run-a-3",)
    assert "policy: dgrad &lt;b&gt;error" in figure.data[1].hovertext[0]
    assert figure.data[1].marker.color == get_theme("light").fallback


def test_a_period_that_began_before_the_picture_keeps_its_words_in_it() -> None:
    history = [
        {"gemm": "dgrad", "from_step": 0, "to_step": 29, "precision": "fp8", "decision_id": None},
        {"gemm": "dgrad", "from_step": 30, "to_step": None, "precision": "bf16", "decision_id": "r-1"},
        {"gemm": "fprop", "from_step": 0, "to_step": 9, "precision": "fp8", "decision_id": None},
    ]
    figure = precision_figure(history, steps=(20, 25))
    assert [(bar.base[0], bar.x[0], bar.text[0]) for bar in figure.data] == [(19.5, 6, "FP8")]
    assert "from step 0 to 29" in figure.data[0].hovertext[0]
    assert figure.layout.yaxis.categoryarray == ("dgrad", "fprop")


def test_charts_over_steps_share_margins_and_range() -> None:
    steps = (5, 50)
    figures = [
        metric_figure([line()], metric="relative_error", steps=steps),
        amax_figure([spread()], steps=steps),
        tiles_figure({"steps": [7], "bins": [bins(b12=1)], "p01_db": [30.0]}, steps=steps),
        precision_figure([], steps=steps),
    ]
    assert {figure.layout.xaxis.range for figure in figures} == {(4.5, 50.5)}
    assert len({(figure.layout.margin.l, figure.layout.margin.r) for figure in figures}) == 1
