"""Recomputed GEMMs say what the definition says of the layer's real, or emulated, results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision
from fp8_safeguard.monitor.stats import TensorStats, compare

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
# A GEMM recomputed in float32 against one in float64, as a fraction of its result.
GEMM_TOLERANCE = 1e-5


def assert_same(actual: TensorStats, wanted: TensorStats, tolerance: float = SUM_TOLERANCE) -> None:
    assert actual.nulls == wanted.nulls
    np.testing.assert_allclose(actual.to_vector(), wanted.to_vector(), rtol=tolerance, atol=0)


def one_step(
    watch: Watch, read: Read, model: Fp8Linear
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sample of one forward and backward of 50 tokens, with x, dy and y."""
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(50, model.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = torch.randn(50, model.out_features, generator=torch.Generator().manual_seed(2))
    y = model(x)
    y.backward(dy)
    optimizer.step()
    return read(guard), x, dy, y


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def dequantised(x: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """E4M3 and back, with numpy and ml_dtypes alone."""
    values = x.detach().numpy()
    result = np.empty(values.shape, dtype=np.float64)
    for i in range(0, values.shape[0], block[0]):
        for j in range(0, values.shape[1], block[1]):
            part = values[i : i + block[0], j : j + block[1]]
            scale = np.float32(np.abs(part).max()) / np.float32(448)
            codes = np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            result[i : i + block[0], j : j + block[1]] = codes.astype(np.float64) * np.float64(scale)
    return result


class TestGemms:
    def test_plain_layer_compares_its_real_output_and_says_emulated_for_its_gradients(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(200, 40)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.randn(50, 200, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dy = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
        w = model.weight.detach().double()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.backward(dy.bfloat16())
        optimizer.step()
        got = read(guard)
        exact = x.detach().double() @ w.T + model.bias.detach().double()
        assert_same(got[" fprop"], compare(exact.numpy(), y.detach().double().numpy()), 1e-3)
        assert {s.label.strip() for s in got.sample.slots if s.emulated} == {"dgrad", "wgrad"}

    def test_emulated_gradient_gemms_are_those_of_the_dequantised_operands(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(200, 40, bias=False)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(50, 200, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dy = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
        w = model.weight.detach().clone()
        model(x).backward(dy)
        optimizer.step()
        got = read(guard)
        dyq, wq = dequantised(dy, (1, 128)), dequantised(w, (128, 128))
        wanted = compare(array(dy.double() @ w.double()), dyq @ wq)
        assert_same(got[" dgrad"], wanted, GEMM_TOLERANCE)
        exact = array(dy.double().T @ x.detach().double())
        wanted = compare(exact, dequantised(dy, (128, 1)).T @ dequantised(x, (128, 1)))
        assert_same(got[" wgrad"], wanted, GEMM_TOLERANCE)

    def test_our_layer_compares_its_real_results(self, watch: Watch, read: Read) -> None:
        model = Fp8Linear(200, 40)
        got, x, dy, y = one_step(watch, read, model)
        w, x64, dy64 = model.weight.detach().double(), x.detach().double(), dy.double()
        pairs = {
            "fprop": (x64 @ w.T, y),
            "dgrad": (dy64 @ w, x.grad),
            "wgrad": (dy64.T @ x64, model.weight.grad),
        }
        for gemm, (exact, real) in pairs.items():
            assert_same(got[f" {gemm}"], compare(array(exact), array(real)), GEMM_TOLERANCE)
            assert 0.015 < got[f" {gemm}"].relative_error < 0.05
        assert not any(slot.emulated for slot in got.sample.slots)

    def test_a_gemm_in_fallback_goes_on_saying_what_fp8_would_do(self, watch: Watch, read: Read) -> None:
        model = Fp8Linear(200, 40, precision=LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16"))
        got, x, dy, _ = one_step(watch, read, model)
        w = model.weight.detach()
        w64, x64, dy64 = w.double(), x.detach().double(), dy.double()
        xq, wq = dequantised(x.detach(), (1, 128)), dequantised(w, (128, 128))
        dyq = dequantised(dy, (1, 128))
        pairs = {
            "fprop": (x64 @ w64.T, xq @ wq.T),
            "dgrad": (dy64 @ w64, dyq @ wq),
            "wgrad": (dy64.T @ x64, dequantised(dy, (128, 1)).T @ dequantised(x.detach(), (128, 1))),
        }
        for gemm, (exact, fp8) in pairs.items():
            assert_same(got[f" {gemm}"], compare(array(exact), fp8), GEMM_TOLERANCE)
        assert {s.label.strip() for s in got.sample.slots if s.emulated} == {"fprop", "dgrad", "wgrad"}

    @pytest.mark.parametrize("dgrad", ["fp8", "bf16"])
    def test_gradients_are_judged_as_the_layer_hands_them_on(
        self, watch: Watch, read: Read, dgrad: str
    ) -> None:
        """Outliers hide a flushed weight column from the GEMM's own error, but not from the layers before."""
        precision = LinearPrecision(dgrad=dgrad)  # type: ignore[arg-type]
        model = Fp8Linear(256, 40, precision=precision)
        gain = torch.ones(256)
        gain[::16] = 2.0**19
        model.input_gain = gain
        got, x, dy, _ = one_step(watch, read, model)
        w, x64, dy64 = model.weight.detach().double(), x.detach().double(), dy.double()
        if dgrad == "fp8":
            assert_same(got[" dgrad"], compare(array(dy64 @ w), array(x.grad)), GEMM_TOLERANCE)
        assert_same(got[" wgrad"], compare(array(dy64.T @ x64), array(model.weight.grad)), GEMM_TOLERANCE)
        # The outliers' columns of dX are lost entirely; the rest has the format's own noise.
        exact = dy64 @ w
        lost = float(exact[:, ::16].square().sum() / exact.square().sum())
        assert 0.04 < lost < 0.1
        assert got[" dgrad"].relative_error == pytest.approx(lost**0.5, abs=0.01)
        assert got[" dgrad"].cosine_distortion == pytest.approx(1 - (1 - lost) ** 0.5, abs=0.003)

    def test_grouped_layer_compares_each_expert_with_its_own_weight(self, watch: Watch, read: Read) -> None:
        model = Fp8GroupedLinear(3, 64, 40)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        bounds = [0, 30, 30, 50]
        x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dy = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
        y = model(x, torch.tensor(bounds, dtype=torch.int32))
        y.backward(dy)
        optimizer.step()
        got = read(guard)
        spans = [slice(0, 30), slice(30, 30), slice(30, 50)]
        w, x64, dy64 = model.weight.detach().double(), x.detach().double(), dy.double()
        exact = {
            "fprop": (torch.cat([x64[s] @ w[e].T for e, s in enumerate(spans)]), y),
            "dgrad": (torch.cat([dy64[s] @ w[e] for e, s in enumerate(spans)]), x.grad),
            "wgrad": (torch.stack([dy64[s].T @ x64[s] for s in spans]), model.weight.grad),
        }
        for gemm, (wanted, real) in exact.items():
            assert_same(got[f" {gemm}"], compare(array(wanted), array(real)), GEMM_TOLERANCE)
        assert got[" wgrad"].relative_error > 0.01

    def test_weight_gradients_take_turns(self, watch: Watch, read: Read, train: Train) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        guard = watch(model, recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        turns = []
        for _ in range(5):
            train(model, optimizer)
            sample = read(guard).sample
            turns.append([slot.layer for slot in sample.slots if slot.gemm == "wgrad"])
        assert turns == [["0", "1"], ["2", "3"], ["0", "4"], ["1", "2"], ["3", "4"]]
