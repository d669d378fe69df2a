"""The overhead budget on simulated runs: what it spends, what it measures, and that it keeps to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from fp8_safeguard.hooks.budget import LEARNING_SAMPLES, ROTATION_SAMPLES, TILE_STRIDE, Budget, Pace, Schedule
from fp8_safeguard.hooks.costs import Costs, Latest
from fp8_safeguard.hooks.meter import LayerSeconds

STEP = 0.1
IDLE = 20e-6


@dataclass
class Run:
    """A training run on a clock of its own; what it did is in the fields."""

    layers: int = 8
    every: int = 10
    limit: float | None = 0.01
    full: float = 0.3
    """A whole sample over a step."""
    rows: float = 0.4
    """Share of the recomputed GEMMs in it."""
    tiles: float = 0.1
    """Cost of tiles over that of whole operands."""
    noise: float = 0.05
    sizes: tuple[float, ...] = ()
    cold: float = 0.0
    """Seconds that the first sample takes besides."""
    urgent: tuple[str, ...] = ()
    stall: Callable[[int], float] = lambda step: 0.0
    """Seconds that pass after a step without training."""
    speed: Callable[[int], float] = lambda step: 1.0
    sampled: list[int] = field(default_factory=list)
    in_full: dict[str, list[int]] = field(default_factory=dict)
    judged: dict[str, list[int]] = field(default_factory=dict)
    schedules: list[tuple[int, Schedule]] = field(default_factory=list)
    spent: float = 0.0
    trained: float = 0.0
    tail: float = 0.0

    def __post_init__(self) -> None:
        self.names = [f"layer{i}" for i in range(self.layers)]
        self.budget = Budget(self.names, self.every, self.limit)
        self.random = random.Random(0)
        total = sum(self.sizes) or self.layers
        self.shares = [size / total for size in self.sizes or [1.0] * self.layers]
        self.step = 0
        self.in_full = {name: [] for name in self.names}
        self.judged = {name: [] for name in self.names}

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self._one()
        return self

    @property
    def ratio(self) -> float:
        return self.spent / self.trained

    @property
    def report(self) -> dict[str, Any]:
        return self.budget.report()

    def longest_wait(self, name: str, since: int) -> int:
        """Steps between two full measurements of a layer, at most, from that step on."""
        steps = [since, *(step for step in self.in_full[name] if step >= since), self.step]
        return max(after - before for before, after in itertools.pairwise(steps))

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.1, 1.0 + self.noise * self.random.gauss(0.0, 1.0))

    def _one(self) -> None:
        net, spent, layers = self._noisy(STEP * self.speed(self.step)), IDLE, None
        if self.budget.due(self.step) and self.budget.admits(self.urgent):
            picked = (self.names[len(self.sampled) % self.layers],)
            self.budget.begin(picked)
            layers = {name: self._measured(name, picked) for name in self.names}
            spent += sum(took.total for took in layers.values()) + 1e-4
            spent += self.cold if not self.sampled else 0.0
            self.sampled.append(self.step)
        self.budget.end_step(net + spent + self.stall(self.step), spent, layers)
        if not self.schedules or self.schedules[-1][1] != self.budget.schedule:
            self.schedules.append((self.step, self.budget.schedule))
        self.spent += spent
        self.trained += net
        self.step += 1

    def _measured(self, name: str, picked: tuple[str, ...]) -> LayerSeconds:
        scope = self.budget.scope(name)
        whole = self.full * STEP * self.shares[self.names.index(name)] * self.speed(self.step)
        operands, judge = whole * (1.0 - self.rows), 0.0
        if scope.full:
            self.in_full[name].append(self.step)
        else:
            operands = operands * self.tiles + 2e-5
        if scope.judged:
            self.judged[name].append(self.step)
            judge = whole * self.rows * (2.5 if name in picked else 1.0)
        return LayerSeconds(self._noisy(operands), self._noisy(judge))


RUNS: dict[str, dict[str, Any]] = {
    "a sample takes 30 % of a step": {},
    "a sample takes three steps": {"full": 3.0, "layers": 64},
    "every step is asked for": {"every": 1, "layers": 32},
    "one layer is as large as the others together": {"sizes": (1,) * 15 + (15,), "layers": 16},
    "measurements scatter": {"noise": 0.3},
    "tiles save nothing": {"tiles": 1.0},
    "a single layer": {"layers": 1},
    "a tenth of the budget": {"limit": 0.001},
    "the first sample compiles for five seconds": {"cold": 5.0},
    "urgent layers": {"urgent": ("layer3", "layer5"), "full": 3.0},
}


@cache
def long_run(name: str) -> Run:
    """12,000 steps of that run, the spending of its second half in `tail`; nobody changes it."""
    run = Run(**RUNS[name]).go(6000)
    spent, trained = run.spent, run.trained
    run.go(6000)
    run.tail = (run.spent - spent) / (run.trained - trained)
    return run


@pytest.mark.parametrize("name", RUNS)
class TestItKeepsToTheBudget:
    def test_the_ratio_comes_down_to_the_budget_and_uses_it(self, name: str) -> None:
        run = long_run(name)
        limit = run.budget.limit
        assert limit is not None
        assert run.ratio <= limit
        # As measured by the budget itself, which leaves out the first three steps.
        assert run.report["overhead_ratio"] == pytest.approx(run.ratio, rel=0.02)
        # An interval is twice the next shorter one: at worst half of the budget stays unused.
        assert 0.35 * limit <= run.tail <= limit

    def test_every_layer_has_its_turn_as_reported(self, name: str) -> None:
        run = long_run(name)
        since = max(run.schedules[-1][0], 3000)
        waits = {layer: run.longest_wait(layer, since) for layer in run.names}
        assert max(waits.values()) <= run.report["full_coverage_steps"] + run.report["every"], waits

    def test_only_steps_that_were_asked_for_are_sampled_and_the_first_in_full(self, name: str) -> None:
        run = long_run(name)
        assert {step % run.every for step in run.sampled} == {0}
        assert run.sampled[0] == 0
        assert all(steps[0] == 0 for steps in run.in_full.values())

    def test_it_settles(self, name: str) -> None:
        run = long_run(name)
        assert len(run.schedules) <= 12, run.schedules
        assert len([step for step, _ in run.schedules if step > 6000]) <= 3, run.schedules


class TestWhatItChooses:
    def test_where_everything_fits_everything_is_measured_at_every_due_step(self) -> None:
        run = Run(full=0.05).go(3000)
        assert run.sampled[10:] == list(range(run.sampled[10], 3000, 10))
        assert run.report == {
            "budget": 0.01, "every": 10, "overhead_ratio": run.report["overhead_ratio"],
            "layers_per_sample": 8, "layers": 8, "tile_stride": 1, "full_coverage_steps": 10,
        }  # fmt: skip

    def test_where_it_does_not_the_others_are_sampled_by_tiles_that_move_on(self) -> None:
        run = Run(layers=16, rows=0.2).go(4000)
        assert run.report["tile_stride"] == TILE_STRIDE == 17
        assert 16 / ROTATION_SAMPLES <= run.report["layers_per_sample"] < 16
        turns = set()
        for _ in range(3 * run.report["every"]):
            run._one()
            scopes = [run.budget.scope(name) for name in run.names]
            turns |= {scope.turn for scope in scopes if not scope.full}
        assert all(scope.stride == 17 for scope in scopes if not scope.full)

    def test_every_layer_is_judged_until_that_takes_an_interval_sixteen_times_as_long(self) -> None:
        kept = Run(layers=16).go(4000)
        assert all(steps == kept.sampled for steps in kept.judged.values())
        dropped = Run(layers=16, full=16.0, rows=0.8, tiles=0.02).go(40_000)
        late = [step for step in dropped.sampled if step > 10_000]
        assert late
        assert all(len([s for s in steps if s > 10_000]) < len(late) for steps in dropped.judged.values())

    def test_intervals_are_powers_of_two_so_that_those_of_several_groups_meet(self) -> None:
        slow, fast = Run(full=1.0).go(6000), Run(full=0.1).go(6000)
        assert slow.report["every"] % fast.report["every"] == 0
        assert {step for step in slow.sampled if step > 3000} <= set(fast.sampled)

    def test_urgent_layers_are_measured_more_often_and_the_others_still(self) -> None:
        run = Run(layers=32, urgent=("layer7",), full=1.0, rows=0.1, tiles=0.3).go(30_000)
        assert 2 <= run.report["layers_per_sample"] < 16
        late = {name: len([s for s in steps if s > 15_000]) for name, steps in run.in_full.items()}
        others = [count for name, count in late.items() if name != "layer7"]
        assert late["layer7"] > 1.8 * max(others)
        assert min(others) >= max(others) - 2 > 0

    def test_a_single_place_is_shared_with_an_urgent_layer(self) -> None:
        budget = Budget(["a", "b", "c"], 1, 0.01)
        budget.schedule, budget.samples, turns = Schedule(1, 1), 2, []
        for _ in range(8):
            turns.append(budget._next_turn(("c",))[0])
            budget._move_back(turns[-1:])
            budget.samples += 1
        assert turns.count("c") >= 4
        assert {"a", "b"} <= set(turns)

    def test_without_a_budget_nothing_is_left_out(self) -> None:
        run = Run(limit=None, full=5.0, every=300).go(3000)
        assert run.sampled == list(range(0, 3000, 300))
        assert all(steps == run.sampled for steps in run.in_full.values())
        assert run.report["budget"] is None
        assert (run.report["every"], run.report["tile_stride"]) == (300, 1)


class TestWhatHappensMeanwhile:
    def test_pauses_and_stalls_are_not_training(self) -> None:
        # Each fiftieth step waits as long as 300: seven times the training time passes in them.
        paused = Run(stall=lambda step: 300 * STEP if step % 50 == 49 else 0.0).go(4000)
        steady = Run().go(4000)
        assert paused.ratio <= 0.01
        assert len(paused.sampled) <= 1.3 * len(steady.sampled)
        assert paused.budget.pace.median == pytest.approx(steady.budget.pace.median, rel=0.05)

    def test_the_first_steps_compile_and_say_nothing_of_the_speed(self) -> None:
        run = Run(stall=lambda step: 60.0 if step in (0, 1, 9) else 0.0).go(100)
        assert run.budget.pace.median == pytest.approx(STEP, rel=0.1)
        assert run.budget.pace.seconds <= 100 * STEP * 1.05

    def test_when_steps_become_ten_times_as_fast_it_samples_less_often(self) -> None:
        run = Run(speed=lambda step: 1.0)
        run.go(8000)
        before = run.report["every"]
        run.speed = lambda step: 0.1
        run.full *= 10  # a sample takes as long as before
        run.go(8000)
        assert run.report["every"] >= 4 * before
        spent, trained = run.spent, run.trained
        run.go(8000)
        assert (run.spent - spent) / (run.trained - trained) <= 0.01

    def test_when_steps_become_ten_times_as_slow_it_samples_more_often(self) -> None:
        run = Run()
        run.go(8000)
        before = run.report["every"]
        run.speed = lambda step: 10.0
        run.full /= 10
        run.go(8000)
        assert run.report["every"] <= before / 2

    def test_what_nobody_could_pay_is_tried_again_when_steps_take_longer(self) -> None:
        run = Run(limit=1e-4)
        run.speed = lambda step: 0.1
        run.full *= 10
        run.go(4000)
        assert len(run.sampled) == LEARNING_SAMPLES
        run.speed = lambda step: 100.0
        run.full /= 1000
        run.go(8000)
        assert len(run.sampled) > 2 * LEARNING_SAMPLES

    def test_it_does_not_follow_costs_that_swing(self) -> None:
        run = Run()
        for turn in range(40):
            run.full = 0.9 if turn % 2 else 0.3
            run.go(500)
        assert run.ratio <= 0.01
        changes = [sum(start <= step < start + 5000 for step, _ in run.schedules) for start in (0, 15_000)]
        assert changes[1] <= changes[0] / 2, run.schedules

    def test_the_first_sample_is_lent_and_repaid(self) -> None:
        run = Run(cold=5.0).go(2000)
        assert run.budget.loan > 0
        # Samples go on meanwhile, for half of the income.
        assert len(run.sampled) >= 8
        run.go(20_000)
        assert run.budget.loan == 0

    def test_what_a_device_took_longer_than_the_host_is_paid_too(self) -> None:
        # The host only starts the kernels: a hundredth of what the device takes.
        run, device = Run(layers=4, full=0.3), Budget([f"layer{i}" for i in range(4)], 10, 0.01)
        spent = trained = 0.0
        for step in range(8000):
            net, own, layers = STEP, IDLE, None
            if device.due(step) and device.admits():
                device.begin(())
                took = {name: run._measured(name, ()) for name in run.names}
                layers = {name: LayerSeconds(s.operands / 100, s.judge / 100) for name, s in took.items()}
                own += sum(s.total for s in layers.values())
                spent += sum(s.total for s in took.values())
                device.end_step(net + own, own, layers)
                device.amend(took)
            else:
                device.end_step(net + own, own)
            spent, trained = spent + own, trained + net
        assert 0.004 <= spent / trained <= 0.0105
        assert device.report()["overhead_ratio"] == pytest.approx(spent / trained, rel=0.05)


class TestPace:
    def test_it_is_known_after_eight_steps(self) -> None:
        pace = Pace()
        assert [pace.add(2.0) for _ in range(9)] == [0.0] * 7 + [10.0, 2.0]
        assert (pace.median, pace.seconds) == (2.0, 12.0)

    def test_a_step_counts_for_three_times_the_median_at_most(self) -> None:
        pace = Pace()
        for _ in range(20):
            pace.add(1.0)
        assert pace.add(1000.0) == 3.0
        assert pace.add(0.25) == 0.25


class TestCosts:
    def test_a_cold_first_value_does_not_stay(self) -> None:
        latest = Latest()
        latest.add(100.0)
        assert latest.median == 100.0
        for value in (1.0, 2.0, 9.0):
            latest.add(value)
        assert latest.median == 2.0

    def test_a_sample_is_the_sum_of_its_layers(self) -> None:
        costs = Costs(["a", "b"])
        took = {"a": LayerSeconds(4.0, 1.0), "b": LayerSeconds(8.0, 2.0)}
        for _ in range(2):
            costs.learn(16.0, took, full=("a", "b"), judged=True, picked=(), predicted=0.0)
        assert costs.of_sample(["a", "b"], judged=True, picked=()) == pytest.approx(16.0)
        tiles = {"a": LayerSeconds(0.4, 1.0), "b": LayerSeconds(0.8, 2.0)}
        costs.learn(5.2, tiles, full=(), judged=True, picked=(), predicted=0.0)
        assert costs.of_sample([], judged=True, picked=()) == pytest.approx(0.4 + 0.8 + 3.0 + 1.0)
        assert costs.of_sample(["b"], judged=False, picked=()) == pytest.approx(0.4 + 8.0 + 2.0 + 1.0)

    def test_when_everything_takes_longer_a_layer_whose_turn_is_far_off_does_too(self) -> None:
        names = list("abcdefghijkl")
        costs = Costs(names)

        def sample(turn: list[str], seconds: float, predicted: float) -> None:
            took = {name: LayerSeconds(seconds if name in turn else seconds / 10, 0.0) for name in names}
            spent = sum(each.total for each in took.values())
            costs.learn(spent, took, full=turn, judged=True, picked=(), predicted=predicted)

        for _ in range(3):
            sample(names, 1.0, 0.0)
            sample([], 1.0, 0.0)
        assert costs.of_sample(["l"], judged=True, picked=()) == pytest.approx(1.0 + 11 * 0.1)
        for name in names[:6]:
            sample([name], 3.0, costs.of_sample([name], judged=True, picked=()))
        # Six of twelve had their turn since; l was measured in full when it took a third.
        assert costs.of_sample(["l"], judged=True, picked=()) >= 0.9 * (3.0 + 11 * 0.3)
