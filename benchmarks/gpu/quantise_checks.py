"""Codes, scales and statistics on the device against the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from gpu.case import Bench, Case, Row, checked, kernels, mismatches
from torch import Tensor

from fp8_safeguard.kernels import QuantizedTensor, quantize, tensor_stats
from fp8_safeguard.monitor.stats import COLUMNS

SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
SUM_TOLERANCE = 1e-6
"""Relative: blocks are summed in float32 (6e-8 a step, a tree of steps), across blocks in float64."""
LOGFMT_CODES = 1e-5
"""Of all codes, may differ: the device's logarithm may end on another bit."""
Source = Callable[[Bench], Tensor]


def differing(got: Tensor, wanted: Tensor) -> int:
    """Elements whose bytes differ, sign of zero and of NaN included; all of them where shape or dtype do."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return max(got.numel(), 1)
    kind = torch.uint8 if got.element_size() == 1 else torch.int32
    return int((got.cpu().contiguous().view(kind) != wanted.cpu().contiguous().view(kind)).sum())


def differing_tensors(got: QuantizedTensor, wanted: QuantizedTensor) -> int:
    """Codes and scales that differ."""
    return differing(got.data, wanted.data) + differing(got.scale, wanted.scale)


def differing_stats(got: Tensor, wanted: Tensor) -> tuple[int, float]:
    """Counts that differ, and the largest relative difference of a sum."""
    got, wanted = got.cpu().reshape(-1, wanted.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    exact = [index for index in range(wanted.shape[-1]) if index not in SUMS]
    counts = int((got[:, exact] != wanted[:, exact]).sum())
    apart = (got[:, SUMS] - wanted[:, SUMS]).abs() / wanted[:, SUMS].abs().clamp(min=1e-300)
    return counts, float(apart.nan_to_num(nan=0.0).max())


def every_bf16(bench: Bench) -> Tensor:
    """All 65,536 codes, neighbours in magnitude side by side, NaN and Inf among them."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return values.reshape(256, 256)[:: bench.size(1, 4)]


def random_bits(bench: Bench) -> Tensor:
    """A million random float32 patterns."""
    side = bench.size(1024, 128)
    bits = torch.randint(-(2**31), 2**31, (side, side), generator=bench.seed(), dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def log_gaussian(bench: Bench) -> Tensor:
    """A million values over many binades, as activations and gradients are."""
    side, seed = bench.size(1024, 128), bench.seed()
    size = torch.exp(2.5 * torch.randn(side, side, generator=seed))
    return size * torch.randn(side, side, generator=seed).sign()


def edges(bench: Bench) -> Tensor:
    """Zero blocks, subnormals, the largest numbers, ties and non-finite values, ragged in both directions."""
    x = torch.randn(260, bench.size(300, 140), generator=bench.seed())
    x[:128, :128] = 0.0
    x[128:140] *= 1e-42
    x[140:150] *= 1e30
    x[150, :7] = torch.tensor([448.0, 464.0, 465.0, 17.0, 19.0, 2.0**-10, -0.0])
    x[151, 3], x[152, 129], x[153, -1] = float("nan"), float("inf"), -float("inf")
    x[154:158, :4] = torch.tensor([1e-45, 3.4e38, -1e-38, 0.0])
    return x


def both_kinds(bench: Bench, name: str, source: Source, options: dict[str, Any]) -> Sequence[Row]:
    """Row and `col` or tile codes, scales and, if asked, statistics of one tensor."""
    x = source(bench)
    fused = kernels("triton_fused").quantize_layouts(x.to(bench.device), **options)
    same = {key: options[key] for key in ("fmt", "scale", "multiplier") if key in options}
    wrong, apart = 0, 0.0
    for slot, layout in enumerate(["row"] * options.get("row", True) + [options["blocks"]]):
        got = fused.row if layout == "row" else fused.block
        wrong += differing_tensors(got, quantize(x, layout=layout, **same))
        if options.get("stats"):
            counts, sums = differing_stats(fused.stats[slot], tensor_stats(x, layout=layout, **same))
            wrong, apart = wrong + counts, max(apart, sums)
    rows = [mismatches(name, wrong)]
    if options.get("stats"):
        rows.append(checked(f"{name} sums", apart, "relative", SUM_TOLERANCE))
    return rows


def split_by_expert(bench: Bench, name: str) -> Sequence[Row]:
    """Offsets on the device, an empty expert, rows behind the last one: codes, scales, statistics."""
    x = torch.randn(304, bench.size(272, 130), generator=bench.seed()).bfloat16()
    offsets = torch.tensor([0, 16, 16, 160, 288], dtype=torch.int32)
    fused = kernels("triton_fused").quantize_layouts(
        x.to(bench.device), blocks="col", stats=True, aligned=True, offsets=offsets.to(bench.device)
    )
    wanted = quantize(x[:288], layout="col", offsets=offsets)
    got, real = fused.block, wanted.scale.shape[0]
    wrong = differing(got.data[:288], wanted.data) + differing(got.scale[:real], wanted.scale)
    wrong += int((got.data[288:].view(torch.uint8) != 0).sum()) + int((got.scale[real:] != 1).sum())
    wrong += differing_tensors(fused.row, quantize(x))
    counts, sums = 0, 0.0
    for slot, layout in enumerate(("row", "col")):
        some, apart = differing_stats(fused.stats[slot], tensor_stats(x, layout=layout, offsets=offsets))
        counts, sums = counts + some, max(sums, apart)
    return [mismatches(name, wrong + counts), checked(f"{name} sums", sums, "relative", SUM_TOLERANCE)]


def leading_dimensions(bench: Bench, name: str) -> Sequence[Row]:
    """3-D experts share no block; a non-contiguous source; a transposed weight."""
    x = torch.randn(3, 130, 260, generator=bench.seed()).bfloat16()
    fused = kernels("triton_fused").quantize_layouts(x.to(bench.device), blocks="tile")
    wrong = differing_tensors(fused.row, quantize(x)) + differing_tensors(
        fused.block, quantize(x, layout="tile")
    )
    view = x.mT[:, ::2]
    fused = kernels("triton_fused").quantize_layouts(view.to(bench.device), blocks="col")
    wrong += differing_tensors(fused.row, quantize(view)) + differing_tensors(
        fused.block, quantize(view, layout="col")
    )
    tile = quantize(x, layout="tile")
    there = QuantizedTensor(tile.data.to(bench.device), tile.scale.to(bench.device), "tile", "e4m3")
    wrong += differing_tensors(kernels("triton_transpose").transpose_tiles(there), tile.transpose())
    return [mismatches(name, wrong)]


def reblocked(bench: Bench, name: str) -> Sequence[Row]:
    """Row codes moved to col blocks equal quantising the row codes' values."""
    x = log_gaussian(bench)
    row = quantize(x, scale="pow2")
    there = QuantizedTensor(row.data.to(bench.device), row.scale.to(bench.device), "row", "e4m3")
    got = kernels("triton_fused").reblock(there)
    return [mismatches(name, differing_tensors(got, quantize(row.dequantize(), layout="col", scale="pow2")))]


def mx(bench: Bench, name: str) -> Sequence[Row]:
    """MXFP8 codes and scales against the same kernel's formulas in float64."""
    x = log_gaussian(bench)
    got = kernels("triton_mx").quantize_mx(x.to(bench.device))
    blocks = x.reshape(-1, 32)
    amax = blocks.abs().amax(dim=1).double()
    fraction, exponent = torch.frexp(amax)
    # 448 = 0.875 x 2^9: the smallest power of two that is at least amax / 448.
    power = (exponent - 9 + (fraction > 0.875)).clamp(-127, 127)
    codes = (
        (blocks.double() / torch.exp2(power.double())[:, None])
        .float()
        .clamp(-448, 448)
        .to(torch.float8_e4m3fn)
    )
    wrong = differing(got.data, codes.reshape(x.shape))
    return [mismatches(name, wrong + differing(got.scale.reshape(-1), (power + 127).to(torch.uint8)))]


def logfmt(bench: Bench, name: str) -> Sequence[Row]:
    """LogFMT-8 as on the CPU, but for the last bit of a logarithm: decoded values within half a step."""
    x, fused = log_gaussian(bench), kernels("moe.triton_logfmt")
    got, wanted = fused.logfmt8_encode(x.to(bench.device)), kernels("moe.triton_logfmt").logfmt8_encode(x)
    wrong = differing(got.codes, wanted.codes) / x.numel()
    step = wanted.step.double().repeat_interleave(128, dim=-1)
    decoded = fused.logfmt8_decode(got).cpu().double()
    away = (decoded - x.double()).abs() / (x.double().abs() * torch.expm1(step * math.log(2)))
    return [
        checked(name, wrong, "of the codes", LOGFMT_CODES),
        checked(f"{name} values", float(away.nan_to_num(nan=0.0).max()), "of a step", 0.5 + SUM_TOLERANCE),
    ]


def _case(name: str, source: Source, seconds: float, interpreted: bool, **options: Any) -> Case:
    name = f"quantise {name}"
    return Case(
        name=name, kind="check", run=partial(_both, name=name, source=source, options=options), seconds=seconds,
        interpreted=interpreted,
    )  # fmt: skip


def _both(bench: Bench, *, name: str, source: Source, options: dict[str, Any]) -> Sequence[Row]:
    return both_kinds(bench, name, source, options)


def _alone(run: Callable[[Bench, str], Sequence[Row]], name: str, seconds: float, *needs: str) -> Case:
    name = f"quantise {name}"
    return Case(
        name=name, kind="check", run=lambda bench: run(bench, name), seconds=seconds, needs=needs, interpreted=True
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """The checks of the quantise family, the most telling ones first."""
    yield _case("every bf16 row col stats", every_bf16, 8, False, blocks="col", stats=True)
    yield _case("edges row col stats", edges, 7, True, blocks="col", stats=True)
    yield _alone(split_by_expert, "experts, offsets, aligned", 8)
    yield _alone(leading_dimensions, "3-D, strided, transposed", 6)
    for fmt, scale, blocks in product(("e4m3", "e5m2"), ("fp32", "pow2"), ("col", "tile")):
        options = {"fmt": fmt, "scale": scale, "blocks": blocks}
        named = f"{fmt} {scale} row {blocks}"
        yield _case(f"random bits {named}", random_bits, 4, False, **options)
        yield _case(f"log-Gaussian {named}", log_gaussian, 1, False, **options)
        yield _case(f"every bf16 {named}", every_bf16, 4, False, **options)
    yield _case("edges tile stats", edges, 5, False, row=False, blocks="tile", stats=True)
    yield _case("multiplier 1/4 stats", log_gaussian, 5, False, blocks="col", multiplier=0.25, stats=True)
    yield _case("multiplier 2^-40", log_gaussian, 2, False, blocks="col", multiplier=2.0**-40)
    yield _alone(reblocked, "re-block row to col", 3)
    yield _alone(mx, "MXFP8", 2)
    yield _alone(logfmt, "LogFMT-8", 1, "moe.triton_logfmt")
