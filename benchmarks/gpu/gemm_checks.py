"""GEMMs against float64, their repeatability, and the accumulator's error constant."""

# Shapes: M x N the result, K the summed dimension, T tokens, E experts.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from gpu.case import Bench, Case, Row, checked, kernels, mismatches
from torch import Tensor

from fp8_safeguard.kernels import QuantizedTensor
from fp8_safeguard.kernels.triton_fused import quantize_layouts

HOPPER_TOLERANCE = 2.0**-13
"""Of sum |a||b|: Hopper's tensor core keeps about 14 bits of a block of 128 (DeepSeek-V3, 3.3.2); checked here."""
EXACT_TOLERANCE = 1e-6
"""Where products are summed in float32 throughout: under the interpreter."""
BF16_ROUNDING = 2.0**-8
REPEATS = 20


def quantised(
    bench: Bench, x: Tensor, layout: str, offsets: Tensor | None = None, aligned: bool = False
) -> QuantizedTensor:
    """One layout of x as the quantise kernel gives it."""
    blocks = "" if layout == "row" else layout
    fused = quantize_layouts(x, row=layout == "row", blocks=blocks, offsets=offsets, aligned=aligned)
    found = fused.row if layout == "row" else fused.block
    assert found is not None
    return found


def operand(bench: Bench, rows: int, columns: int) -> Tensor:
    """Every row and column has a magnitude of its own."""
    x = bench.normal(rows, columns, dtype=torch.float32)
    return x * torch.exp(bench.normal(rows, 1).float()) * torch.exp(bench.normal(1, columns).float())


def error_of(got: Tensor, a: Tensor, b: Tensor) -> float:
    """Largest |got - a b^T| over sum |a||b|, operands float64; a rounding to BF16 taken off."""
    wanted, size = a @ b.mT, (a.abs() @ b.abs().mT).clamp(min=1e-300)
    error = (got.double() - wanted).abs()
    if got.dtype == torch.bfloat16:
        error = (error - BF16_ROUNDING * wanted.abs()).clamp(min=0)
    return float((error / size).nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def error_row(bench: Bench, name: str, error: float, **more: float) -> Row:
    """The error against its tolerance, and as the constant that calibrates it."""
    goal = EXACT_TOLERANCE if bench.small else HOPPER_TOLERANCE
    return checked(name, error, "of sum |a||b|", goal, constant=error / HOPPER_TOLERANCE, **more)


def dense(
    bench: Bench, name: str, *, shape: tuple[int, int, int], layout: str, dtype: torch.dtype
) -> Sequence[Row]:
    """a row times b row or tile; the same bits again and again."""
    m, n, k = shape
    a, b = quantised(bench, operand(bench, m, k), "row"), quantised(bench, operand(bench, n, k), layout)
    call = partial(kernels("triton_products").fp8_gemm_nt, a, b, dtype)
    error = error_of(call(), a.dequantize(torch.float64), b.dequantize(torch.float64))
    return [error_row(bench, name, error, k=k), repeats(bench, name, call)]


def repeats(bench: Bench, name: str, call: Callable[[], Tensor]) -> Row:
    """Calls whose bits differ from the first one's."""
    first = call()
    wrong = sum(not torch.equal(first, call()) for _ in range(REPEATS if bench.device == "cuda" else 1))
    return mismatches(f"{name} repeats", wrong)


def small_m(bench: Bench, name: str) -> Sequence[Row]:
    """Blocks of 64 rows, for few tokens."""
    return dense(bench, name, shape=(bench.size(48, 20), bench.size(7168, 128), bench.size(2048, 256)), layout="tile", dtype=torch.float32)  # fmt: skip


def dgrad(bench: Bench, name: str) -> Sequence[Row]:
    """dY W three ways: W turned by the kernel, on its way to the tensor core, and as a view of its copy."""
    m, n, k = (bench.size(size, small) for size, small in ((4096, 64), (2112, 136), (7168, 128)))
    products, transpose = kernels("triton_products"), kernels("triton_transpose")
    dy, w = quantised(bench, operand(bench, m, n), "row"), quantised(bench, operand(bench, n, k), "tile")
    ways = [transpose.transpose_tiles(w), products.turned(w)]
    got = [products.fp8_gemm_nt(dy, way) for way in ways]
    wanted = dy.dequantize(torch.float64), w.dequantize(torch.float64).mT
    error = max(error_of(each, *wanted) for each in got)
    return [
        error_row(bench, name, error, k=n),
        repeats(bench, name, partial(products.fp8_gemm_nt, dy, ways[1])),
    ]


def wgrad(bench: Bench, name: str) -> Sequence[Row]:
    """dY^T X, and added to what is there."""
    t, n, k = (bench.size(size, small) for size, small in ((8192, 256), (2112, 64), (4096, 128)))
    dy, x = quantised(bench, operand(bench, t, n), "col"), quantised(bench, operand(bench, t, k), "col")
    wanted = dy.dequantize(torch.float64).mT, x.dequantize(torch.float64).mT
    gradient = kernels("triton_products").fp8_gemm_wgrad
    plain = gradient(dy, x)
    added = gradient(dy, x, out=plain.clone())
    doubled = int((added != 2 * plain).sum())
    call = partial(gradient, dy, x)
    return [
        error_row(bench, name, error_of(plain, *wanted), k=t),
        mismatches(f"{name} accumulate", doubled),
        repeats(bench, name, call),
    ]


def bounds_of(bench: Bench, aligned: bool) -> list[int]:
    """Uneven experts, two of them empty; rows are left behind the last one."""
    if bench.small:
        return [0, 48, 48, 176, 208, 208] if aligned else [0, 37, 37, 170, 201, 201]
    sizes = [0, 16, 640, 1296, 0, 2032, 128, 3008] if aligned else [0, 1, 635, 1291, 0, 2047, 128, 3001]
    return torch.tensor([0, *sizes]).cumsum(0).tolist()


def grouped(bench: Bench, name: str, *, aligned: bool) -> Sequence[Row]:
    """Each expert's rows times its weight; rows behind the last offset give zeros."""
    bounds = bounds_of(bench, aligned)
    experts, n, k = len(bounds) - 1, bench.size(2048, 128), bench.size(7168, 256)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    x = quantised(bench, operand(bench, bounds[-1] + 32, k), "row")
    w = quantised(bench, operand(bench, experts * n, k).reshape(experts, n, k), "tile")
    call = partial(kernels("triton_products").grouped_gemm_nt, x, w, offsets)
    y, x_exact, w_exact = call(), x.dequantize(torch.float64), w.dequantize(torch.float64)
    spans = enumerate(pairwise(bounds))
    error = max(error_of(y[i:j], x_exact[i:j], w_exact[expert]) for expert, (i, j) in spans)
    behind = int((y[bounds[-1] :] != 0).sum())
    return [
        error_row(bench, name, error, k=k),
        mismatches(f"{name} rows behind", behind),
        repeats(bench, name, call),
    ]


def grouped_wgrad(bench: Bench, name: str, *, aligned: bool) -> Sequence[Row]:
    """dY^T X expert by expert; an expert without rows gives exact zeros, whatever memory held before."""
    bounds = bounds_of(bench, aligned)
    n, k = bench.size(2048, 64), bench.size(4096, 128)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    rows = bounds[-1] + (32 if aligned else 0)
    dy, x = (quantised(bench, operand(bench, rows, width), "col", offsets, aligned) for width in (n, k))
    call = partial(kernels("triton_products").grouped_gemm_wgrad, dy, x, offsets, aligned=aligned)
    torch.full((len(bounds) - 1, n, k), torch.nan, device=bench.device)  # memory that the result may get
    dw, dy_exact, x_exact = call(), dy.dequantize(torch.float64), x.dequantize(torch.float64)
    error, nonzero = 0.0, 0
    for expert, (i, j) in enumerate(pairwise(bounds)):
        error = max(error, error_of(dw[expert], dy_exact[i:j].mT, x_exact[i:j].mT) if j > i else 0.0)
        nonzero += int((dw[expert] != 0).sum()) if j == i else 0
    return [
        error_row(bench, name, error, k=max(j - i for i, j in pairwise(bounds))),
        mismatches(f"{name} empty experts", nonzero),
        repeats(bench, name, call),
    ]


def without_promotion(bench: Bench, name: str) -> Sequence[Row]:
    """What a sum of one sign loses in a block of 128, where every product counts: the worst case of the constant."""
    m, n, k = (bench.size(size, small) for size, small in ((1024, 64), (1024, 128), (16384, 256)))
    a = quantised(bench, bench.normal(m, k, dtype=torch.float32).abs(), "row")
    b = quantised(bench, bench.normal(n, k, dtype=torch.float32).abs(), "tile")
    y = kernels("triton_products").fp8_gemm_nt(a, b)
    return [
        error_row(bench, name, error_of(y, a.dequantize(torch.float64), b.dequantize(torch.float64)), k=k)
    ]


def _case(
    name: str,
    run: Callable[[Bench, str], Sequence[Row]],
    seconds: float,
    interpreted: bool = True,
) -> Case:
    name = f"gemm {name}"
    return Case(
        name=name, kind="check", run=lambda bench: run(bench, name), seconds=seconds, interpreted=interpreted,
    )  # fmt: skip


def _dense(
    bench: Bench, name: str, shape: tuple[int, int, int], layout: str, dtype: torch.dtype
) -> Sequence[Row]:
    return dense(bench, name, shape=(130, 144, 400) if bench.small else shape, layout=layout, dtype=dtype)


def cases() -> Iterator[Case]:
    """The checks of the products, the plainest first."""
    full, half = torch.float32, torch.bfloat16
    for layout, dtype, shape in (
        ("tile", full, (4096, 7168, 2048)),
        ("tile", half, (4096, 2112, 7168)),
        ("row", full, (4096, 4096, 7168)),
        ("tile", full, (517, 333, 1001)),
    ):
        label = f"{layout} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
        run = partial(_dense, shape=shape, layout=layout, dtype=dtype)
        yield _case(label, run, 5, interpreted=layout == "row")
    yield _case("one sign, K 16384", without_promotion, 3)
    yield _case("few rows", small_m, 4, interpreted=False)
    yield _case("dgrad, transposed three ways", dgrad, 5)
    yield _case("wgrad", wgrad, 6)
    for aligned in (True, False):
        label = "aligned" if aligned else "ragged"
        yield _case(f"grouped {label}", partial(grouped, aligned=aligned), 5, interpreted=aligned)
        yield _case(f"grouped wgrad {label}", partial(grouped_wgrad, aligned=aligned), 6)
