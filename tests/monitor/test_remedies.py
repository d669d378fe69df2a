"""Remedies: what-ifs that are offered where plain FP8 is not safe."""

from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.alternatives import variant_words
from fp8_safeguard.monitor.readiness import Row, assess
from fp8_safeguard.monitor.readings import GemmReadings, OperandReadings
from fp8_safeguard.monitor.slots import Slot


def gemm(
    name: str, errors: Any, *, variant: str | None = None, nonfinite: int = 0, first: int = 0
) -> GemmReadings:
    errors = np.asarray(errors, dtype=np.float64)
    slot = Slot("a", gemm=name, variant=variant, emulated=variant is not None)
    steps = first + 10 * np.arange(len(errors))
    return GemmReadings(slot=slot, steps=steps, errors=errors, nonfinite=nonfinite)


def operand(which: str, layout: str, **values: Any) -> OperandReadings:
    return OperandReadings(slot=Slot("a", operand=which, layout=layout), **values)


def judged(name: str, *readings: GemmReadings, operands: Any = ()) -> Row:
    return next(row for row in assess(readings, operands).rows if row.gemm == name)


def only(*readings: GemmReadings, operands: Any = ()) -> Row:
    (row,) = assess(readings, operands).rows
    return row


def test_the_best_safe_alternative_is_the_remedy() -> None:
    bad = gemm("fprop", [0.3] * 4)
    whatifs = [
        gemm("fprop", [0.05] * 4, variant="x_e5m2"),
        gemm("fprop", [0.045] * 4, variant="pow2"),
        gemm("fprop", [0.4] * 4, variant="multiplier_2^-4"),
        gemm("dgrad", [0.001] * 4, variant="e5m2"),
    ]
    row = judged("fprop", bad, *whatifs)
    assert row.verdict == "keep_bf16"
    # Half of E5M2's own level: better than 0.045 of E4M3's.
    assert row.best is not None
    assert (row.best.variant, row.best.error_median, row.best.threshold) == ("x_e5m2", 0.05, 0.1)
    assert row.remedy == "safe with e5m2 for x"


def test_without_a_safe_alternative_the_best_is_shown_and_no_remedy() -> None:
    whatifs = [gemm("fprop", [error] * 4, variant=name) for name, error in (("pow2", 0.7), ("e5m2", 0.4))]
    row = only(gemm("fprop", [0.74] * 4), *whatifs)
    assert row.best is not None
    assert (row.best.variant, row.remedy) == ("e5m2", None)


def test_a_safe_gemm_needs_no_alternative() -> None:
    row = only(gemm("fprop", [0.024] * 4), gemm("fprop", [0.02] * 4, variant="pow2"))
    assert (row.best, row.remedy) == (None, None)


def test_an_alternative_of_too_few_samples_is_no_remedy() -> None:
    row = only(gemm("fprop", [0.3] * 4), gemm("fprop", [0.02] * 2, variant="pow2"))
    assert row.best is not None
    assert (row.best.verdict, row.best.samples, row.remedy) == ("unknown", 2, None)


@pytest.mark.parametrize(("error", "best"), [(0.0547, "x_e5m2"), (0.0549, None), (0.0647, None)])
def test_what_has_no_less_error_than_plain_fp8_is_no_remedy(error: float, best: str | None) -> None:
    """E5M2's limit is double: 6.47 % is safe there and still worse than 5.48 % that is not safe in E4M3."""
    row = only(gemm("fprop", [0.0548] * 4), gemm("fprop", [error] * 4, variant="x_e5m2"))
    assert row.verdict == "keep_bf16"
    assert (row.best.variant if row.best else None) == best
    assert row.remedy == ("safe with e5m2 for x" if best else None)


def test_a_what_if_is_compared_in_the_samples_that_have_it() -> None:
    """What-ifs come with a flag; the healthy samples before it say nothing against them."""
    late = gemm("fprop", [0.06] * 4, variant="x_e5m2", first=80)
    row = only(gemm("fprop", [0.024] * 8 + [0.3] * 4), late)
    assert (row.error_median, row.remedy) == (0.024, "safe with e5m2 for x")
    early = gemm("fprop", [0.06] * 4, variant="x_e5m2")
    assert only(gemm("fprop", [0.024] * 8 + [0.3] * 4), early).best is None


def test_a_fault_that_comes_and_goes_is_judged_where_it_is() -> None:
    """In shadow mode what-ifs stand in healthy samples, too, and the median of those is no fault."""
    plain = gemm("fprop", [0.024] * 6 + [0.06] * 2)
    row = only(plain, gemm("fprop", [0.05] * 6 + [0.055] * 2, variant="x_e5m2"))
    assert (row.verdict, row.remedy) == ("keep_bf16", "safe with e5m2 for x")
    # As good in health, and no better where it fails.
    assert only(plain, gemm("fprop", [0.02] * 6 + [0.07] * 2, variant="x_e5m2")).best is None


def test_a_row_to_watch_gets_no_remedy_that_is_worse() -> None:
    plain = gemm("fprop", [0.03] * 7 + [0.051])
    worse = gemm("fprop", [0.06] * 8, variant="e5m2")
    better = gemm("fprop", [0.02] * 8, variant="mx32")
    assert (only(plain, worse).verdict, only(plain, worse).best) == ("watch", None)
    assert only(plain, worse, better).remedy == "safe with MXFP8 blocks of 32"
    # No other way of quantising takes a NaN away.
    assert only(gemm("fprop", [0.03] * 8, nonfinite=2), better).best is None


@pytest.mark.parametrize(
    ("variants", "best", "helps"),
    [
        # Neither x nor w alone heals it, as the policy knows.
        ({"fprop": "x_e5m2", "dgrad": "w_e5m2"}, "x_e5m2", False),
        ({"fprop": "x_e5m2", "dgrad": "dy_e5m2"}, "x_e5m2", False),
        ({"fprop": "e5m2", "dgrad": "dy_e5m2"}, "e5m2", False),
        ({"fprop": "e5m2", "dgrad": "w_e5m2"}, "e5m2", True),
    ],
)
def test_a_remedy_changes_both_operands_that_vanish_together(
    variants: dict[str, str], best: str, helps: bool
) -> None:
    lost = [
        operand("x", "row", underflow=0.25, sure_underflow=0.25, underflow_step=1),
        operand("w", "tile", underflow=0.0045, sure_underflow=0.0045, underflow_step=1),
    ]
    readings = [gemm(name, [0.028] * 8) for name in variants]
    readings += [gemm(name, [0.02] * 8, variant=variant) for name, variant in variants.items()]
    for name in variants:
        row = judged(name, *readings, operands=lost)
        assert (row.verdict, row.cause) == ("keep_bf16", "x and w vanish together")
        assert row.reason == "25 % of x and 0.45 % of w vanish together"
        assert (row.remedy is not None) is helps
    row = judged("fprop", *readings, operands=lost)
    assert row.best is not None
    assert row.best.variant == best
    dgrad = judged("dgrad", *readings, operands=lost)
    # What changes nothing that is lost is not even shown.
    assert (dgrad.best is None) is (variants["dgrad"] == "dy_e5m2")


@pytest.mark.parametrize(("variant", "helps"), [("dy_e5m2", True), ("w_e5m2", False), ("mx32", True)])
def test_a_remedy_of_flushed_rows_changes_the_gradient(variant: str, helps: bool) -> None:
    flushed = [operand("dy", "row", underflow=0.0, rows_flushed=0.6, rows_flushed_step=7)]
    plain, other = gemm("dgrad", [0.2] * 8), gemm("dgrad", [0.03] * 8, variant=variant)
    row = only(plain, other, operands=flushed)
    assert row.cause == "rows of dy flushed"
    # Neither reason hides the other.
    assert row.reason == (
        "error 20 % at step 0: beyond 15 % one sample is enough; 60 % of the rows of dy row flushed at step 7"
    )
    assert (row.best is not None) is helps
    assert only(plain, other).cause == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("e5m2", "e5m2"),
        ("dy_e5m2", "e5m2 for dy"),
        ("pow2", "power-of-two scales"),
        ("x_tile128", "128x128 blocks for x"),
        ("multiplier_2^-4", "multiplier 2^-4"),
        ("dy_multiplier_2^-20", "multiplier 2^-20 for dy"),
        ("x_margin_2^4", "margin 2^4 for x"),
        ("mx32", "MXFP8 blocks of 32"),
        ("something new", "something new"),
    ],
)
def test_alternatives_in_words(name: str, words: str) -> None:
    assert variant_words(name) == words


def test_bf16_is_no_remedy_for_fp8() -> None:
    row = only(gemm("fprop", [0.3] * 4), gemm("fprop", [0.002] * 4, variant="bf16"))
    assert (row.best, row.remedy, row.alternatives) == (None, None, 0)


def test_a_row_says_how_many_alternatives_were_measured_of_it() -> None:
    variants = ("fp8", "bf16", "pow2", "mx32")
    whatifs = [gemm("fprop", [0.3] * 4, variant=name) for name in variants]
    row = only(gemm("fprop", [0.3] * 4), *whatifs, gemm("fprop", [], variant="e5m2"))
    assert (row.best, row.alternatives) == (None, 2)


@pytest.mark.parametrize(("emulated", "best"), [(6.8, "x_e5m2"), (0.027, None)])
def test_what_the_emulation_does_not_show_no_what_if_heals(emulated: float, best: str | None) -> None:
    """A stale inverse scale is in no operand: every alternative looks healthy, and plain FP8 does, too."""
    whatifs = [gemm("fprop", [0.05] * 4, variant="x_e5m2"), gemm("fprop", [0.02] * 4, variant="mx32")]
    row = only(gemm("fprop", [7.0] * 4), gemm("fprop", [emulated] * 4, variant="fp8"), *whatifs)
    assert (row.best.variant if row.best else None) == best
    assert (row.remedy is not None) is (best is not None)


def test_one_layer_gets_one_multiplier() -> None:
    """The gradient has one scale: what suits dgrad alone is no advice, nor is it what has a little less error."""
    errors = {
        "dy_multiplier_2^-12": {"dgrad": 0.03, "wgrad": 0.3},
        "dy_multiplier_2^-16": {"dgrad": 0.031, "wgrad": 0.034},
        "dy_multiplier_2^-20": {"dgrad": 0.0275, "wgrad": 0.028},
    }
    readings = [gemm(name, [0.97] * 4) for name in ("dgrad", "wgrad")]
    readings += [
        gemm(name, [error] * 4, variant=variant)
        for variant, of in errors.items()
        for name, error in of.items()
    ]
    for name in ("dgrad", "wgrad"):
        row = judged(name, *readings)
        assert row.best is not None
        assert (row.best.variant, row.remedy) == ("dy_multiplier_2^-16", "safe with multiplier 2^-16 for dy")
        assert row.alternatives == 3
