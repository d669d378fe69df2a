"""A fault is seen: which picture a page opens with, and what is said of alerts that it does not show."""

from itertools import pairwise
from typing import Any

import pytest

from fp8_safeguard.dashboards.alerts import alert_rows
from fp8_safeguard.dashboards.heatmap import heatmap_figure
from fp8_safeguard.dashboards.metrics import PAGE_METRICS, VIEWS, metric_view
from fp8_safeguard.dashboards.sight import opening_metric, out_of_sight
from fp8_safeguard.monitor.metrics import METRICS

FPROP, DGRAD = {"gemm": "fprop"}, {"gemm": "dgrad"}
X_ROW = {"operand": "x", "layout": "row"}


def alert(number: int, metric: str, slot: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "id": number, "layer": f"layers.{number}", "rule": metric, "severity": "act", "state": "open", "metric": metric,
        "value": 0.5, "threshold": 0.05, "first_step": 10 + number, "last_step": 20, "step": 11, "slot": slot, "slots": [],
        "occurrences": 1,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("items", "metric"),
    [
        ([], "gradient_distortion"),
        ([alert(1, "relative_error", FPROP)], "relative_error"),
        ([alert(1, "underflow_ratio", X_ROW), alert(0, "saturation_ratio", X_ROW)], "saturation_ratio"),
        # It is over, but it is the only one there was.
        ([alert(1, "underflow_ratio", X_ROW, state="resolved")], "underflow_ratio"),
        # What gradient distortion shows is seen there, beside whatever else.
        ([alert(1, "relative_error", DGRAD), alert(0, "underflow_ratio", X_ROW)], "gradient_distortion"),
        ([alert(1, "underflow_ratio", X_ROW, severity="watch")], "gradient_distortion"),
        # Between the turns of a wgrad its layer looks healthy there.
        ([alert(1, "relative_error", {"gemm": "wgrad"})], "relative_error"),
        # NaN has a mark in any picture of what holds it.
        ([alert(1, "nonfinite_count", {"operand": "dy", "layout": "row"})], "gradient_distortion"),
        ([alert(1, "nonfinite_count", X_ROW)], "nonfinite_count"),
        # There is no picture of it.
        ([alert(1, "loss", {}, layer=None)], "gradient_distortion"),
    ],
)
def test_a_page_opens_with_the_picture_of_the_worst_evidence(items: list[Any], metric: str) -> None:
    assert opening_metric(alert_rows(items)) == metric


def test_a_fault_in_several_slots_of_a_layer_counts_with_all_of_them() -> None:
    parts = [alert(1, "relative_error", slot) for slot in (FPROP, DGRAD)]
    rows = alert_rows([alert(1, "relative_error", FPROP, slots=parts)])
    assert opening_metric(rows) == "gradient_distortion"
    assert out_of_sight(rows, "gradient_distortion", "") is None


@pytest.mark.parametrize(
    ("metric", "slot", "seen"),
    [
        ("gradient_distortion", "", False),
        ("relative_error", "", True),
        ("relative_error", "fprop", True),
        ("relative_error", "dgrad", False),
        ("underflow_ratio", "", False),
    ],
)
def test_what_a_picture_does_not_show_is_named(metric: str, slot: str, seen: bool) -> None:
    rows = alert_rows([alert(1, "relative_error", FPROP), alert(2, "relative_error", FPROP)])
    found = out_of_sight(rows, metric, slot)
    assert (found is None) == seen
    if found is not None:
        assert (found.row.layer, found.row.metric, found.row.slot, found.others) == (
            "layers.1", "relative_error", "fprop", 1,
        )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"severity": "watch"},
        {"state": "held"},
        {"state": "resolved"},
        {"waits_since": {"decision": "r-1", "step": 30}},
    ],
)
def test_only_what_is_in_breach_and_asks_for_a_remedy_is_missed(changes: dict[str, Any]) -> None:
    assert (
        out_of_sight(alert_rows([alert(1, "relative_error", FPROP, **changes)]), PAGE_METRICS[0], "") is None
    )


def test_the_names_of_layers_with_alerts_are_marked_and_always_shown() -> None:
    layers = [f"layers.{number}" for number in range(200)]
    axis = heatmap_figure(
        [[0.1]] * 200, layers, [0], metric="amax", alerts={"layers.101": "act", "layers.3": "watch"}
    ).layout.yaxis
    named = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    assert named["layers.101"] == "layers.101 ▲"
    assert named["layers.3"] == "layers.3 △"
    assert {text for text in axis.ticktext if text[-1] in "▲△"} == {"layers.101 ▲", "layers.3 △"}
    assert 10 < len(named) <= 32
    # In the order of the rows, and apart from each other.
    places = [layers.index(layer) for layer in named]
    assert min(later - earlier for earlier, later in pairwise(places)) >= 7


def test_an_alert_in_every_layer_leaves_labels_apart_and_the_worst_named() -> None:
    layers = [f"layers.{number}" for number in range(64)]
    alerts = {**dict.fromkeys(layers, "watch"), "layers.33": "act"}
    axis = heatmap_figure([[0.1]] * 64, layers, [0], metric="amax", alerts=alerts).layout.yaxis
    assert "layers.33 ▲" in axis.ticktext
    assert len(axis.ticktext) <= 32


def test_a_long_name_makes_room_for_its_mark() -> None:
    name = "encoder.7." + "very_" * 10 + "long.weight"
    (label,) = heatmap_figure([[0.1]], [name], [0], metric="amax", alerts={name: "act"}).layout.yaxis.ticktext
    assert (label[:11], label[-13:], len(label)) == ("encoder.7.…", "long.weight ▲", 30)


def test_every_metric_says_what_it_is() -> None:
    named = {*METRICS, *VIEWS, *PAGE_METRICS, "loss", "gradient_norm"}
    assert [name for name in sorted(named) if not metric_view(name).definition] == []
