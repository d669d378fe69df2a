"""Operands that were sampled by tiles: what a sample with nulls says, and what it leaves open."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.budget import Costs
from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide
from fp8_safeguard.monitor.sight import Sight
from fp8_safeguard.monitor.signals import Measures, compile_slots, history_values
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import ALL_COLUMNS, HISTOGRAM
from fp8_safeguard.monitor.thresholds import get_preset

ENFORCE = PolicyConfig(run="r", mode="enforce")
LAYER = "blocks.3.qkv"
TOLD = ("count", "zeros", "underflow", "saturated", "nan", "inf")


@pytest.fixture
def by_tiles(observation: Any) -> Callable[..., StepObservation]:
    """An observation in which the operands of some layers (all, if none is named) were sampled by tiles."""

    def make(step: int, slots: Any, ill: Any = None, layers: tuple[str, ...] = ()) -> StepObservation:
        seen: StepObservation = observation(step, slots, ill)
        stats = []
        for at, slot in enumerate(slots):
            whole = seen.stats.stats(at)
            if slot.operand is not None and (not layers or slot.layer in layers):
                rates = {name: round((whole.column(name) or 0) / 17) for name in TOLD}
                nothing = {"histogram" if name == HISTOGRAM else name: None for name in ALL_COLUMNS}
                whole = dataclasses.replace(whole, **{**nothing, **rates})
            stats.append(whole)
        return dataclasses.replace(seen, stats=StatsTable.from_stats(stats))

    return make


def alerts(state: PolicyState) -> list[tuple[str, str | None]]:
    return [(alert.rule, alert.layer) for alert in state.alerts.values()]


def test_an_underflow_is_seen_in_tiles_and_resolves_in_tiles(slots: Any, by_tiles: Any, follow: Any) -> None:
    ill = {("blocks.0.o", "dy row"): {"underflow_ratio": 0.006}}
    state, _ = follow(by_tiles(step, slots, ill) for step in range(2))
    assert alerts(state) == [("underflow", "blocks.0.o")]
    state, _ = follow((by_tiles(2 + step, slots) for step in range(3)), state=state)
    assert alerts(state) == []


@pytest.mark.parametrize(
    ("operand", "ill", "rule"),
    [
        ("dy row", {"sqnr_db": 18.0}, "sqnr"),
        ("dy row", {"histogram": (0, 0, 100, *[0] * 13)}, "tile-sqnr"),
        ("dy row", {"rows_flushed": 900}, "rows-flushed"),
    ],
)
def test_what_tiles_cannot_show_neither_resolves_nor_extends(
    slots: Any, observation: Any, by_tiles: Any, follow: Any, operand: str, ill: Any, rule: str
) -> None:
    wrong = {("blocks.0.o", operand): ill}
    state, _ = follow(observation(step, slots, wrong) for step in range(2))
    assert (rule, "blocks.0.o") in alerts(state)
    before = dict(state.evidence)
    state, _ = follow((by_tiles(2 + step, slots) for step in range(20)), state=state)
    assert (rule, "blocks.0.o") in alerts(state)
    assert {key: found for key, found in state.evidence.items() if key.startswith(f"{rule}|")} == {
        key: found for key, found in before.items() if key.startswith(f"{rule}|")
    }
    state, _ = follow((observation(30 + step, slots) for step in range(3)), state=state)
    assert alerts(state) == []


def test_a_nan_is_seen_in_tiles_and_only_a_whole_sample_says_that_it_is_gone(
    slots: Any, observation: Any, by_tiles: Any, follow: Any
) -> None:
    state, _ = follow([by_tiles(0, slots, {(LAYER, "x row"): {"nan": 170}})])
    assert alerts(state) == [("non-finite", LAYER)]
    state, _ = follow((by_tiles(1 + step, slots) for step in range(10)), state=state)
    assert alerts(state) == [("non-finite", LAYER)]
    state, _ = follow((observation(20 + step, slots) for step in range(3)), state=state)
    assert alerts(state) == []


def test_a_companion_of_a_nan_waits_for_a_whole_sample_too(
    slots: Any, observation: Any, by_tiles: Any, follow: Any
) -> None:
    ill = {(LAYER, "x row"): {"nan": 170}, (LAYER, "w tile"): {"inf": 34}}
    state, _ = follow([observation(0, slots, ill)])
    follow_up = [by_tiles(1 + step, slots, layers=(LAYER,)) for step in range(6)]
    state, _ = follow(follow_up, state=state)
    (alert,) = state.alerts.values()
    assert {signal.slot.operand for signal in alert.live} == {"x", "w"}


def test_baselines_are_made_of_whole_samples_alone(
    slots: Any, observation: Any, by_tiles: Any, follow: Any
) -> None:
    whole, _ = follow(observation(step, slots) for step in range(6))
    mixed, _ = follow(
        seen
        for step in range(6)
        for seen in (
            observation(3 * step, slots),
            by_tiles(3 * step + 1, slots),
            by_tiles(3 * step + 2, slots),
        )
    )
    operands = [slot.key for slot in slots if slot.operand is not None]
    assert np.array_equal(mixed.history.medians(operands), whole.history.medians(operands))
    assert not np.isnan(whole.history.medians(operands)).any()
    only, _ = follow(by_tiles(step, slots) for step in range(12))
    assert np.isnan(only.history.medians(operands)).all()


def test_a_jump_is_judged_by_whole_samples(slots: Any, observation: Any, by_tiles: Any, follow: Any) -> None:
    state, _ = follow(
        seen for step in range(8) for seen in (observation(2 * step, slots), by_tiles(2 * step + 1, slots))
    )
    assert alerts(state) == []
    state, _ = follow(
        [observation(20 + step, slots, {(LAYER, "x row"): {"amax": 5000.0}}) for step in range(2)],
        state=state,
    )
    assert ("amax-jump", LAYER) in alerts(state)


def test_a_fallback_is_not_restored_on_tiles_and_not_kept_from_it(
    slots: Any, observation: Any, by_tiles: Any, follow: Any, asked: Any, drift: Any
) -> None:
    config = dataclasses.replace(ENFORCE, dwell_steps=10, restore_samples=3)
    course = [observation(at, slots, drift(at)) for at in (0, 5, 10, 20)]
    state, decisions = follow(course, config)
    fallen = set(asked(decisions))
    assert (LAYER, "fprop", "bf16_fallback") in fallen
    state, decisions = follow((by_tiles(30 + step, slots) for step in range(10)), config, state)
    assert decisions == []
    # A rate above its level in the tiles is harm, and starts the count again.
    seen = [
        observation(50, slots),
        observation(51, slots),
        by_tiles(52, slots, {(LAYER, "x row"): {"underflow_ratio": 0.03}}),
        observation(53, slots),
        observation(54, slots),
    ]
    state, decisions = follow(seen, config, state)
    assert (LAYER, "fprop", "restore") not in asked(decisions)
    state, decisions = follow([observation(55, slots)], config, state)
    assert (LAYER, "fprop", "restore") in asked(decisions)


def test_the_cost_of_a_layer_is_learned_from_whole_operands(
    slots: Any, observation: Any, by_tiles: Any
) -> None:
    whole, tiles = observation(0, slots), by_tiles(0, slots)
    known = Costs().learned(whole.slots, whole.stats)
    first = Costs().learned(tiles.slots, tiles.stats)
    assert set(first.layers) == set(known.layers)
    assert not any(first.layers.values())
    assert first.learned(whole.slots, whole.stats).layers == known.layers
    assert known.learned(tiles.slots, tiles.stats).layers == known.layers
    # Where x has few tiles and dy many, only x is whole.
    half = dataclasses.replace(tiles, stats=_with_whole_x(whole, tiles))
    assert not any(Costs().learned(half.slots, half.stats).layers.values())


def _with_whole_x(whole: StepObservation, tiles: StepObservation) -> StatsTable:
    return StatsTable.from_stats(
        [(whole if slot.operand == "x" else tiles).stats.stats(at) for at, slot in enumerate(whole.slots)]
    )


class TestSight:
    def test_a_rule_is_shown_if_all_its_columns_are(
        self, slots: Any, observation: Any, by_tiles: Any
    ) -> None:
        compiled = compile_slots(slots, get_preset("floor"))
        whole = Sight(compiled, observation(0, slots).stats)
        tiles = Sight(compiled, by_tiles(0, slots, layers=(LAYER,)).stats)
        here = Slot(LAYER, operand="dy", layout="row").family
        other = Slot("blocks.0.o", operand="dy", layout="row").family
        gemm = Slot(LAYER, gemm="fprop").family
        shown = {
            rule: (whole.shows(rule, here), tiles.shows(rule, here), tiles.shows(rule, other))
            for rule in ("underflow", "saturation", "sqnr", "tile-sqnr", "rows-flushed", "amax-jump")
        }
        both, not_here = (True, True, True), (True, False, True)
        assert shown == {
            **dict.fromkeys(("underflow", "saturation"), both),
            **dict.fromkeys(("sqnr", "tile-sqnr", "rows-flushed", "amax-jump"), not_here),
        }
        assert tiles.shows("gemm-error", gemm)
        assert not tiles.shows("underflow", Slot("nobody", operand="x", layout="row").family)
        assert (whole.shows_layer(LAYER), tiles.shows_layer(LAYER), tiles.shows_layer("blocks.0.o")) == (
            True, False, True,
        )  # fmt: skip
        assert not whole.shows_layer("nobody")

    def test_the_history_takes_no_null(self, slots: Any, by_tiles: Any) -> None:
        compiled = compile_slots(slots, get_preset("floor"))
        values = history_values(compiled, Measures(by_tiles(0, slots).stats))
        assert np.isnan(values[~compiled.is_gemm]).all()


def test_a_step_of_tiles_alone_decides_nothing_by_itself(slots: Any, by_tiles: Any) -> None:
    state, decisions = decide(PolicyState(), by_tiles(0, slots), ENFORCE)
    assert decisions == ()
    assert state.alerts == {}
