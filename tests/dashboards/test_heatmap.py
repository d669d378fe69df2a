"""The heatmap figure: gaps, non-finite marks, fixed ranges, limits."""

import json
import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.dashboards.figures import HeatmapInputError, heatmap_figure

NAN, INF = float("nan"), float("inf")


def payload(figure: Any) -> dict[str, Any]:
    """What a browser decodes: strict JSON, no typed arrays."""
    text = figure.to_json()

    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name} in JSON")

    decoded: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert "bdata" not in text
    return decoded


def cells(figure: Any) -> list[list[float | None]]:
    z: list[list[float | None]] = payload(figure)["data"][0]["z"]
    return z


def marks(figure: Any, name: str) -> list[tuple[int, str]]:
    trace = next(trace for trace in payload(figure)["data"] if trace.get("name") == name)
    return list(zip(trace["x"], trace["y"], strict=True))


def test_values_layers_and_steps_reach_the_trace_unchanged() -> None:
    figure = heatmap_figure(
        [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], ["a", "b"], [0, 1, 2], metric="underflow_ratio"
    )
    trace = payload(figure)["data"][0]
    assert trace["type"] == "heatmap"
    assert (trace["z"], trace["x"], trace["y"]) == ([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [0, 1, 2], ["a", "b"])


def test_first_layer_is_drawn_at_the_top() -> None:
    axis = heatmap_figure([[1.0], [2.0], [3.0]], ["a", "b", "c"], [0], metric="amax").layout.yaxis
    assert tuple(axis.range) == (2.5, -0.5)


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("metric", ["gradient_distortion", "amax"])
@pytest.mark.parametrize(
    "values",
    [
        [[None, None], [0.1, 0.2]],
        [[NAN, 0.1], [0.2, 0.3]],
        [[None, None], [None, None]],
        [[NAN, NAN], [INF, -INF]],
        [[], [0.5]],
        [[0.0, 0.0], [0.0, 0.0]],
        [],
    ],
    ids=["first row null", "NaN first", "all null", "all non-finite", "ragged", "all zero", "no rows"],
)
def test_b79_range_is_finite_or_absent_and_rows_are_padded(values: Any, metric: str, scale: str) -> None:
    trace = payload(heatmap_figure(values, ["a", "b"], [0, 1], metric=metric, scale=scale))["data"][0]
    bounds = [trace.get("zmin"), trace.get("zmax")]
    assert bounds == [None, None] or (all(map(math.isfinite, bounds)) and bounds[0] < bounds[1])
    assert [len(row) for row in trace["z"]] == [2, 2]


def test_b79_ragged_rows_keep_their_values_in_place() -> None:
    assert cells(heatmap_figure([[1.0], [2.0, 3.0]], ["late", "b"], [0, 1], metric="amax")) == [
        [1.0, None],
        [2.0, 3.0],
    ]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize(
    ("layers", "steps", "note"),
    [
        ([], [], "no samples yet"),
        ([], [3], "no samples yet"),
        (["a"], [], "no samples yet"),
        (["a"], [3], "not sampled"),
    ],
)
def test_b79_empty_input_says_so(layers: list[str], steps: list[int], note: str, scale: str) -> None:
    values = [[None] * len(steps) for _ in layers]
    figure = heatmap_figure(values, layers, steps, metric="underflow_ratio", scale=scale)
    assert any(note in annotation.text for annotation in figure.layout.annotations)


def test_a_heatmap_with_one_value_has_no_empty_note() -> None:
    assert not heatmap_figure([[0.1]], ["a"], [0], metric="underflow_ratio").layout.annotations


@pytest.mark.parametrize("backing", [list, np.array], ids=["list", "numpy"])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_b80_non_finite_cells_are_null_in_z_and_marked_apart(backing: Any, scale: str) -> None:
    values = backing([[0.5, NAN, 0.5], [INF, 0.5, -INF]])
    figure = heatmap_figure(values, ["a", "b"], [10, 20, 30], metric="underflow_ratio", scale=scale)
    assert [[cell is None for cell in row] for row in cells(figure)] == [
        [False, True, False],
        [True, False, True],
    ]
    assert marks(figure, "NaN") == [(20, "a")]
    assert marks(figure, "Inf") == [(10, "b"), (30, "b")]


def test_b80_the_wire_s_strings_and_missing_are_told_apart() -> None:
    figure = heatmap_figure([[None, "NaN", "Infinity", "-Infinity"]], ["a"], [0, 1, 2, 3], metric="amax")
    assert cells(figure) == [[None, None, None, None]]
    assert marks(figure, "NaN") == [(1, "a")]
    assert marks(figure, "Inf") == [(2, "a"), (3, "a")]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, object])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_b80_arrays_of_any_kind_become_plain_lists(dtype: Any, scale: str) -> None:
    """Plotly sends a numpy array as base64, where NaN and Inf skip the replacement by null."""
    values = np.array([[0.5, NAN], [INF, -INF]], dtype=dtype)
    figure = heatmap_figure(
        values, ["a", "b"], [10, 20], metric="amax", scale=scale, nonfinite=np.array([[0, 0, 1, 0]])
    )
    assert [[cell is None for cell in row] for row in cells(figure)] == [[False, True], [True, True]]
    assert marks(figure, "NaN") == [(10, "a"), (20, "a")]
    assert marks(figure, "Inf") == [(10, "b"), (20, "b")]


def test_counted_non_finite_elements_are_marked_over_a_finite_value() -> None:
    figure = heatmap_figure([[0.1, 0.2]], ["a"], [0, 1], metric="underflow_ratio", nonfinite=[[0, 1, 12, 3]])
    assert cells(figure) == [[0.1, 0.2]]
    assert marks(figure, "NaN") == [(1, "a")]
    trace = next(trace for trace in figure.data if trace.name == "NaN")
    assert trace.text == ("12 NaN, 3 Inf",)


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_b83_a_uniform_rate_keeps_the_fixed_range(value: float) -> None:
    trace = payload(heatmap_figure([[value] * 3] * 2, ["a", "b"], [0, 1, 2], metric="underflow_ratio"))[
        "data"
    ][0]
    assert (trace["zauto"], trace["zmin"], trace["zmax"]) == (False, 0, 1)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_b83_nothing_and_everything_have_the_two_ends_of_one_scale(scale: str) -> None:
    places = []
    for value in (0.0, 1.0):
        figure = heatmap_figure(
            [[value] * 3] * 2, ["a", "b"], [0, 1, 2], metric="underflow_ratio", scale=scale
        )
        trace = payload(figure)["data"][0]
        assert trace["zauto"] is False
        share = (trace["z"][0][0] - trace["zmin"]) / (trace["zmax"] - trace["zmin"])
        places.append(min(max(share, 0.0), 1.0))
    assert places == [0.0, 1.0]


def test_b83_a_uniform_amax_gets_a_range_around_it() -> None:
    trace = payload(heatmap_figure([[5.0, 5.0]], ["a"], [0, 1], metric="amax"))["data"][0]
    assert trace["zmin"] < 5 < trace["zmax"]


@pytest.mark.parametrize("value", [5e-324, 1e-308, 1.7e308])
def test_log_scale_reaches_the_ends_of_the_floats(value: float) -> None:
    trace = payload(heatmap_figure([[value]], ["a"], [0], metric="amax", scale="log"))["data"][0]
    assert -308 <= trace["zmin"] < trace["zmax"] <= 308


def test_log_scale_colours_by_log10_and_keeps_the_exact_values() -> None:
    values = [[4e-4, 0.1, 0.0, 1.0]]
    trace = payload(heatmap_figure(values, ["a"], [0, 1, 2, 3], metric="gradient_distortion", scale="log"))[
        "data"
    ][0]
    assert trace["customdata"] == values
    assert trace["z"][0][1] == -1
    assert trace["z"][0][0] == pytest.approx(math.log10(4e-4), abs=1e-5)
    assert trace["z"][0][2] < trace["zmin"] == -4
    assert trace["zmax"] == 0


def test_log_range_of_a_metric_without_a_fixed_one_covers_the_data() -> None:
    trace = payload(heatmap_figure([[3.0, 4000.0]], ["a"], [0, 1], metric="amax", scale="log"))["data"][0]
    assert (trace["zmin"], trace["zmax"]) == (0, 4)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("metric", "bad_end"), [("gradient_distortion", 1.0), ("cosine", 0.0)])
def test_the_bad_end_of_the_scale_has_the_same_colour_for_every_metric(
    metric: str, bad_end: float, theme: str
) -> None:
    scale = dict(heatmap_figure([[0.5]], ["a"], [0], metric=metric, theme=theme).data[0].colorscale)
    reference = dict(
        heatmap_figure([[0.5]], ["a"], [0], metric="underflow_ratio", theme=theme).data[0].colorscale
    )
    assert scale[bad_end] == reference[1.0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_rise_or_fall_in_lightness_all_the_way(theme: str) -> None:
    scale = heatmap_figure([[0.5]], ["a"], [0], metric="amax", theme=theme).data[0].colorscale
    lightness = [_luminance(colour) for _, colour in scale]
    assert lightness in (sorted(lightness), sorted(lightness, reverse=True))


def _luminance(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_thresholds_become_labelled_lines_at_their_place_on_the_colour_bar() -> None:
    thresholds = [
        {"value": 0.1, "severity": "act", "origin": "floor"},
        {"value": 5.0, "severity": "watch", "origin": "x"},
    ]
    figure = heatmap_figure([[0.5]], ["a"], [0], metric="relative_error", scale="log", thresholds=thresholds)
    assert [shape.y0 for shape in figure.layout.shapes] == [pytest.approx(0.5)]
    assert [note.text for note in figure.layout.annotations] == ["act"]
    assert "10 %" in figure.layout.annotations[0].hovertext


def test_plain_numbers_are_thresholds_too() -> None:
    figure = heatmap_figure([[0.5]], ["a"], [0], metric="underflow_ratio", thresholds=[0.25])
    assert [shape.y0 for shape in figure.layout.shapes] == [0.25]


def test_layer_names_are_never_markup() -> None:
    name = '<a href="https://example.org">x</a> & <b>'
    figure = heatmap_figure([[0.5]], [name], [0], metric="amax")
    text = figure.to_json()
    assert "<a " not in text
    assert figure.data[0].y == ('&lt;a href="https://example.org"&gt;x&lt;/a&gt; &amp; &lt;b&gt;',)


def test_numeric_layer_names_stay_names() -> None:
    assert heatmap_figure([[0.5]], ["12"], [0], metric="amax").layout.yaxis.type == "category"


def test_a_row_is_marked_where_it_went_to_bf16() -> None:
    decisions = [
        {
            "step": 1,
            "layer": "b",
            "target": {"gemm": "dgrad"},
            "action": "bf16_fallback",
            "effective_step": 2,
        },
        {
            "step": 1,
            "layer": "b",
            "target": {"gemm": "wgrad"},
            "action": "bf16_fallback",
            "effective_step": None,
        },
        {
            "step": 1,
            "layer": "gone",
            "target": {"gemm": "dgrad"},
            "action": "bf16_fallback",
            "effective_step": 2,
        },
    ]
    figure = heatmap_figure([[0.5] * 4] * 2, ["a", "b"], [0, 1, 2, 3], metric="amax", decisions=decisions)
    assert marks(figure, "BF16 fallback") == [(2, "b")]


def test_hover_names_layer_step_value_and_unit() -> None:
    linear = heatmap_figure([[0.5]], ["a"], [0], metric="gradient_distortion").data[0].hovertemplate
    log = heatmap_figure([[0.5]], ["a"], [0], metric="gradient_distortion", scale="log").data[0].hovertemplate
    for part in ("%{y}", "step %{x", "gradient distortion", "1 − cosine"):
        assert part in linear
        assert part in log
    assert "%{z:" in linear
    assert "%{customdata:" in log
    assert "%{z" not in log


def test_hover_says_when_a_column_stands_for_several_steps() -> None:
    template = heatmap_figure([[0.5]], ["a"], [0], metric="amax", step_width=8).data[0].hovertemplate
    assert "worst within 8 steps" in template


def test_more_cells_than_a_browser_can_draw_are_refused_with_the_way_out() -> None:
    row = [0.1] * 100_001
    with pytest.raises(HeatmapInputError, match=r"10 layers x 100001 steps = 1,000,010 cells.*max_cols"):
        heatmap_figure(
            [row] * 10, [str(layer) for layer in range(10)], range(100_001), metric="underflow_ratio"
        )


@pytest.mark.parametrize(
    ("values", "layers", "steps", "message"),
    [
        ([[1.0], [2.0]], ["a"], [0], r"more rows of values \(2\) than layers \(1\)"),
        ([[1.0, 2.0]], ["a"], [0], r"more values \(2\) than there are steps \(1\)"),
        ([[1.0], [2.0]], ["a", "a"], [0], "'a' names two rows"),
        ([[1.0, 2.0]], ["a"], [1, 1], "must increase"),
    ],
)
def test_shapes_that_disagree_are_refused(values: Any, layers: Any, steps: Any, message: str) -> None:
    with pytest.raises(HeatmapInputError, match=message):
        heatmap_figure(values, layers, steps, metric="amax")


def test_an_unknown_scale_names_the_known_ones() -> None:
    with pytest.raises(HeatmapInputError, match="'linear' or 'log'"):
        heatmap_figure([], [], [], metric="amax", scale="sqrt")


def test_a_mark_outside_the_heatmap_is_refused() -> None:
    with pytest.raises(HeatmapInputError, match=r"cell \(3, 0\)"):
        heatmap_figure([[1.0]], ["a"], [0], metric="amax", nonfinite=[(3, 0, 1, 0)])


def test_b82_irregular_steps_keep_every_column_on_a_linear_axis() -> None:
    figure = heatmap_figure([[0.1] * 6], ["a"], [0, 1, 2, 5, 10, 100], metric="underflow_ratio")
    assert payload(figure)["data"][0]["x"] == [0, 1, 2, 5, 10, 100]
    assert figure.layout.xaxis.type in (None, "linear")
    assert figure.layout.xaxis.range[0] <= -0.5
    assert figure.layout.xaxis.range[1] >= 100


def test_many_rows_label_every_few_only() -> None:
    layers = [f"layer.{number}" for number in range(200)]
    axis = heatmap_figure([[0.1]] * 200, layers, [0], metric="underflow_ratio").layout.yaxis
    assert 10 < len(axis.tickvals) <= 32
    assert set(axis.tickvals) <= set(layers)


def test_long_names_lose_their_common_start_on_the_axis_only() -> None:
    names = [f"model.layers.{number}.mlp.experts.down_proj" for number in (0, 11)]
    figure = heatmap_figure([[0.1]] * 2, names, [0], metric="underflow_ratio")
    assert figure.data[0].y == tuple(names)
    assert figure.layout.yaxis.ticktext == ("…0.mlp.experts.down_proj", "…11.mlp.experts.down_proj")


def test_names_that_stay_too_long_lose_their_middle() -> None:
    name = "encoder.7." + "very_" * 10 + "long.weight"
    (label,) = heatmap_figure([[0.1]], [name], [0], metric="amax").layout.yaxis.ticktext
    assert (label[:11], label[-11:], len(label)) == ("encoder.7.…", "long.weight", 30)
