"""What is measured of each operand is what the definition says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision, OperandFormat
from fp8_safeguard.monitor.stats import TensorStats, measure

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
ALL_PARTS = {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"}


def assert_same(actual: TensorStats, wanted: TensorStats, tolerance: float = SUM_TOLERANCE) -> None:
    assert actual.nulls == wanted.nulls
    np.testing.assert_allclose(actual.to_vector(), wanted.to_vector(), rtol=tolerance, atol=0)


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def wide(*shape: int, seed: int) -> torch.Tensor:
    """Values over many decades, some zero: every statistic has something to count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(6 * torch.randn(*shape, generator=generator))
    return torch.where(torch.rand(*shape, generator=generator) < 0.1, 0.0, x)


class TestOperands:
    @pytest.mark.parametrize("shape", [(5, 200), (3, 70, 200), (1, 1, 200)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_a_plain_linear_reports_each_operand_as_the_definition_measures_it(
        self, watch: Watch, read: Read, shape: tuple[int, ...], bias: bool
    ) -> None:
        model = nn.Linear(200, 130, bias=bias)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, dy = wide(*shape, seed=1).requires_grad_(), wide(*shape[:-1], 130, seed=2)
        w = model.weight.detach().clone()
        model(x).backward(dy)
        optimizer.step()
        got = read(guard)
        assert {slot.layer for slot in got.sample.slots} == {""}
        x_TK, dy_TN = array(x).reshape(-1, 200), array(dy).reshape(-1, 130)
        for operand, value, layouts in (
            ("x", x_TK, "row col"),
            ("dy", dy_TN, "row col"),
            ("w", array(w), "tile"),
        ):
            for layout in layouts.split():
                assert_same(got[f" {operand} {layout}"], measure(value, layout=layout))

    def test_our_layer_reports_with_the_formats_that_it_is_configured_with(
        self, watch: Watch, read: Read
    ) -> None:
        precision = LinearPrecision(
            x=OperandFormat(scale="pow2"), w=OperandFormat(multiplier=0.5), dy=OperandFormat(fmt="e5m2")
        )
        model = Fp8Linear(200, 130, precision=precision)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, dy = wide(9, 200, seed=1).requires_grad_(), wide(9, 130, seed=2)
        w = model.weight.detach().clone()
        model(x).backward(dy)
        optimizer.step()
        got = read(guard)
        for layout in ("row", "col"):
            assert_same(got[f" x {layout}"], measure(array(x), layout=layout, scale="pow2"))
            assert_same(got[f" dy {layout}"], measure(array(dy), layout=layout, fmt="e5m2"))
        assert_same(got[" w tile"], measure(array(w), layout="tile", multiplier=0.5))
        fmts = {slot.label.strip(): slot.fmt for slot in got.sample.slots}
        assert fmts["dy row"] == fmts["dgrad"] == fmts["wgrad"] == "e5m2"
        assert fmts["x row"] is None
        assert fmts["fprop"] is None

    def test_micro_batches_and_shared_modules_add_up_and_the_weight_counts_once(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(200, 200)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        w = model.weight.detach().clone()
        inputs = []
        model.register_forward_hook(lambda module, args, out: inputs.append(args[0].detach().clone()))
        for seed in (1, 2, 3):
            model(model(wide(6, 200, seed=seed))).sum().backward()
        optimizer.step()
        got = read(guard)
        assert len(inputs) == 6
        for layout in ("row", "col"):
            assert_same(
                got[f" x {layout}"], TensorStats.merge(measure(array(x), layout=layout) for x in inputs)
            )
        assert_same(got[" w tile"], measure(array(w), layout="tile"))
        assert got[" dy row"].count == 6 * 6 * 200

    @pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
    def test_frames_take_turns_and_every_sample_is_as_full_as_the_first(
        self, watch: Watch, read: Read, train: Train, kind: Any
    ) -> None:
        model = kind(8, 8)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(7):
            train(model, optimizer)
            assert read(guard).parts("") == ALL_PARTS - {"dgrad"}
            assert read(guard)[" dy row"].count == 4 * 8

    def test_experts_travel_as_their_sum_and_the_worst_one(self, watch: Watch, read: Read) -> None:
        model = Fp8GroupedLinear(3, 200, 130)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(70, 200, generator=torch.Generator().manual_seed(1))
        x[:40] = 0.0  # zeros of its own do not make an expert the worst
        x[50:] = wide(20, 200, seed=2)
        model(x, torch.tensor([0, 50, 50, 70], dtype=torch.int32)).sum().backward()
        optimizer.step()
        got = read(guard)
        parts = [measure(array(x[a:b]), layout="col") for a, b in ((0, 50), (50, 50), (50, 70))]
        assert_same(got[" x col"], TensorStats.merge(parts))
        assert_same(got[" x col, expert 2"], parts[2])
        assert got[" x row, expert 2"].underflow == got[" x row"].underflow > 0

    @pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
    def test_nothing_is_measured_without_gradients_or_while_paused(
        self, watch: Watch, read: Read, train: Train, kind: Any
    ) -> None:
        model = kind(8, 8)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            model(torch.randn(100, 8))
        with torch.inference_mode():
            model(torch.randn(100, 8))
        with guard.paused():
            model(torch.randn(100, 8)).sum().backward()
        train(model, optimizer)
        assert read(guard)[" x row"].count == read(guard)[" dy row"].count == 4 * 8

    def test_nan_and_inf_are_counted_and_a_later_micro_batch_does_not_hide_them(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        bad = torch.ones(2, 8)
        bad[0, 0], bad[1, 3] = math.nan, math.inf
        for x in (bad, torch.ones(2, 8)):
            model(x).sum().backward()
        optimizer.step()
        got = read(guard)
        assert (got[" x row"].nan, got[" x row"].inf) == (1, 1)
        assert got[" fprop"].metric("nonfinite_count") == 16


class TestExtremes:
    @pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
    def test_b33_operands_are_measured_in_their_order_whatever_their_strides(
        self, watch: Watch, read: Read, kind: Any
    ) -> None:
        model = kind(200, 130, bias=False)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, dy = wide(200, 9, seed=1).t().requires_grad_(), wide(18, 260, seed=2)[::2, ::2]
        model(x).backward(dy)
        optimizer.step()
        got = read(guard)
        for layout in ("row", "col"):
            assert_same(got[f" x {layout}"], measure(array(x), layout=layout))
            assert_same(got[f" dy {layout}"], measure(array(dy), layout=layout))

    @pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
    def test_b28_gradients_near_1e_9_are_reported_without_underflow(
        self, watch: Watch, read: Read, kind: Any
    ) -> None:
        torch.manual_seed(0)
        model = kind(8, 8)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        dy = (torch.arange(1, 9, dtype=torch.float64) / 8 * 1e-9).float().expand(3, 8)
        model(torch.randn(3, 8).requires_grad_()).backward(dy)
        optimizer.step()
        got = read(guard)
        for label in (" dy row", " dy col"):
            assert (got[label].underflow, got[label].zeros) == (0, 0)
            assert got[label].amax == float(np.float32(1e-9))
        assert got[" dgrad"].relative_error < 0.1
        assert got[" wgrad"].relative_error < 0.1

    @pytest.mark.parametrize(
        ("dtype", "codes", "wanted"),
        [
            (torch.float8_e4m3fn, [0x00, 0x7E, 0x7F, 0xFF], (2, 0, 448.0)),
            (torch.float8_e5m2, [0x7C, 0x7D, 0x00, 0x7B], (1, 1, 57344.0)),
        ],
    )
    def test_b25_activations_that_are_float8_already_are_measured_by_the_values_they_hold(
        self,
        watch: Watch,
        read: Read,
        caplog: pytest.LogCaptureFixture,
        dtype: torch.dtype,
        codes: Any,
        wanted: Any,
    ) -> None:
        class Decoding(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x.float(), self.weight)

        model = Decoding(4, 4, bias=False)
        guard = watch(model)
        model(torch.tensor([codes], dtype=torch.uint8).view(dtype)).sum().backward()
        guard.step()
        got = read(guard)
        for layout in ("row", "col"):
            stats = got[f" x {layout}"]
            assert (stats.nan, stats.inf, stats.amax) == wanted
        assert got[" fprop"].metric("nonfinite_count") == 4
        assert [r.message for r in caplog.records if "failed" in r.message] == []
