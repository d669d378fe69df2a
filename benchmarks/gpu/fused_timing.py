"""Times quantising against copies and fused operations against their chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu.case import Bench, Case, Row, kernels
from gpu.floors import FUSED, KERNELS, QUANTISING, Work
from gpu.moe_calls import LARGE, OPERATIONS, SMALL, Inputs, Operation
from gpu.moe_checks import NEEDS
from gpu.timing import Call, race, rows_of
from torch import Tensor

COPY_GOAL = 1 / 0.85
"""Time over that of a copy that moves as many bytes."""
STATS_GOAL = 1.05
"""Time over that without statistics."""
CHAIN_GOAL = 0.5
"""Time over that of the unfused chain."""
SIZE = 8192
REQUESTS: dict[str, dict[str, Any]] = {
    "quantize_row_col": {"blocks": "col"},
    "quantize_row": {},
    "quantize_col": {"row": False, "blocks": "col"},
    "quantize_tile": {"row": False, "blocks": "tile"},
    "quantize_row_col_stats": {"blocks": "col", "stats": True},
    "stats_row_col": {"blocks": "col", "stats": True, "store": False},
}


def copy_of(bench: Bench, work: Work) -> Call:
    """A copy that reads and writes as many bytes together."""
    size = 4096 if bench.small else work.bytes // 2
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def quantising(bench: Bench, *, kernel: str) -> Sequence[Row]:
    """A quantiser against a copy; with statistics against without too."""
    side, work = bench.size(SIZE, 128), KERNELS[kernel].work()
    x, layouts = bench.normal(side, side), kernels("triton_fused").quantize_layouts
    calls: dict[str, Call] = {"ours": lambda: layouts(x, **REQUESTS[kernel]), "copy": copy_of(bench, work)}
    timed = race(bench, calls)
    return rows_of(kernel, timed, ours="ours", baseline="copy", work=work, goal=COPY_GOAL)


def statistics(bench: Bench) -> Sequence[Row]:
    """What statistics add to quantising both layouts."""
    side = bench.size(SIZE, 128)
    x, layouts = bench.normal(side, side), kernels("triton_fused").quantize_layouts
    calls: dict[str, Call] = {
        "with": lambda: layouts(x, **REQUESTS["quantize_row_col_stats"]),
        "without": lambda: layouts(x, **REQUESTS["quantize_row_col"]),
    }
    works = {"with": KERNELS["quantize_row_col_stats"].work(), "without": KERNELS["quantize_row_col"].work()}
    name = "quantize_row_col statistics"
    return rows_of(name, race(bench, calls), ours="with", baseline="without", works=works, goal=STATS_GOAL)


def moving(bench: Bench, *, kernel: str) -> Sequence[Row]:
    """Transpose, re-blocking, MXFP8 and LogFMT-8 against a copy."""
    side, work = bench.size(SIZE, 128), KERNELS[kernel].work()
    x, fused = bench.normal(side, side), kernels("triton_fused")
    tile = fused.quantize_layouts(x, row=False, blocks="tile").block
    row = fused.quantize_layouts(x, scale="pow2").row
    encoded = kernels("moe.triton_logfmt").logfmt8_encode(x)
    ours: dict[str, Call] = {
        "transpose_tiles": lambda: kernels("triton_transpose").transpose_tiles(tile),
        "reblock": lambda: fused.reblock(row),
        "quantize_mx": lambda: kernels("triton_mx").quantize_mx(x),
        "logfmt_encode": lambda: kernels("moe.triton_logfmt").logfmt8_encode(x),
        "logfmt_decode": lambda: kernels("moe.triton_logfmt").logfmt8_decode(encoded, x.dtype),
    }
    timed = race(bench, {"ours": ours[kernel], "copy": copy_of(bench, work)})
    goal = None if kernel.startswith("logfmt") else COPY_GOAL  # those are bound by float64
    return rows_of(kernel, timed, ours="ours", baseline="copy", work=work, goal=goal)


def fused(bench: Bench, *, operation: str) -> Sequence[Row]:
    """A fused operation, quantising both layouts without keeping the values, against its chain."""
    moe, work = OPERATIONS[operation], FUSED[operation].work()
    inputs = moe.inputs(bench, SMALL if bench.small else LARGE)
    wanted = kernels("moe.routing").Wanted(values=False, row=True, blocks="col")
    ours = kernels("moe.triton_ops")
    calls: dict[str, Call] = {
        "ours": lambda: moe.call(ours, inputs, wanted),
        "chain": lambda: chain(moe, inputs),
    }
    return rows_of(operation, race(bench, calls), ours="ours", baseline="chain", work=work, goal=CHAIN_GOAL)


def chain(moe: Operation, inputs: Inputs) -> Any:
    """Plain torch for the values, then our quantise kernel on them: the strictest chain there is."""
    values_only = kernels("moe.routing").Wanted()
    result = moe.call(kernels("moe.eager"), inputs, values_only)
    if not moe.quantises:
        return result
    produced = result if hasattr(result, "values") else result[0]
    held = inputs.get("routing_map")
    offsets = inputs.get("offsets") if held is None else held.offsets
    layouts = kernels("triton_fused").quantize_layouts
    return result, layouts(produced.values, blocks="col", offsets=offsets, aligned=offsets is not None)


def layer(bench: Bench) -> Sequence[Row]:
    """What a layer gains in the end: forward and backward, every cast included."""
    side = bench.size(SIZE, 128)
    x, w, dy = (bench.normal(side, side).requires_grad_(grad) for grad in (True, True, False))
    linear = kernels("linear").fp8_linear
    calls: dict[str, Call] = {
        "ours": (lambda: planned(x, w, dy))
        if bench.device == "meta"
        else lambda: torch.autograd.grad(linear(x, w), (x, w), dy),
        "bf16": lambda: torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), dy),
    }
    shape = {"M": SIZE, "N": SIZE, "K": SIZE}
    done = {
        name: three_times(KERNELS[kernel].work(**shape))
        for name, kernel in (("ours", "fprop"), ("bf16", "bf16"))
    }
    name = f"fp8_linear forward and backward {SIZE}x{SIZE}x{SIZE}"
    return rows_of(name, race(bench, calls), ours="ours", baseline="bf16", works=done)


def planned(x: Tensor, w: Tensor, dy: Tensor) -> object:
    """What the layer launches on a GPU; asked itself it would take the backend of tensors without memory."""
    passes, precision = kernels("passes"), kernels("precision").LinearPrecision()
    call = passes.LinearCall(precision=precision, backend="triton")
    _, kept, _ = passes.forward(x.detach(), w.detach(), None, call)
    return passes.backward(dy, x.detach(), w.detach(), kept, call, x.dtype)


def three_times(work: Work) -> Work:
    """Three products of that size."""
    numbers = {name: 3 * getattr(work, name) for name in ("reads", "writes", "tensor", "vector")}
    return Work(**numbers, unit=work.unit)


def cases() -> Iterator[Case]:
    """Quantising first: it is what makes or breaks FP8; then each fused operation."""
    for kernel in REQUESTS:
        yield Case(
            name=f"time {kernel}", kind="timing", run=partial(quantising, kernel=kernel), seconds=1.5,
            work=QUANTISING[kernel].work(), interpreted=kernel == "quantize_row",
        )  # fmt: skip
    yield Case(name="time statistics", kind="timing", run=statistics, seconds=1, interpreted=True)
    yield Case(name="time fp8_linear", kind="timing", run=layer, seconds=4, interpreted=True)
    for name in OPERATIONS:
        yield Case(
            name=f"time {name}", kind="timing", run=partial(fused, operation=name), seconds=2.5,
            work=FUSED[name].work(), needs=NEEDS, interpreted=name == "rms_norm_backward",
        )  # fmt: skip
    for kernel in ("transpose_tiles", "reblock", "quantize_mx", "logfmt_encode", "logfmt_decode"):
        yield Case(
            name=f"time {kernel}", kind="timing", run=partial(moving, kernel=kernel), seconds=1.5,
            work=QUANTISING[kernel].work(), needs=("moe.triton_logfmt",), interpreted=kernel == "transpose_tiles",
        )  # fmt: skip
