"""What several ranks measured adds up as TensorStats do, and the worst of them are found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks.buffer import Snapshot, VariantRows
from fp8_safeguard.hooks.coverage import discover
from fp8_safeguard.hooks.layers import Part
from fp8_safeguard.hooks.merging import Layout, Local, Merge, local_of, worst_of, worst_of_all
from fp8_safeguard.hooks.sample import Notes, StepRecord
from fp8_safeguard.kernels.stats import merge_stats
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

NAN, ROWS, AMAX = (COLUMNS.index(name) for name in ("nan", "rows", "amax"))
SUM_SQ, ERROR = COLUMNS.index("sum_sq"), COLUMNS.index("sum_sq_err")


@pytest.fixture
def layout() -> Layout:
    layers, _ = discover(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda module, name: True)
    return Layout(layers)


def vectors(seed: int, rows: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Plausible statistics: whole numbers everywhere, so that sums are exact in any order."""
    return np.random.default_rng(seed).integers(1, 1000, size=(rows, VECTOR_LENGTH)).astype(np.float64)


def measured(layout: Layout, values: Any, parts: set[int] | None = None, **record: Any) -> Local:
    filled = [p.first_row for p in layout.places if parts is None or p.part in parts]
    made = StepRecord(
        step=0, snapshot=Snapshot(torch.from_numpy(values), None, record.pop("variants", ())),
        filled=frozenset(filled), marks=record.pop("marks", {}), notes=Notes(), plan_version=0, effective_step=None,
        overhead_ratio=0.0,
    )  # fmt: skip
    return local_of(layout, made, record.pop("loss_scale", 1.0))


def add_up(layout: Layout, locals_W: list[Local | None]) -> tuple[Merge, Any, Any]:
    """A round of that many ranks, without their connections."""
    empty = np.zeros(len(layout.places), np.uint8)
    masks = np.stack([empty if each is None else each.masks_S for each in locals_W])
    merge = Merge(layout, masks, [b"" if each is None else each.variant_names for each in locals_W])
    packed = [merge.packed(rank, local) for rank, local in enumerate(locals_W)]
    sums = np.sum([each for each, _ in packed], axis=0)
    with np.errstate(invalid="ignore"):
        maxima = np.max([each for _, each in packed], axis=0)
    values, variants = merge.unpacked(sums, maxima)
    return merge, values, variants


def test_sums_add_amax_is_the_largest_and_a_weight_counts_once(layout: Layout) -> None:
    parts = [vectors(seed, layout.rows) for seed in range(3)]
    _, values, _ = add_up(layout, [measured(layout, each.copy()) for each in parts])
    for place in layout.places:
        rows = [torch.from_numpy(part[place.first_row]) for part in parts]
        merged = merge_stats(torch.stack(rows)).numpy()
        expected = parts[0][place.first_row] if place.part is Part.W_TILE else merged
        assert values[place.first_row].tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_b29_a_maximum_loses_no_nan_whichever_rank_has_it(layout: Layout, bad: int) -> None:
    parts = [vectors(seed, layout.rows) for seed in range(3)]
    parts[bad][:, AMAX] = math.nan
    _, values, _ = add_up(layout, [measured(layout, each) for each in parts])
    assert all(math.isnan(values[p.first_row, AMAX]) for p in layout.places if p.part is not Part.W_TILE)


def test_b20_a_rank_with_nothing_adds_nothing(layout: Layout) -> None:
    part = vectors(0, layout.rows)
    part[:, AMAX] = 3.0
    merge, values, _ = add_up(layout, [None, measured(layout, part)])
    assert values.tolist() == part.tolist()
    assert worst_of(layout, merge, 0, None, values).tolist() == np.zeros((4, 4)).tolist()


def test_a_slot_that_one_rank_read_in_tiles_is_that_of_those_that_read_all_of_it(layout: Layout) -> None:
    whole, tiles = vectors(0, layout.rows), vectors(1, layout.rows)
    tiles[:, COLUMNS.index("inf") + 1 :] = math.nan
    _, values, _ = add_up(layout, [measured(layout, tiles.copy()), measured(layout, whole)])
    assert values.tolist() == whole.tolist()
    _, values, _ = add_up(layout, [measured(layout, tiles.copy()), measured(layout, tiles.copy())])
    first = values[layout.places[0].first_row]
    assert first[0] == 2 * tiles[0, 0]
    assert np.isnan(first[[ROWS, AMAX, SUM_SQ]]).all()


def test_gradients_are_brought_to_one_loss_scale_before_they_are_added(layout: Layout) -> None:
    part = vectors(0, layout.rows)
    scaled = part.copy()
    for place in layout.places:
        if place.part in (Part.DY_ROW, Part.DY_COL, Part.DGRAD, Part.WGRAD):
            for name, power in (
                ("amax", 1),
                ("sum_sq", 2),
                ("sum_sq_q", 2),
                ("sum_sq_err", 2),
                ("sum_4th", 4),
            ):
                scaled[place.rows, COLUMNS.index(name)] *= 1024.0**power
    _, values, _ = add_up(
        layout, [measured(layout, scaled, loss_scale=1024.0), measured(layout, part.copy())]
    )
    x = layout.places[0].first_row
    expected = 2 * part[: layout.rows]
    expected[:, AMAX] = part[:, AMAX]
    assert values[x].tolist() == expected[x].tolist()
    dy = next(p for p in layout.places if p.part is Part.DY_ROW).first_row
    assert values[dy].tolist() == expected[dy].tolist()


def test_variants_merge_where_every_rank_with_the_slot_has_them(layout: Layout) -> None:
    rows = layout.rows
    fprop = next(p for p in layout.places if p.part is Part.FPROP).first_row
    names = {0: ["pow2", "bf16 w"], 1: ["pow2"]}
    parts = [vectors(rank, rows + len(listed)) for rank, listed in names.items()]
    locals_W: list[Local | None] = [
        measured(
            layout,
            part.copy(),
            variants=tuple(
                VariantRows(fprop, name, "e4m3", rows + k, 1) for k, name in enumerate(names[rank])
            ),
        )
        for rank, part in enumerate(parts)
    ]
    _, values, variants = add_up(layout, locals_W)
    assert [(each.name, each.first_row) for each in variants] == [("pow2", rows)]
    expected = merge_stats(torch.from_numpy(np.stack([part[rows] for part in parts]))).numpy()
    assert values[rows].tolist() == expected.tolist()
    # A rank that did not measure the slot at all says nothing against it.
    _, _, variants = add_up(layout, [locals_W[0], measured(layout, parts[1].copy(), {Part.X_ROW})])
    assert {each.name for each in variants} == {"pow2", "bf16 w"}


def test_what_a_slot_is_judged_by_travels_with_it(layout: Layout) -> None:
    """Rank 0 lost its sample: that the operand is E5M2, and the GEMM emulated, it hears from the others."""
    fprop = next(p for p in layout.places if p.part is Part.FPROP).first_row
    marks = {0: {"fmt": "e5m2"}, fprop: {"emulated": True}}
    local = measured(layout, vectors(0, layout.rows), marks=marks)
    merge, values, variants = add_up(layout, [None, local])
    base = StepRecord(7, Snapshot(torch.zeros(0), None), frozenset(), {}, Notes(), 3, None, 0.0)
    record = merge.record(base, values, variants)
    assert record.marks == marks
    assert (record.step, record.plan_version, record.divided) == (7, 3, True)
    assert record.filled == {place.first_row for place in layout.places}


def healthy(layout: Layout, seed: int, error: float = 0.026) -> Any:
    """Statistics of which every GEMM has that relative error, some a little more or less."""
    values, noise = vectors(seed, layout.rows), np.random.default_rng(seed + 99)
    values[:, NAN : NAN + 2] = 0
    values[:, SUM_SQ] = 1000.0
    values[:, ERROR] = 1000.0 * (error * noise.uniform(0.9, 1.1, layout.rows)) ** 2
    return values


def test_one_bad_rank_of_sixteen_stands_out_though_the_sum_hides_it(layout: Layout) -> None:
    parts = [healthy(layout, seed) for seed in range(16)]
    dgrad = [at for at, place in enumerate(layout.places) if place.part is Part.DGRAD][1]
    parts[11][layout.places[dgrad].first_row, ERROR] = 1000.0 * 0.2**2
    locals_W: list[Local | None] = [measured(layout, part) for part in parts]
    merge, values, _ = add_up(layout, locals_W)
    merged = values[layout.places[dgrad].first_row]
    assert math.sqrt(merged[ERROR] / merged[SUM_SQ]) < 0.06
    tables = np.stack([worst_of(layout, merge, rank, local, values) for rank, local in enumerate(locals_W)])
    named = worst_of_all(layout, tables, [f"host{rank}" for rank in range(16)])
    assert len(named) == 4
    assert named[0] == {
        "rank": 11, "host": "host11", "layer": "1", "gemm": "dgrad", "metric": "relative_error",
        "value": pytest.approx(0.2),
    }  # fmt: skip
    assert all(one["value"] < 0.03 for one in named[1:])


def test_a_rank_is_held_against_the_others_not_against_a_sum_with_itself_in_it(layout: Layout) -> None:
    """Of two ranks the worse one's error is at most 1.4 of both; a sliver of another slot could look worse than that."""
    parts = [healthy(layout, seed) for seed in range(2)]
    fprop, dgrad = (
        next(p for p in layout.places if p.part is part).first_row for part in (Part.FPROP, Part.DGRAD)
    )
    parts[1][fprop, ERROR] = 1000.0 * 0.3**2
    parts[0][dgrad, [SUM_SQ, ERROR]] = 10.0, 10.0 * 0.06**2
    locals_W: list[Local | None] = [measured(layout, part) for part in parts]
    merge, values, _ = add_up(layout, locals_W)
    tables = np.stack([worst_of(layout, merge, rank, local, values) for rank, local in enumerate(locals_W)])
    named = worst_of_all(layout, tables, ["a", "b"])
    assert [(one["rank"], one["gemm"]) for one in named[:2]] == [(1, "fprop"), (0, "dgrad")]


def test_nonfinite_values_come_first_those_of_one_rank_alone_before_those_of_all(layout: Layout) -> None:
    parts = [healthy(layout, seed) for seed in range(3)]
    parts[0][layout.places[0].first_row, ERROR] = 1000.0
    for part in parts:
        part[layout.places[8].first_row, NAN] = 50.0  # everywhere
    parts[2][layout.places[3].first_row, NAN] = 1.0  # on one rank
    locals_W: list[Local | None] = [measured(layout, part) for part in parts]
    merge, values, _ = add_up(layout, locals_W)
    tables = np.stack([worst_of(layout, merge, rank, local, values) for rank, local in enumerate(locals_W)])
    named = worst_of_all(layout, tables, ["a", "b", "c"])
    found = [(one["rank"], one["layer"], one.get("operand"), one["value"]) for one in named]
    assert found == [(2, "0", "dy", 1.0), (0, "1", "x", 50.0), (1, "1", "x", 50.0), (2, "1", "x", 50.0)]


def test_other_layers_or_options_have_another_digest() -> None:
    same, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, n)) for n in (4, 5))
    digests = [
        Layout(discover(model, lambda module, name: True)[0]).digest(1) for model in (same, same, other)
    ]
    assert digests[0] == digests[1] != digests[2]
    assert Layout(discover(same, lambda module, name: True)[0]).digest(2) != digests[0]
