"""Presets: the published values, per operand, layout, gemm and format."""

from typing import Any

import pytest

from fp8_safeguard.monitor.policy import PolicyConfig
from fp8_safeguard.monitor.slots import LAYOUTS, OPERANDS, Slot
from fp8_safeguard.monitor.thresholds import (
    AUTOSWITCH,
    FLOOR,
    SEED,
    UnknownPresetError,
    get_preset,
    thresholds_for,
)


def lines(preset: str, slot: Slot | None, metric: str, **options: Any) -> dict[str, float]:
    return {line["severity"]: line["value"] for line in thresholds_for(preset, slot, metric, **options)}


@pytest.mark.parametrize(
    ("slot", "metric", "expected"),
    [
        (Slot("a", gemm="fprop"), "relative_error", {"act": 0.05}),
        (Slot("a", gemm="dgrad"), "relative_error", {"act": 0.05}),
        (Slot("a", gemm="wgrad"), "relative_error", {"act": 0.08}),
        (Slot("a", operand="x", layout="row"), "underflow_ratio", {"watch": 0.005, "act": 0.2}),
        (Slot("a", operand="dy", layout="row"), "underflow_ratio", {"watch": 0.005}),
        (Slot("a", operand="w", layout="tile"), "underflow_ratio", {"watch": 0.001, "act": 0.003}),
        (Slot("a", operand="x", layout="col"), "underflow_ratio", {"watch": 0.02}),
        (Slot("a", operand="dy", layout="col"), "underflow_ratio", {"watch": 0.02}),
        (Slot("a", operand="dy", layout="row"), "rows_flushed_ratio", {"watch": 0.01, "act": 0.5}),
        (Slot("a", operand="x", layout="row"), "rows_flushed_ratio", {"watch": 0.01}),
        (Slot("a", operand="w", layout="tile"), "sqnr_db", {"watch": 28.5, "act": 20.0}),
        (Slot("a", operand="dy", layout="col"), "tile_sqnr_p01_db", {"watch": 24.0}),
        (Slot("a", operand="x", layout="row"), "saturation_ratio", {"watch": 0.0001, "act": 0.01}),
        (Slot("a", operand="x", layout="row"), "amax", {}),
        (Slot("a", operand="x", layout="row"), "cosine", {}),
    ],
)
def test_floor_holds_the_measured_values(slot: Any, metric: str, expected: float) -> None:
    assert lines("floor", slot, metric) == expected


def test_floor_follows_the_slots_own_median() -> None:
    fprop, wgrad = Slot("a", gemm="fprop"), Slot("a", gemm="wgrad")
    assert lines("floor", fprop, "relative_error", median=0.035) == pytest.approx(
        {"watch": 0.0455, "act": 0.07}
    )
    assert lines("floor", fprop, "relative_error", median=0.04) == pytest.approx(
        {"watch": 0.052, "act": 0.08}
    )
    assert lines("floor", wgrad, "relative_error", median=0.03) == pytest.approx({"watch": 0.06, "act": 0.09})
    x = Slot("a", operand="x", layout="row")
    assert lines("floor", x, "amax", median=2.0) == {"watch": 32.0}
    assert lines("floor", x, "kurtosis", median=3.0) == {"watch": 300.0}


def test_an_error_below_the_formats_own_is_no_news_however_low_the_median() -> None:
    fprop = Slot("a", gemm="fprop")
    assert lines("floor", fprop, "relative_error", median=0.01)["watch"] == 0.04
    two_e4m3_operands = (2 * 0.0257**2) ** 0.5
    assert two_e4m3_operands < 0.04 < 0.05


@pytest.mark.parametrize("metric", ["amax", "kurtosis"])
def test_a_jump_is_told_once_an_operand(metric: str) -> None:
    speaking = [
        (operand, layout)
        for operand, layouts in (("x", ("row", "col")), ("dy", ("row", "col")), ("w", ("tile", "row")))
        for layout in layouts
        if lines("floor", Slot("a", operand=operand, layout=layout), metric, median=1.0)
    ]
    assert speaking == [("x", "row"), ("dy", "row"), ("w", "tile")]


def test_a_creeping_median_cannot_relax_the_act_level_beyond_twice() -> None:
    assert lines("floor", Slot("a", gemm="dgrad"), "relative_error", median=0.3)["act"] == pytest.approx(0.1)


def test_floor_moves_with_the_format() -> None:
    x, fprop = Slot("a", operand="x", layout="row", fmt="e5m2"), Slot("a", gemm="fprop", fmt="e5m2")
    assert lines("floor", x, "sqnr_db") == {"watch": 22.5, "act": 14.0}
    assert lines("floor", x, "tile_sqnr_p01_db") == {"watch": 18.0}
    assert lines("floor", fprop, "relative_error") == {"act": 0.1}
    assert lines("floor", x, "underflow_ratio") == {"watch": 0.005, "act": 0.2}
    assert FLOOR.matching(fprop)[0].level("instant", "e5m2") == pytest.approx(0.3)


def test_seed_is_one_pair_for_every_slot() -> None:
    slots = [Slot("a", gemm="wgrad"), *(Slot("a", operand=o, layout=at) for o in OPERANDS for at in LAYOUTS)]
    for slot in (*slots, None):
        assert lines("seed", slot, "underflow_ratio") == {"watch": 0.005, "act": 0.005}
        assert lines("seed", slot, "cosine") == {"watch": 0.995, "act": 0.995}
        assert lines("seed", slot, "gradient_distortion")["act"] == pytest.approx(0.005)
        assert lines("seed", slot, "sqnr_db") == {}


def test_autoswitch_is_the_published_rule_for_operands_and_says_nothing_of_results() -> None:
    slots = [Slot("a", operand=o, layout=at) for o in OPERANDS for at in LAYOUTS]
    for slot in slots:
        assert lines("autoswitch", slot, "underflow_ratio") == {"watch": 0.05, "act": 0.05}
        assert lines("autoswitch", slot, "mse") == {"watch": 1e-4, "act": 1e-4}
        assert lines("autoswitch", slot, "cosine") == {}
    assert AUTOSWITCH.matching(Slot("a", gemm="fprop")) == ()


@pytest.mark.parametrize(
    ("name", "column", "value", "gemms"),
    [
        ("x row", "underflow", 260, {"fprop"}),
        ("x row", "underflow", 240, set()),
        ("w tile", "sum_sq_err", 6.0, {"fprop", "dgrad"}),
        ("dy col", "sum_sq_err", 0.6, {"wgrad"}),
        ("dy col", "sum_sq_err", 0.4, set()),
    ],
)
def test_autoswitch_takes_the_gemms_that_read_the_operand_out_of_fp8_with_one_sample(
    name: str, column: str, value: float, gemms: set[str], slots: Any, observation: Any, follow: Any
) -> None:
    """Of 5000 elements: underflow at 5.2 and 4.8 %, mean squared error at 1.2e-3, 1.2e-4 and 8e-5; the rest is lossless."""
    quiet: dict[str, float] = {"count": 5000, "underflow": 0, "sum_sq_err": 0.0}
    ill: dict[Any, Any] = {
        (s.layer, f"{s.operand} {s.layout}"): dict(quiet) for s in slots if s.operand is not None
    }
    ill["blocks.0.o", name][column] = value
    config = PolicyConfig(preset="autoswitch", mode="enforce", budget_ratio=1.0)
    _, decided = follow([observation(0, slots, ill)], config)
    assert {d.layer for d in decided} == ({"blocks.0.o"} if gemms else set())
    mine = {d.target.gemm for d in decided if d.layer == "blocks.0.o" and d.action == "bf16_fallback"}
    assert mine == gemms


def test_seed_makes_no_exception_for_few_vanished_elements(slots: Any, observation: Any, follow: Any) -> None:
    few = {"count": 100, "underflow": 5, "zeros": 5, "rows": 1}
    config = PolicyConfig(preset="seed")
    seen = (observation(step, slots, {("blocks.0.o", "x row"): few}) for step in range(2))
    state, _ = follow(seen, config)
    assert {(alert.rule, alert.layer) for alert in state.alerts.values()} == {
        ("seed-underflow", "blocks.0.o")
    }


def test_every_slot_meets_at_most_one_rule_of_each_name() -> None:
    slots = [Slot("a", gemm=gemm) for gemm in ("fprop", "dgrad", "wgrad")]
    slots += [Slot("a", operand=operand, layout=layout) for operand in OPERANDS for layout in LAYOUTS]
    for preset in (FLOOR, SEED, AUTOSWITCH):
        for slot in slots:
            names = [rule.rule for rule in preset.matching(slot)]
            assert len(names) == len(set(names))
            assert names or (preset is AUTOSWITCH and slot.gemm)


def test_every_line_says_where_it_comes_from() -> None:
    for rule in (*FLOOR.rules, *SEED.rules, *AUTOSWITCH.rules):
        assert len(rule.origin) > 10


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UnknownPresetError, match=r"'ling'.*floor, seed, autoswitch"):
        get_preset("ling")
    assert get_preset(SEED) is SEED
