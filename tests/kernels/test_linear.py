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
)

BF16 = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")


pytestmark = pytest.mark.usefixtures("route")


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


@pytest.mark.parametrize("backend", ["native", "numba", "reference"])
@pytest.mark.parametrize("shape", [(4, 0, 96), (4, 96, 0), (0, 8, 8), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_b20_a_shard_without_elements_multiplies_to_zeros(
    backend: str, shape: tuple[int, int, int], precision: str
) -> None:
    rows, features, depth = shape
    x = torch.ones(rows, depth, requires_grad=True)
    w = torch.ones(features, depth, requires_grad=True)
    each = LinearPrecision(fprop=precision, dgrad=precision, wgrad=precision)
    y = fp8_linear(x, w, precision=each, backend=backend)
    y.sum().backward()
    assert y.shape == (rows, features)
    for leaf in (x, w):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
    assert not any(tensor.any() for tensor in (y, x.grad, w.grad))


def in_format(fmt: str) -> LinearPrecision:
    """Every operand in one format."""
    operand = OperandFormat(fmt=fmt)
    return LinearPrecision(x=operand, w=operand, dy=operand)


def three_results(
    x: Tensor, w: Tensor, dy: Tensor, precision: LinearPrecision | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of one forward and backward."""
    x_leaf, w_leaf = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = fp8_linear(x_leaf, w_leaf, precision=precision or LinearPrecision())
    y.backward(dy)
    assert x_leaf.grad is not None
    assert w_leaf.grad is not None
    return y.detach(), x_leaf.grad, w_leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("zero", ["x", "w", "dy", "blocks"])
def test_b26_zero_operands_and_blocks_give_exact_zeros_and_nothing_else(
    zero: str, fmt: str, dtype: torch.dtype, tensors: Any
) -> None:
    """The matrix B of LoRA is all zero at first; a row, a row block, a column and a tile may be at any time."""
    operands = dict(zip(("x", "w", "dy"), tensors, strict=True))
    for name, tensor in operands.items():
        if zero == name:
            tensor.zero_()
        elif zero == "blocks":
            tensor[5] = tensor[0, 128:] = tensor[:, 7] = tensor[:128, :128] = 0
    x, w, dy = operands["x"].to(dtype), operands["w"], operands["dy"].to(dtype)
    precision = in_format(fmt)
    results = three_results(x, w, dy, precision)
    sizes = (
        x.double().abs() @ w.double().abs().t(),
        dy.double().abs() @ w.double().abs(),
        dy.double().abs().t() @ x.double().abs(),
    )
    for got, want, size in zip(results, expected(x, w, dy, precision), sizes, strict=True):
        assert torch.isfinite(got).all()
        assert (got[size == 0] == 0).all()
        assert_near(got, want, size, got.dtype)
    assert any(bool((size == 0).any()) for size in sizes)


def test_b26_an_expert_of_zeros_takes_nothing_from_the_others(generator: torch.Generator) -> None:
    offsets = torch.tensor([0, 40, 90, 150], dtype=torch.int32)
    x = torch.randn(150, 200, generator=generator)
    w, dy = torch.randn(3, 130, 200, generator=generator), torch.randn(150, 130, generator=generator)
    w[1], x[90:], dy[:40] = 0, 0, 0
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_grouped_linear(x_leaf, w_leaf, offsets)
    y.backward(dy)
    for got in (y, x_leaf.grad, w_leaf.grad):
        assert torch.isfinite(got).all()
    zeros = (y[40:], x_leaf.grad[:90], w_leaf.grad[0], w_leaf.grad[2])
    assert all(bool((part == 0).all()) for part in zeros)
    healthy = (y[:40], x_leaf.grad[90:], w_leaf.grad[1])
    exact = (x[:40].double() @ w[0].double().t(), dy[90:].double() @ w[2].double())
    exact = (*exact, dy[40:90].double().t() @ x[40:90].double())
    for got, want in zip(healthy, exact, strict=True):
        assert (got - want).norm() < 0.06 * want.norm()


def test_b26_lora_that_starts_at_zero_learns(generator: torch.Generator) -> None:
    down, up = Fp8Linear(200, 16), Fp8Linear(16, 130)
    torch.nn.init.zeros_(up.weight)
    x = torch.randn(40, 200, generator=generator)
    y = up(down(x))
    (y - torch.randn(40, 130, generator=generator)).square().mean().backward()
    assert (y == 0).all()
    assert (down.weight.grad == 0).all()
    assert torch.isfinite(up.weight.grad).all()
    assert (up.weight.grad.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_b28_gradients_near_1e_9_keep_the_format_s_precision(gemm: str, fmt: str) -> None:
    """Through an identity, each gradient element is its own quantised value."""
    dy = (torch.arange(1, 9, dtype=torch.float64) / 8 * 1e-9).float()
    if gemm == "dgrad":
        got = three_results(torch.zeros(1, 8), torch.eye(8), dy[None], in_format(fmt))[1][0]
    else:
        got = three_results(torch.eye(8), torch.zeros(1, 8), dy[:, None], in_format(fmt))[2][0]
    step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt]
    # 1e-6: an identity's own 1.0 comes back through a rounded scale.
    assert ((got.double() - dy.double()).abs() <= (step + 1e-6) * dy.double()).all()
    assert (got > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b33_strided_operands_give_the_bits_of_their_copies(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    base = torch.randn(400, 400, generator=generator).to(dtype)
    views = [
        (base.t()[:150, :200], base[:260:2, ::2], base[1:301:2, 3:263:2]),
        (base[:150, 100:300], base.t()[7:137, :200], base.t()[:150, :130]),
        (base[4, :200].expand(150, 200), base[:130, :1].expand(130, 200), base[:150, 9:10].expand(150, 130)),
    ]
    for x, w, dy in views:
        assert not any(tensor.is_contiguous() for tensor in (x, w, dy))
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (x, w, dy)]
        got, wanted = three_results(x, w, dy), three_results(*copies)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_b33_strided_experts_give_the_bits_of_their_copies(generator: torch.Generator) -> None:
    offsets = torch.tensor([0, 30, 100], dtype=torch.int32)
    x = torch.randn(200, 100, generator=generator).t()
    w = torch.randn(2, 200, 130, generator=generator).mT
    dy = torch.randn(200, 260, generator=generator)[::2, ::2]
    results = []
    for copied in (False, True):
        operands = [t.clone(memory_format=torch.contiguous_format) if copied else t for t in (x, w, dy)]
        x_leaf, w_leaf = operands[0].detach().requires_grad_(), operands[1].detach().requires_grad_()
        y = fp8_grouped_linear(x_leaf, w_leaf, offsets)
        y.backward(operands[2])
        results.append((y, x_leaf.grad, w_leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SUBNORMALS = {
    "e4m3": ([448.0, 2.0**-9, 2.0**-10, 2.0**-10 * 1.01, 3 * 2.0**-10, 2.0**-6], [1, 0, 1, 2, 8], 2.0**-9),
    "e5m2": ([57344.0, 2.0**-16, 2.0**-17, 2.0**-17 * 1.01, 3 * 2.0**-17], [1, 0, 1, 2], 2.0**-16),
}


@pytest.mark.parametrize("fmt", SUBNORMALS)
@pytest.mark.parametrize("place", ["x", "w", "dy row", "dy col", "x col"])
def test_b44_subnormals_reach_every_gemm(place: str, fmt: str) -> None:
    """Against an identity at the maximum, whose scale is 1: each product is one quantised value."""
    points, codes, quantum = SUBNORMALS[fmt]
    line = torch.tensor([points], dtype=torch.float32)
    one = torch.eye(len(points)) * points[0]
    if place == "x":
        got = three_results(line, one, torch.zeros(1, len(points)), in_format(fmt))[0]
    elif place == "w":
        got = three_results(one, line, torch.zeros(len(points), 1), in_format(fmt))[0]
    elif place == "dy row":
        got = three_results(torch.zeros(1, len(points)), one, line, in_format(fmt))[1]
    elif place == "dy col":
        # Columns hold one value each, so the subnormals share a column: tokens are the blocked dimension.
        got = three_results(one, torch.zeros(1, len(points)), line.t(), in_format(fmt))[2]
    else:
        got = three_results(line.t(), torch.zeros(len(points), 1), one, in_format(fmt))[2]
    wanted = [code * quantum * points[0] for code in codes]
    assert got.flatten().tolist()[1:] == wanted


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
