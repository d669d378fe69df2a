"""Wrong values in errors: quoted briefly, whatever their size, and never made into a long text on the way."""

import tracemalloc
from typing import Any

import pytest

from fp8_safeguard.monitor.quoting import MOST_CHARACTERS, quoted
from fp8_safeguard.monitor.wire import WireError, parse_sample


@pytest.mark.parametrize(
    "value", ["x", "it's", 5, -1.5, None, True, [1, "a"], {"gemm": "fprop"}, b"raw", "y" * MOST_CHARACTERS]
)
def test_a_short_value_is_quoted_whole(value: Any) -> None:
    assert quoted(value) == repr(value)


def test_a_long_text_keeps_its_beginning() -> None:
    assert quoted("begin" + "x" * 10**6).startswith("'beginxxx")


HUGE: list[Any] = [
    "x" * 3_000_000,
    [["x" * 1000] * 100] * 100,
    {f"name{number}": "x" * 1000 for number in range(10_000)},
    [[[["deep"] * 1000] * 100] * 100] * 100,
]


@pytest.mark.parametrize("value", HUGE, ids=["text", "lists", "object", "deep"])
def test_a_huge_value_takes_little_memory_to_quote(value: Any) -> None:
    tracemalloc.start()
    try:
        text = quoted(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) == MOST_CHARACTERS + len("...")
    assert peak < 500_000


PLACES = (
    "schema",
    "attempt",
    "group",
    "step",
    "groups",
    "mode",
    "plan_version",
    "overhead_ratio",
    "run",
    "slots_id",
)


@pytest.mark.parametrize("field", PLACES)
def test_every_field_of_a_sample_refuses_a_huge_value_briefly(field: str) -> None:
    body = {"schema": 1, "attempt": {"id": "0"}, "group": "0", "step": 0, "columns": {}, field: HUGE[1]}
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            parse_sample(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"/{field}" in [pointer for pointer, _ in caught.value.errors]
    assert max(len(message) for _, message in caught.value.errors) < 500
    assert peak < 1_000_000


@pytest.mark.parametrize("field", ["slots", "scalars", "ranks"])
def test_reading_stops_where_enough_is_wrong(field: str) -> None:
    class Counted(list[Any]):
        read = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                Counted.read += 1
                yield item

    body = {
        "schema": 1,
        "attempt": {"id": "0"},
        "group": "0",
        "step": 0,
        "columns": {},
        field: Counted([5] * 50_000),
    }
    with pytest.raises(WireError) as caught:
        parse_sample({"slots": [], **body})
    assert len(caught.value.errors) == 1000
    assert Counted.read < 1100
