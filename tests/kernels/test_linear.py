"""fp8_linear and its layers: outputs and gradients against a plain dequantised computation."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import (
    Fp8GroupedLinear,
    Fp8Linear,
    LinearPrecision,
    OperandError,
    OperandFormat,
    UnknownOptionError,
    fp8_grouped_linear,
    fp8_linear,
    quantize,
    tiles,
)

BF16 = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")


@pytest.fixture(params=["tiles", "float32"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to multiply: matrix tiles where the processor has them, and float32 products."""
    if request.param == "float32":
        monkeypatch.setattr(tiles, "usable", lambda x: False)
    elif not tiles.usable(torch.empty(0)):
        pytest.skip("this processor has no bfloat16 matrix tiles")
    return str(request.param)


def dequantised(x: Tensor, layout: str, operand: OperandFormat) -> Tensor:
    quantized = quantize(
        x, layout=layout, fmt=operand.fmt, scale=operand.scale, multiplier=operand.multiplier
    )
    return quantized.dequantize(torch.float64)


def expected(x: Tensor, w: Tensor, dy: Tensor, precision: LinearPrecision) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw in float64: each GEMM on dequantised or bfloat16-rounded operands."""

    def both(gemm: str, first: tuple[Tensor, str, str], second: tuple[Tensor, str, str]) -> list[Tensor]:
        if getattr(precision, gemm) == "bf16":
            return [first[0].bfloat16().double(), second[0].bfloat16().double()]
        return [dequantised(t, layout, getattr(precision, name)) for t, layout, name in (first, second)]

    x_row, w_row = both("fprop", (x, "row", "x"), (w, "tile", "w"))
    dy_row, w_dgrad = both("dgrad", (dy, "row", "dy"), (w, "tile", "w"))
    dy_col, x_col = both("wgrad", (dy, "col", "dy"), (x, "col", "x"))
    return x_row @ w_row.t(), dy_row @ w_dgrad, dy_col.t() @ x_col


def assert_near(got: Tensor, wanted: Tensor, magnitude: Tensor, rounded_to: torch.dtype) -> None:
    """Within float32 accumulation of the exact product, plus one rounding to the output dtype."""
    rounding = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}[rounded_to]
    assert ((got.double() - wanted).abs() <= 2e-6 * magnitude + rounding * wanted.abs()).all()


@pytest.fixture
def tensors(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(150, 200, generator=generator)
    w = torch.randn(130, 200, generator=generator) / 14
    dy = torch.randn(150, 130, generator=generator) * 1e-3
    return x, w, dy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gemms", list(product(["fp8", "bf16"], repeat=3)))
def test_each_gemm_has_its_own_precision(
    gemms: tuple[str, str, str], dtype: torch.dtype, tensors: Any
) -> None:
    x, w, dy = tensors
    x, dy = x.to(dtype), dy.to(dtype)
    precision = LinearPrecision(fprop=gemms[0], dgrad=gemms[1], wgrad=gemms[2])
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x_leaf, w_leaf, precision=precision)
    y.backward(dy)
    assert (y.dtype, x_leaf.grad.dtype, w_leaf.grad.dtype) == (dtype, dtype, torch.float32)
    wanted = expected(x, w, dy, precision)
    magnitudes = (
        x.double().abs() @ w.double().abs().t(),
        dy.double().abs() @ w.double().abs(),
        dy.double().abs().t() @ x.double().abs(),
    )
    for got, gemm, want, magnitude in zip(
        (y, x_leaf.grad, w_leaf.grad), gemms, wanted, magnitudes, strict=True
    ):
        coarse = torch.bfloat16 if gemm == "bf16" else got.dtype
        assert_near(got, want, magnitude, coarse)


def test_operand_formats_reach_their_operands(tensors: Any) -> None:
    x, w, dy = tensors
    precision = LinearPrecision(
        x=OperandFormat(fmt="e5m2", scale="pow2"),
        w=OperandFormat(multiplier=0.5),
        dy=OperandFormat(fmt="e5m2", multiplier=2.0**4),
    )
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x_leaf, w_leaf, precision=precision)
    y.backward(dy)
    wanted = expected(x, w, dy, precision)
    magnitudes = (
        x.double().abs() @ w.double().abs().t(),
        dy.double().abs() @ w.double().abs(),
        dy.double().abs().t() @ x.double().abs(),
    )
    for got, want, magnitude in zip((y, x_leaf.grad, w_leaf.grad), wanted, magnitudes, strict=True):
        assert_near(got, want, magnitude * 2, torch.float32)


def test_leading_dimensions_and_bias(tensors: Any, generator: torch.Generator) -> None:
    x, w, dy = tensors
    bias = torch.randn(130, generator=generator)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    flat = fp8_linear(*leaves)
    shaped = fp8_linear(x.reshape(5, 30, 200), w, bias)
    assert torch.equal(shaped.reshape(150, 130), flat)
    assert torch.equal(flat, fp8_linear(x, w) + bias)
    flat.backward(dy)
    torch.testing.assert_close(leaves[2].grad, dy.sum(dim=0))
    assert fp8_linear(x[0], w).shape == (130,)


def test_sum_loss_hands_back_an_expanded_gradient(tensors: Any) -> None:
    """loss.sum() backpropagates a stride-0 tensor."""
    x, w, _ = tensors
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    fp8_linear(x_leaf, w_leaf).sum().backward()
    plain = dequantised(torch.ones(150, 130), "row", OperandFormat()) @ dequantised(
        w, "tile", OperandFormat()
    )
    torch.testing.assert_close(x_leaf.grad.double(), plain, rtol=1e-5, atol=1e-6)


def test_frozen_tensors_get_no_gradient(tensors: Any) -> None:
    x, w, dy = tensors
    x_leaf = x.clone().requires_grad_()
    fp8_linear(x_leaf, w).backward(dy)
    w_leaf = w.clone().requires_grad_()
    fp8_linear(x, w_leaf).backward(dy)
    assert x_leaf.grad is not None
    assert w_leaf.grad is not None
    assert not fp8_linear(x, w).requires_grad


def test_b20_no_rows(tensors: Any) -> None:
    _, w, _ = tensors
    x_leaf, w_leaf = torch.empty(0, 200, requires_grad=True), w.clone().requires_grad_()
    y = fp8_linear(x_leaf, w_leaf)
    y.sum().backward()
    assert y.shape == (0, 130)
    assert torch.equal(w_leaf.grad, torch.zeros_like(w))


COUNTS = [0, 70, 1, 129]


@pytest.mark.parametrize("precision", [LinearPrecision(), BF16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_equals_one_dense_layer_an_expert(
    dtype: torch.dtype, precision: LinearPrecision, generator: torch.Generator
) -> None:
    offsets = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)
    rows = sum(COUNTS) + 9
    x, w = (
        torch.randn(rows, 200, generator=generator).to(dtype),
        torch.randn(4, 130, 200, generator=generator),
    )
    dy = torch.randn(rows, 130, generator=generator).to(dtype)
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_grouped_linear(x_leaf, w_leaf, offsets, precision=precision)
    y.backward(dy)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        x_part, w_part = x[start:end].clone().requires_grad_(), w[expert].clone().requires_grad_()
        y_part = fp8_linear(x_part, w_part, precision=precision)
        y_part.backward(dy[start:end])
        torch.testing.assert_close(
            y[start:end], y_part, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
        )
        torch.testing.assert_close(
            w_leaf.grad[expert], w_part.grad, rtol=1e-2, atol=2e-2 if precision is BF16 else 1e-4
        )
        torch.testing.assert_close(x_leaf.grad[start:end], x_part.grad, rtol=1e-2, atol=2e-2)
    assert torch.equal(y[sum(COUNTS) :], torch.zeros(9, 130, dtype=dtype))
    assert torch.equal(x_leaf.grad[sum(COUNTS) :], torch.zeros(9, 200, dtype=dtype))
    assert torch.equal(w_leaf.grad[0], torch.zeros(130, 200))


@pytest.mark.parametrize("grouped", [False, True])
def test_power_of_two_gain_leaves_every_bf16_bit(grouped: bool, generator: torch.Generator) -> None:
    gain = 2.0 ** torch.randint(-6, 19, (128,), generator=generator)
    x = torch.randn(60, 128, generator=generator).bfloat16()
    dy = torch.randn(60, 96, generator=generator).bfloat16()
    offsets = torch.tensor([0, 20, 60], dtype=torch.int32)
    module = Fp8GroupedLinear(2, 128, 96, precision=BF16) if grouped else Fp8Linear(128, 96, precision=BF16)
    results = []
    for chosen in (None, gain):
        module.input_gain = chosen
        module.weight.grad = None
        x_leaf = x.clone().requires_grad_()
        y = module(x_leaf, offsets) if grouped else module(x_leaf)
        y.backward(dy)
        results.append((y, x_leaf.grad, module.weight.grad))
    for plain, gained in zip(*results, strict=True):
        assert torch.equal(plain, gained)


def test_gain_hurts_fp8_where_it_preserves_bf16(generator: torch.Generator) -> None:
    """The reason for the gain: outlier channels flush the others of their block."""
    x = torch.randn(64, 128, generator=generator)
    module = Fp8Linear(128, 96)
    module.input_gain = torch.ones(128)
    module.input_gain[::16] = 2.0**19
    exact = x.double() @ module.weight.double().t()
    healthy = (fp8_linear(x, module.weight) - exact).norm() / exact.norm()
    faulty = (module(x) - exact).norm() / exact.norm()
    assert healthy < 0.05
    assert faulty > 0.3


class Recorder:
    """Keeps what a GemmObserver is told."""

    def __init__(self, wants: bool = True) -> None:
        self.wants = wants
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.grad_modes: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("fprop", "dgrad", "wgrad"):
            raise AttributeError(name)

        def record(*tensors: Any) -> None:
            self.calls[name] = tensors
            self.grad_modes.append(torch.is_grad_enabled())

        return record


def test_observer_sees_the_real_tensors_without_autograd(generator: torch.Generator) -> None:
    recorder = Recorder()
    module = Fp8Linear(64, 32, bias=True)
    module.observer = recorder
    module.input_gain = torch.full((64,), 2.0)
    x = torch.randn(10, 64, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(10, 32, generator=generator).bfloat16()
    with torch.no_grad():
        module.bias.fill_(3.0)
    y = module(x)
    y.backward(dy)
    assert set(recorder.calls) == {"fprop", "dgrad", "wgrad"}
    assert not any(recorder.grad_modes)
    seen_x, seen_w, seen_y, offsets = recorder.calls["fprop"]
    assert torch.equal(seen_x, x.detach() * 2)
    assert torch.equal(seen_w, module.weight.detach() / 2)
    assert offsets is None
    torch.testing.assert_close(seen_y.float() + 3.0, y.float(), rtol=2**-7, atol=0.02)
    assert torch.equal(recorder.calls["dgrad"][2] * 2, x.grad)
    assert torch.equal(recorder.calls["wgrad"][2] / 2, module.weight.grad)


def test_observer_that_does_not_want_is_not_called_and_frozen_gemms_are_none(
    generator: torch.Generator,
) -> None:
    silent = Recorder(wants=False)
    x = torch.randn(10, 64, generator=generator)
    w = torch.randn(32, 64, generator=generator, requires_grad=True)
    fp8_linear(x, w, stats=silent).sum().backward()
    assert silent.calls == {}
    awake = Recorder()
    fp8_linear(x, w, stats=awake).sum().backward()
    assert awake.calls["dgrad"][2] is None
    assert awake.calls["wgrad"][2] is not None


def test_observer_changes_no_bit(generator: torch.Generator) -> None:
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    x, w = torch.randn(10, 64, generator=generator), torch.randn(2, 32, 64, generator=generator)
    results = []
    for observer in (None, Recorder()):
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8_grouped_linear(x_leaf, w_leaf, offsets, stats=observer)
        y.square().sum().backward()
        results.append((y, x_leaf.grad, w_leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(observer.calls["fprop"][3], offsets)


def test_backward_uses_the_precision_of_its_forward(generator: torch.Generator) -> None:
    x = torch.randn(10, 64, generator=generator)
    module = Fp8Linear(64, 32)
    grads = []
    for switch in (LinearPrecision(), BF16):
        module.precision = LinearPrecision()
        module.weight.grad = None
        y = module(x)
        module.precision = switch
        y.sum().backward()
        grads.append(module.weight.grad)
    assert torch.equal(*grads)


def test_training_reduces_a_loss(generator: torch.Generator) -> None:
    teacher = torch.randn(32, 64, generator=generator) / 8
    module = Fp8Linear(64, 32)
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0)
    losses = []
    for _ in range(40):
        x = torch.randn(256, 64, generator=generator)
        loss = (module(x) - x @ teacher.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_layers_survive_state_dicts_and_copies() -> None:
    import copy
    import pickle

    module = Fp8Linear(16, 8, bias=True)
    assert set(module.state_dict()) == {"weight", "bias"}
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)
    assert set(Fp8GroupedLinear(2, 16, 8).state_dict()) == {"weight"}
    assert module.weight.abs().max() <= 0.25


def test_mistakes_are_explained() -> None:
    with pytest.raises(OperandError, match=r"pass x \[..., K\]"):
        fp8_linear(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(OperandError, match=r"pass x \[T, K\]"):
        fp8_grouped_linear(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(UnknownOptionError, match="'bf16'"):
        LinearPrecision(fprop="fp16")
    with pytest.raises(UnknownOptionError, match="'e5m2'"):
        OperandFormat(fmt="fp8")
    with pytest.raises(ValueError, match="power of two"):
        OperandFormat(multiplier=3.0)
