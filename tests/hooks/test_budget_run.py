"""The overhead budget on real training steps, on a clock that the test moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, accounts, attach, judge, meter, operands, session, together, uses
from fp8_safeguard.hooks.budget import WHOLE, Scope
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.meter import Meter
from fp8_safeguard.hooks.operands import SAMPLED_COLUMNS
from fp8_safeguard.monitor.stats import ALL_COLUMNS

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]

STEP = 1.0
ELEMENT = 1e-5
"""Seconds that the statistics of one element of x or dy take in one layout, on the test's clock."""
TICK = 1e-6


class Clock:
    """Seconds: each reading takes a microsecond, everything else as long as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Our modules read this clock; statistics and judged GEMMs take their time on it."""
    return moved_by_our_work(monkeypatch)


def moved_by_our_work(patch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    for module in (meter, accounts):
        patch.setattr(module, "time", SimpleNamespace(perf_counter=moved))

    def slowed(module: Any, name: str, seconds: Callable[[torch.Tensor], float]) -> None:
        real = getattr(module, name)

        def slow(x: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            moved.pass_(seconds(x))
            return real(x, *arguments, **keywords)

        patch.setattr(module, name, slow)

    # One call for all of it would read the real clock.
    patch.setattr(together.native_use, "fits", lambda *operands: False)
    slowed(operands, "layout_stats", lambda x: 2 * ELEMENT * x.numel())
    slowed(operands, "tensor_stats", lambda x: ELEMENT / 100 * x.numel())
    for name in ("fprop_error", "dgrad_error", "wgrad_error"):
        slowed(judge.recompute, name, lambda x: 0.002)
    return moved


def deep(pairs: int = 2) -> nn.Sequential:
    """Layers 640 -> 128 -> 640 ..."""
    torch.manual_seed(0)
    widths = [640, 128] * pairs + [640]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def narrow(layers: int) -> nn.Sequential:
    """Layers of less than one tile."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))


class Training:
    """Steps of one second each."""

    def __init__(self, guard: Guard, model: nn.Sequential, clock: Clock, read: Read | None = None) -> None:
        self.guard, self.model, self.clock = guard, model, clock
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        self.x = torch.randn(16, model[0].in_features, generator=torch.Generator().manual_seed(1))
        self.step = 0
        self.samples: dict[int, Any] = {}
        self._read = read

    def run(self, steps: int) -> None:
        for _ in range(steps):
            before = self.guard._session.samples
            self.model(self.x).square().mean().backward()
            self.clock.pass_(STEP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.guard._session.deliver()
            if self._read is not None and self.guard._session.samples > before:
                self.samples[self.step] = self._read(self.guard)
            self.step += 1

    @property
    def trained(self) -> float:
        return self.step * STEP


def wide(layer: str) -> str:
    """The operand with five tiles; the other one has a single tile, which is always measured in full."""
    return "x" if layer in "02" else "dy"


def in_full(sample: Any, layer: str) -> bool:
    return bool(sample[f"{layer} {wide(layer)} row"].amax is not None)


@dataclass
class Finished:
    """What a run of 110 steps under a budget of 5 % left."""

    samples: dict[int, Any]
    plan: dict[str, Any]
    spent_ratio: float


@pytest.fixture(scope="class")
def finished(read: Read) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        clock, model = moved_by_our_work(patch), deep()
        # A whole sample takes more than half of a step.
        guard = attach(model, every=2, overhead_budget=0.05, spool_dir="")
        training = Training(guard, model, clock, read)
        training.run(110)
        ratio = guard.spent_seconds / (training.step * STEP)
        left = Finished(training.samples, guard.sampling_plan, ratio)
        guard.detach()
    return left


class TestARun:
    def test_it_keeps_to_the_budget(self, finished: Finished) -> None:
        assert finished.spent_ratio <= 0.05
        assert finished.spent_ratio == pytest.approx(finished.plan["overhead_ratio"], rel=0.05)
        assert {step % 2 for step in finished.samples} == {0}
        late = [step for step in finished.samples if step > 60]
        assert late
        assert {step % finished.plan["every"] for step in late} == {0}

    def test_every_layer_has_its_turn_as_reported_and_the_first_sample_is_whole(
        self, finished: Finished
    ) -> None:
        assert finished.plan["layers_per_sample"] < 4
        for layer in "0123":
            steps = [step for step, sample in finished.samples.items() if in_full(sample, layer)]
            assert steps[0] == 0
            gaps = [after - before for before, after in itertools.pairwise([*steps, 110])]
            assert (
                max(gaps[len(gaps) // 2 :]) <= finished.plan["full_coverage_steps"] + finished.plan["every"]
            )

    def test_what_tiles_do_not_tell_is_null_and_the_rates_are_there(self, finished: Finished) -> None:
        partial = [
            (sample, layer)
            for sample in finished.samples.values()
            for layer in "0123"
            if not in_full(sample, layer)
        ]
        assert partial
        for sample, layer in partial:
            for layout in ("row", "col"):
                stats = sample[f"{layer} {wide(layer)} {layout}"]
                assert stats.nulls == set(ALL_COLUMNS) - set(SAMPLED_COLUMNS)
                assert stats.count == 128 * 16
                assert stats.underflow_ratio is not None
                for metric in ("cosine", "sqnr_db", "kurtosis", "tile_sqnr_p01_db", "rows_flushed_ratio"):
                    assert stats.metric(metric) is None
            # The verdict's judge goes on for every layer; nobody needs the gradient of the first one's input.
            assert {"fprop", *(() if layer == "0" else ("dgrad",))} <= sample.parts(layer)

    def test_each_sample_says_what_the_budget_made_of_it(self, finished: Finished) -> None:
        names = {"budget", "every", "overhead_ratio", "layers_per_sample", "layers", "tile_stride"}
        for step, sample in finished.samples.items():
            sent = sample.sample.sampling
            assert set(sent) | {"overhead_ratio"} == names | {"full_coverage_steps"}
            assert (sent["budget"], sent["layers"]) == (0.05, 4)
            whole = [layer for layer in "0123" if in_full(sample, layer)]
            assert (len(whole), step % sent["every"]) == (sent["layers_per_sample"], 0)
            assert sent["tile_stride"] == (1 if len(whole) == 4 else 17)
            assert sent["full_coverage_steps"] == sent["every"] * math.ceil(4 / len(whole))

    def test_without_a_budget_every_sample_is_whole(self, watch: Watch, read: Read, clock: Clock) -> None:
        model = deep()
        guard = watch(model, every=2)
        training = Training(guard, model, clock, read)
        training.run(20)
        assert list(training.samples) == list(range(0, 20, 2))
        assert all(in_full(sample, layer) for sample in training.samples.values() for layer in "0123")
        assert guard.sampling_plan["budget"] is None
        assert read(guard).sample.sampling["every"] == 2

    def test_the_model_trains_as_without_us(self, watch: Watch, clock: Clock) -> None:
        alone, observed = deep(), deep()
        Training(
            SimpleNamespace(_session=SimpleNamespace(samples=0, deliver=lambda: None)), alone, clock
        ).run(40)  # type: ignore[arg-type]
        state = torch.get_rng_state()
        Training(watch(observed, every=2, overhead_budget=0.05), observed, clock).run(40)
        assert torch.equal(torch.get_rng_state(), state)
        for one, other in zip(alone.parameters(), observed.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_layer_in_breach_comes_first(self, watch: Watch, read: Read, clock: Clock) -> None:
        model = deep(4)
        guard = watch(model, every=2, overhead_budget=0.05)
        training = Training(guard, model, clock, read)
        training.run(60)
        flags = guard._session.builder.flags
        flags.hear({"alerts": [{"layer": "6", "severity": "act"}]})
        assert flags.layers == ("6",)
        budget = guard._session.budget
        while not budget.admits(flags.layers):
            training.run(1)
        assert budget.scope("6") is WHOLE


class TestJudgedInTurn:
    def test_where_not_all_are_judged_each_has_its_weight_gradient_in_turn(
        self, watch: Watch, read: Read, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("fprop_error", "dgrad_error"):
            real = getattr(judge.recompute, name)

            def slow(*arguments: Any, real: Any = real, **keywords: Any) -> Any:
                clock.pass_(0.3)
                return real(*arguments, **keywords)

            monkeypatch.setattr(judge.recompute, name, slow)
        model = narrow(6)
        guard = watch(model, every=1, overhead_budget=0.05)
        training = Training(guard, model, clock, read)
        training.run(520)
        late = [sample for step, sample in training.samples.items() if step > 100]
        assert guard.sampling_plan["judged_per_sample"] < 6
        assert guard.sampling_plan["overhead_ratio"] <= 0.05
        wgrads = [layer for sample in late for layer in "012345" if "wgrad" in sample.parts(layer)]
        assert set(wgrads) == set("012345")
        for sample in late:
            judged = {layer for layer in "012345" if "fprop" in sample.parts(layer)}
            assert len(judged) == sample.sample.sampling["layers_per_sample"] < 6

    def test_of_those_that_are_judged_the_one_whose_turn_was_longest_ago(self, watch: Watch) -> None:
        inner = watch(narrow(6))._session
        frame = Frame(1, torch.device("cpu"))
        picked = []
        for turn in ("012", "345", "012", "345", "012", "345", "012"):
            inner.budget._turn, inner.budget._others = frozenset(turn), Scope(full=False, judged=False)
            inner._pick(frame)
            picked += [layer.name for layer in inner.layers if inner.picks_wgrad(layer)]
            inner.samples += 1
        assert picked == ["0", "3", "1", "4", "2", "5", "0"]


class TestAccounts:
    def test_all_that_is_ours_on_the_training_thread_is_accounted(
        self, watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = narrow(2)
        guard = watch(model, every=2)
        inner = guard._session
        spent: list[float] = []

        def taking(target: Any, name: str, seconds: float) -> None:
            real = getattr(target, name)

            def slow(*arguments: Any, **keywords: Any) -> Any:
                clock.pass_(seconds)
                spent.append(seconds)
                return real(*arguments, **keywords)

            monkeypatch.setattr(target, name, slow)

        taking(inner.client, "submit", 3.0)
        taking(inner.controls, "at_boundary", 0.5)
        taking(inner, "_find_scale", 0.25)
        taking(inner, "_buffers", 7.0)
        taking(session, "coverage_rows", 11.0)
        taking(uses, "forward", 13.0)
        taking(inner.builder.flags, "choose", 0.0)
        before = guard.spent_seconds
        training = Training(guard, model, clock)
        training.run(4)
        inner.deliver()
        measured = guard.spent_seconds - before
        # Statistics and judged rows take theirs besides: less than a second.
        assert sum(spent) <= measured <= sum(spent) + 1.0
        assert {3.0, 0.5, 0.25, 7.0, 11.0, 13.0} <= set(spent)

    def test_the_ratio_of_a_sample_is_that_since_the_last_one(
        self, watch: Watch, read: Read, clock: Clock
    ) -> None:
        model = narrow(2)
        guard = watch(model, every=4)
        clock.pass_(10_000.0)  # between attach() and the first step the data set is unpacked
        training = Training(guard, model, clock, read)
        marks = [(clock.now, guard.spent_seconds)]
        ratios = []
        for _ in range(3):
            training.run(1)
            marks.append((clock.now, guard.spent_seconds))
            ratios.append(read(guard).sample.overhead_ratio)
            training.run(3)
        for (start, spent), (end, more), ratio in zip(marks, marks[1:], ratios, strict=False):
            assert ratio == pytest.approx((more - spent) / (end - start), rel=1e-3)

    def test_nested_sections_count_once(self, clock: Clock) -> None:
        seconds = Meter()
        outer = seconds.begin()
        clock.pass_(1.0)
        inner = seconds.begin()
        clock.pass_(2.0)
        assert seconds.end(inner) == 0.0
        assert seconds.now == pytest.approx(3.0, abs=1e-4)
        clock.pass_(4.0)
        seconds.end(outer)
        assert seconds.host_seconds == pytest.approx(7.0, abs=1e-4)
        assert seconds.now == seconds.host_seconds

    def test_a_layer_within_another_section_has_its_own_time(self, clock: Clock) -> None:
        seconds = Meter()
        outer = seconds.begin()
        clock.pass_(1.0)
        begun = seconds.begin_layer()
        clock.pass_(2.0)
        seconds.end_layer(begun, "a")
        seconds.end(outer)
        assert seconds.layers["a"].judge == pytest.approx(2.0, abs=1e-4)
        assert seconds.host_seconds == pytest.approx(3.0, abs=1e-4)

    def test_an_interrupted_section_does_not_stop_the_account(
        self, watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = narrow(2)
        guard = watch(model, every=1)
        training = Training(guard, model, clock)
        training.run(1)

        def interrupted(*arguments: Any, **keywords: Any) -> Any:
            raise KeyboardInterrupt

        for owner, name in ((operands, "layout_stats"), (guard._session.controls, "at_boundary")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    training.run(1)
            before = guard.spent_seconds
            training.run(2)
            assert guard.spent_seconds > before

    def test_the_way_past_a_hook_is_measured_once(self, watch: Watch, clock: Clock) -> None:
        model = narrow(2)
        guard = watch(model, every=3)
        training = Training(guard, model, clock)
        assert guard.sampling_plan["hook_seconds"] is None
        training.run(3)
        first = guard.sampling_plan["hook_seconds"]
        assert first is not None
        assert 0.0 <= first < 1e-3
        training.run(9)
        assert guard.sampling_plan["hook_seconds"] == first
