"""The device branch of the FP8 linear layers: the same values as on a CPU, and nothing read back to the host."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_safeguard.kernels import (
    KernelError,
    LinearPrecision,
    OffsetsError,
    OperandFormat,
    QuantizedTensor,
    fp8_grouped_linear,
    fp8_linear,
    library,
    triton_fused,
)
from fp8_safeguard.kernels.dispatch import use_gemm_backend
from fp8_safeguard.kernels.numbers import numbered
from fp8_safeguard.kernels.triton_launch import Launch

FP8 = LinearPrecision()
BF16 = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")
MIXED = [
    LinearPrecision(fprop="bf16"),
    LinearPrecision(
        x=OperandFormat(scale="pow2"), w=OperandFormat(multiplier=0.5), dy=OperandFormat(fmt="e5m2")
    ),
]
OFFSETS = [0, 0, 70, 71, 200, 200]
"""Five experts, the first and the last without rows."""


class Recorder:
    """Keeps what a GemmObserver is told; `wants` lists its answers, the last one for good."""

    def __init__(self, *wants: bool) -> None:
        self.answers = list(wants) or [True]
        self.calls: dict[str, tuple[Any, ...]] = {}

    @property
    def wants(self) -> bool:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def fprop(self, *tensors: Any) -> None:
        self.calls["fprop"] = tensors

    def dgrad(self, *tensors: Any) -> None:
        self.calls["dgrad"] = tensors

    def wgrad(self, *tensors: Any) -> None:
        self.calls["wgrad"] = tensors


def three(layer: Any, x: Tensor, w: Tensor, dy: Tensor, *more: Any, **keywords: Any) -> list[Tensor]:
    """y, dx, dw of one forward and backward."""
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = layer(x_leaf, w_leaf, *more, **keywords)
    y.backward(dy)
    assert x_leaf.grad is not None
    assert w_leaf.grad is not None
    return [y.detach(), x_leaf.grad, w_leaf.grad]


def both(layer: Any, *tensors: Any, **keywords: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The device branch, and what a CPU's reference computes from the same tensors."""
    return (
        three(layer, *tensors, backend="triton", **keywords),
        three(layer, *tensors, backend="reference", **keywords),
    )


def assert_same(
    got: list[Tensor], wanted: list[Tensor], sizes: list[Tensor], rounding: float = 2.0**-23
) -> None:
    """Both within 1e-6 x sum |a||b| of the exact product, apart from one rounding of the result each."""
    for ours, theirs, size in zip(got, wanted, sizes, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        bound = 2e-6 * size + 2 * rounding * theirs.abs()
        assert ((ours.double() - theirs.double()).abs() <= bound).all()


@pytest.fixture
def tensors(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x [150,200], w [136,200], dy [150,136]: ragged in tokens, not whole blocks in features."""
    x = torch.randn(150, 200, generator=generator)
    w = torch.randn(136, 200, generator=generator) / 14
    return x, w, torch.randn(150, 136, generator=generator) * 1e-3


@pytest.fixture
def experts(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [209,200], w [5,72,200], dy [209,72], offsets: nine rows of no expert."""
    x = torch.randn(209, 200, generator=generator)
    w = torch.randn(5, 72, 200, generator=generator) / 14
    dy = torch.randn(209, 72, generator=generator)
    return x, w, dy, torch.tensor(OFFSETS, dtype=torch.int32)


def sizes_of(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Sum |a||b| of the three products."""
    x, w, dy = x.double().abs(), w.double().abs(), dy.double().abs()
    return [x @ w.t(), dy @ w, dy.t() @ x]


def grouped_sizes(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> list[Tensor]:
    """The same, expert by expert."""
    y, dx, dw = (torch.zeros(shape, dtype=torch.float64) for shape in (dy.shape, x.shape, w.shape))
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        rows = slice(start, end)
        y[rows], dx[rows], dw[expert] = sizes_of(x[rows], w[expert], dy[rows])
    return [y, dx, dw]


WAITING = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "bincount",
)
"""Operators whose result the host must see, or whose size depends on values."""


class DeviceOnly(TorchDispatchMode):
    """Raises where a GPU would have to be waited for: what may not happen inside the capture of a CUDA graph."""

    in_kernel = False
    """Kernels run on the device: what the interpreter does for them is not the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in WAITING or masks) and not self.in_kernel:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be read back to the host, except by kernels."""
    mode, run = DeviceOnly(), Launch.run

    def kernel(launch: Launch) -> None:
        mode.in_kernel = True
        try:
            run(launch)
        finally:
            mode.in_kernel = False

    def guarded(method: Any) -> Any:
        def refuse(*arguments: Any, **keywords: Any) -> Any:
            assert mode.in_kernel, "something is read back to the host"
            return method(*arguments, **keywords)

        return refuse

    monkeypatch.setattr(Launch, "run", kernel)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, guarded(getattr(Tensor, name)))
    with mode:
        yield


@pytest.mark.parametrize("precision", [FP8, BF16, MIXED[0], MIXED[-1]])
def test_dense_equals_the_cpu(precision: LinearPrecision, tensors: Any) -> None:
    got, wanted = both(fp8_linear, *tensors, precision=precision)
    for ours, theirs, size, gemm in zip(
        got, wanted, sizes_of(*tensors), ("fprop", "dgrad", "wgrad"), strict=True
    ):
        if getattr(precision, gemm) == "bf16":
            assert torch.equal(ours, theirs)
        assert_same([ours], [theirs], [size])


@pytest.mark.parametrize("precision", [FP8, BF16, MIXED[-1]])
def test_grouped_equals_the_cpu(precision: LinearPrecision, experts: Any) -> None:
    got, wanted = both(fp8_grouped_linear, *experts[:2], experts[2], experts[3], precision=precision)
    for ours, theirs, size, gemm in zip(
        got, wanted, grouped_sizes(*experts), ("fprop", "dgrad", "wgrad"), strict=True
    ):
        rounding = 2.0**-8 if getattr(precision, gemm) == "bf16" else 2.0**-23
        assert_same([ours], [theirs], [size], rounding)
    for zeros in (got[0][200:], got[1][200:], got[2][0], got[2][4]):
        assert torch.equal(zeros, torch.zeros_like(zeros))


def doubled(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
    """Twice x's scale in fprop, w's in dgrad, dy's in wgrad: every result is twice what it would be."""
    if (gemm, operand) not in (("fprop", "x"), ("dgrad", "w"), ("wgrad", "dy")):
        return codes
    return replace(codes, scale=codes.scale * 2)


def test_tampering_changes_what_the_device_multiplies(tensors: Any, experts: Any) -> None:
    for layer, operands in ((fp8_linear, tensors), (fp8_grouped_linear, experts)):
        *leaves, more = (*operands, None) if layer is fp8_linear else operands
        offsets = [] if more is None else [more]
        plain = three(layer, *leaves, *offsets, backend="triton")
        tampered = three(layer, *leaves, *offsets, backend="triton", tamper=doubled)
        for result, other in zip(plain, tampered, strict=True):
            assert torch.equal(other, 2 * result)


def test_a_scale_for_a_whole_operand_is_refused_on_a_device(tensors: Any) -> None:
    x, w, _ = tensors
    for operand in (OperandFormat(scaling="tensor"), OperandFormat(amax_floor=1.0)):
        with pytest.raises(KernelError, match="on a CPU only so far"):
            fp8_linear(x, w, precision=LinearPrecision(x=operand), backend="triton")


def test_b39_what_torch_leaves_unwritten_becomes_zero(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped BF16 product promises nothing for rows of no expert, nor for an expert without rows."""
    multiply = F.grouped_mm

    def sparing(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = multiply(a, b, offs=offs)
        if b.dim() == 3:
            out[int(offs[-1]) :] = float("nan")
        else:
            out[[0, 4]] = float("nan")
        return out

    monkeypatch.setattr(F, "grouped_mm", sparing)
    y, dx, dw = three(fp8_grouped_linear, *experts, precision=BF16, backend="triton")
    for zeros in (y[200:], dx[200:], dw[0], dw[4]):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    assert all(tensor.isfinite().all() for tensor in (y, dx, dw))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_come_in_the_dtypes_of_their_operands(dtype: torch.dtype, tensors: Any) -> None:
    x, w, dy = tensors
    got, wanted = both(fp8_linear, x.to(dtype), w, dy.to(dtype))
    assert [tensor.dtype for tensor in got] == [dtype, dtype, torch.float32]
    coarse = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert_same(got, wanted, sizes_of(*tensors), coarse)


def test_bias_leading_dimensions_and_few_rows(tensors: Any, generator: torch.Generator) -> None:
    x, w, _ = tensors
    bias = torch.randn(136, generator=generator)
    leaves = [tensor.clone().requires_grad_() for tensor in (x[:60].reshape(2, 30, 200), w, bias)]
    with use_gemm_backend("triton"):
        y = fp8_linear(*leaves)
    assert torch.equal(y.reshape(60, 136), fp8_linear(x[:60], w, backend="triton") + bias)
    dy = torch.randn(2, 30, 136, generator=generator)
    y.backward(dy)
    assert torch.equal(leaves[2].grad, dy.reshape(60, 136).sum(dim=0))
    wanted = three(fp8_linear, x[:60], w, dy.reshape(60, 136), backend="reference")
    sizes = sizes_of(x[:60], w, dy.reshape(60, 136))
    assert_same([leaves[0].grad.reshape(60, 200), leaves[1].grad], wanted[1:], sizes[1:])


def test_b20_no_rows_and_b39_no_rows_for_any_expert(tensors: Any, experts: Any) -> None:
    w, w_experts = tensors[1], experts[1]
    y, dx, dw = three(fp8_linear, torch.empty(0, 200), w, torch.empty(0, 136), backend="triton")
    assert (y.shape, dx.shape) == ((0, 136), (0, 200))
    assert torch.equal(dw, torch.zeros_like(w))
    none = torch.zeros(6, dtype=torch.int32)
    for rows in (0, 40):
        got = three(
            fp8_grouped_linear, torch.ones(rows, 200), w_experts, torch.ones(rows, 72), none, backend="triton"
        )
        assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in got)


ALIGNED = torch.tensor([0, 64, 64, 128, 160, 208], dtype=torch.int32)


@pytest.mark.parametrize(("precision", "alignment"), [(FP8, 16), (BF16, 1)])
def test_nothing_is_read_back_to_the_host(
    precision: LinearPrecision, alignment: int, tensors: Any, experts: Any, device_only: None
) -> None:
    """As inside the capture of a CUDA graph."""
    three(fp8_linear, *tensors, precision=precision, backend="triton")
    x, w, dy, offsets = experts[0][:208], experts[1], experts[2][:208], experts[3]
    keywords = {"precision": precision, "alignment": alignment, "backend": "triton"}
    three(fp8_grouped_linear, x, w, dy, ALIGNED if alignment == 16 else offsets, **keywords)


def test_aligned_experts_and_compiled_layers_give_the_same_bits(experts: Any) -> None:
    x, w, dy = experts[0][:208], experts[1], experts[2][:208]
    plain = three(fp8_grouped_linear, x, w, dy, ALIGNED, backend="triton")
    promised = three(fp8_grouped_linear, x, w, dy, ALIGNED, backend="triton", alignment=16)
    layer = torch.compile(fp8_grouped_linear, fullgraph=True, backend="aot_eager")
    compiled = three(layer, x, w, dy, ALIGNED, backend="triton", alignment=16)
    for others in (promised, compiled):
        assert all(torch.equal(a, b) for a, b in zip(plain, others, strict=True))


def test_alignment_is_promised_of_offsets_not_of_the_rows_behind_them(generator: torch.Generator) -> None:
    x, dy = torch.randn(33, 40, generator=generator), torch.randn(33, 16, generator=generator)
    w, offsets = torch.randn(2, 16, 40, generator=generator), torch.tensor([0, 16, 32], dtype=torch.int32)
    got, wanted = both(fp8_grouped_linear, x, w, dy, offsets, alignment=16)
    assert_same(got, wanted, grouped_sizes(x, w, dy, offsets))


def test_operators_promise_the_compiler_what_they_return(tensors: Any, experts: Any) -> None:
    """Shapes and strides, those of the FP8 copies among them."""
    grouped = experts[0][:208].clone().requires_grad_(), experts[1].clone().requires_grad_()
    dense = tensors[0].clone().requires_grad_(), tensors[1].clone().requires_grad_()
    for operands, offsets, alignment in ((grouped, ALIGNED, 16), (dense, None, 1)):
        arguments = (*operands, None, offsets, *library.encoded(FP8), "triton", alignment, 0, True, True)
        torch.library.opcheck(library.linear_forward, arguments, test_utils=("test_faketensor",))
        for steering in (Steering(FP8), Steering(BF16)):
            steered = (*arguments, steering.number)
            torch.library.opcheck(library.linear_forward, steered, test_utils=("test_faketensor",))


class Steering:
    """An observer that only says with which precision its layer computes."""

    wants = False

    def __init__(self, precision: LinearPrecision) -> None:
        self.precision = precision
        self.number = numbered(self)


def test_a_steered_layer_changes_its_precision_in_one_graph(tensors: Any, experts: Any) -> None:
    """What one precision does not keep for the backward is room in the graph that another one uses."""
    grouped = experts[0][:208], experts[1], experts[2][:208], ALIGNED
    counter = CompileCounterWithBackend("aot_eager")
    steering = Steering(FP8)
    mixed = LinearPrecision(fprop="bf16", x=OperandFormat(fmt="e5m2"), dy=OperandFormat(multiplier=0.5))
    for function, operands, more in (
        (fp8_linear, tensors, {}),
        (fp8_grouped_linear, grouped, {"alignment": 16}),
    ):
        layer = torch.compile(function, fullgraph=True, backend=counter)
        for precision in (FP8, BF16, mixed, replace(mixed, fprop="fp8", dgrad="bf16")):
            steering.precision = precision
            got = three(layer, *operands, stats=steering, backend="triton", **more)
            wanted = three(function, *operands, precision=precision, backend="triton", **more)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert counter.frame_count == 2


def saved_bytes(layer: Any, x: Tensor, w: Tensor, *more: Any, **keywords: Any) -> int:
    """Bytes that wait for the backward, the weight itself not counted."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(x.requires_grad_(), w.requires_grad_(), *more, **keywords)
    return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor.data_ptr() != w.data_ptr())


def test_only_fp8_copies_wait_for_the_backward(generator: torch.Generator) -> None:
    x = torch.randn(256, 256, generator=generator).bfloat16()
    w = torch.randn(128, 256, generator=generator)
    scales = 4 * (2 * 256 + 2)
    assert saved_bytes(fp8_linear, x, w, backend="triton") == 256 * 256 + 128 * 256 + scales
    precision = LinearPrecision(wgrad="bf16", dgrad="bf16")
    assert saved_bytes(fp8_linear, x, w, backend="triton", precision=precision) == 2 * 256 * 256


def test_each_tensor_is_quantised_once(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """x and dy by one read each for rows and columns, the weight once for both of its GEMMs."""
    reads: list[tuple[tuple[int, ...], bool, str]] = []
    quantise = triton_fused.quantize_layouts

    def counted(x: Tensor, **keywords: Any) -> Any:
        reads.append((tuple(x.shape), keywords["row"], keywords["blocks"]))
        return quantise(x, **keywords)

    monkeypatch.setattr(triton_fused, "quantize_layouts", counted)
    three(fp8_linear, *tensors, backend="triton")
    assert reads == [((150, 200), True, "col"), ((136, 200), False, "tile"), ((150, 136), True, "col")]
    reads.clear()
    with torch.no_grad():
        fp8_linear(tensors[0], tensors[1].requires_grad_(), backend="triton")
    assert reads == [((150, 200), True, ""), ((136, 200), False, "tile")]


def test_observers_are_told_what_they_are_told_on_a_cpu(tensors: Any, experts: Any) -> None:
    for layer, operands in ((fp8_linear, tensors), (fp8_grouped_linear, experts)):
        told = []
        for backend in ("triton", "reference"):
            recorder = Recorder()
            three(layer, *operands, stats=recorder, backend=backend)
            told.append(recorder.calls)
        assert set(told[0]) == set(told[1]) == {"fprop", "dgrad", "wgrad"}
        for gemm, ours in told[0].items():
            for mine, theirs in zip(ours, told[1][gemm], strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_an_observer_that_missed_the_forward_is_not_told_of_the_backward(tensors: Any) -> None:
    """x is gone then: only its FP8 copy was kept."""
    late = Recorder(False, True)
    three(fp8_linear, *tensors, stats=late, backend="triton")
    assert late.calls == {}


def test_offsets_are_checked_by_shape(experts: Any) -> None:
    x, w, _, offsets = experts
    with pytest.raises(OffsetsError, match=r"5 experts need int32 \[6\] on cpu"):
        fp8_grouped_linear(x, w, offsets[:-1], backend="triton")
