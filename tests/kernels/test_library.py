"""The FP8 layers and functions under torch.compile: one graph, and the bits of eager code."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8_safeguard.kernels import (
    Fp8GroupedLinear,
    Fp8Linear,
    LinearPrecision,
    OperandFormat,
    QuantizedTensor,
    fp8_gemm_nt,
    fp8_linear,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
    library,
    numbers,
    quantize,
    tensor_stats,
)
from fp8_safeguard.kernels.dispatch import use_gemm_backend
from fp8_safeguard.kernels.numbers import numbered

MIXED = LinearPrecision(
    dgrad="bf16", x=OperandFormat(scale="pow2", multiplier=0.5), dy=OperandFormat(fmt="e5m2")
)
OFFSETS = torch.tensor([0, 30, 30, 80], dtype=torch.int32)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager") -> tuple[Any, CompileCounterWithBackend]:
    """The function as one graph (or an error), and how many graphs were made."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def results(layer: Callable[..., Tensor], module: nn.Module, x: Tensor, *more: Any) -> list[Tensor | None]:
    """Output and gradients of one step."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, *more)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())]


def assert_equal(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# What Inductor itself warns of when it is imported.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_dense_layer_is_one_graph_with_the_bits_of_eager(backend: str, generator: torch.Generator) -> None:
    module = Fp8Linear(200, 72, bias=True)
    x = torch.randn(2, 40, 200, generator=generator).bfloat16()
    wanted = results(module, module, x)
    layer, counter = compiled(module, backend)
    for _ in range(2):
        assert_equal(results(layer, module, x), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("precision", [LinearPrecision(), MIXED])
def test_a_grouped_layer_is_one_graph_whatever_its_offsets_say(
    precision: LinearPrecision, generator: torch.Generator
) -> None:
    module = Fp8GroupedLinear(3, 200, 72, precision=precision)
    x = torch.randn(90, 200, generator=generator)
    layer, counter = compiled(module)
    for offsets in (OFFSETS, torch.tensor([0, 0, 64, 90], dtype=torch.int32)):
        wanted = results(module, module, x, offsets)
        assert_equal(results(layer, module, x, offsets), wanted)
    assert counter.frame_count == 1


def test_what_is_frozen_gets_no_gradient_and_inference_none(generator: torch.Generator) -> None:
    module = Fp8Linear(200, 72)
    module.weight.requires_grad_(False)
    x = torch.randn(40, 200, generator=generator)
    layer, _ = compiled(module)
    assert_equal(results(layer, module, x)[:2], results(module, module, x)[:2])
    assert module.weight.grad is None
    with torch.no_grad():
        assert torch.equal(layer(x), module(x))


def test_only_another_precision_makes_another_graph(generator: torch.Generator) -> None:
    module = Fp8Linear(64, 32)
    x = torch.randn(20, 64, generator=generator)
    layer, counter = compiled(module)
    graphs = 0
    for precision in (LinearPrecision(), MIXED):
        for _ in range(2):
            # An equal one, not the same one.
            module.precision = replace(precision)
            wanted = results(module, module, x)
            assert_equal(results(layer, module, x), wanted)
        for _ in range(2):
            before, module.precision = counter.frame_count, replace(precision)
            results(layer, module, x)
            assert counter.frame_count == before > graphs
        graphs = counter.frame_count


class Sampler:
    """An observer that wants some steps."""

    def __init__(self) -> None:
        self.wants = False
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def fprop(self, *tensors: Any) -> None:
        self.told.append(("fprop", tensors))

    def dgrad(self, *tensors: Any) -> None:
        self.told.append(("dgrad", tensors))

    def wgrad(self, *tensors: Any) -> None:
        self.told.append(("wgrad", tensors))


def test_an_observer_is_told_from_inside_the_graph_and_sampling_does_not_compile(
    generator: torch.Generator,
) -> None:
    module = Fp8Linear(64, 32)
    module.observer = sampler = Sampler()
    x = torch.randn(20, 64, generator=generator)
    layer, counter = compiled(module)
    told = {}
    for sampled in (False, True, False):
        sampler.wants, sampler.told = sampled, []
        wanted = results(module, module, x)
        told["eager"], sampler.told = sampler.told, []
        assert_equal(results(layer, module, x), wanted)
        told["compiled"] = sampler.told
        assert [gemm for gemm, _ in told["compiled"]] == (["fprop", "dgrad", "wgrad"] if sampled else [])
        for (_, ours), (_, theirs) in zip(told["compiled"], told["eager"], strict=True):
            assert ours[3] is theirs[3] is None
            assert_equal(list(ours[:3]), list(theirs[:3]))
    assert counter.frame_count == 1


class Steering(Sampler):
    """An observer that says the precision too."""

    def __init__(self, precision: LinearPrecision) -> None:
        super().__init__()
        self.precision = precision
        self.number = numbered(self)


def test_a_steering_observer_changes_the_precision_in_the_graph_that_there_is(
    generator: torch.Generator,
) -> None:
    module = Fp8Linear(64, 32)
    module.observer = steering = Steering(LinearPrecision())
    x = torch.randn(20, 64, generator=generator)
    layer, counter = compiled(module)
    for precision in (
        LinearPrecision(),
        MIXED,
        LinearPrecision(fprop="bf16", wgrad="bf16"),
        LinearPrecision(),
    ):
        steering.precision = module.precision = precision
        assert_equal(results(layer, module, x), results(module, module, x))
    assert counter.frame_count == 1


def test_a_layer_is_multiplied_as_before_when_its_steering_observer_is_gone(
    generator: torch.Generator,
) -> None:
    """As a checkpoint does that repeats a forward after the observer was taken off."""
    x, w = torch.randn(20, 64, generator=generator), torch.randn(32, 64, generator=generator)
    arguments = x, w, None, None, *library.encoded(LinearPrecision()), "native", 1, 1, True, True
    steering = Steering(MIXED)
    number = steering.number
    wanted = library.linear_forward(*arguments, number)
    del steering
    assert numbers.found(number) is None
    assert_equal(list(library.linear_forward(*arguments, number)), list(wanted))


def test_an_observer_may_be_exchanged(generator: torch.Generator) -> None:
    module = Fp8Linear(64, 32)
    x = torch.randn(20, 64, generator=generator)
    layer, _ = compiled(module)
    for observer in (Sampler(), Sampler()):
        observer.wants, module.observer = True, observer
        results(layer, module, x)
        assert len(observer.told) == 3


def test_another_backend_makes_another_graph(generator: torch.Generator) -> None:
    module = Fp8Linear(64, 32)
    x = torch.randn(20, 64, generator=generator)
    layer, counter = compiled(module)
    results(layer, module, x)
    with use_gemm_backend("reference"):
        wanted = results(module, module, x)
        assert_equal(results(layer, module, x), wanted)
    assert counter.frame_count == 2
    results(layer, module, x)
    assert counter.frame_count == 2


def test_functions_that_quantise_measure_and_multiply_are_one_graph(generator: torch.Generator) -> None:
    def chain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, stats = quantize(x, stats=True)
        b = quantize(w, layout="tile", scale="pow2", multiplier=2.0)
        return fp8_gemm_nt(a, b, torch.bfloat16), stats, tensor_stats(w, layout="tile"), b.scale

    x, w = torch.randn(3, 40, 200, generator=generator)[1], torch.randn(72, 200, generator=generator)
    function, counter = compiled(chain)
    assert_equal(list(function(x, w)), list(chain(x, w)))
    assert counter.frame_count == 1


def test_grouped_functions_are_one_graph(generator: torch.Generator) -> None:
    def chain(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        y = grouped_gemm_nt(quantize(x), quantize(w, layout="tile"), offsets)
        dy_col, x_col = (quantize(t, layout="col", offsets=offsets) for t in (dy, x))
        measured = tensor_stats(x, layout="col", offsets=offsets)
        return y, grouped_gemm_wgrad(dy_col, x_col, offsets), x_col.scale, measured

    x, dy = (torch.randn(80, width, generator=generator) for width in (200, 72))
    w = torch.randn(3, 72, 200, generator=generator)
    function, counter = compiled(chain)
    assert_equal(list(function(x, w, dy, OFFSETS)), list(chain(x, w, dy, OFFSETS)))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("shape", "layout"), [((200,), "row"), ((200,), "col"), ((40, 200), "col"), ((2, 130, 140), "tile")]
)
def test_a_quantised_tensor_leaves_the_graph_whole(
    shape: tuple[int, ...], layout: str, generator: torch.Generator
) -> None:
    x = torch.randn(*shape, generator=generator)
    got: QuantizedTensor = compiled(lambda x: quantize(x, layout=layout))[0](x)
    wanted = quantize(x, layout=layout)
    assert (got.layout, got.fmt, got.scale.shape) == (layout, "e4m3", wanted.scale.shape)
    assert torch.equal(got.dequantize(), wanted.dequantize())


def test_a_call_by_function_with_a_changing_number_of_rows(generator: torch.Generator) -> None:
    w = torch.randn(72, 200, generator=generator)
    function = torch.compile(
        lambda x, w: fp8_linear(x, w).relu(), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (40, 56, 72):
        x = torch.randn(rows, 200, generator=generator)
        assert torch.equal(function(x, w), fp8_linear(x, w).relu())


def test_a_precision_survives_as_text() -> None:
    for precision in (LinearPrecision(), MIXED, LinearPrecision(w=OperandFormat(multiplier=2.0**-126))):
        assert library.decoded(*library.encoded(precision)) == precision


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_each_operator_keeps_the_rules_of_torch_library(generator: torch.Generator) -> None:
    x, w = torch.randn(40, 200, generator=generator), torch.randn(72, 200, generator=generator)
    dy, experts = torch.randn(40, 72, generator=generator), torch.randn(3, 72, 200, generator=generator)
    offsets = torch.tensor([0, 16, 16, 40], dtype=torch.int32)
    precision = library.encoded(LinearPrecision())
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.zeros(72, requires_grad=True)
    none, bytes_of_none = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    row, tile, tiles = quantize(x), quantize(w, layout="tile"), quantize(experts, layout="tile")
    dy_col, x_col = quantize(dy, layout="col", offsets=offsets), quantize(x, layout="col", offsets=offsets)

    def parts(operand: QuantizedTensor) -> tuple[Any, ...]:
        return operand.data.view(torch.uint8), operand.scale, operand.layout, operand.fmt

    columns = [part for t in (dy_col, x_col) for part in (t.data.view(torch.uint8), t.scale, t.fmt, offsets)]
    grad = x.clone().requires_grad_(), experts.clone().requires_grad_()
    options = *precision, "native", 1, 0
    for operator, arguments in [
        (library.linear_forward, (*leaves, None, *options, True, True)),
        (library.linear_forward, (*grad, None, offsets, *options, True, True)),
        (
            library.linear_backward,
            (
                dy,
                x,
                w,
                None,
                bytes_of_none,
                none,
                bytes_of_none,
                none,
                *options,
                x.dtype,
                w.dtype,
                True,
                False,
            ),
        ),
        (library.quantize_tensor, (x, "col", "e5m2", "pow2", 1.0, True, None)),
        (library.tensor_stats, (x, "tile", "e4m3", "fp32", 1.0, offsets)),
        (library.gemm_nt, (*parts(row), *parts(tile), None, torch.float32, 1, "native")),
        (library.gemm_nt, (*parts(row), *parts(tiles), offsets, torch.bfloat16, 1, "native")),
        (library.grouped_gemm_wgrad, (*columns, offsets, torch.float32, 1, "native")),
    ]:
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)
