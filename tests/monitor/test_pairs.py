"""All rules on all their slots at once: what is known without medians, and slots that stand elsewhere in a sample."""

import numpy as np
import pytest

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.signals import Measures, compile_slots, find_breaches, may_breach
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.thresholds import PRESETS, Preset, Threshold

OPERANDS = (("x", "row"), ("x", "col"), ("w", "tile"), ("dy", "row"), ("dy", "col"))
SLOTS = (
    *(Slot("a", operand=operand, layout=layout) for operand, layout in OPERANDS),
    *(Slot("a", gemm=gemm) for gemm in ("fprop", "dgrad", "wgrad")),
    Slot("a", gemm="fprop", expert=3),
    Slot("b", operand="dy", layout="row", fmt="e5m2"),
)
MEDIANS_BOTH_WAYS = Preset(
    "both ways",
    (
        Threshold(
            rule="low",
            metric="sqnr_db",
            above=False,
            watch=20.0,
            act=10.0,
            watch_over_median=0.9,
            origin="test",
        ),
        Threshold(
            rule="high", metric="relative_error", watch=0.1, act=0.05, act_over_median=4.0, origin="test"
        ),
    ),
)


def table(rng: np.random.Generator, worst: float) -> StatsTable:
    """A random sample of all slots: no ratio and no relative error in it is above `worst`."""
    count = 8192
    bad = rng.uniform(0.0, worst, (len(SLOTS), 4))
    parts = []
    for slot, (underflow, saturated, flushed, error) in zip(SLOTS, bad.tolist(), strict=True):
        sums = {"amax": float(rng.uniform(1, 9)), "sum_sq": 1.0, "sum_sq_q": 1.0, "sum_sq_err": error**2}
        fields = {"count": count, "nan": 0, "inf": 0, **sums}
        if slot.gemm is None:
            rates = {"zeros": 0, "underflow": int(underflow * count), "saturated": int(saturated * count)}
            rows = {"rows": 64, "rows_flushed": int(flushed * 64), "sum_4th": float(rng.uniform(0, 1))}
            fields |= {**rates, **rows, "histogram": tuple(rng.integers(0, 2, 16).tolist())}
        parts.append(TensorStats(**fields))
    return StatsTable.from_stats(parts)


@pytest.mark.parametrize("preset", [*PRESETS.values(), MEDIANS_BOTH_WAYS], ids=lambda preset: preset.name)
def test_what_cannot_breach_breaches_under_no_medians(preset: Preset) -> None:
    rng = np.random.default_rng(5)
    compiled, everywhere = compile_slots(SLOTS, preset), np.arange(len(SLOTS))
    found, silent = 0, 0
    for _ in range(300):
        measures = Measures(table(rng, 10 ** rng.uniform(-6, 0)))
        medians = 10 ** rng.uniform(-3, 2, (len(compiled.own), 2))
        medians[rng.random(medians.shape) < 0.3] = np.nan
        breaches = find_breaches(compiled, measures, medians)
        expected = may_breach(compiled, measures, everywhere)
        assert expected or not breaches
        found, silent = found + bool(breaches), silent + (not expected)
    assert found
    # Levels of their own medians alone say nothing in advance.
    assert silent or preset in (MEDIANS_BOTH_WAYS, PRESETS["floor"])


def test_a_rule_with_a_fixed_level_is_known_to_be_silent_below_it() -> None:
    """Whatever the median: it only raises a level where high is bad."""
    only = Preset("gemms", tuple(rule for rule in PRESETS["floor"].rules if rule.gemm is not None))
    compiled, everywhere = compile_slots(SLOTS, only), np.arange(len(SLOTS))
    healthy, ill = (StatsTable.from_stats([product(error)] * len(SLOTS)) for error in (0.039, 0.041))
    assert not may_breach(compiled, Measures(healthy), everywhere)
    assert may_breach(compiled, Measures(ill), everywhere)


def product(error: float) -> TensorStats:
    sums = {"amax": 1.0, "sum_sq": 1.0, "sum_sq_q": 1.0, "sum_sq_err": error**2}
    return TensorStats(count=8192, nan=0, inf=0, **sums)


@pytest.mark.parametrize("preset", [*PRESETS.values(), MEDIANS_BOTH_WAYS], ids=lambda preset: preset.name)
def test_slots_may_stand_anywhere_in_the_sample_or_not_at_all(preset: Preset) -> None:
    rng = np.random.default_rng(6)
    absent = Slot("c", operand="x", layout="row")
    placed = (absent, *SLOTS, Slot("c", gemm="wgrad"))
    here, there = compile_slots(SLOTS, preset), compile_slots(placed, preset)
    measured_at = np.array([len(SLOTS), *range(len(SLOTS)), len(SLOTS)])
    seen = 0
    for _ in range(30):
        measures = Measures(table(rng, 0.9))
        medians = 10 ** rng.uniform(-3, 1, (len(here.own), 2))
        around = np.concatenate([[[1e-9, 1e-9]], medians, [[1e-9, 1e-9]]])
        breaches = find_breaches(here, measures, medians)
        assert find_breaches(there, measures, around, measured_at) == breaches
        # Rule after rule, each in the order of the slots.
        order = [(preset.rules.index(each.rule), SLOTS.index(each.slot)) for each in breaches]
        assert order == sorted(order)
        seen += len(breaches)
    assert seen


def test_a_list_of_what_ifs_alone_has_nothing_to_judge() -> None:
    compiled = compile_slots((Slot("a", gemm="fprop", variant="pow2", emulated=True),), PRESETS["floor"])
    measures = Measures(StatsTable.from_stats([product(1.0)]))
    assert find_breaches(compiled, measures, np.empty((0, 2))) == []
    assert not may_breach(compiled, measures, np.array([0]))
