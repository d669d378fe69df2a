"""The loss strip."""

import json

import pytest

from fp8_safeguard.dashboards.figures import loss_figure

NAN = float("nan")


def test_missing_losses_are_gaps_and_broken_ones_are_marked() -> None:
    figure = loss_figure(
        [0, 1, 2, 3], [2.0, None, "NaN", float("inf")], gradient_norms=[1.0, "Infinity", 1.0, 1.0]
    )
    line = next(trace for trace in figure.data if trace.name == "loss")
    broken = next(trace for trace in figure.data if trace.name == "non-finite")
    assert line.y == (2.0, None, None, None)
    assert line.connectgaps is False
    assert (broken.x, broken.marker.symbol) == ((2, 3, 1), ("x", "triangle-up", "triangle-up"))
    assert broken.text == ("loss NaN", "loss ∞", "gradient norm ∞")
    assert [shape.x0 for shape in figure.layout.shapes] == [1, 2, 3]
    # The page fits the other axes to the lines in view: the marks must stay in the picture.
    assert (figure.layout[broken.yaxis.replace("y", "yaxis")].range, set(broken.y)) == ((0, 1), {0.08})


def test_json_is_strict() -> None:
    text = loss_figure([0, 1], [NAN, 1.0], gradient_norms=[NAN, 2.0]).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))


def test_gradient_norm_has_its_own_axis() -> None:
    figure = loss_figure([0, 1], [2.0, 1.0], gradient_norms=[0.5, 0.6])
    assert {trace.name: trace.yaxis for trace in figure.data if trace.mode == "lines"} == {
        "gradient norm": "y2",
        "loss": "y",
    }


@pytest.mark.parametrize("norms", [(), (None, None), (NAN, None)])
def test_an_axis_without_a_line_is_not_drawn(norms: tuple[float | None, ...]) -> None:
    layout = loss_figure([0, 1], [2.0, 1.0], gradient_norms=norms).layout
    assert (layout.yaxis.visible, layout.yaxis2.visible) == (True, False)
    assert loss_figure([0], [None], gradient_norms=[1.0]).layout.yaxis.visible is False


def test_no_loss_is_said() -> None:
    assert loss_figure([], []).layout.annotations[0].text == "no loss reported"
