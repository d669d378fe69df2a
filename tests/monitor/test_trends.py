"""What is remembered of slow signals: bounded, packed, and not taught by faults."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.series import MOST_SERIES, RECENT, RELEARN_SAMPLES, Series
from fp8_safeguard.monitor.trends import Trends

LOSS = ("loss", "(run)")
NORM = ("gradient_norm", "(run)")


def after(values: Any, key: tuple[str, str] = NORM) -> Series:
    """A series of these values."""
    series = Series()
    for value in values:
        series = series.added({key: float(value)})
    return series


def test_a_median_and_its_spread_are_those_of_the_last_eight() -> None:
    values = np.random.default_rng(0).uniform(1.0, 2.0, 30)
    series = after(values)
    assert series.window(*NORM) == pytest.approx(values[-RECENT:], rel=1e-6)
    assert series.median(*NORM) == pytest.approx(np.median(values[-RECENT:]), rel=1e-6)
    spread = np.median(np.abs(values[-RECENT:] - np.median(values[-RECENT:])))
    assert series.deviation(*NORM) == pytest.approx(spread, rel=1e-5)
    odd = after(values[:5])
    assert odd.median(*NORM) == pytest.approx(np.median(values[:5]), rel=1e-6)


def test_few_values_say_nothing_and_an_unknown_series_neither() -> None:
    assert math.isnan(after([1.0, 1.0, 1.0]).median(*NORM))
    assert math.isnan(after([1.0, 1.0, 1.0]).deviation(*NORM))
    assert math.isnan(Series().median(*NORM))
    assert math.isnan(after([1.0] * 8).slow(*NORM))
    assert Series().growth(*NORM) == 0.0
    assert len(Series().window(*NORM)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_passed_over(bad: float) -> None:
    assert after([1.0, bad, 1.1, bad]) == after([1.0, 1.1])


def test_a_fault_teaches_no_norm_but_what_stays_is_one() -> None:
    healthy = [1.0] * 10
    assert after([*healthy, *[9.0] * RELEARN_SAMPLES]).median(*NORM) == 1.0
    assert after([*healthy, *[9.0] * (RELEARN_SAMPLES + 8)]).median(*NORM) == 9.0
    assert after([*healthy, *[0.1] * 8]).median(*NORM) == 1.0
    assert after([*healthy, *[3.0] * 8]).median(*NORM) == 3.0
    # A loss is steadier: twice its median is no norm.
    assert after([*healthy, *[2.5] * 8], LOSS).median(*LOSS) == 1.0
    # One good value in between, and the count begins again.
    broken = [*healthy, *[9.0] * 20, 1.0, *[9.0] * 20]
    assert after(broken).median(*NORM) == 1.0


def test_vanishing_values_are_as_good_as_their_floor() -> None:
    key = ("dy_col_underflow", "l")
    assert after([1e-6, 1e-3, 1e-7, 2e-3, 3e-3], key).median(*key) == pytest.approx(1e-3)


def test_the_sum_grows_with_a_lasting_rise_alone() -> None:
    assert after([1.0] * 30).growth(*NORM) == 0.0
    assert after([*[1.0] * 30, 50.0, *[1.0] * 4]).growth(*NORM) == 0.0
    assert after([*[1.0] * 30, *[1.9] * 60]).growth(*NORM) == 0.0
    rising = after([*[1.0] * 30, *(1.04 ** np.arange(60))])
    assert rising.growth(*NORM) > 6.0
    # Against a sum in plain Python: what lies above twice the slow mean, at most 1 - log 2 a sample.
    slow, total, values = 0.0, 0.0, [*[1.0] * 30, *(1.02 ** np.arange(40)).tolist()]
    for count, value in enumerate(values):
        step = max(-1.0, min(1.0, math.log(value) - slow))
        if count >= 16:
            total = max(0.0, total + step - math.log(2.0))
        slow += (math.log(value) - slow if count < RECENT else step) / min(count + 1, 64)
    assert after(values).growth(*NORM) == pytest.approx(total, abs=1e-5)
    assert after(values).slow(*NORM) == pytest.approx(math.exp(slow), rel=1e-5)


def test_it_is_packed_bounded_and_comes_back_equal() -> None:
    found = {(name, f"model.layers.{at}.x"): 1.0 / (at + 1) for name in ("a", "b") for at in range(40)}
    series = Series()
    for _ in range(10):
        series = series.added(found)
    again = Series.from_dict(json.loads(json.dumps(series.to_dict())))
    assert again == series
    assert again.added(found) == series.added(found)
    assert series != Series()
    assert Series.from_dict({}) == Series()
    assert len(json.dumps(series.to_dict())) < 90 * len(found)
    many = {("a", f"l{at}"): 1.0 for at in range(MOST_SERIES + 10)}
    full = Series().added(many)
    assert len(full.rows) == MOST_SERIES
    assert full.added({("a", "zzz"): 1.0}).rows == full.rows


def test_the_order_of_what_comes_and_when_it_came_first_leaves_no_trace_in_the_rows() -> None:
    found = {("b", "x"): 1.0, ("a", "y"): 2.0, ("a", "x"): 3.0}
    turned = dict(reversed(found.items()))
    assert Series().added(found).to_dict() == Series().added(turned).to_dict()
    late = Series().added({("b", "x"): 1.0}).added(found)
    assert list(late.rows) == sorted(found)
    assert late.window("b", "x").tolist() == [1.0, 1.0]


def test_what_a_policy_remembers_survives_storage_at_every_step(
    slots: Any, observation: Any, drift: Any
) -> None:
    config = PolicyConfig(run="r", mode="observe")
    state, stored = PolicyState(), PolicyState()
    for at in range(24):
        ill = drift(at - 10) if at >= 10 else {}
        run = {"loss": 2.0 + 0.1 * (at % 3), "gradient_norm": math.nan if at == 5 else 1.0}
        scalars = {("blocks.0.mlp_norm", "gain_amax"): 1.0 if at < 12 else 64.0}
        seen = observation(at, slots, ill, run=run, scalars=scalars)
        state, made = decide(state, seen, config)
        stored, again = decide(PolicyState.from_dict(json.loads(json.dumps(stored.to_dict()))), seen, config)
        assert (made, state.trends) == (again, stored.trends)
    assert any(lasting.told for lasting in state.trends.causes.values())
    assert Trends.from_dict({}) == Trends()


def test_layers_in_an_fp8_fault_teach_nothing_of_their_energy(slots: Any, observation: Any) -> None:
    config, state = PolicyConfig(run="r", mode="observe"), PolicyState()
    for at in range(8):
        state, _ = decide(state, observation(at, slots), config)
    before = state.trends.series.window("fprop_energy", "blocks.2.o").tolist()
    ill = {("blocks.0.qkv", "fprop"): {"error": 7.0, "sum_sq_q": 64e4},
           ("blocks.2.o", "fprop"): {"sum_sq": 2e4, "sum_sq_q": 2e4}}  # fmt: skip
    state, _ = decide(state, observation(8, slots, ill), config)
    assert state.trends.series.window("fprop_energy", "blocks.2.o").tolist() == before
    broken = {("blocks.0.qkv", "fprop"): {"nan": 3}}
    state, _ = decide(state, observation(9, slots, broken, run={"loss": 1.0}), config)
    assert math.isnan(state.trends.series.median(*LOSS))
    assert len(state.trends.series.window(*LOSS)) == 0
