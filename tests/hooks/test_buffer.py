"""Frames add up, and the ring never hands out one that is still being copied."""

from __future__ import annotations

import math

import torch

from fp8_safeguard.hooks.buffer import Frame, Ring
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH, TensorStats

CPU = torch.device("cpu")
AMAX = COLUMNS.index("amax")


def vectors(rows: int, base: float) -> torch.Tensor:
    return torch.full((rows, VECTOR_LENGTH), base, dtype=torch.float64)


def test_parts_merge_as_the_definition_says() -> None:
    frame = Frame(5, CPU)
    parts = [vectors(2, 3.0), vectors(2, 1.0), vectors(2, 7.0)]
    for part in parts:
        frame.add(1, part)
    wanted = TensorStats.merge(TensorStats.from_vector(part[0].numpy()) for part in parts).to_vector()
    values = frame.snapshot().numpy()
    assert (values[1] == wanted).all()
    assert (values[2] == wanted).all()
    assert frame.filled == {1}
    assert (values[[0, 3, 4]] == 0).all()


def test_a_nan_amax_is_not_lost() -> None:
    for order in ((math.nan, 1.0), (1.0, math.nan)):
        frame = Frame(1, CPU)
        for amax in order:
            part = vectors(1, 1.0)
            part[0, AMAX] = amax
            frame.add(0, part)
        assert math.isnan(frame.snapshot().numpy()[0, AMAX])


def test_rows_are_there_for_everybody_who_reads_and_merge_with_what_comes_after() -> None:
    frame = Frame(4, CPU)
    frame.add_row(1, vectors(1, 3.0).numpy())
    frame.add_row(2, vectors(1, 5.0).numpy())
    assert (frame.values[1:3, 0].numpy() == [3.0, 5.0]).all()
    parts = [vectors(1, 3.0), vectors(1, 7.0), vectors(1, 1.0)]
    frame.add(1, parts[1])
    frame.add_row(1, parts[2].numpy())
    frame.add_row(3, vectors(1, 9.0).numpy())
    wanted = TensorStats.merge(TensorStats.from_vector(part[0].numpy()) for part in parts).to_vector()
    values = frame.snapshot().numpy()
    assert (values[1] == wanted).all()
    assert (values[[0, 2, 3], 0] == [0.0, 5.0, 9.0]).all()
    assert frame.filled == {1, 2, 3}


def test_rows_that_nobody_read_are_gone_with_their_step() -> None:
    frame = Frame(2, CPU)
    frame.add_row(0, vectors(1, 3.0).numpy())
    frame.begin()
    frame.add_row(1, vectors(1, 5.0).numpy())
    assert (frame.values[:, 0].numpy() == [0.0, 5.0]).all()


def test_a_frame_that_is_taken_again_starts_empty_and_a_snapshot_keeps_its_values() -> None:
    ring = Ring(1, CPU, size=1)
    first = ring.acquire()
    assert first is not None
    first.add(0, vectors(1, 2.0))
    snapshot = first.snapshot()
    second = ring.acquire()
    assert second is first
    assert second.filled == set()
    second.add(0, vectors(1, 5.0))
    assert (snapshot.numpy() == 2.0).all()
    assert (second.snapshot().numpy() == 5.0).all()


def test_frames_under_way_are_passed_over_and_with_all_of_them_there_is_none() -> None:
    class Copy:
        done = False

        def query(self) -> bool:
            return self.done

    ring = Ring(1, CPU, size=2)
    copies = [Copy(), Copy()]
    for frame, copy in zip(ring._frames, copies, strict=True):
        frame._in_flight = copy
    assert ring.acquire() is None
    copies[1].done = True
    assert ring.acquire() is ring._frames[1]


class TestVariants:
    """What-ifs of a slot: rows behind those of all slots, there only in steps that measured some."""

    def test_they_stand_behind_the_slots_in_their_order(self) -> None:
        frame = Frame(4, CPU)
        frame.add(0, vectors(2, 1.0))
        frame.add_variant(2, "late", "e5m2", vectors(2, 3.0), experts=2)
        frame.add_variant(0, "early", "e4m3", vectors(1, 5.0))
        snapshot = frame.snapshot()
        assert snapshot.numpy().shape == (7, VECTOR_LENGTH)
        found = [(v.slot_row, v.name, v.fmt, v.first_row, v.experts) for v in snapshot.variants]
        assert found == [(0, "early", "e4m3", 4, 1), (2, "late", "e5m2", 5, 2)]
        assert (snapshot.numpy()[4:, 0] == [5.0, 3.0, 3.0]).all()
        assert frame.filled == {0}

    def test_parts_merge_at_the_experts_that_they_are_of(self) -> None:
        frame = Frame(3, CPU)
        for first, base in ((0, 3.0), (2, 7.0), (2, 1.0)):
            frame.add_variant(0, "pow2", "e4m3", vectors(1, base), experts=3, first=first)
        values = frame.snapshot().numpy()[3:]
        merged = TensorStats.merge(
            TensorStats.from_vector(vectors(1, base)[0].numpy()) for base in (7.0, 1.0)
        )
        assert (values[0] == 3.0).all()
        assert (values[1] == 0.0).all()
        assert (values[2] == merged.to_vector()).all()

    def test_what_was_added_is_a_copy_and_a_snapshot_stays_as_it_is(self) -> None:
        frame, given = Frame(1, CPU), vectors(1, 2.0)
        frame.add_variant(0, "pow2", "e4m3", given)
        given.zero_()
        snapshot = frame.snapshot()
        frame.add_variant(0, "pow2", "e4m3", vectors(1, 2.0))
        assert (snapshot.numpy()[1] == 2.0).all()
        [held] = frame.variants_of({0})
        assert held[0, 0] == 4.0
        assert frame.variants_of({1}) == []

    def test_the_next_step_begins_without_them(self) -> None:
        ring = Ring(1, CPU, size=1)
        first = ring.acquire()
        assert first is not None
        first.add_variant(0, "pow2", "e4m3", vectors(1, 2.0))
        first.closely = frozenset({"layer"})
        second = ring.acquire()
        assert second is first
        assert second.closely is None
        snapshot = second.snapshot()
        assert snapshot.variants == ()
        assert snapshot.numpy().shape == (1, VECTOR_LENGTH)
