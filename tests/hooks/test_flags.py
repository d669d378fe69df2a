"""Which layers get a closer look, for how long, and how many of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fp8_safeguard.hooks.flags import (
    CLOSE_LAYERS,
    FLAG_SAMPLES,
    FLAGGED_LAYERS,
    LONGEST_WAIT,
    LOOKS_AT_ONCE,
    TREATED_EVERY,
    Flags,
)
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.wire import Sample

LAYERS = 12
_HISTOGRAM = (0,) * 13 + (32,) + (0,) * 2

MODULES = [nn.Linear(1, 1) for _ in range(LAYERS)]


def operand(**changed: Any) -> TensorStats:
    """A healthy operand of 4096 elements."""
    fields = {"count": 4096, "zeros": 0, "underflow": 0, "saturated": 0, "nan": 0, "inf": 0, "rows": 32}
    sums = {"rows_flushed": 0, "amax": 3.0, "sum_sq": 4096.0, "sum_sq_q": 4096.0, "sum_sq_err": 2.7}
    return TensorStats(**{**fields, **sums, "sum_4th": 3 * 4096.0, "histogram": _HISTOGRAM, **changed})


def product(error: float = 0.03, count: int = 4096, **changed: Any) -> TensorStats:
    """A recomputed GEMM with that relative error."""
    fields = {"count": count, "nan": 0, "inf": 0, "amax": 3.0, "sum_sq": 100.0, "sum_sq_q": 100.0}
    return TensorStats(**{**fields, "sum_sq_err": 100.0 * error**2, **changed})


Entry = tuple[int, Part, TensorStats]


class Watched:
    """Flags of twelve layers, and samples for them."""

    def __init__(self, thresholds: str = "floor") -> None:
        self.layers = [
            ObservedLayer(
                str(n), module, own=True, transposed=False, experts=1, first_row=n * len(Part)
            )
            for n, module in enumerate(MODULES)
        ]  # fmt: skip
        self.flags = Flags(self.layers, thresholds)
        self.step = 0

    def see(self, *entries: Entry, everywhere: bool = True, **slot: Any) -> tuple[str, ...]:
        """The flagged layers after a sample with these slots, the others healthy or (not `everywhere`) not there."""
        given = {(layer, part): stats for layer, part, stats in entries}
        healthy = {
            (layer, part): product() if part >= Part.FPROP else operand()
            for layer in range(LAYERS if everywhere else 0)
            for part in Part
        }
        slots, indices, stats = [], [], []
        for (layer, part), values in {**healthy, **given}.items():
            own = self.layers[layer].slots[part]
            extra = slot if (layer, part) in given else {}
            slots.append(Slot(**{**vars_of(own), **extra}))
            indices.append(layer * len(Part) + part)
            stats.append(values)
        table = StatsTable.from_stats(stats)
        sample = Sample(
            step=self.step,
            slots=tuple(slots),
            indices=tuple(indices),
            columns=table.columns,
            nulls=table.nulls,
        )
        self.step += 10
        self.flags.look(sample)
        return self.flags.layers


def vars_of(slot: Slot) -> dict[str, Any]:
    names = ("layer", "operand", "layout", "gemm", "emulated")
    return {name: getattr(slot, name) for name in names}


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("part", "stats", "flagged"),
    [
        (Part.X_ROW, operand(underflow=24), True),  # 0.6 %
        (Part.X_ROW, operand(underflow=18), False),  # 0.4 %
        (Part.W_TILE, operand(underflow=8), True),  # 0.2 %, of weights
        (Part.X_COL, operand(underflow=60), False),
        (Part.DY_ROW, operand(rows_flushed=1), True),
        (Part.X_ROW, operand(saturated=1), True),
        (Part.DY_COL, operand(sum_sq_err=6.0), True),
        (Part.FPROP, product(0.051), True),
        (Part.FPROP, product(0.045), False),
        (Part.WGRAD, product(0.079), False),
        (Part.WGRAD, product(0.081), True),
        (Part.FPROP, product(0.3, count=1000), False),  # too few elements
        (Part.DGRAD, product(nan=1), True),
        (Part.X_ROW, operand(amax=1e6, sum_4th=1e12), False),
    ],
)
def test_the_presets_watch_levels_flag_a_layer(
    watched: Watched, part: Part, stats: TensorStats, flagged: bool
) -> None:
    assert watched.see() == ()
    assert watched.see((3, part, stats)) == (("3",) if flagged else ())


def test_levels_follow_the_slots_own_median_and_its_format(watched: Watched) -> None:
    for _ in range(4):
        assert watched.see((3, Part.FPROP, product(0.045))) == ()
    # Once there is a median, 1.3 times it is worth watching; before, only what is beyond any.
    assert watched.see((5, Part.FPROP, product(0.045))) == ("5",)
    watched = Watched()
    assert watched.see((3, Part.FPROP, product(0.09)), fmt="e5m2") == ()
    assert watched.see((3, Part.FPROP, product(0.11)), fmt="e5m2") == ("3",)


def test_a_jump_of_amax_alone_is_nothing(watched: Watched) -> None:
    for _ in range(6):
        watched.see()
    assert watched.see((3, Part.X_ROW, operand(amax=1e9, sum_4th=1e30))) == ()


def test_the_other_preset(watched: Watched) -> None:
    watched = Watched("seed")
    assert watched.see((3, Part.FPROP, product(0.05))) == ()
    assert watched.see((3, Part.FPROP, product(0.2))) == ("3",)


def test_variants_did_not_happen_and_one_expert_did(watched: Watched) -> None:
    assert watched.see((3, Part.FPROP, product(0.9)), variant="pow2") == ()
    assert watched.see((3, Part.FPROP, product(0.9)), expert=7) == ("3",)


def test_of_many_layers_with_nan_only_the_first_is_to_blame(watched: Watched) -> None:
    bad = [(layer, part, operand(nan=5)) for layer in range(4, LAYERS) for part in (Part.X_ROW, Part.DY_ROW)]
    assert watched.see(*bad) == ("4",)


def test_a_flag_lasts_three_samples_of_its_layer(watched: Watched) -> None:
    breach = (3, Part.FPROP, product(0.2))
    assert watched.see(breach) == watched.see(breach) == ("3",)
    seen = [watched.see() for _ in range(FLAG_SAMPLES)]
    assert seen == [("3",)] * (FLAG_SAMPLES - 1) + [()]
    watched.see(breach)
    # Samples that the budget left it out of say nothing about it.
    others = (0, Part.FPROP, product())
    assert [watched.see(others, everywhere=False) for _ in range(5)] == [("3",)] * 5


def test_no_more_than_eight_are_flagged_the_latest_and_worst(watched: Watched) -> None:
    early = [(layer, Part.FPROP, product(0.9)) for layer in range(5)]
    assert len(watched.see(*early)) == 5
    late = [(layer, Part.FPROP, product(0.1 + 0.01 * layer)) for layer in range(6, LAYERS)]
    flagged = watched.see(*late)
    assert flagged[:6] == ("11", "10", "9", "8", "7", "6")
    assert len(flagged) == FLAGGED_LAYERS
    assert len(watched.see(*[(layer, Part.FPROP, product(0.2)) for layer in range(LAYERS)])) == FLAGGED_LAYERS


class TestChoice:
    def test_takes_turns_and_skips_what_is_not_measured(self, watched: Watched) -> None:
        watched.see(*[(layer, Part.FPROP, product(0.1 * layer)) for layer in range(1, 6)])
        everything: Callable[[str], bool] = lambda name: True  # noqa: E731
        turns = [watched.flags.choose(everything) for _ in range(3)]
        assert turns[:2] == [{"5", "4"}, {"3", "2"}]
        assert "1" in turns[2]
        assert all(len(turn) == CLOSE_LAYERS for turn in turns)
        assert watched.flags.choose(lambda name: name == "2") == {"2"}
        assert watched.flags.choose(lambda name: False) == frozenset()

    def test_what_stays_in_breach_is_looked_at_more_and_more_rarely(self, watched: Watched) -> None:
        turns = []
        for _ in range(200):
            watched.see((3, Part.FPROP, product(0.2)))
            turns.append(watched.flags.choose(lambda name: True) == {"3"})
        assert turns[:LOOKS_AT_ONCE] == [True] * LOOKS_AT_ONCE
        waits = [at - before for before, at in itertools.pairwise(n for n, turn in enumerate(turns) if turn)]
        assert waits == sorted(waits)
        assert waits[-1] == LONGEST_WAIT
        for _ in range(FLAG_SAMPLES):
            watched.see()
        assert watched.flags.choose(lambda name: True) == frozenset()
        watched.see((3, Part.FPROP, product(0.2)))
        assert [watched.flags.choose(lambda name: True) for _ in range(2)] == [{"3"}] * 2

    def test_is_empty_where_nothing_is_flagged(self, watched: Watched) -> None:
        watched.see()

        def never(name: str) -> bool:
            raise AssertionError("asked for nothing")

        assert watched.flags.choose(never) == frozenset()


class TestServer:
    def test_alerts_and_decisions_flag_their_layer(self, watched: Watched) -> None:
        watched.flags.hear({"alerts": [{"layer": "3", "severity": "watch"}, {"layer": None}]})
        watched.flags.hear(
            {"decisions": [{"layer": "7", "action": "format"}, {"layer": "8", "action": "restore"}]}
        )
        assert watched.flags.layers == ("7", "3")
        assert watched.see() == ("7", "3")

    def test_layers_that_a_plan_changes_are_looked_at_in_turn(self, watched: Watched) -> None:
        """Nothing else shows whether they still need it. What runs in BF16 is emulated in every sample."""
        entries = [
            {"layer": name, "action": action}
            for name, action in (("5", "format"), ("2", "scale_multiplier"), ("7", "bf16_fallback"), ("no such", "format"))
        ]  # fmt: skip
        watched.flags.hear({"plan": {"version": 1, "entries": entries}})
        seen = [watched.see(everywhere=False) for _ in range(2 * TREATED_EVERY)]
        assert next(filter(None, seen)) == ("5",)
        assert seen.index(("5",)) == TREATED_EVERY - 1
        assert watched.flags.layers == ("5", "2")
        watched.flags.hear({"plan": None})
        assert [watched.see() for _ in range(FLAG_SAMPLES)][-1] == ()
        watched.flags.hear({"plan": {"version": 2, "entries": []}})
        assert {watched.see() for _ in range(2 * TREATED_EVERY)} == {()}

    @pytest.mark.parametrize(
        "reply",
        [{}, {"alerts": None}, {"plan": {"entries": [None, {"layer": ["3"]}]}}, {"alerts": "3"}, {"alerts": [None, 3, {}]}, {"decisions": [{"layer": "no such"}]},
         {"alerts": [{"layer": ["3"]}]}],
    )  # fmt: skip
    def test_what_cannot_be_read_flags_nothing(self, watched: Watched, reply: dict[str, Any]) -> None:
        watched.flags.hear(reply)
        assert watched.flags.layers == ()


def test_two_threads_write_while_one_reads(watched: Watched) -> None:
    stop, failures = threading.Event(), []

    def write(body: Callable[[int], None]) -> None:
        try:
            n = 0
            while not stop.is_set():
                body(n)
                n += 1
        except Exception as error:
            failures.append(error)

    bodies = (
        lambda n: watched.see((n % LAYERS, Part.FPROP, product(0.2)), everywhere=False),
        lambda n: watched.flags.hear({"alerts": [{"layer": str(n % LAYERS), "severity": "act"}]}),
    )
    threads = [threading.Thread(target=write, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert len(watched.flags.choose(lambda name: True)) <= CLOSE_LAYERS
        assert len(watched.flags.layers) <= FLAGGED_LAYERS
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
