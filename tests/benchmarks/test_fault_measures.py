"""The fault suite's arithmetic: separation, lead, ratios and their bounds."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest


def flat(until: int = 100, loss: float = 2.0) -> dict[int, float]:
    return dict.fromkeys(range(until), loss)


def test_separation_is_the_first_trailing_mean_above_both_levels(suite: Any) -> None:
    measures, twin = suite("faults.measures"), flat()
    # 1.5 % from step 40 on: means of 0.3, 0.6, ... % at 40, 41, ...
    losses = twin | dict.fromkeys(range(40, 100), 2.03)
    assert measures.separation(losses, twin, 40, 0.0) == 41
    # 5 sigma / sqrt 5 = 1.0 %: the mean of the fourth step, 1.2 %, is the first above.
    assert measures.separation(losses, twin, 40, 0.0045) == 43
    assert measures.separation(losses, twin, 60, 0.0045) == 60
    assert measures.separation(losses, twin, 40, 0.1) is None
    assert measures.separation(twin, twin, 40, 0.0) is None
    begins = {step: loss for step, loss in losses.items() if step >= 40}
    assert measures.separation(begins, twin, 40, 0.0) == 44


def test_a_loss_that_is_no_number_separates_at_once_and_a_better_one_never(suite: Any) -> None:
    measures, twin = suite("faults.measures"), flat()
    assert measures.separation(twin | {50: math.nan}, twin, 40, 0.0031) == 50
    assert measures.separation(flat(loss=1.0), twin, 0, 0.0) is None


def test_sigma_is_the_deviation_of_a_steps_gap(suite: Any) -> None:
    measures, twin = suite("faults.measures"), flat()
    losses = {step: 2.0 * (1.0 + (0.004 if step % 2 else -0.004)) for step in twin}
    assert measures.sigma(losses, twin) == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("detected", "separated", "steps"), [(510, 530, 20), (535, 530, -5), (None, 530, None), (510, None, None)]
)
def test_lead_is_what_detection_is_ahead_of_separation(
    detected: int | None, separated: int | None, steps: int | None, suite: Any
) -> None:
    assert suite("faults.measures").lead(detected, separated) == steps


def test_the_ratio_is_of_the_last_twenty_steps_that_both_have(suite: Any) -> None:
    measures = suite("faults.measures")
    losses = flat(90) | dict.fromkeys(range(70, 90), 2.02)
    assert measures.tail_ratio(losses, flat(100)) == pytest.approx(1.01)
    assert measures.tail_ratio(losses | {75: math.nan}, flat(100)) == math.inf


def test_the_interval_of_ratios_is_students_over_seeds(suite: Any) -> None:
    """Of logs 0.01, 0.02, 0.03: mean 0.02, deviation 0.01, t of 2 degrees 4.303, so 0.02 +- 4.303 * 0.01 / sqrt 3."""
    mean_ratio = suite("faults.measures").mean_ratio
    found = mean_ratio([math.exp(x) for x in (0.01, 0.02, 0.03)])
    width = 4.303 * 0.01 / math.sqrt(3)
    assert [math.log(x) for x in (found.value, found.low, found.high)] == pytest.approx(
        [0.02, 0.02 - width, 0.02 + width]
    )
    alone = mean_ratio([1.01])
    assert (alone.value, alone.low, alone.high) == (pytest.approx(1.01), 0.0, math.inf)
    assert mean_ratio([]) is None
    assert mean_ratio([1.0, math.inf]).value == math.inf


def test_the_interval_covers_the_truth_as_often_as_it_says(suite: Any) -> None:
    mean_ratio, draw, hits = suite("faults.measures").mean_ratio, random.Random(1), 0
    for _ in range(2000):
        found = mean_ratio([math.exp(draw.gauss(0.0, 0.01)) for _ in range(4)])
        hits += found.low <= 1.0 <= found.high
    # Binomial: 1900 +- 10; four deviations.
    assert abs(hits - 1900) < 40


def test_a_share_has_wilsons_bounds(suite: Any) -> None:
    """Wilson 1927; the value of 9 of 10 is that of the standard tables."""
    share = suite("faults.measures").share
    nine = share(9, 10)
    assert (nine.value, nine.low, nine.high) == (
        0.9,
        pytest.approx(0.5958, abs=2e-4),
        pytest.approx(0.9821, abs=2e-4),
    )
    assert share(10, 10).low < 1.0 == share(10, 10).high
    assert share(0, 10).low == 0.0 < share(0, 10).high
