"""The loss gap of two runs: windows, the null, and what a real gap looks like beside chaos."""

import math

import numpy as np
import pytest

from fp8_safeguard.monitor.lossgap import (
    LEAST_GAP,
    NULL_FACTOR,
    CheckError,
    compare_losses,
    step_sd,
    windows_of,
)

CHAOS_SD = 0.0104
"""Standard deviation of a step's relative gap between two healthy runs: 0.83 % mean absolute."""


def reference(steps: int = 600, every: int = 1) -> dict[int, float]:
    return {step: 1.4 + math.exp(-step / 150) for step in range(0, steps, every)}


def twin(of: dict[int, float], seed: int, gap: float = 0.0, after: int = 0) -> dict[int, float]:
    """A run that differs by chaos, and from a step on by a gap."""
    noise = np.random.default_rng(seed).normal(0, CHAOS_SD, len(of))
    return {
        step: loss * (1 + wobble + (gap if step >= after else 0.0))
        for (step, loss), wobble in zip(of.items(), noise.tolist(), strict=True)
    }


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        (range(100), [(0, 50), (50, 100)]),
        # What is left is too short, and joins; or long enough, and does not.
        (range(120), [(0, 50), (50, 120)]),
        (range(130), [(0, 50), (50, 100), (100, 130)]),
        (range(0, 300, 10), [(0, 5), (5, 10), (10, 15), (15, 20), (20, 25), (25, 30)]),
        # Every 25 steps: five samples take 125 steps.
        (range(0, 500, 25), [(0, 5), (5, 10), (10, 15), (15, 20)]),
        (range(7), [(0, 7)]),
    ],
)
def test_windows_are_50_steps_and_no_fewer_than_five_samples(
    steps: range, parts: list[tuple[int, int]]
) -> None:
    assert windows_of(list(steps)) == parts


def test_a_constant_gap_is_the_mean_of_every_window() -> None:
    """Closed form: no noise, so the null is 0 and the limit the least gap."""
    losses = reference(200)
    report = compare_losses({step: 1.01 * loss for step, loss in losses.items()}, losses)
    assert report.mean_gap_ratio == pytest.approx(0.01)
    assert [window.gap_ratio for window in report.windows] == [pytest.approx(0.01)] * 4
    assert {window.limit for window in report.windows} == {LEAST_GAP}
    assert len(report.over) == 4
    assert not compare_losses(losses, losses).over
    assert not compare_losses({step: 0.9 * loss for step, loss in losses.items()}, losses).over


def test_the_spread_of_a_step_is_found_beside_a_shift() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 4000)
    shifted = noise + np.where(np.arange(4000) > 1000, 0.2, 0.0)
    assert step_sd(noise) == pytest.approx(0.01, rel=0.05)
    assert step_sd(shifted) == pytest.approx(step_sd(noise), rel=0.01)
    assert step_sd(noise[:1]) == 0.0


@pytest.mark.parametrize("every", [1, 5])
def test_chaos_alone_never_breaks_the_limit_and_a_lasting_gap_does(every: int) -> None:
    losses = reference(every=every)
    runs = [twin(losses, seed) for seed in range(100)]
    assert not any(compare_losses(run, losses).over for run in runs)
    # "Every point within 0.25 %" would fail all of them.
    assert all(max(abs(run[step] / losses[step] - 1) for step in losses) > 0.0025 for run in runs)
    limit = NULL_FACTOR * CHAOS_SD / math.sqrt(50 / every)
    for seed in range(20):
        report = compare_losses(twin(losses, seed, gap=2 * limit, after=300), losses)
        assert report.over
        assert min(window.from_step for window in report.over) >= 250


def test_a_null_of_twins_is_the_spread_of_their_windows() -> None:
    losses = reference()
    twins = [twin(losses, seed) for seed in (1, 2, 3)]
    report = compare_losses(twin(losses, 9), losses, twins=twins)
    means = [
        float(np.mean([side[step] / losses[step] - 1 for step in range(start, start + 50)]))
        for side in twins
        for start in range(0, 600, 50)
    ]
    assert report.window_sd == pytest.approx(math.sqrt(np.mean(np.square(means))))
    assert report.null == "from 36 windows of 3 twins"
    assert report.windows[0].limit == pytest.approx(NULL_FACTOR * (report.window_sd or 0.0))
    assert "share too few steps" in compare_losses(losses, losses, twins=[{0: 1.0}]).null


def test_a_given_limit_goes_before_a_learned_one() -> None:
    losses = reference()
    run = {step: loss * 1.004 for step, loss in losses.items()}
    assert not compare_losses(run, losses, max_gap=0.005).over
    assert compare_losses(run, losses, max_gap=0.003).over
    assert compare_losses(run, losses, max_gap=0.003).window_sd is None


def test_only_shared_steps_count_and_fewer_than_five_are_refused() -> None:
    losses = reference(100)
    late = {step: loss for step, loss in losses.items() if step >= 60} | {500: 99.0}
    report = compare_losses(late, losses)
    assert (report.shared_steps, report.from_step, report.to_step) == (40, 60, 99)
    for few in ({}, {500: 1.0}, dict.fromkeys(range(96, 200), 1.0)):
        with pytest.raises(CheckError, match="are needed"):
            compare_losses(few, losses)


def test_a_loss_that_is_no_number_is_told_with_its_steps() -> None:
    losses = reference(100)
    run = {**losses, 40: math.nan, 41: math.inf}
    report = compare_losses(run, losses)
    assert report.broken == (40, 41)
    assert not report.over
    everything = compare_losses(dict.fromkeys(losses, math.nan), losses)
    assert len(everything.broken) == 100
    assert compare_losses(run, {**losses, 40: math.nan, 41: math.nan}).broken == ()
    with pytest.raises(CheckError, match="have a finite loss"):
        compare_losses(losses, dict.fromkeys(losses, math.nan))
