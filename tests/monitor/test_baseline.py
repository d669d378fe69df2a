"""Learned baselines: what they keep, what levels become of it, and which windows are refused."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.baseline import (
    LEAST_STEPS,
    SAMPLES_KEPT,
    Baseline,
    BaselineError,
    Learner,
    learn,
)
from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.levels import Healthy
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.policy import PolicyConfig
from fp8_safeguard.monitor.signals import Measures, compile_slots, find_breaches
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.thresholds import FLOOR, get_preset, thresholds_for

HEAD = Slot("lm_head", operand="dy", layout="row")
QUIET = Slot("blocks.0.o", operand="dy", layout="row")
X_ROW = Slot("blocks.0.o", operand="x", layout="row")
DGRAD = Slot("lm_head", gemm="dgrad")
COUNT = 100_000


def stats(slot: Slot, value: float, **more: Any) -> TensorStats:
    """A slot with that underflow ratio, or relative error."""
    if slot.gemm is not None:
        sums = {"sum_sq": 1.0, "sum_sq_q": 1.0, "sum_sq_err": value**2}
        return TensorStats(**{"count": 4096, "nan": 0, "inf": 0, "amax": 1.0, **sums, **more})
    gone = round(value * COUNT)
    fields = {"count": COUNT, "zeros": gone, "underflow": gone, "saturated": 0, "nan": 0, "inf": 0, "rows": 64,
              "rows_flushed": 0, "amax": 1.0, "sum_sq": 1.0, "sum_sq_q": 1.0, "sum_sq_err": 1e-3, "sum_4th": 3.0 / COUNT}  # fmt: skip
    return TensorStats(**{**fields, **more})


def seen(step: int, values: dict[Slot, float], run: dict[str, float] | None = None) -> StepObservation:
    table = StatsTable.from_stats([stats(slot, value) for slot, value in values.items()])
    return StepObservation(
        step=step, slots=tuple(values), stats=table, run={"loss": 2.0} if run is None else run
    )


def window(values: dict[Slot, list[float]], **options: Any) -> Baseline:
    """The baseline of so many steps."""
    steps = max(map(len, values.values()))
    return learn(
        [seen(500 + n, {slot: row[n] for slot, row in values.items()}) for n in range(steps)], **options
    )


@pytest.mark.parametrize("steps", [20, 99, 100, 101, SAMPLES_KEPT, SAMPLES_KEPT + 1, 1500])
def test_counts_and_worst_values_are_exact_and_quantiles_are_of_evenly_spaced_samples(steps: int) -> None:
    values = np.random.default_rng(steps).permutation(np.arange(steps)) / COUNT
    baseline = window({QUIET: values.tolist()})
    found = baseline.healthy(QUIET, "underflow_ratio")
    assert found is not None
    stride = 1
    while -(-steps // stride) >= SAMPLES_KEPT:
        stride *= 2
    kept = values[::stride]
    assert found.samples == steps
    assert found.extremum == pytest.approx(values.max(), rel=1e-5)
    assert found.median == pytest.approx(np.median(kept), rel=1e-5)
    assert found.high == pytest.approx(np.quantile(kept, 0.99, method="higher"), rel=1e-5)
    assert (baseline.from_step, baseline.to_step, baseline.steps) == (500, 499 + steps, steps)


def test_what_is_bad_when_low_keeps_its_lowest() -> None:
    rng = np.random.default_rng(3)
    noise = rng.uniform(5e-4, 2e-3, 40)
    learner = Learner()
    for step, power in enumerate(noise):
        table = StatsTable.from_stats([stats(QUIET, 0.0, sum_sq_err=float(power))])
        learner.add(StepObservation(step=step, slots=(QUIET,), stats=table))
    found = learner.finish().healthy(QUIET, "sqnr_db")
    assert found is not None
    decibels = -10 * np.log10(noise)
    assert found.extremum == pytest.approx(decibels.min(), rel=1e-5)
    assert found.high == pytest.approx(decibels.min(), rel=1e-5)
    assert found.median == pytest.approx(np.median(decibels), rel=1e-5)


def test_experts_are_one_family_and_the_worst_of_a_step_counts() -> None:
    experts = [dataclasses.replace(QUIET, expert=number) for number in (1, 2)]
    small = dataclasses.replace(QUIET, expert=3)
    learner = Learner()
    for step in range(30):
        rows = [stats(experts[0], 0.001), stats(experts[1], 0.004), stats(small, 0.9, count=4095)]
        table = StatsTable.from_stats(rows)
        learner.add(StepObservation(step=step, slots=(*experts, small), stats=table))
    found = learner.finish().healthy(dataclasses.replace(QUIET, expert=77), "underflow_ratio")
    assert found == Healthy(30, 0.004, 0.004, 0.004)


def test_the_json_form_gives_the_same_baseline_and_the_order_of_slots_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    values = {slot: rng.uniform(0.01, 0.02, 25).tolist() for slot in (HEAD, QUIET, DGRAD)}
    baseline = window(values, run="a", attempt="3", preset="seed")
    again = Baseline.from_dict(json.loads(json.dumps(baseline.to_dict(), allow_nan=False)))
    turned = window(dict(reversed(values.items())), run="a", attempt="3", preset="seed")
    assert again == baseline == turned
    assert hash(again) == hash(baseline)
    assert window(values, run="b") != baseline
    assert baseline.origin == "learned from run a, steps 500 to 524"


@pytest.mark.parametrize("document", [None, [], {}, {"schema": 2}, {"schema": 1}, "text"])
def test_what_is_no_baseline_is_refused(document: Any) -> None:
    with pytest.raises(BaselineError):
        Baseline.from_dict(document)


@pytest.mark.parametrize(
    "row", [[0, 1.0, 1.0, 1.0], [3, 1.0, 1.0], [3, math.nan, 1.0, 1.0], "ab", [1, None, 1, 1]]
)
def test_a_value_that_is_none_is_refused(row: Any) -> None:
    document = window({QUIET: [0.001] * LEAST_STEPS}).to_dict()
    document["families"][QUIET.family]["metrics"]["amax"] = row
    with pytest.raises(BaselineError, match="incomplete"):
        Baseline.from_dict(document)


def lines(slot: Slot, metric: str, baseline: Baseline | None = None, **options: Any) -> dict[str, float]:
    return {
        str(line["severity"]): float(line["value"])
        for line in thresholds_for("floor", slot, metric, baseline=baseline, **options)
    }


@pytest.mark.parametrize(
    ("healthy", "watch"),
    [
        # Half-way to 1 where half as much again would be more than everything.
        (0.45, 0.675), (0.8, 0.9),
        # Above the preset's 0.5 % by the margin; near it; where both meet.
        (0.02, 0.03), (0.004, 0.006), (0.1 / 30, 0.005),
        # Twenty times the quantile, not above the preset's level, and not below 0.1 %.
        (0.0002, 0.004), (0.0001, 0.002), (0.00004, 0.001), (0.0, 0.001),
    ],
)  # fmt: skip
def test_a_watch_level_follows_what_is_healthy_here(healthy: float, watch: float) -> None:
    baseline = window({HEAD: [healthy] * 30})
    assert lines(HEAD, "underflow_ratio", baseline)["watch"] == pytest.approx(watch, rel=1e-5)
    assert lines(HEAD, "underflow_ratio")["watch"] == 0.005


def test_an_act_level_never_falls_and_rises_to_twice_the_presets_at_most() -> None:
    for healthy, act in ((0.0, 0.2), (0.1, 0.2), (0.16, 0.24), (0.5, 0.4)):
        baseline = window({X_ROW: [healthy] * 30})
        assert lines(X_ROW, "underflow_ratio", baseline)["act"] == pytest.approx(act, rel=1e-5)
    for error, act in ((0.01, 0.05), (0.03, 0.06), (0.045, 0.09), (0.5, 0.1)):
        baseline = window({DGRAD: [error] * 30})
        assert lines(DGRAD, "relative_error", baseline)["act"] == pytest.approx(act, rel=1e-5)


def test_levels_in_db_and_of_a_cosine_move_in_the_amplitude_of_the_error() -> None:
    learner = Learner()
    for step in range(30):
        power = 10 ** (-26.0 / 10)
        # A cosine of 0.99: sum_sq and sum_sq_q are 1, so it is 1 - sum_sq_err / 2.
        row = stats(X_ROW, 0.0, sum_sq_err=power)
        learner.add(StepObservation(step=step, slots=(X_ROW,), stats=StatsTable.from_stats([row])))
    baseline = learner.finish()
    expected = 26.0 - 20 * math.log10(1.2)
    assert lines(X_ROW, "sqnr_db", baseline) == {
        "watch": pytest.approx(expected, rel=1e-4),
        "act": pytest.approx(20.0),
    }
    seed = thresholds_for("seed", X_ROW, "cosine", baseline=baseline)
    assert [line["value"] for line in seed] == [pytest.approx(0.995), pytest.approx(0.995)]


def test_too_few_samples_of_a_slot_and_another_format_change_nothing() -> None:
    few = window({HEAD: [0.45] * 30, QUIET: [0.45] * 19 + [0.0] * 11})
    rare = Learner()
    for step in range(30):
        rare.add(seen(step, {HEAD: 0.45, QUIET: 0.45} if step < 19 else {HEAD: 0.45}))
    plain = lines(QUIET, "underflow_ratio")
    assert lines(QUIET, "underflow_ratio", few) != plain
    assert lines(QUIET, "underflow_ratio", rare.finish()) == plain
    coarse = dataclasses.replace(HEAD, fmt="e5m2")
    assert lines(coarse, "underflow_ratio", few) == lines(coarse, "underflow_ratio")


def test_only_a_level_that_moved_says_where_it_was_learned() -> None:
    baseline = window({X_ROW: [0.02] * 30}, run="good")
    origins = {
        line["severity"]: line["origin"]
        for line in thresholds_for("floor", X_ROW, "underflow_ratio", baseline=baseline)
    }
    assert origins["watch"] == "learned from run good, steps 500 to 529"
    assert "learned" not in str(origins["act"])


def breaches(
    values: dict[Slot, float], baseline: Baseline | None, preset: str = "floor"
) -> list[tuple[str, str]]:
    observation = seen(0, values)
    compiled = compile_slots(observation.slots, get_preset(preset), baseline)
    medians = compiled.with_learned(np.full((len(compiled.own), 2), np.nan))
    found = find_breaches(compiled, Measures(observation.stats), medians)
    return [(breach.rule.rule, breach.severity) for breach in found]


def test_what_is_healthy_here_breaches_nothing_and_what_is_not_still_does() -> None:
    baseline = window({HEAD: [0.45] * 30, QUIET: [2e-5] * 30, DGRAD: [0.02] * 30})
    assert breaches({HEAD: 0.45}, None) == [("underflow", "watch")]
    assert breaches({HEAD: 0.45}, baseline) == []
    assert breaches({HEAD: 0.68}, baseline) == [("underflow", "watch")]
    # Earlier than the preset, which says nothing yet.
    assert breaches({QUIET: 0.002}, None) == []
    assert breaches({QUIET: 0.002}, baseline) == [("underflow", "watch")]
    # A median from the first sample: 4.5 % is under the act level, and far over 1.3 times 2 %.
    assert breaches({DGRAD: 0.045}, None) == []
    assert breaches({DGRAD: 0.045}, baseline) == [("gemm-error", "watch")]
    assert breaches({DGRAD: 0.039}, baseline) == []
    assert breaches({DGRAD: 0.2}, baseline) == [("gemm-error", "act")]
    # A slot that was always 8 % wrong acts at twice the preset's level, not at twice its own median.
    assert breaches({DGRAD: 0.101}, window({DGRAD: [0.08] * 30})) == [("gemm-error", "act")]


def test_a_breach_of_a_learned_level_says_so() -> None:
    baseline = window({QUIET: [2e-5] * 30}, run="good")
    observation = seen(0, {QUIET: 0.002, X_ROW: 0.02})
    compiled = compile_slots(observation.slots, FLOOR, baseline)
    medians = np.full((2, 2), np.nan)
    found = {breach.slot: breach for breach in find_breaches(compiled, Measures(observation.stats), medians)}
    assert found[QUIET].rule.origin.startswith("learned from run good, steps 500 to 529; ")
    assert found[QUIET].limit == pytest.approx(0.001)
    assert "learned" not in found[X_ROW].rule.origin


@pytest.mark.parametrize("preset", ["floor", "seed", "autoswitch"])
def test_the_vectorised_levels_are_those_of_the_lines(preset: str) -> None:
    """Every slot at 200 values from healthy to broken: what find_breaches says, against thresholds_for one by one."""
    rng = np.random.default_rng(7)
    slots = [HEAD, QUIET, X_ROW, DGRAD, Slot("o", gemm="wgrad"), Slot("w", operand="w", layout="tile")]
    baseline = window(
        {slot: (10 ** rng.uniform(-5, -0.4) * rng.uniform(0.5, 1, 40)).tolist() for slot in slots}
    )
    for value in np.geomspace(1e-5, 0.999, 200).tolist():
        observation = seen(0, dict.fromkeys(slots, value))
        measures = Measures(observation.stats)
        compiled = compile_slots(observation.slots, get_preset(preset), baseline)
        medians = compiled.with_learned(np.full((len(compiled.own), 2), np.nan))
        found = {
            (breach.slot, breach.rule.metric, breach.severity)
            for breach in find_breaches(compiled, measures, medians)
        }
        expected = set()
        for at, slot in enumerate(slots):
            for rule in get_preset(preset).matching(slot):
                number = float(measures[rule.metric][at])
                limits = {
                    line["severity"]: float(line["value"])
                    for line in thresholds_for(preset, slot, rule.metric, baseline=baseline)
                }
                beyond = {
                    severity
                    for severity, limit in limits.items()
                    if (number > limit if rule.above else number < limit)
                }
                if rule.metric == "underflow_ratio" and measures["underflow"][at] < rule.min_underflow:
                    continue
                if beyond:
                    expected.add((slot, rule.metric, "act" if "act" in beyond else "watch"))
        assert found == expected


def test_a_pair_rule_alone_is_lowered_to_its_learned_level(
    observation: Callable[..., StepObservation], slots: tuple[Slot, ...], follow: Any
) -> None:
    """Activations that are flushed by 45 % in health stay beyond the act level, whose weights would have to agree."""
    ill = {("blocks.1.qkv", "x row"): {"underflow_ratio": 0.45}}
    baseline = learn([observation(step, slots, ill) for step in range(30)])
    steps = [observation(step, slots, ill) for step in range(6)]
    plain, _ = follow(steps, PolicyConfig(mode="enforce"))
    state, decisions = follow(steps, PolicyConfig(mode="enforce", baseline=baseline))
    assert [key for key in plain.alerts if key.startswith("underflow|")] == ["underflow|blocks.1.qkv"]
    assert not state.alerts
    assert not decisions


def refused(observations: list[StepObservation]) -> str:
    with pytest.raises(BaselineError) as raised:
        learn(observations)
    return str(raised.value)


def test_a_window_that_is_short_or_not_healthy_is_refused_with_the_value() -> None:
    healthy = [seen(step, {QUIET: 0.001}) for step in range(30)]
    assert "holds 19 sampled steps and needs 20" in refused(healthy[:19])
    assert "holds no sampled step" in refused([]) or "0 sampled steps" in refused([])
    learn(healthy)
    broken = StatsTable.from_stats([stats(QUIET, 0.001, nan=3)])
    bad = [
        *healthy[:7],
        StepObservation(step=7, slots=(QUIET,), stats=broken, run={"loss": 2.0}),
        *healthy[8:],
    ]
    assert "blocks.0.o dy row has 3 non-finite values at step 7" in refused(bad)
    lost = [*healthy[:9], seen(9, {QUIET: 0.001}, {"loss": math.nan}), *healthy[10:]]
    assert "loss is nan at step 9" in refused(lost)
    skipped = [*healthy[:9], seen(9, {QUIET: 0.001}, {}), *healthy[10:]]
    assert "1 of 30 steps have no loss" in refused(skipped)


def test_the_memory_of_learning_does_not_grow_with_the_steps() -> None:
    learner = Learner()
    sizes = []
    for step in range(3 * SAMPLES_KEPT):
        learner.add(seen(step, {QUIET: 0.001, DGRAD: 0.03}))
        sizes.append(learner._kept.nbytes)
    assert len(set(sizes)) == 1
    assert len(json.dumps(learner.finish().to_dict())) < 2000
