"""Readiness: verdicts on what was measured of GEMMs, healthy and faulty, and what they say together."""

import math
from typing import Any

import numpy as np
import pytest
from torch import nn

from fp8_safeguard.hooks.coverage import Coverage, discover
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.monitor.readiness import Report, Row, assess
from fp8_safeguard.monitor.readings import GemmReadings, OperandReadings, unseen, verdict_of
from fp8_safeguard.monitor.slots import Slot

# Typical and largest healthy errors of a recomputed GEMM over four seeds, E4M3.
HEALTHY = {"fprop": (0.024, 0.039), "dgrad": (0.028, 0.038), "wgrad": (0.028, 0.037)}
FAULTS = {
    # Recomputed error of the worst slot, the sample's place in the run; all of them harmed FP8 and not BF16.
    "gain drift": ("fprop", [0.033, 0.032, 0.054, 0.27, 0.93]),
    "abrupt outliers": ("fprop", [0.024, 0.024, 0.74]),
    "flushed gradients": ("dgrad", [1.0, 1.0]),
    "saturated activations": ("fprop", [0.82]),
    "stale inverse scale": ("fprop", [7.0]),
}


def gemm(
    layer: str,
    name: str,
    errors: Any,
    *,
    variant: str | None = None,
    emulated: bool = False,
    fmt: str | None = None,
    nonfinite: int = 0,
) -> GemmReadings:
    errors = np.asarray(errors, dtype=np.float64)
    slot = Slot(layer, gemm=name, variant=variant, emulated=emulated, fmt=fmt)
    return GemmReadings(slot=slot, steps=10 * np.arange(len(errors)), errors=errors, nonfinite=nonfinite)


def operand(layer: str, which: str, layout: str, **values: Any) -> OperandReadings:
    return OperandReadings(slot=Slot(layer, operand=which, layout=layout), **values)


def rows(report: Report) -> dict[tuple[str, str], Row]:
    return {(row.layer, row.gemm): row for row in report.rows}


def only(*readings: GemmReadings, operands: Any = ()) -> Row:
    (row,) = assess(readings, operands).rows
    return row


def own_layer(layer: str, **changes: Any) -> list[GemmReadings]:
    errors = {name: [typical] * 7 + [worst] for name, (typical, worst) in HEALTHY.items()}
    return [gemm(layer, name, changes.get(name, values)) for name, values in errors.items()]


def test_a_healthy_run_is_ready() -> None:
    report = assess([each for n in range(20) for each in own_layer(f"blocks.{n}")])
    assert {row.verdict for row in report.rows} == {"safe"}
    assert {row.reason for row in report.rows} == {""}
    assert report.summary.sentence == "ready for FP8"
    assert (report.summary.verdict, report.summary.safe_ratio) == ("ready", 1.0)
    assert (report.summary.gemms, report.summary.layers, report.summary.keep_bf16_layers) == (60, 20, ())
    assert (report.summary.samples, report.summary.samples_needed) == (480, 4)
    assert (report.summary.gemms_short, report.summary.samples_short) == (0, 0)
    row = report.rows[0]
    assert (row.error_median, row.error_worst, row.error_worst_step) == (0.024, 0.039, 70)
    assert (row.error_latest, row.error_latest_step, row.samples, row.threshold) == (0.039, 70, 8, 0.05)
    assert row.source == "measured"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_that_harms_fp8_keeps_its_gemm_in_bf16(fault: str) -> None:
    name, errors = FAULTS[fault]
    row = only(gemm("a", name, errors))
    assert row.verdict == "keep_bf16"
    assert row.reason


@pytest.mark.parametrize(
    ("name", "errors", "verdict"),
    [
        # Controls that were no fault of FP8: raw norm gain, a data spike, QK gain.
        ("fprop", [0.035] * 8, "safe"),
        ("fprop", [0.024] * 7 + [0.036], "safe"),
        ("dgrad", [0.032] * 8, "safe"),
        # A level itself is still allowed.
        ("fprop", [0.05, 0.05, 0.04, 0.04], "watch"),
        ("fprop", [0.04] * 8, "safe"),
        ("fprop", [0.024] * 7 + [0.041], "safe"),
        ("fprop", [0.024] * 6 + [0.041] * 2, "watch"),
        ("fprop", [0.024] * 7 + [0.051], "watch"),
        ("fprop", [0.024] * 6 + [0.051] * 2, "keep_bf16"),
        ("fprop", [0.06] * 8, "keep_bf16"),
        ("dgrad", [0.024] * 7 + [0.15], "watch"),
        ("dgrad", [0.024] * 7 + [0.151], "keep_bf16"),
        ("wgrad", [0.024] * 6 + [0.079] * 2, "watch"),
        ("wgrad", [0.024] * 7 + [0.89], "watch"),
        ("wgrad", [0.024] * 6 + [0.081] * 2, "keep_bf16"),
        ("wgrad", [0.024] * 7 + [0.91], "keep_bf16"),
        ("fprop", [0.024] * 7 + [math.inf], "keep_bf16"),
    ],
)
def test_levels_of_the_error(name: str, errors: list[float], verdict: str) -> None:
    assert only(gemm("a", name, errors)).verdict == verdict


def test_the_levels_follow_the_format() -> None:
    errors = [0.055] * 8
    assert only(gemm("a", "fprop", errors)).verdict == "keep_bf16"
    coarse = only(gemm("a", "fprop", errors, fmt="e5m2"))
    assert (coarse.verdict, coarse.threshold) == ("safe", 0.1)


def test_too_few_samples_say_how_many_are_needed() -> None:
    row = only(gemm("a", "wgrad", [0.028] * 3))
    assert (row.verdict, row.reason) == ("unknown", "3 samples, 1 more needed")
    assert only(gemm("a", "wgrad", [0.028] * 4)).verdict == "safe"
    assert only(gemm("a", "wgrad", [])).reason == "no sample, 4 more needed"
    assert only(gemm("a", "wgrad", [])).error_median is None
    few = [gemm("a", "fprop", [0.02] * 9), gemm("a", "dgrad", [0.02] * 3), gemm("a", "wgrad", [0.02])]
    summary = assess([*few, *foreign("real")]).summary
    # The real output of `real` waits for shadow mode, not for more samples.
    assert (summary.samples, summary.gemms_short, summary.samples_short) == (29, 2, 3)


def test_bad_enough_needs_no_more_samples() -> None:
    assert only(gemm("a", "dgrad", [0.16])).verdict == "keep_bf16"
    assert only(gemm("a", "dgrad", [0.06])).verdict == "unknown"


def test_a_gemm_that_waits_for_its_turn_has_a_row() -> None:
    places = (("x", "row"), ("x", "col"), ("w", "tile"), ("dy", "row"), ("dy", "col"))
    operands = [operand("a", *place, underflow=0.0) for place in places]
    found = rows(assess([gemm("a", "dgrad", [0.024] * 4)], operands))
    assert {key[1]: row.verdict for key, row in found.items()} == {
        "fprop": "unknown",
        "dgrad": "safe",
        "wgrad": "unknown",
    }


def test_a_first_layer_has_no_dgrad_to_wait_for() -> None:
    places = (("x", "row"), ("x", "col"), ("w", "tile"), ("dy", "row"), ("dy", "col"))
    readings = [each for each in own_layer("a") if each.slot.gemm != "dgrad"]
    report = assess(readings, [operand("a", *place, underflow=0.0) for place in places])
    assert [row.gemm for row in report.rows] == ["fprop", "wgrad"]
    assert report.summary.sentence == "ready for FP8"


def test_underflow_alone_is_an_early_warning() -> None:
    lost = [operand("a", "x", "row", underflow=0.57, underflow_step=40, sure_underflow=0.57)]
    row = only(gemm("a", "fprop", [0.032] * 8), operands=lost)
    assert (row.verdict, row.reason) == ("watch", "57 % of x row underflows")
    assert (row.underflow, row.underflow_slot, row.underflow_step) == (0.57, "x row", 40)


@pytest.mark.parametrize(
    ("of_x", "of_w", "verdict"),
    [
        # A drift of outlier channels at +20, +30 and abrupt: before the error shows it.
        (0.028, 0.0045, "keep_bf16"),
        (0.25, 0.0011, "keep_bf16"),
        (0.86, 0.063, "keep_bf16"),
        # Neither alone, nor both at their watch levels only.
        (0.57, 0.00009, "watch"),
        (0.0008, 0.0045, "watch"),
        (0.028, 0.0014, "watch"),
    ],
)
def test_weights_and_activations_that_vanish_together_are_acted_on_as_by_the_policy(
    of_x: float, of_w: float, verdict: str
) -> None:
    lost = [
        operand("a", "x", "row", underflow=of_x, sure_underflow=of_x, underflow_step=1),
        operand("a", "w", "tile", underflow=of_w, sure_underflow=of_w, underflow_step=1),
    ]
    found = rows(assess(own_layer("a"), lost))
    assert found["a", "fprop"].verdict == verdict
    assert found["a", "wgrad"].verdict == "safe"
    # Without shadow mode the operands still tell.
    assert rows(assess(foreign("a"), lost))["a", "fprop"].verdict == (
        "keep_bf16" if verdict == "keep_bf16" else "unknown"
    )


def test_a_few_vanished_elements_are_chance_but_shown() -> None:
    lost = [operand("a", "w", "tile", underflow=0.02, underflow_step=3, sure_underflow=None)]
    row = only(gemm("a", "fprop", [0.032] * 8), operands=lost)
    assert (row.verdict, row.underflow, row.underflow_slot) == ("safe", 0.02, "w tile")


def test_operands_speak_only_for_the_gemms_that_read_them() -> None:
    lost = [operand("a", "dy", "row", underflow=0.3, sure_underflow=0.3, underflow_step=1)]
    found = rows(assess(own_layer("a"), lost))
    assert {key[1]: row.verdict for key, row in found.items()} == {
        "fprop": "safe",
        "dgrad": "watch",
        "wgrad": "safe",
    }


@pytest.mark.parametrize(("flushed", "verdict"), [(0.01, "safe"), (0.2, "watch"), (0.51, "keep_bf16")])
def test_rows_of_the_gradient_that_are_flushed(flushed: float, verdict: str) -> None:
    rows_lost = [operand("a", "dy", "row", underflow=0.0, rows_flushed=flushed, rows_flushed_step=7)]
    row = only(gemm("a", "dgrad", [0.03] * 8), operands=rows_lost)
    assert (row.verdict, row.rows_flushed) == (verdict, flushed)


def test_nan_makes_a_gemm_one_to_watch_and_is_counted() -> None:
    row = only(gemm("a", "fprop", [0.024] * 8, nonfinite=2))
    assert (row.verdict, row.nonfinite_samples) == ("watch", 2)
    assert row.reason == "NaN or Inf in 2 samples"
    assert only(gemm("a", "fprop", [], nonfinite=9)).verdict == "unknown"


def foreign(layer: str, output: float = 0.002) -> list[GemmReadings]:
    """A plain BF16 layer: its real output is compared, its backward GEMMs are emulated."""
    return [
        gemm(layer, "fprop", [output] * 8),
        gemm(layer, "dgrad", [0.028] * 8, emulated=True),
        gemm(layer, "wgrad", [0.028] * 8, emulated=True),
    ]


def test_the_real_output_of_a_bf16_layer_says_nothing_of_fp8() -> None:
    report = assess(foreign("a"))
    found = rows(report)
    assert found["a", "fprop"].verdict == "unknown"
    assert "attach(..., shadow=True)" in found["a", "fprop"].reason
    assert found["a", "fprop"].source is None
    assert (found["a", "dgrad"].verdict, found["a", "dgrad"].source) == ("safe", "emulated")
    assert report.summary.verdict == "not_ready"
    assert report.summary.sentence == (
        "not ready: 1 of 3 GEMMs are not known yet; run it with attach(..., shadow=True)"
    )


def test_a_frozen_foreign_layer_with_a_forward_result_alone_stays_unknown() -> None:
    assert only(gemm("a", "fprop", [0.002] * 8)).verdict == "unknown"


def test_the_shadow_variant_is_judged_where_there_is_one() -> None:
    shadow = gemm("a", "fprop", [0.024] * 8, variant="fp8", emulated=True)
    report = assess([*foreign("a"), shadow])
    row = rows(report)["a", "fprop"]
    assert (row.verdict, row.source, row.error_median) == ("safe", "shadow", 0.024)
    assert report.summary.sentence == "ready for FP8"
    bad = gemm("a", "fprop", [0.3] * 8, variant="fp8", emulated=True)
    assert rows(assess([*foreign("a"), bad]))["a", "fprop"].verdict == "keep_bf16"


def test_the_plain_what_if_of_a_flagged_fp8_layer_does_not_replace_its_own_result() -> None:
    flagged = gemm("a", "fprop", [0.9] * 4, variant="fp8", emulated=True)
    row = rows(assess([*own_layer("a"), flagged]))["a", "fprop"]
    assert (row.verdict, row.source, row.samples) == ("safe", "measured", 8)
    backward = gemm("b", "dgrad", [0.9] * 4, variant="fp8", emulated=True)
    assert rows(assess([*foreign("b"), backward]))["b", "dgrad"].source == "emulated"


def test_a_foreign_fp8_layer_is_judged_by_its_real_output() -> None:
    row = rows(assess(foreign("a", output=0.026)))["a", "fprop"]
    assert (row.verdict, row.source) == ("safe", "measured")


def test_a_layer_of_ours_in_bf16_emulates_its_forward_result() -> None:
    readings = [gemm("a", name, [0.024] * 8, emulated=True) for name in HEALTHY]
    assert {row.source for row in assess(readings).rows} == {"emulated"}
    assert assess(readings).summary.verdict == "ready"


def test_an_own_weight_gradient_with_a_tiny_error_is_not_taken_for_high_precision() -> None:
    found = rows(assess(own_layer("a", wgrad=[0.005] * 8, fprop=[0.009] * 8)))
    assert {row.verdict for row in found.values()} == {"safe"}


def not_observed(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "shape": [8, 8], "status": "not observed", "reason": reason}


COMPILED = "compiled: products by function are not observed in a compiled graph"


def test_a_model_that_was_observed_in_part_is_not_ready() -> None:
    coverage = [
        *(not_observed(f"blocks.{n}.qkv", COMPILED) for n in range(5)),
        not_observed("tok", "embedding: a look-up, no GEMM"),
        not_observed("head", "excluded by filter"),
        not_observed("stem", "convolution: not supported"),
        not_observed("positions", "no product with it was recognised: used by add"),
        {"name": "a", "shape": [8, 8], "status": "observed", "reason": ""},
    ]
    summary = assess(own_layer("a"), coverage=coverage).summary
    assert summary.verdict == "not_ready"
    assert summary.sentence == (
        "not ready: 5 weight matrices were not observed: blocks.0.qkv, blocks.1.qkv, blocks.2.qkv and 2 more"
    )
    assert {each.reason for each in summary.unobserved} == {COMPILED}
    assert [each.name for each in summary.left_out] == ["head", "stem", "positions"]
    assert assess(own_layer("a"), coverage=coverage[5:]).summary.verdict == "ready"
    merged = not_observed("w", "no product with it was recognised: used by add, cat")
    assert assess(own_layer("a"), coverage=[merged]).summary.verdict == "not_ready"
    assert assess([], coverage=coverage[:1]).summary.sentence == (
        "not ready: no GEMM was measured in these steps; 1 weight matrix was not observed: blocks.0.qkv"
    )


def test_the_reasons_of_a_real_model_are_told_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.stem = nn.Embedding(8, 4), nn.Conv1d(4, 4, 1)
            self.used, self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    model = Model()
    layers, left_out = discover(model, lambda module, name: name != "head")
    coverage = Coverage(model, layers, left_out, OnceLog())
    next(layer for layer in layers if layer.name == "used").seen = True
    needed, without = unseen(coverage.rows(1))
    assert [each.name for each in needed] == ["idle"]
    assert {each.name for each in without} == {"head", "stem.weight"}


@pytest.mark.parametrize(
    ("name", "ended", "words"),
    [
        ("wgrad", False, "not ready: 1 of 1 GEMMs are not known yet; let it run on"),
        (
            "wgrad",
            True,
            "not ready: 1 of 1 GEMMs are not known; the run has ended, and it lacks 3 samples; "
            "attach(recompute=N) recomputes more weight gradients a sample",
        ),
        ("dgrad", True, "not ready: 1 of 1 GEMMs are not known; the run has ended, and it lacks 3 samples"),
    ],
)
def test_what_an_unknown_gemm_lacks(name: str, ended: bool, words: str) -> None:
    assert assess([gemm("a", name, [0.028])], ended=ended).summary.sentence == words


@pytest.mark.parametrize(
    ("bad", "verdict", "sentence"),
    [
        (0, "ready", "ready for FP8"),
        (1, "ready_with_bf16", "ready with 1 layer kept in BF16"),
        (3, "ready_with_bf16", "ready with 3 layers kept in BF16"),
        (
            4,
            "not_ready",
            "not ready: 4 of 20 layers (20 %) would have to stay in BF16, and the budget is 15 %",
        ),
    ],
)
def test_layers_to_keep_in_bf16_are_held_against_the_budget(bad: int, verdict: str, sentence: str) -> None:
    readings = [
        each
        for n in range(20)
        for each in own_layer(f"blocks.{n}", **({"dgrad": [0.5] * 8} if n < bad else {}))
    ]
    summary = assess(readings).summary
    assert (summary.verdict, summary.sentence) == (verdict, sentence)
    assert summary.keep_bf16_layers == tuple(f"blocks.{n}" for n in range(bad))
    assert summary.keep_bf16_ratio == bad / 20
    assert summary.counts == {"keep_bf16": bad, "watch": 0, "unknown": 0, "safe": 60 - bad}


def test_what_is_to_be_watched_is_said_beside_the_verdict() -> None:
    report = assess([*own_layer("a"), *own_layer("b", dgrad=[0.03] * 7 + [0.06])])
    assert report.summary.sentence == "ready for FP8, 1 of 6 GEMMs to watch"


def test_nothing_measured_is_not_ready() -> None:
    summary = assess([]).summary
    assert summary.sentence == "not ready: no GEMM was measured in these steps"
    assert (summary.safe_ratio, summary.keep_bf16_ratio, summary.gemms) == (None, None, 0)


def test_rows_follow_the_models_order_whatever_came_first() -> None:
    readings = [gemm("late", "wgrad", [0.02] * 4), *own_layer("first"), gemm("unlisted", "fprop", [0.02] * 4)]
    report = assess(readings, order=["first", "never measured", "late"])
    assert [row.layer for row in report.rows] == ["first", "first", "first", "late", "unlisted"]
    assert [row.gemm for row in report.rows[:3]] == ["fprop", "dgrad", "wgrad"]


def test_the_verdict_never_improves_as_errors_grow() -> None:
    order = ("safe", "watch", "keep_bf16")
    rng = np.random.default_rng(3)
    for name in HEALTHY:
        errors = rng.uniform(0.01, 0.05, 12)
        ranks = [
            order.index(verdict_of(gemm("a", name, errors * factor), ())[0])
            for factor in np.geomspace(0.5, 50, 40)
        ]
        assert ranks == sorted(ranks)
        assert ranks[0] == 0
        assert ranks[-1] == 2
