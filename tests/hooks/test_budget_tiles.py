"""Tiles of an operand: which are read, what they say, and that the rest is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import operands, tiles
from fp8_safeguard.hooks.budget import TILE_STRIDE, Scope
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.hooks.meter import Meter
from fp8_safeguard.hooks.operands import SAMPLED_COLUMNS
from fp8_safeguard.kernels import OperandFormat
from fp8_safeguard.kernels.tiles import multiplies_codes
from fp8_safeguard.monitor.stats import COLUMNS, TensorStats, measure

E4M3 = OperandFormat()


class Bench:
    """What `operands` needs of a session: one layer, measured as a scope says."""

    def __init__(self, scope: Scope, experts: int = 1) -> None:
        self.layer = ObservedLayer(
            "layer", nn.Linear(1, 1), own=False, transposed=False, experts=experts, first_row=0
        )
        self.frame: Frame | None = Frame(len(Part) * experts, torch.device("cpu"))
        self.meter = Meter()
        self.recent = SimpleNamespace(get=lambda x, how, compute: compute())
        self._scope = scope
        self.experts = experts

    def scope(self, layer: ObservedLayer) -> Scope:
        return self._scope

    def x(self, x_TK: torch.Tensor, **how: Any) -> dict[str, np.ndarray]:
        operands.measure(self, self.layer, x_TK, E4M3, row=Part.X_ROW, col=Part.X_COL, **how)  # type: ignore[arg-type]
        return {"row": self._rows(Part.X_ROW), "col": self._rows(Part.X_COL)}

    def w(self, w: torch.Tensor) -> np.ndarray:
        operands.measure_weight(self, self.layer, w, E4M3)  # type: ignore[arg-type]
        return self._rows(Part.W_TILE)

    def _rows(self, part: Part) -> np.ndarray:
        assert self.frame is not None
        first = self.layer.row(part)
        return self.frame.values[first : first + self.experts].numpy()


def sampled(turn: int, stride: int = TILE_STRIDE) -> Scope:
    return Scope(full=False, judged=False, stride=stride, turn=turn)


def places(rows: int, columns: int, stride: int, turn: int) -> list[tuple[int, int]]:
    """The definition, written out: places in reading order, from the turn's on, one in so many."""
    down, across = math.ceil(rows / 128), math.ceil(columns / 128)
    while math.gcd(stride, down) > 1 or math.gcd(stride, across) > 1:
        stride += 1
    every = min(stride, down * across)
    return [divmod(place, across) for place in range(turn % every, down * across, every)]


def expected(x: torch.Tensor, layout: str, chosen: list[tuple[int, int]]) -> dict[str, int | None]:
    """Counts of these tiles by the float64 definition of the statistics."""
    parts = [
        measure(x[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].float().numpy(), layout=layout)
        for r, c in chosen
    ]
    merged = TensorStats.merge(parts)
    return {name: merged.column(name) for name in SAMPLED_COLUMNS}


def counts(vector: np.ndarray) -> dict[str, float]:
    return dict(zip(SAMPLED_COLUMNS, vector[: len(SAMPLED_COLUMNS)].tolist(), strict=True))


def wild(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with zeros, NaN and Inf among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp(3.0 * torch.randn(rows, columns, generator=generator))
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    x[rows // 2, columns // 3], x[rows // 3, columns // 2] = math.nan, math.inf
    return x


SHAPES = [(640, 512), (1000, 200), (130, 900), (1, 5000), (700, 60)]


class TestWhatTilesSay:
    @pytest.mark.parametrize(("rows", "columns"), SHAPES)
    @pytest.mark.parametrize("turn", [0, 1, 16])
    def test_the_rates_are_those_of_the_tiles_in_either_layout(
        self, rows: int, columns: int, turn: int
    ) -> None:
        x = wild(rows, columns)
        found = Bench(sampled(turn)).x(x)
        for layout in ("row", "col"):
            assert counts(found[layout][0]) == expected(x, layout, places(rows, columns, 17, turn))

    @pytest.mark.parametrize(("rows", "columns"), SHAPES)
    def test_all_turns_together_are_the_whole(self, rows: int, columns: int) -> None:
        x = wild(rows, columns)
        total = math.ceil(rows / 128) * math.ceil(columns / 128)
        turns = min(total, tiles.step_between(TILE_STRIDE, math.ceil(rows / 128), math.ceil(columns / 128)))
        parts = [Bench(sampled(turn)).x(x)["col"][0, :6] for turn in range(turns)]
        whole = Bench(Scope()).x(x)["col"][0, :6]
        assert np.array_equal(np.sum(parts, axis=0), whole)

    def test_the_other_columns_are_null(self) -> None:
        found = Bench(sampled(3)).x(wild(640, 512))
        assert np.isnan(found["row"][0, len(SAMPLED_COLUMNS) :]).all()
        assert not np.isnan(found["row"][0, : len(SAMPLED_COLUMNS)]).any()

    def test_micro_batches_add_up(self) -> None:
        x, y = wild(640, 512), wild(640, 512, seed=1)
        bench = Bench(sampled(2))
        bench.x(x)
        both = bench.x(y)["row"][0]
        single = [counts(Bench(sampled(2)).x(part)["row"][0]) for part in (x, y)]
        assert counts(both) == {name: single[0][name] + single[1][name] for name in SAMPLED_COLUMNS}
        assert np.isnan(both[COLUMNS.index("rows")])

    def test_a_view_that_is_not_contiguous_and_another_dtype(self) -> None:
        x = wild(512, 640).mT.bfloat16()
        chosen = places(640, 512, 17, 5)
        assert counts(Bench(sampled(5)).x(x)["row"][0]) == expected(x, "row", chosen)

    def test_an_operand_of_a_few_tiles_is_measured_in_full(self) -> None:
        x = wild(256, 256)
        assert np.array_equal(Bench(sampled(1)).x(x)["row"], Bench(Scope()).x(x)["row"])
        weight = wild(200, 256)
        assert np.array_equal(Bench(sampled(1)).w(weight), Bench(Scope()).w(weight))

    def test_nothing_and_a_single_row(self) -> None:
        for shape in ((0, 512), (640, 0), (1, 1)):
            assert Bench(sampled(1)).x(torch.zeros(shape))["row"][0, 0] == math.prod(shape)

    @pytest.mark.parametrize("shape", [(640, 512), (700, 500), (64, 900)])
    def test_a_weight_in_tiles(self, shape: tuple[int, int]) -> None:
        w = wild(*shape)
        found = Bench(sampled(4)).w(w)
        assert counts(found[0]) == expected(w, "tile", places(*shape, 17, 4))
        assert np.isnan(found[0, 6:]).all()

    def test_a_weight_whose_codes_are_made_anyway_is_measured_in_full(self) -> None:
        w = wild(640, 512).nan_to_num(1.0, 2.0)
        bench = Bench(Scope(full=False, judged=True, stride=17, turn=4))
        found, whole = bench.w(w), Bench(Scope()).w(w)
        if multiplies_codes(w):
            assert np.array_equal(found, whole)
            assert bench.layer.step.codes is not None
            # Out of its turn: the operands' account does not pay for it.
            assert bench.meter._operands == 0.0
        else:
            assert found[0, 0] == 2 * 128 * 128

    @pytest.mark.parametrize("shape", [(300, 520), (40, 4500)])
    def test_a_weight_of_experts_gives_the_same_tiles_of_each(self, shape: tuple[int, int]) -> None:
        w_ENK = torch.stack([wild(*shape, seed=e) for e in range(3)])
        found = Bench(sampled(6), experts=3).w(w_ENK)
        for expert in range(3):
            assert counts(found[expert]) == expected(w_ENK[expert], "tile", places(*shape, 17, 6))

    def test_rows_of_experts_give_a_band_of_columns(self) -> None:
        x, offsets = wild(600, 700), torch.tensor([0, 90, 90, 600], dtype=torch.int32)
        found = Bench(sampled(2), experts=3).x(x, offsets=offsets)
        for layout in ("row", "col"):
            for expert, (start, end) in enumerate([(0, 90), (90, 90), (90, 600)]):
                band = x[start:end, 256:384].numpy()
                stats = measure(band, layout=layout)
                assert counts(found[layout][expert]) == {n: stats.column(n) for n in SAMPLED_COLUMNS}

    def test_an_underflow_rate_above_one_in_a_thousand_is_right_within_ten_percent_rms(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.exp(2.5 * torch.randn(1024, 2048, generator=generator))
        whole = measure(x.numpy(), layout="row").underflow_ratio
        assert whole is not None
        assert whole > 1e-3
        found = np.array([Bench(sampled(turn)).x(x)["row"][0] for turn in range(17)])
        rates = found[:, COLUMNS.index("underflow")] / found[:, COLUMNS.index("count")]
        assert math.sqrt(np.mean((rates / whole - 1.0) ** 2)) < 0.1


class TestWhichAreRead:
    @pytest.mark.parametrize(("down", "across"), [(8, 16), (17, 4), (34, 16), (3, 51), (64, 17)])
    def test_no_band_of_columns_or_rows_is_always_the_same(self, down: int, across: int) -> None:
        step = tiles.step_between(TILE_STRIDE, down, across)
        assert step >= TILE_STRIDE
        for size in (down, across):
            assert math.gcd(step, size) == 1
        seen = [tiles.positions(down * across, step, turn) for turn in range(step)]
        assert sorted(place for chosen in seen for place in chosen) == list(range(down * across))
        # One turn already goes through several columns, where it reads several tiles.
        columns = {place % across for place in seen[0]}
        assert len(columns) == min(across, len(seen[0]))

    @pytest.mark.parametrize("number", [1, 2, 5, 16])
    def test_at_least_one_and_each_in_its_turn(self, number: int) -> None:
        chosen = [list(tiles.positions(number, 17, turn)) for turn in range(number)]
        assert sorted(place for places in chosen for place in places) == list(range(number))
        assert all(len(places) == 1 for places in chosen)

    @pytest.mark.parametrize(("rows", "columns"), [(640, 512), (1000, 200), (130, 900)])
    def test_a_device_picks_the_same_ones(self, rows: int, columns: int) -> None:
        x_ETK = torch.stack([wild(rows, columns), wild(rows, columns, seed=1)])
        for turn in range(3):
            chosen = tiles.positions(tiles.tiles_of(rows, columns), 17, turn)
            across = math.ceil(columns / 128)
            size = (128, min(128, columns))
            copied, gathered = (
                take(x_ETK, chosen, across, size) for take in (tiles._copied, tiles._gathered)
            )
            assert torch.equal(copied.nan_to_num(7.5, 9e9), gathered.nan_to_num(7.5, 9e9))

    def test_only_the_picked_elements_reach_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []

        def spying(name: str) -> Callable[..., Any]:
            real = getattr(operands, name)

            def spy(x: torch.Tensor, **how: Any) -> Any:
                read.append(x.numel())
                return real(x, **how)

            return spy

        for name in ("layout_stats", "tensor_stats"):
            monkeypatch.setattr(operands, name, spying(name))
        x, w, offsets = (
            torch.ones(2048, 1024),
            torch.ones(1024, 1024),
            torch.tensor([0, 2048], dtype=torch.int32),
        )
        for scope in (sampled(0), sampled(0, stride=67)):
            Bench(scope).x(x)
            Bench(scope).x(x[:16])
            Bench(scope).w(w)
            Bench(scope).x(x, offsets=offsets)
        tile = 128 * 128
        assert read == [8 * tile, tile // 8, 4 * tile, 16 * tile, 2 * tile, tile // 8, tile, 16 * tile]

    def test_the_time_goes_to_the_operands(self) -> None:
        bench = Bench(sampled(0))
        begun = bench.meter.begin_layer()
        bench.x(torch.ones(640, 512))
        bench.meter.end_layer(begun, "layer")
        took = bench.meter.layers["layer"]
        assert 0 < took.operands <= took.total <= bench.meter.host_seconds
