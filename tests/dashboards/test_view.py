"""Numbers and words of the pages."""

from typing import Any

import pytest

from fp8_safeguard.dashboards import view
from fp8_safeguard.dashboards.metrics import PAGE_METRICS, default_scale, format_value, metric_view
from fp8_safeguard.monitor.metrics import LOWER_IS_WORSE, METRICS


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("underflow_ratio", 0.005, "0.5 %"),
        ("underflow_ratio", 0.0, "0 %"),
        ("underflow_ratio", 1e-6, "0.0001 %"),
        ("relative_error", 0.12345, "12.3 %"),
        ("gradient_distortion", 4.2e-4, "0.00042"),
        ("gradient_distortion", 4.2e-7, "4.2e−7"),
        ("amax", 65504.0, "65,504"),
        ("amax", 3.0e38, "3e38"),
        ("amax", None, "–"),
        ("amax", float("nan"), "NaN"),
        ("amax", float("-inf"), "−∞"),
    ],
)
def test_numbers_for_people(metric: str, value: float | None, text: str) -> None:
    assert format_value(value, metric_view(metric)) == text


def test_direction_agrees_with_the_monitor() -> None:
    shown = {metric for metric in METRICS if metric_view(metric).worse_when_low}
    assert shown == LOWER_IS_WORSE


def test_every_page_metric_exists_and_opens_on_a_fixed_log_range() -> None:
    assert set(PAGE_METRICS) - {"gradient_distortion"} <= set(METRICS)
    assert {default_scale(metric) for metric in PAGE_METRICS} == {"log"}


def test_worst_layer_row_shows_the_value_against_its_threshold() -> None:
    item = {
        "layer": "blocks.3",
        "state": "unstable",
        "worst": {"metric": "relative_error", "operand": None, "layout": None, "gemm": "dgrad",
                  "value": 0.125, "threshold": 0.05, "step": 1209},
        "precision": {"fprop": "fp8", "dgrad": "bf16", "wgrad": "fp8"},
    }  # fmt: skip
    (row,) = view.layer_rows([item])
    assert (row.signal, row.value, row.threshold, row.excess) == ("GEMM error dgrad", "12.5 %", "5 %", "2.5×")
    assert (row.step, row.precision) == ("1,209", "bf16: dgrad")


@pytest.mark.parametrize(
    "worst", [None, {"metric": "underflow_ratio", "value": "NaN", "threshold": None, "step": None}]
)
def test_a_layer_without_a_reading_shows_dashes_not_zero(worst: Any) -> None:
    (row,) = view.layer_rows([{"layer": "a", "state": "unknown", "worst": worst, "precision": {}}])
    assert row.value in ("–", "NaN")
    assert (row.threshold, row.excess, row.step) == ("–", "", "–")


def alert(**changes: Any) -> dict[str, Any]:
    return {
        "layer": "a", "rule": "underflow", "severity": "watch", "state": "open", "metric": "underflow_ratio",
        "slot": {"layer": "a", "operand": "x", "layout": "row"}, "value": 0.009, "threshold": 0.005,
        "first_step": 207, "last_step": 215,
    } | changes  # fmt: skip


def test_alerts_open_before_their_first_bad_step() -> None:
    (row,) = view.alert_rows([alert()])
    assert (row.title, row.detail, row.when) == ("underflow x row", "0.9 % (limit 0.5 %)", "since step 207")
    assert (row.from_step, row.metric, row.slot) == (167, "underflow_ratio", "x row")
    assert view.alert_rows([alert(first_step=3)])[0].from_step == 0


def test_open_and_acting_alerts_come_first_and_what_a_fallback_holds_later() -> None:
    rows = view.alert_rows(
        [
            alert(layer="over", state="resolved"),
            alert(layer="held", severity="act"),
            alert(layer="watch"),
            alert(layer="act", severity="act", first_step=300),
        ],
        held={"held"},
    )
    assert [(row.layer, row.standing) for row in rows] == [
        ("act", "open"),
        ("watch", "open"),
        ("held", "held"),
        ("over", "over"),
    ]
    assert rows[-1].when == "steps 207 to 215"


def test_alerts_of_one_layer_and_rule_are_one_entry_with_its_worst_value() -> None:
    gemms = [
        alert(
            metric="relative_error",
            slot={"layer": "a", "gemm": gemm},
            value=value,
            threshold=0.05,
            first_step=step,
        )
        for gemm, value, step in (("fprop", 0.07, 210), ("dgrad", 0.09, 208))
    ]
    (row,) = view.alert_rows(gemms)
    assert (row.title, row.detail, row.when) == (
        "GEMM error dgrad, fprop",
        "9 % (limit 5 %)",
        "since step 208",
    )
    assert row.slot == ""


@pytest.mark.parametrize(
    ("metric", "value", "threshold", "excess"),
    [("sqnr_db", 14.25, 28.5, "2×"), ("relative_error", 0.1, 0.05, "2×"), ("relative_error", "NaN", 0.05, ""),
     ("saturation_ratio", 0.1, 0.0, "")],
)  # fmt: skip
def test_excess_is_above_one_for_the_bad_side(metric: str, value: Any, threshold: float, excess: str) -> None:
    worst = {"metric": metric, "value": value, "threshold": threshold, "step": 1}
    (row,) = view.layer_rows([{"layer": "a", "state": "watch", "worst": worst, "precision": {}}])
    assert row.excess == excess


def test_status_numbers() -> None:
    detail = {"last_step": 1259, "loss": 1.71339, "gradient_norm": "NaN", "mode": "enforce",
              "overhead_ratio": 0.00433, "fallback_budget_used_ratio": None}  # fmt: skip
    shown = {stat.label: stat.value for stat in view.run_stats(detail)}
    assert shown == {"step": "1,259", "loss": "1.71", "grad norm": "NaN", "budget used": "–",
                     "mode": "enforce", "overhead": "0.43 %"}  # fmt: skip


def test_an_unknown_state_is_not_called_healthy() -> None:
    assert view.state_of({"state": "confused"}) == "unknown"
    assert view.state_of({"state": "watch"}) == "watch"
