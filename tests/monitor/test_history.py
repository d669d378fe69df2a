"""The history of a slot: medians of the last eight values, once there are four."""

import json
import statistics
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.history import History


def filled(values: list[float]) -> History:
    """A history of slot `a` that saw these values, in both metrics."""
    history = History()
    for value in values:
        history = history.added(("a",), np.array([[value, 2 * value]]), np.ones((1, 2), dtype=bool))
    return history


@pytest.mark.parametrize("count", range(1, 13))
def test_median_of_the_last_eight_once_there_are_four(count: Any) -> None:
    values = np.random.default_rng(count).integers(0, 1000, count).astype(float).tolist()
    got = filled(values).medians(("a", "b"))
    if count < 4:
        assert np.isnan(got).all()
    else:
        assert got[0].tolist() == [statistics.median(values[-8:]), 2 * statistics.median(values[-8:])]
        assert np.isnan(got[1]).all()


def test_only_admitted_finite_values_enter() -> None:
    history = filled([1.0, 2.0, 3.0, 4.0])
    for value, admit in ((100.0, False), (np.nan, True), (np.inf, True), (1e300, True)):
        history = history.added(("a",), np.array([[value, value]]), np.full((1, 2), admit))
    assert history == filled([1.0, 2.0, 3.0, 4.0])


def test_slots_may_come_and_go_in_any_order() -> None:
    history = filled([1.0] * 4)
    both = np.array([[5.0, 5.0], [1.0, 1.0]])
    for _ in range(4):
        history = history.added(("b", "a"), both, np.ones((2, 2), dtype=bool))
    history = history.added(("c",), both[:1], np.ones((1, 2), dtype=bool))
    assert history.medians(("a", "c", "b"))[:, 0].tolist() == pytest.approx([1.0, np.nan, 5.0], nan_ok=True)


def test_json_form_gives_an_equal_history() -> None:
    history = filled([0.1, 0.2, 0.3, 0.4, 0.7])
    again = History.from_dict(json.loads(json.dumps(history.to_dict())))
    assert again == history
    assert again.medians(("a",)).tolist() == history.medians(("a",)).tolist()
    assert again != filled([0.1])
    assert History.from_dict(History().to_dict()) == History()
