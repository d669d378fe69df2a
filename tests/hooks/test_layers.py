"""Layers of every kind in a graph: frozen, first, zero, and before an in-place activation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
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


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


class TestKinds:
    def test_bfloat16_and_kwargs_and_conv1d(self, watch: Watch, read: Read) -> None:
        model = nn.ModuleDict({"conv": Conv1D(130, 200), "linear": nn.Linear(130, 64)}).bfloat16()
        guard = watch(model, recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(2, 7, 200, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        w = model["conv"].weight.detach().clone()
        model["linear"](input=model["conv"](x=x).relu_()).sum().backward()
        optimizer.step()
        got = read(guard)
        assert got.parts("conv") == got.parts("linear") == ALL_PARTS
        assert_same(got["conv x col"], measure(array(x).reshape(-1, 200), layout="col"))
        assert_same(got["conv w tile"], measure(array(w).T, layout="tile"))
        status = {row["name"]: row["status"] for row in guard.coverage()}
        assert status == {"conv": "adapted", "linear": "observed"}

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
        plain = copy.deepcopy(model)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        weight = torch.arange(48.0).reshape(2, 3, 8)
        for net in (plain, model):
            y = net(x)
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
        assert torch.equal(plain.weight.grad, model.weight.grad)
        assert torch.equal(plain.bias.grad, model.bias.grad)
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
