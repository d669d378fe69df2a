"""Delayed scaling: scales of a step from the amax of the steps before it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.kernels import (
    DelayedScaling,
    Fp8GroupedLinear,
    Fp8Linear,
    KernelError,
    LinearPrecision,
    OperandFormat,
    QuantizedTensor,
    fp8_grouped_linear,
    fp8_linear,
    quantize,
)

from .delayed_inputs import delayed, with_amax

pytestmark = pytest.mark.usefixtures("same_weights")
MAXIMUM = 448.0


class Step:
    """Steps of an optimizer that changes nothing."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def __call__(
        self, *micro_batches: tuple[Tensor, Tensor], call: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        for x, dy in micro_batches:
            y = (call or self.layer)(x.clone().requires_grad_())
            y.backward(dy)
        self.optimizer.zero_grad()
        self.optimizer.step()


class Simulated:
    """Delayed scaling by the letter, in plain Python: one operand."""

    def __init__(self, length: int, margin: int, choice: str) -> None:
        self.length, self.margin, self.choice = length, margin, choice
        self.amax: list[float] = []

    def scale(self, now: float) -> float:
        """Of a step whose own amax is `now`, which counts only while nothing else is known."""
        window = self.amax[-self.length :]
        chosen = (max(window) if self.choice == "max" else window[-1]) if window else now
        return float(np.float32(np.float32(chosen or now) / np.float32(MAXIMUM)) * 2.0**self.margin)


@pytest.mark.parametrize("choice", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (4, 0), (4, 2), (64, -1)])
def test_twenty_steps_follow_the_rule(length: int, margin: int, choice: str) -> None:
    """Scales of x, w and dy at each of 20 steps with two micro-batches, against a simulation of the rule."""
    layer = Fp8Linear(64, 48, precision=delayed(amax_history=length, margin=margin, amax_choice=choice))
    seen: list[tuple[str, str, float]] = []

    def tamper(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        assert (codes.scale == codes.scale.flatten()[0]).all()
        seen.append((gemm, operand, float(codes.scale.flatten()[0])))
        return codes

    layer.tamper, train = tamper, Step(layer)
    generator = np.random.default_rng(1)
    simulated = {name: Simulated(length, margin, choice) for name in ("x", "w", "dy")}
    for step in range(20):
        with torch.no_grad():
            layer.weight.copy_(with_amax(48, 64, float(np.float32(generator.lognormal())), step))
        amax = {
            name: [float(np.float32(generator.lognormal(0, 2))) for _ in range(2)] for name in ("x", "dy")
        }
        amax["w"] = [float(layer.weight.detach().abs().max())] * 2
        seen.clear()
        train(*((with_amax(32, 64, amax["x"][k]), with_amax(32, 48, amax["dy"][k])) for k in range(2)))
        micro_batches = [seen[:6], seen[6:]]
        for k, made in enumerate(micro_batches):
            wanted = {name: simulated[name].scale(amax[name][k]) for name in amax}
            assert made == [
                ("fprop", "x", wanted["x"]), ("fprop", "w", wanted["w"]), ("dgrad", "dy", wanted["dy"]),
                ("dgrad", "w", wanted["w"]), ("wgrad", "dy", wanted["dy"]), ("wgrad", "x", wanted["x"]),
            ], f"step {step}, micro-batch {k}"  # fmt: skip
        for name, values in amax.items():
            simulated[name].amax.append(max(values))
            assert layer.scaling.history(name) == tuple(simulated[name].amax[-length:])
            assert layer.scaling.scale(name, getattr(layer.precision, name)) == simulated[name].scale(
                math.nan
            )


def test_plain_scalings_give_what_they_gave_by_way_of_codes() -> None:
    """A tamper that changes nothing leaves every bit of a layer with block scales, dense and grouped, where it was."""
    generator = torch.Generator().manual_seed(2)
    x, dy = torch.randn(200, 150, generator=generator), torch.randn(200, 96, generator=generator)
    w = torch.randn(3, 96, 150, generator=generator)
    offsets = torch.tensor([0, 60, 60, 190], dtype=torch.int32)
    for backend in ("native", "numba", "reference"):
        results = []
        for tamper in (None, lambda gemm, operand, codes: codes):
            dense, grouped, leaf, other = (each.clone().requires_grad_() for each in (w[0], w, x, x))
            y = fp8_linear(leaf, dense, tamper=tamper, backend=backend)
            y.backward(dy)
            z = fp8_grouped_linear(other, grouped, offsets, tamper=tamper, backend=backend)
            z.backward(dy)
            results.append((y, leaf.grad, dense.grad, z, other.grad, grouped.grad))
        for plain, coded in zip(*results, strict=True):
            assert torch.equal(plain, coded), backend


def test_a_tamper_changes_what_is_multiplied_and_nothing_that_is_kept() -> None:
    """H: fprop's x is dequantised with 8 times its scale; the gradients are those of a healthy layer."""
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(64, 128, generator=generator), torch.randn(64, 32, generator=generator)
    found = []
    for factor in (1.0, 8.0):
        layer = Fp8Linear(128, 32, precision=LinearPrecision())
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, 32 * 128).reshape(32, 128))

        def stale(gemm: str, operand: str, codes: QuantizedTensor, factor: float = factor) -> QuantizedTensor:
            if (gemm, operand) != ("fprop", "x"):
                return codes
            return QuantizedTensor(codes.data, codes.scale * factor, codes.layout, codes.fmt, codes.offsets)

        layer.tamper = stale
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        found.append((y.detach(), leaf.grad, layer.weight.grad))
    torch.testing.assert_close(found[1][0], found[0][0] * 8)
    assert torch.equal(found[1][1], found[0][1])
    assert torch.equal(found[1][2], found[0][2])


def reference(x: Tensor, w: Tensor, dy: Tensor, scales: dict[str, float]) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw in float64 from operands quantised with those scales."""
    x, w, dy = (
        quantize(tensor, tensor_scale=scales[name]).dequantize(torch.float64)
        for name, tensor in (("x", x), ("w", w), ("dy", dy))
    )
    return x @ w.T, dy @ w, dy.T @ x


@pytest.mark.parametrize("grouped", [False, True])
def test_results_are_those_of_operands_with_these_scales(grouped: bool) -> None:
    """A second step whose values have grown: x and dy saturate at what the first step has shown."""
    x, dy = with_amax(96, 130, 1.0, 1), with_amax(96, 40, 0.5, 2)
    if grouped:
        layer: Any = Fp8GroupedLinear(1, 130, 40, precision=delayed())
        offsets = torch.tensor([0, 96], dtype=torch.int32)
        call = lambda x: layer(x, offsets)  # noqa: E731
    else:
        layer, call = Fp8Linear(130, 40, precision=delayed()), None
    train = Step(layer)
    train((x, dy), call=call)
    leaf = (x * 100).requires_grad_()
    y = (call or layer)(leaf)
    y.backward(dy * 100)
    w = layer.weight.detach().reshape(40, 130)
    scales = {
        name: np.float32(amax) / np.float32(448)
        for name, amax in (("x", 1.0), ("w", w.abs().max()), ("dy", 0.5))
    }
    wanted = reference(x * 100, w, dy * 100, {name: float(scale) for name, scale in scales.items()})
    for got, exact in zip((y, leaf.grad, layer.weight.grad.reshape(40, 130)), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
    assert float(y.detach().norm()) < 0.1 * float((x @ w.T * 100).norm())


def checkpointed(layer: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(layer, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_b05_scales_of_the_backward_are_updated_under_checkpointing(reentrant: bool) -> None:
    """Gradients of amax 4 then 2: history and scale after step 2 as without, and not the initial 1.0."""
    precision = delayed(initial_scale=1.0)
    plain, saved = Fp8Linear(64, 32, precision=precision), Fp8Linear(64, 32, precision=precision)
    saved.load_state_dict(plain.state_dict())
    recorded: list[str] = []
    saved.scaling.record = spy(saved.scaling, recorded)  # type: ignore[method-assign]
    results = []
    for layer, call in ((plain, None), (saved, checkpointed(saved, reentrant))):
        train = Step(layer)
        for amax in (4.0, 2.0):
            train((with_amax(16, 64, 1.0), with_amax(16, 32, amax)), call=call)
        names = ("x", "w", "dy")
        results.append(
            [(layer.scaling.history(name), layer.scaling.scale(name, precision.dy)) for name in names]
        )
    assert results[0] == results[1]
    history, scale = results[1][2]
    assert history == (4.0, 2.0)
    assert scale == float(np.float32(4.0) / np.float32(448))
    assert recorded == ["x", "w", "dy"] * 2


def spy(scaling: DelayedScaling, recorded: list[str]) -> Callable[[str, float], None]:
    record = scaling.record

    def note(name: str, amax: float) -> None:
        recorded.append(name)
        record(name, amax)

    return note


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_has_the_scales_of_the_first(reentrant: bool) -> None:
    """The gradients under a checkpoint equal those without it, at the second step, whose scales are not its own."""
    found = []
    for wrap in (None, reentrant):
        layer = Fp8Linear(64, 32, precision=delayed())
        with torch.no_grad():
            layer.weight.copy_(with_amax(32, 64, 0.3))
        call = None if wrap is None else checkpointed(layer, wrap)
        Step(layer)((with_amax(16, 64, 1.0), with_amax(16, 32, 1.0)), call=call)
        leaf = with_amax(16, 64, 5.0).requires_grad_()
        (call or layer)(leaf).backward(with_amax(16, 32, 5.0))
        found.append((leaf.grad, layer.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_b104_what_was_never_measured_is_unknown_and_no_number() -> None:
    """A layer that has never run, one before its first step of training, and one that was added to a resumed model."""
    scaling, precision = DelayedScaling(), delayed(initial_scale=1.0)
    for name in ("x", "w", "dy"):
        assert scaling.scale(name, precision.x) is None
        assert scaling.history(name) == ()
    assert scaling.scalars() == {}
    assert scaling.known("x", OperandFormat(scaling="delayed")).tensor_scale is None
    layer = Fp8Linear(64, 32, precision=delayed())
    assert "_extra_state" not in layer.state_dict()
    layer.eval()
    x = with_amax(16, 64, 3.0)
    y = layer(x)
    assert layer.scaling.scale("x", layer.precision.x) is None
    # What it computes with is what its operands ask for now.
    wanted = reference(x, layer.weight.detach(), torch.zeros(16, 32), {
        "x": float(np.float32(3) / np.float32(448)), "dy": 1.0,
        "w": float(np.float32(layer.weight.detach().abs().max()) / np.float32(448)),
    })[0]  # fmt: skip
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-5)


def test_zeros_and_what_is_not_finite_never_make_a_scale() -> None:
    layer = Fp8Linear(64, 32, precision=delayed(amax_choice="most_recent"))
    train, x, dy = Step(layer), with_amax(16, 64, 2.0), with_amax(16, 32, 2.0)
    train((x, dy))
    poisoned = x.clone()
    poisoned[0, :2] = torch.tensor([float("inf"), float("nan")])
    train((poisoned, torch.full((16, 32), float("nan"))))
    assert layer.scaling.history("x") == (2.0, 2.0)
    assert layer.scaling.history("dy") == (2.0, 0.0)
    layer.scaling.record("x", float("nan"))
    layer.scaling.record("x", float("inf"))
    layer.scaling.record("x", -float("inf"))
    assert layer.scaling.history("x") == (2.0, 2.0)
    # The newest amax of dy says nothing: its own decides.
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(dy)
    assert torch.isfinite(leaf.grad).all()
    assert leaf.grad.any()


def test_a_step_is_what_an_optimizer_makes_of_it() -> None:
    """Micro-batches and places that share the layer are one step; eval() and forwards without a graph are none."""
    layer = Fp8Linear(32, 32, precision=delayed())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for x in (1.0, 3.0, 2.0):
        layer(layer(with_amax(8, 32, x))).sum().backward()
    assert len(layer.scaling.history("x")) == 1
    assert layer.scaling.history("x")[0] >= 3.0
    optimizer.step()
    layer.eval()
    layer(with_amax(8, 32, 1000.0))
    layer.train()
    with torch.no_grad():
        layer.eval()(with_amax(8, 32, 1000.0))
    layer.train()
    layer(with_amax(8, 32, 5.0)).sum().backward()
    assert len(layer.scaling.history("x")) == 2
    assert max(layer.scaling.history("x")) < 1000.0


def test_a_frozen_weight_has_steps_too() -> None:
    """Only the optimizer tells: the weight is never written to."""
    layer, head = Fp8Linear(64, 32, precision=delayed()), nn.Linear(32, 4)
    layer.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for amax in (1.0, 2.0, 4.0):
        leaf = with_amax(8, 64, amax).requires_grad_()
        head(layer(leaf)).sum().backward()
        optimizer.step()
    assert layer.scaling.history("x") == (1.0, 2.0, 4.0)
    assert layer.scaling.steps("dy") == 2


def test_other_optimizers_write_to_the_weight() -> None:
    layer = Fp8Linear(64, 32, precision=delayed())
    for amax in (1.0, 2.0):
        layer(with_amax(8, 64, amax)).sum().backward()
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad, alpha=0.1)
    assert layer.scaling.history("x") == (1.0, 2.0)


def test_bf16_gemms_leave_the_histories_going() -> None:
    """A fallback that ends finds scales of now, not of when it began."""
    precision = delayed()
    layer = Fp8Linear(64, 32, precision=LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16", x=precision.x, w=precision.w, dy=precision.dy))  # fmt: skip
    Step(layer)((with_amax(16, 64, 2.0), with_amax(16, 32, 3.0)))
    assert layer.scaling.history("x") == (2.0,)
    assert layer.scaling.history("dy") == (3.0,)


def test_delayed_scaling_without_a_memory_is_refused() -> None:
    with pytest.raises(KernelError, match="nothing remembers its amax"):
        fp8_linear(torch.ones(4, 8), torch.ones(2, 8), precision=delayed())
    y = fp8_linear(
        torch.ones(4, 8), torch.ones(2, 8), precision=LinearPrecision(x=OperandFormat(scaling="tensor"))
    )
    torch.testing.assert_close(y, torch.full((4, 2), 8.0))
