"""One step of several groups: what is merged, and whose trouble shows."""

import math
from itertools import permutations

import pytest

from fp8_safeguard.monitor.observation import observe
from fp8_safeguard.monitor.wire import parse_sample


def sample(group: str, **run: object) -> dict[str, object]:
    columns = {name: [1] for name in ("count", "zeros", "underflow", "saturated", "nan", "inf")}
    sums = {name: [1.0] for name in ("amax", "sum_sq", "sum_sq_q", "sum_sq_err")}
    slots = [{"index": 0, "layer": "a", "operand": "x", "layout": "row"}]
    head = {"schema": 1, "attempt": {"id": "0"}, "group": group, "groups": 3, "step": 4}
    return {**head, "slots": slots, "columns": {**columns, **sums}, "run": run}


def test_of_several_groups_the_largest_run_value_counts_and_nan_before_all() -> None:
    """As the server merges them, whatever order they come in."""
    documents = [
        sample("0", loss=2.0, gradient_norm=1.0),
        sample("1", loss="NaN", gradient_norm=3.0),
        sample("2", loss=2.5, learning_rate=0.1),
    ]
    for order in permutations(documents):
        seen = observe([parse_sample(document) for document in order])
        assert math.isnan(seen.run["loss"] or 0.0)
        assert (seen.run["gradient_norm"], seen.run["learning_rate"]) == (3.0, 0.1)
        assert seen.stats.columns["count"].tolist() == [3]


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ((2.0, "-Infinity", 3.0), -math.inf),
        ((2.0, "Infinity", "-Infinity"), math.inf),
        (("-Infinity", "NaN", 3.0), math.nan),
        ((-2.0, -3.0, -2.5), -2.0),
    ],
)
def test_b95_an_infinity_of_either_sign_counts_before_any_number(
    told: tuple[object, ...], counts: float
) -> None:
    for order in permutations(told):
        documents = [
            {**sample(str(group), loss=value), "scalars": [{"layer": "a", "name": "entropy", "value": value}]}
            for group, value in enumerate(order)
        ]
        seen = observe([parse_sample(document) for document in documents])
        assert [seen.run["loss"], seen.scalars["a", "entropy"]] == pytest.approx([counts] * 2, nan_ok=True)


def test_a_value_that_nobody_measured_is_not_there() -> None:
    seen = observe([parse_sample(sample("0", loss=None))])
    assert seen.run.get("loss") is None
    assert seen.run == pytest.approx({})
