"""Layers with one scale for a whole operand: what is measured, judged, told and controlled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import whatif
from fp8_safeguard.kernels import (
    Fp8GroupedLinear,
    Fp8Linear,
    LinearPrecision,
    OperandFormat,
    QuantizedTensor,
    ScaledFormat,
    quantize,
)
from fp8_safeguard.monitor.whatifs import VARIANTS

Watch = Callable[..., Any]
Read = Callable[[Any], Any]
MAXIMUM = 448.0


def values(rows: int, columns: int, amax: float, seed: int) -> Tensor:
    """Normal values of which the largest is amax."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * (amax / x.abs().max())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dy: Tensor, **how: Any) -> None:
    model(x.clone().requires_grad_(), **how).backward(dy)
    optimizer.step()
    optimizer.zero_grad()


def restored(x: Tensor, scale: float, fmt: str = "e4m3") -> Tensor:
    return quantize(x, fmt=fmt, tensor_scale=scale).dequantize(torch.float64)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@pytest.fixture
def layer() -> Fp8Linear:
    made = Fp8Linear(96, 64, precision=LinearPrecision())
    with torch.no_grad():
        made.weight.copy_(values(64, 96, 0.5, 3))
    return made


def faulty(operand: str, **options: Any) -> LinearPrecision:
    changed: dict[str, Any] = {operand: OperandFormat(**options)}
    return LinearPrecision(**changed)


@pytest.mark.parametrize(
    ("fault", "precision", "slot", "metric", "least"),
    [
        ("E", faulty("dy", scaling="delayed", initial_scale=1.0), " dy row", "underflow_ratio", 0.99),
        ("F", faulty("dy", scaling="tensor", multiplier=2.0**18), " dy row", "underflow_ratio", 0.9),
        ("F2", faulty("dy", scaling="tensor", multiplier=2.0**-8), " dy row", "saturation_ratio", 0.8),
        ("G", faulty("x", scaling="tensor", multiplier=2.0**-4), " x row", "saturation_ratio", 0.5),
        ("D", faulty("dy", amax_floor=1e4), " dy row", "underflow_ratio", 0.99),
    ],
)
def test_each_fault_of_a_scale_shows_in_statistics_and_in_the_results(
    fault: str,
    precision: LinearPrecision,
    slot: str,
    metric: str,
    least: float,
    layer: Fp8Linear,
    watch: Watch,
    read: Read,
) -> None:
    """Saturated or flushed: in the operand that has the fault, and in the GEMMs that read it, and in no other."""
    layer.precision = precision
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    step(layer, optimizer, values(32, 96, 3.0, 1), values(32, 64, 1e-5, 2))
    got = read(guard)
    assert got[slot].metric(metric) >= least
    faulty_gemms = {"fprop", "wgrad"} if fault == "G" else {"dgrad", "wgrad"}
    for gemm in ("fprop", "dgrad", "wgrad"):
        error = got[f" {gemm}"].metric("relative_error")
        assert (error > 0.5) == (gemm in faulty_gemms), f"{gemm}: {error}"
    healthy = " x row" if slot == " dy row" else " dy row"
    assert got[healthy].metric("underflow_ratio") < 0.02
    assert got[healthy].metric("saturation_ratio") == 0


def test_a_stale_inverse_scale_is_seen_in_the_result_alone(
    layer: Fp8Linear, watch: Watch, read: Read
) -> None:
    """H: the operands' statistics are healthy, fprop's result is 8 times what it should be."""

    def stale(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        if (gemm, operand) != ("fprop", "x"):
            return codes
        return QuantizedTensor(codes.data, codes.scale * 8, codes.layout, codes.fmt, codes.offsets)

    layer.tamper = stale
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    step(layer, optimizer, values(32, 96, 3.0, 1), values(32, 64, 1e-5, 2))
    got = read(guard)
    assert got[" fprop"].metric("relative_error") == pytest.approx(7.0, rel=0.02)
    assert got[" dgrad"].metric("relative_error") < 0.05
    assert got[" x row"].metric("cosine") > 0.999


@pytest.mark.parametrize("grouped", [False, True])
def test_statistics_and_errors_are_those_of_the_scales_that_were_used(
    grouped: bool, watch: Watch, read: Read
) -> None:
    """The second step's scales follow the first step's amax, in every slot: against float64."""
    operand = OperandFormat(scaling="delayed")
    precision = LinearPrecision(x=operand, w=operand, dy=operand)
    how: dict[str, Any] = {}
    model: Any = Fp8Linear(96, 64, precision=precision)
    if grouped:
        model = Fp8GroupedLinear(2, 96, 64, precision=precision)
        how = {"offsets": torch.tensor([0, 20, 48], dtype=torch.int32)}
    with torch.no_grad():
        model.weight.copy_(values(64, 96, 0.5, 3))
    guard, optimizer = watch(model), torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer, values(48, 96, 1.0, 1), values(48, 64, 1e-3, 2), **how)
    x, dy, w = values(48, 96, 4.0, 4), values(48, 64, 8e-3, 5), model.weight.detach().clone()
    step(model, optimizer, x, dy, **how)
    got = read(guard)
    before = {"x": values(48, 96, 1.0, 1), "dy": values(48, 64, 1e-3, 2), "w": w}
    scales = {name: np.float32(tensor.abs().max()) / np.float32(448) for name, tensor in before.items()}
    for name, tensor, layouts in (
        ("x", x, "row col"),
        ("dy", dy, "row col"),
        ("w", w.reshape(-1, 96), "tile"),
    ):
        exact, back = tensor.double(), restored(tensor, float(scales[name]))
        for layout in layouts.split():
            stats = got[f" {name} {layout}"]
            assert stats.saturated == int((tensor.abs() / float(scales[name]) > 464).sum())
            assert stats.sum_sq_err == pytest.approx(float((exact - back).square().sum()), rel=1e-6)
    if not grouped:
        xq, wq, dyq = (restored(t, float(scales[name])) for name, t in (("x", x), ("w", w), ("dy", dy)))
        for gemm, actual, exact in (
            ("fprop", xq @ wq.T, x.double() @ w.double().T),
            ("dgrad", dyq @ wq, dy.double() @ w.double()),
            ("wgrad", dyq.T @ xq, dy.double().T @ x.double()),
        ):
            assert got[f" {gemm}"].metric("relative_error") == pytest.approx(
                relative_error(actual, exact), rel=1e-3
            )
    told = {name: value for layer, name, value in scalars(got)}
    assert told == {f"{name}_scale": float(scale) for name, scale in scales.items()} | {
        f"{name}_history_amax": float(tensor.abs().max()) for name, tensor in before.items()
    }


def scalars(got: Any) -> list[tuple[str, str, float]]:
    return [
        (item["layer"], item["name"], item["value"])
        for item in got.sample.scalars
        if item["name"].endswith(("_scale", "_history_amax"))
    ]


def test_b104_no_scale_is_told_before_one_was_measured(layer: Fp8Linear, watch: Watch, read: Read) -> None:
    """The first step of delayed scaling, with a configured initial scale: no such scalar; block scales have none ever."""
    operand = OperandFormat(scaling="delayed", initial_scale=1.0)
    layer.precision = LinearPrecision(x=operand, dy=operand)
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    x, dy = values(32, 96, 3.0, 1), values(32, 64, 1e-5, 2)
    step(layer, optimizer, x, dy)
    assert scalars(read(guard)) == []
    step(layer, optimizer, x, dy)
    assert {name for _, name, _ in scalars(read(guard))} == {
        "x_scale",
        "x_history_amax",
        "dy_scale",
        "dy_history_amax",
    }
    layer.precision = LinearPrecision()
    step(layer, optimizer, x, dy)
    assert scalars(read(guard)) == []


def test_a_stuck_scale_is_told_beside_the_history_that_it_does_not_follow(
    layer: Fp8Linear, watch: Watch, read: Read
) -> None:
    layer.precision = faulty("dy", scaling="delayed")
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    layer.scaling.hold("dy", 1.0)
    for amax in (1e-5, 2e-5):
        step(layer, optimizer, values(32, 96, 3.0, 1), values(32, 64, amax, 2))
    got = read(guard)
    told = {name: value for _, name, value in scalars(got)}
    assert told["dy_scale"] == 1.0
    assert told["dy_history_amax"] == pytest.approx(1e-5)
    assert got[" dy row"].metric("underflow_ratio") == 1.0
    assert got[" dgrad"].metric("relative_error") == 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_changes_nothing_that_is_measured(
    reentrant: bool, layer: Fp8Linear, watch: Watch, read: Read
) -> None:
    layer.precision = LinearPrecision(x=OperandFormat(scaling="delayed"), dy=OperandFormat(scaling="delayed"))
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    for amax in (1.0, 4.0):
        x = values(32, 96, amax, 1).requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).backward(values(32, 64, amax, 2))
        optimizer.step()
    got = read(guard)
    scale = float(np.float32(1.0) / np.float32(448))
    for name, tensor in (("x", values(32, 96, 4.0, 1)), ("dy", values(32, 64, 4.0, 2))):
        assert got[f" {name} row"].saturated == int((tensor.abs() / scale > 464).sum())
        assert got[f" {name} row"].count == tensor.numel()


def test_a_fallback_goes_on_being_told_what_its_scale_would_do(
    layer: Fp8Linear, watch: Watch, read: Read
) -> None:
    layer.precision = LinearPrecision(
        fprop="bf16", dgrad="bf16", wgrad="bf16", x=OperandFormat(scaling="tensor", multiplier=2.0**-4)
    )
    guard, optimizer = watch(layer), torch.optim.SGD(layer.parameters(), lr=0.0)
    step(layer, optimizer, values(32, 96, 3.0, 1), values(32, 64, 1e-5, 2))
    got = read(guard)
    assert got[" x row"].metric("saturation_ratio") > 0.5
    assert got[" fprop"].metric("relative_error") > 0.5
    assert next(slot for slot in got.sample.slots if slot.gemm == "fprop").emulated


class TestWhatIfs:
    """What other scales would do to a GEMM whose operand has one scale for the whole."""

    X, W = values(64, 96, 3.0, 1), values(48, 96, 0.5, 3)

    def errors(self, precision: LinearPrecision) -> dict[str, float]:
        rows = torch.arange(64)
        found = whatif.fprop(self.X, self.W, rows, whatif.alternatives("fprop", precision))
        return {name: float((vector[11] / vector[9]).sqrt()) for name, vector in found.items()}

    def exact(self, x: Tensor, w: Tensor) -> float:
        return relative_error(x @ w.T, self.X.double() @ self.W.double().T)

    def test_each_says_what_it_would_be(self) -> None:
        """x's scale 16 times too small: fresh, block and margin scales against float64 products."""
        stale = ScaledFormat(scaling="delayed", amax=3.0 / 16)
        errors = self.errors(LinearPrecision(x=stale))
        w = quantize(self.W, layout="tile").dequantize(torch.float64)
        for name, scale in (
            ("fp8", 3.0 / 16),
            ("x_margin_2^4", 3.0),
            ("x_margin_2^2", 0.75),
            ("x_margin_2^8", 48.0),
            ("fresh", 3.0),
        ):
            x = restored(self.X, float(np.float32(scale / 448)))
            assert errors[name] == pytest.approx(self.exact(x, w), rel=1e-4), name
        x = quantize(self.X).dequantize(torch.float64)
        assert errors["block"] == pytest.approx(self.exact(x, w), rel=1e-4)
        assert errors["fp8"] > 0.5 > 0.05 > errors["x_margin_2^4"]
        # Delayed scaling makes E5M2's scale of the same amax: it saturates at the same value.
        assert errors["x_e5m2"] > 0.5
        assert "tensor" not in self.errors(LinearPrecision(x=stale, w=stale))
        assert "dy_margin_2^4" not in errors

    def test_e5m2_helps_where_the_scale_itself_stays(self) -> None:
        """G as it was measured: a scale that nothing updates, 16 times too small, is wide enough for E5M2."""
        stuck = ScaledFormat(scaling="delayed", fixed_scale=3.0 / 448 / 16)
        errors = self.errors(LinearPrecision(x=stuck))
        assert errors["fp8"] > 0.5 > 0.07 > errors["x_e5m2"]
        assert errors["x_margin_2^4"] == errors["fp8"]

    def test_layers_with_block_scales_have_none_of_them(self) -> None:
        errors = self.errors(LinearPrecision())
        assert not {name for name in errors if "margin" in name or name in ("fresh", "block")}
        assert "tensor" in errors

    def test_a_floor_is_left_out_of_block_scales(self) -> None:
        errors = self.errors(LinearPrecision(x=OperandFormat(amax_floor=1e9)))
        assert errors["fp8"] == 1.0
        assert errors["block"] < 0.05

    def test_those_that_a_plan_can_bring_about_are_plain_values(self) -> None:
        for name, variant in VARIANTS.items():
            if variant.action == "margin":
                assert variant.plannable
                assert name == f"{variant.operand}_margin_2^{variant.value:.0f}"


@pytest.fixture
def planned(endpoint: Any, watch: Watch, accept: Callable[..., Any]) -> Callable[..., LinearPrecision]:
    """The precision of a layer some steps after the server has sent it these entries."""

    def after_steps(model: Fp8Linear, entries: list[dict[str, Any]]) -> LinearPrecision:
        guard = watch(model, server=endpoint.url, run="scales", mode="enforce")
        endpoint.answer = lambda body: (
            200,
            accept(body, plan={"version": 1 + body["step"], "entries": entries}),
        )
        for n in range(4):
            model(torch.ones(4, 8)).sum().backward()
            guard.step(n)
            assert guard.flush(10)
        return model.precision

    return after_steps


def change(action: str, value: Any, target: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer": "", "target": target, "action": action, "value": value, "decision_id": "d", "not_before_step": 0,
        "expires_step": None,
    }  # fmt: skip


def test_margin_and_history_are_controlled(planned: Callable[..., LinearPrecision]) -> None:
    """On operands with delayed scaling; the rest of the layer is left alone."""
    operand = OperandFormat(scaling="delayed")
    model = Fp8Linear(8, 8, precision=LinearPrecision(x=operand, dy=OperandFormat(scaling="tensor")))
    place = {"operand": "x", "layout": "row"}
    changes = [
        change("margin", 3.0, {"layer": True}), change("amax_history", 64, place), change("scale_multiplier", 0.5, place),
    ]  # fmt: skip
    assert planned(model, changes) == LinearPrecision(
        x=OperandFormat(scaling="delayed", margin=3, amax_history=64, multiplier=0.5),
        dy=OperandFormat(scaling="tensor", margin=3),
    )


def test_a_controlled_margin_is_that_of_the_next_products(planned: Callable[..., LinearPrecision]) -> None:
    model, made = Fp8Linear(8, 8, precision=LinearPrecision(x=OperandFormat(scaling="delayed"))), []

    def note(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        if (gemm, operand) == ("fprop", "x"):
            made.append(float(codes.scale[0, 0]))
        return codes

    model.tamper = note
    planned(model, [change("margin", 3, {"operand": "x", "layout": "row"})])
    one = float(np.float32(1) / np.float32(448))
    assert made == [one, one, 8 * one, 8 * one]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (("margin", 1, {"layer": True}), "margin is not supported by these scalings"),
        (("amax_history", 8, {"operand": "dy", "layout": "row"}), "it needs 'delayed'"),
        (("margin", 1.5, {"operand": "dy", "layout": "row"}), "whole number of octaves"),
        (("margin", 400, {"operand": "dy", "layout": "row"}), "from -64 to 64"),
        (("margin", "2", {"operand": "dy", "layout": "row"}), "whole number of octaves"),
        (("margin", 1, {"gemm": "dgrad"}), "an operand or a layer, not a gemm"),
    ],
)
def test_what_means_nothing_to_a_layer_is_refused_once(
    entry: tuple[Any, ...],
    said: str,
    planned: Callable[..., LinearPrecision],
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = entry[2] == {"layer": True}
    precision = LinearPrecision() if block else LinearPrecision(dy=OperandFormat(scaling="tensor"))
    assert planned(Fp8Linear(8, 8, precision=precision), [change(*entry)]) == precision
    assert sum(said in record.getMessage() for record in caplog.records) == 1
