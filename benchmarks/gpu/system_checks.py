"""CUDA graphs, host synchronisation and torch.compile around every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu.case import Bench, Case, Row, checked, kernels, mismatches
from gpu.gemm_checks import bounds_of, quantised
from gpu.moe_calls import CHECKED, OPERATIONS, SMALL
from gpu.moe_checks import NEEDS, experts, tensors_of
from torch import Tensor

Made = Callable[[Bench], Callable[[], Any]]
"""Prepares inputs and gives the call."""


def captured(bench: Bench, name: str, made: Made) -> Sequence[Row]:
    """The call never waits for the device, and replayed from a CUDA graph gives the same bits."""
    call = made(bench)
    first = [tensor.detach().clone() for tensor in tensors_of(call())]
    if bench.device != "cuda":
        return [mismatches(name, _differ(first, tensors_of(call())))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for tensor in filter(Tensor.is_contiguous, tensors_of(result)):
        tensor.detach().view(-1).view(torch.uint8).fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    return [mismatches(name, _differ(first, tensors_of(result)))]


def _differ(first: Sequence[Tensor], again: Sequence[Tensor]) -> int:
    """Elements whose bytes differ."""
    pairs = zip(first, again, strict=True)
    return sum(int((_bytes(one) != _bytes(other)).sum()) for one, other in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def quantiser(bench: Bench) -> Callable[[], Any]:
    """Both layouts with statistics."""
    x = bench.normal(bench.size(1024, 130), bench.size(1152, 136))
    return partial(kernels("triton_fused").quantize_layouts, x, blocks="col", stats=True)


def split_quantiser(bench: Bench) -> Callable[[], Any]:
    """The same by expert."""
    bounds = bounds_of(bench, aligned=True)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    x = bench.normal(bounds[-1] + 32, bench.size(1152, 136))
    return partial(
        kernels("triton_fused").quantize_layouts, x, blocks="col", stats=True, aligned=True, offsets=offsets
    )


def gemm(bench: Bench) -> Callable[[], Any]:
    """fprop in BF16."""
    k = bench.size(2048, 128)
    a, b = (
        quantised(bench, bench.normal(bench.size(1024, 64), k), "row"),
        quantised(bench, bench.normal(128, k), "tile"),
    )
    return partial(kernels("triton_products").fp8_gemm_nt, a, b, torch.bfloat16)


def wgrad(bench: Bench) -> Callable[[], Any]:
    """wgrad in float32."""
    t = bench.size(2048, 128)
    dy, x = (quantised(bench, bench.normal(t, 128), "col") for _ in range(2))
    return partial(kernels("triton_products").fp8_gemm_wgrad, dy, x)


def grouped(bench: Bench) -> Callable[[], Any]:
    """Grouped fprop, the offsets on the device."""
    bounds, n, k = bounds_of(bench, aligned=True), 128, bench.size(1024, 128)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    x = quantised(bench, bench.normal(bounds[-1] + 32, k), "row")
    w = quantised(bench, bench.normal((len(bounds) - 1) * n, k).reshape(-1, n, k), "tile")
    return partial(kernels("triton_products").grouped_gemm_nt, x, w, offsets, torch.bfloat16)


def grouped_wgrad(bench: Bench) -> Callable[[], Any]:
    """Grouped wgrad, an expert without rows among them."""
    bounds = bounds_of(bench, aligned=True)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    rows = bounds[-1] + 32
    dy, x = (quantised(bench, bench.normal(rows, 128), "col", offsets, aligned=True) for _ in range(2))
    return partial(kernels("triton_products").grouped_gemm_wgrad, dy, x, offsets, aligned=True)


def fused(bench: Bench, *, operation: str) -> Callable[[], Any]:
    """A fused operation that returns everything it can."""
    moe = OPERATIONS[operation]
    inputs = moe.inputs(bench, SMALL if bench.small else CHECKED)
    wanted = kernels("moe.routing").Wanted(values=True, row=True, blocks="col", stats=True)
    return partial(moe.call, kernels("moe.triton_ops"), inputs, wanted)


def linear(bench: Bench) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A layer of the public API and its two parameters."""
    from fp8_safeguard.kernels import fp8_linear

    t, n, k = bench.size(512, 32), bench.size(384, 32), bench.size(640, 48)
    x, w = bench.normal(t, k), bench.normal(n, k)
    return (lambda x, w: fp8_linear(x, w)), [x.requires_grad_(), w.requires_grad_()]


def layer(bench: Bench) -> Callable[[], Any]:
    """Forward and backward of fp8_linear."""
    function, leaves = linear(bench)

    def call() -> Any:
        y = function(*leaves)
        return (y, *torch.autograd.grad(y, leaves, torch.ones_like(y)))

    return call


def routed_experts(bench: Bench) -> Callable[[], Any]:
    """fast_moe, forward and backward, routing included."""
    function, leaves = experts(bench)

    def call() -> Any:
        y = function(True)
        return (y, *torch.autograd.grad(y, leaves, torch.ones_like(y)))

    return call


def compiled(bench: Bench, name: str) -> Sequence[Row]:
    """torch.compile keeps fp8_linear in one graph, forward and backward, and changes no number."""
    function, leaves = linear(bench)
    built = torch.compile(
        function, fullgraph=True, backend="inductor" if bench.device == "cuda" else "aot_eager"
    )
    results = []
    for each in (function, built):
        y = each(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    return [mismatches(name, _differ(*results))]


def promised(bench: Bench, name: str) -> Sequence[Row]:
    """fp8_linear on this device is as close to float64 as its operands' FP8 lets it be."""
    from fp8_safeguard.kernels import quantize

    function, (x, w) = linear(bench)
    y = function(x, w).detach().cpu().double()
    exact = [
        quantize(each.detach().cpu(), layout=layout).dequantize(torch.float64)
        for each, layout in ((x, "row"), (w, "tile"))
    ]
    wanted = exact[0] @ exact[1].mT
    size = exact[0].abs() @ exact[1].abs().mT
    error = ((y - wanted).abs() - 2.0**-8 * wanted.abs()).clamp(min=0) / size
    return [checked(name, float(error.max()), "of sum |a||b|", 1e-6 if bench.small else 2.0**-13)]


def _captured(
    name: str, made: Made, seconds: float = 3, needs: tuple[str, ...] = (), interpreted: bool = False
) -> Case:
    name = f"capture {name}"
    run = partial(captured, name=name, made=made)
    return Case(name=name, kind="check", run=run, seconds=seconds, needs=needs, interpreted=interpreted)


def cases() -> Iterator[Case]:
    """The checks of what surrounds the kernels."""
    yield Case(
        name="fp8_linear",
        kind="check",
        run=partial(promised, name="fp8_linear"),
        seconds=6,
        interpreted=False,
    )
    yield _captured("fp8_linear forward and backward", layer, 6)
    yield _captured("fast_moe forward and backward", routed_experts, 10, NEEDS)
    for name, made in (
        ("quantise", quantiser),
        ("quantise experts", split_quantiser),
        ("gemm", gemm),
        ("wgrad", wgrad),
    ):
        yield _captured(name, made, interpreted=name == "wgrad")
    yield _captured("grouped gemm", grouped)
    yield _captured("grouped wgrad", grouped_wgrad)
    for name in OPERATIONS:
        yield _captured(
            f"moe {name}", partial(fused, operation=name), 2, NEEDS, interpreted=name == "routing"
        )
    name = "torch.compile of fp8_linear"
    yield Case(name=name, kind="check", run=partial(compiled, name=name), seconds=25)
