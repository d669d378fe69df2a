"""Numbers and words of the pages."""

from typing import Any

import pytest

from fp8_safeguard.dashboards import view
from fp8_safeguard.dashboards.coverage import sampling_words
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


def test_every_page_metric_exists_has_a_definition_and_opens_on_a_scale_that_suits_it() -> None:
    assert set(PAGE_METRICS) - {"gradient_distortion"} <= set(METRICS)
    assert all(metric_view(metric).definition for metric in PAGE_METRICS)
    linear = {metric for metric in PAGE_METRICS if default_scale(metric) == "linear"}
    assert linear == {"sqnr_db", "tile_sqnr_p01_db"}


def test_worst_layer_row_shows_the_value_against_its_threshold() -> None:
    item = {
        "layer": "blocks.3",
        "state": "unstable",
        "worst": {"metric": "relative_error", "operand": None, "layout": None, "gemm": "dgrad",
                  "value": 0.125, "threshold": 0.05, "step": 1209},
        "precision": {"fprop": "fp8", "dgrad": "bf16", "wgrad": "fp8"},
    }  # fmt: skip
    (row,) = view.layer_rows([item])
    assert (row.signal, row.value, row.threshold) == ("GEMM error dgrad", "12.5 %", "≤ 5 %")
    assert (row.excess, row.over) == ("2.5× over", True)
    assert (row.step, row.precision, row.note) == ("1,209", "BF16: dgrad", "")
    (row,) = view.layer_rows([{**item, "follows_from": "blocks.1.up"}])
    assert row.note == "follows from 'blocks.1.up'"


@pytest.mark.parametrize(
    "worst", [None, {"metric": "underflow_ratio", "value": "NaN", "threshold": None, "step": None}]
)
def test_a_layer_without_a_reading_shows_dashes_not_zero(worst: Any) -> None:
    (row,) = view.layer_rows([{"layer": "a", "state": "unknown", "worst": worst, "precision": {}}])
    assert row.value in ("–", "NaN")
    assert (row.threshold, row.excess, row.step) == ("–", "", "–")


@pytest.mark.parametrize(
    ("metric", "value", "threshold", "limit", "margin", "over"),
    [
        ("sqnr_db", 31.5, 28.5, "≥ 28.5 dB", "within", False),
        ("sqnr_db", 28.5, 28.5, "≥ 28.5 dB", "within", False),
        ("sqnr_db", 14.25, 28.5, "≥ 28.5 dB", "14 dB under", True),
        ("cosine", 0.5, 0.995, "≥ 0.995", "2× under", True),
        ("relative_error", 0.1, 0.05, "≤ 5 %", "2× over", True),
        ("relative_error", 0.05, 0.05, "≤ 5 %", "within", False),
        ("relative_error", "NaN", 0.05, "≤ 5 %", "NaN", True),
        ("relative_error", "Infinity", 0.05, "≤ 5 %", "over", True),
        ("saturation_ratio", 0.1, 0.0, "≤ 0 %", "over", True),
        ("sqnr_db", "-Infinity", 28.5, "≥ 28.5 dB", "under", True),
        ("amax", None, 2.0, "≤ 2", "", False),
    ],
)
def test_the_margin_names_the_side_of_the_limit(
    metric: str, value: Any, threshold: float, limit: str, margin: str, over: bool
) -> None:
    worst = {"metric": metric, "value": value, "threshold": threshold, "step": 1}
    (row,) = view.layer_rows([{"layer": "a", "state": "watch", "worst": worst, "precision": {}}])
    assert (row.threshold, row.excess, row.over) == (limit, margin, over)


def test_status_numbers() -> None:
    detail = {"last_step": 1259, "loss": 1.71339, "gradient_norm": "NaN", "mode": "enforce",
              "overhead_ratio": 0.00433, "fallback_budget_used_ratio": None}  # fmt: skip
    shown = {stat.label: stat.value for stat in view.run_stats(detail)}
    assert shown == {"step": "1,259", "loss": "1.71", "grad norm": "NaN", "fallback budget used": "–",
                     "mode": "enforce", "overhead": "0.43 %"}  # fmt: skip


def test_the_overhead_of_the_header_is_the_one_that_the_section_on_coverage_tells() -> None:
    detail: dict[str, Any] = {"overhead_ratio": 0.0289, "sampling": {"overhead_ratio": 0.0313}}
    (stat,) = (stat for stat in view.run_stats(detail) if stat.label == "overhead")
    assert stat.value == "3.13 %"
    assert stat.value in sampling_words(detail["sampling"])
    assert "training time so far" in stat.meaning
    (stat,) = (stat for stat in view.run_stats({"overhead_ratio": 0.0289}) if stat.label == "overhead")
    assert (stat.value, "since the sample before" in stat.meaning) == ("2.89 %", True)


def test_an_unknown_state_is_not_called_healthy() -> None:
    assert view.state_of({"state": "confused"}) == "unknown"
    assert view.state_of({"state": "watch"}) == "watch"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"open": 0, "held": 0, "silenced": 0}, "none"),
        ({"open": 1234, "held": 0, "silenced": 0}, "1,234 open"),
        ({"open": 2, "held": 3, "silenced": 1}, "2 open, 3 held, 1 silenced"),
        ({}, "none"),
    ],
)
def test_counts_of_alerts_are_told_without_zeros(counts: dict[str, int], words: str) -> None:
    assert view.alert_words(counts) == words
