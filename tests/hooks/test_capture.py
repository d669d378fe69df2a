"""What is measured is what the definition says, and training is not changed by it."""

from __future__ import annotations

import copy
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
from fp8_safeguard.monitor.stats import TensorStats, compare, measure

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
# A GEMM recomputed in float32 against one in float64, as a fraction of its result.
GEMM_TOLERANCE = 1e-5
ALL_PARTS = {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"}


def assert_same(actual: TensorStats, wanted: TensorStats, tolerance: float = SUM_TOLERANCE) -> None:
    assert actual.nulls == wanted.nulls
    np.testing.assert_allclose(actual.to_vector(), wanted.to_vector(), rtol=tolerance, atol=0)


class Conv1D(nn.Module):
    """As Hugging Face has it for GPT-2: weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.ones(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], self.nf)


def make_layer(kind: str, width: int, seed: int) -> nn.Module:
    """A square layer of a kind that is observed, with weights of both signs."""
    layer: nn.Module
    if kind == "conv1d":
        layer = Conv1D(width, width)
    elif kind == "ours":
        layer = Fp8Linear(width, width)
    elif kind == "experts":
        layer = Fp8GroupedLinear(2, width, width)
    else:
        layer = nn.Linear(width, width, bias=kind == "view")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return layer


def call_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call it; of experts the first has two rows and the second the others."""
    offsets = torch.tensor([0, 2, x.shape[0]], dtype=torch.int32)
    y: torch.Tensor = layer(x, offsets) if isinstance(layer, Fp8GroupedLinear) else layer(x)
    return y


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

    def test_bfloat16_and_kwargs_and_conv1d(self, watch: Watch, read: Read) -> None:
        model = nn.ModuleDict({"conv": Conv1D(130, 200), "linear": nn.Linear(130, 64)}).bfloat16()
        guard = watch(model, recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = wide(2, 7, 200, seed=1).bfloat16().requires_grad_()
        w = model["conv"].weight.detach().clone()
        model["linear"](input=model["conv"](x=x).relu_()).sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("conv") == got.parts("linear") == ALL_PARTS
        assert_same(got["conv x col"], measure(array(x).reshape(-1, 200), layout="col"))
        assert_same(got["conv w tile"], measure(array(w).T, layout="tile"))
        status = {row["name"]: row["status"] for row in guard.coverage()}
        assert status == {"conv": "adapted", "linear": "observed"}

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

    def test_b03_in_place_activation_does_not_disturb_and_is_not_seen(self, watch: Watch, read: Read) -> None:
        linear = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            linear.weight.copy_(-torch.eye(2))
        plain = nn.Sequential(copy.deepcopy(linear), nn.ReLU(inplace=True))
        model = nn.Sequential(linear, nn.ReLU(inplace=True))
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for net in (plain, model):
            net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
        # The output is -1 before the ReLU and 0 after it; the recomputed fprop looked at the real one, in time.
        got = read(guard)["0 fprop"]
        assert (got.amax, got.sum_sq, got.sum_sq_err) == (1.0, 2.0, 0.0)

    @pytest.mark.parametrize("kind", ["linear", "view", "conv1d", "ours", "experts"])
    def test_b03_training_before_in_place_activations_keeps_every_bit(
        self, watch: Watch, read: Read, kind: str
    ) -> None:
        """Layers of each kind, each followed by an activation that overwrites its output."""
        layers = [make_layer(kind, 8, seed) for seed in (1, 2)]
        plain = copy.deepcopy(layers)
        model = nn.ModuleList(layers)
        guard = watch(model, recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
        x = x.reshape(2, 3, 8) if kind == "view" else x
        gradients, outputs = [], []
        for first, second in (plain, layers):
            start = x.clone().requires_grad_()
            hidden = call_layer(first, start)
            outputs.append(hidden.detach().clone())
            y = call_layer(second, nn.functional.relu(hidden, inplace=True))
            nn.functional.relu(y, inplace=True).square().sum().backward()
            gradients.append([start.grad, *(p.grad for net in (first, second) for p in net.parameters())])
        optimizer.step()
        assert all(torch.equal(ours, bare) for bare, ours in zip(*gradients, strict=True))
        assert all(bool(gradient.any()) for gradient in gradients[0])
        got = read(guard)
        assert got.parts("0") == got.parts("1") == ALL_PARTS
        # Before the activation: what comes out of it has no negative elements, and these are counted.
        wanted = float(outputs[0].double().square().sum())
        assert got["0 fprop"].sum_sq_q == pytest.approx(wanted, rel=1e-6)
        assert float(outputs[0].clamp(min=0).double().square().sum()) < 0.9 * wanted

    @pytest.mark.parametrize("change", ["relu", "multiply", "slice"])
    def test_b03_dy_is_seen_though_the_output_is_a_view_that_changes_in_place(
        self, watch: Watch, read: Read, change: Any
    ) -> None:
        """F.linear returns a view for three dimensions with a bias; its place in the graph moves."""
        model = nn.Linear(8, 8)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        weight = torch.arange(48.0).reshape(2, 3, 8)
        y = model(x)
        factor = torch.ones(8)
        if change == "relu":
            factor = (y.detach() > 0).float()
            torch.relu_(y)
        elif change == "multiply":
            factor = torch.full((8,), 2.0)
            y.mul_(2)
        else:
            factor[:3] = 5.0
            y[..., :3].mul_(5)
        (y * weight).sum().backward()
        optimizer.step()
        dy = (weight * factor).reshape(6, 8)
        assert_same(read(guard)[" dy row"], measure(array(dy), layout="row"))

    def test_b09_frozen_weights_are_observed_and_have_no_gradient_record(
        self, watch: Watch, read: Read
    ) -> None:
        class LoRA(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(4, 4)
                self.base.requires_grad_(False)
                self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base(x) + self.b(self.a(x))

        model = LoRA()
        guard = watch(model, recompute=3)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("base") == {"x row", "w tile", "fprop"}
        assert got.parts("a") == {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "wgrad"}
        assert got.parts("b") == ALL_PARTS

    @pytest.mark.parametrize("kind", ["linear", "conv1d", "ours", "experts"])
    def test_b09_a_frozen_layer_in_the_middle_passes_its_gradient_on_and_has_none_of_its_own(
        self, watch: Watch, read: Read, kind: str
    ) -> None:
        frozen = make_layer(kind, 8, 1).requires_grad_(False)
        model = nn.ModuleDict({"first": nn.Linear(8, 8), "frozen": frozen})
        weight = model["frozen"].weight.detach().clone()
        guard = watch(model, recompute=3)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
        call_layer(frozen, model["first"](torch.randn(6, 8))).sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("frozen") == {"x row", "w tile", "dy row", "fprop", "dgrad"}
        assert got.parts("first") == ALL_PARTS - {"dgrad"}
        parts = [weight.T] if kind == "conv1d" else weight.reshape(-1, 8, 8).unbind()
        assert_same(got["frozen w tile"], TensorStats.merge(measure(array(w), layout="tile") for w in parts))
        assert {row["name"]: row["status"] for row in guard.coverage()}["frozen"] != "not observed"

    def test_b09_a_model_without_trainable_weights_is_observed_without_a_gradient(
        self, watch: Watch, read: Read
    ) -> None:
        """A frozen embedding before a frozen layer; only a vector beside them learns."""
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "linear": nn.Linear(4, 4)}).requires_grad_(False)
        prompt = nn.Parameter(torch.zeros(4))
        model.register_parameter("prompt", prompt)
        guard = watch(model)
        optimizer = torch.optim.SGD([prompt], 0.1)
        (model["linear"](model["embed"](torch.tensor([0, 3]))) * prompt).sum().backward()
        optimizer.step()
        assert read(guard).parts("linear") == {"x row", "w tile", "fprop"}
        assert {slot.layer for slot in read(guard).sample.slots} == {"linear"}

    @pytest.mark.parametrize("kind", ["linear", "view", "conv1d", "ours", "experts"])
    def test_b19_first_layer_with_a_plain_batch_has_dy_and_no_dgrad(
        self, watch: Watch, read: Read, kind: str
    ) -> None:
        layer = make_layer(kind, 4, 1)
        guard = watch(layer)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        x = torch.randn(2, 3, 4) if kind == "view" else torch.randn(6, 4)
        assert not x.requires_grad
        call_layer(layer, x).sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("") == ALL_PARTS - {"dgrad"}
        # The gradient of a sum is 1 everywhere.
        assert (got[" dy row"].count, got[" dy row"].sum_sq, got[" dy row"].amax) == (24, 24.0, 1.0)

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


class TestExtremes:
    @pytest.mark.parametrize("kind", ["linear", "conv1d", "ours", "experts"])
    def test_b26_lora_s_zero_matrix_is_measured_without_nan_or_underflow(
        self, watch: Watch, read: Read, kind: str
    ) -> None:
        down, up = make_layer(kind, 8, 1), make_layer(kind, 8, 2)
        for parameter in up.parameters():
            nn.init.zeros_(parameter)
        model = nn.ModuleDict({"down": down, "up": up})
        guard = watch(model, recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(6, 8).requires_grad_()
        y = call_layer(up, call_layer(down, x))
        y.sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("down") == got.parts("up") == ALL_PARTS
        zeros = ("up w tile", "up fprop", "up dgrad", "down dy row", "down dy col", "down wgrad")
        for label in zeros:
            stats = got[label]
            assert (stats.nan, stats.inf, stats.amax, stats.sum_sq, stats.sum_sq_q) == (0, 0, 0.0, 0.0, 0.0)
            assert stats.cosine is None
        for label in ("up w tile", "down dy row", "down dy col"):
            assert (got[label].zero_ratio, got[label].underflow_ratio) == (1.0, 0.0)
        assert all(stats.metric("nonfinite_count") == 0 for stats in got.stats.values())

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
