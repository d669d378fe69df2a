"""Triton: LogFMT-8, sign and logarithm in eight bits, to and fro."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: R rows (all leading dimensions together), C columns, b counts 128-tiles along them. What the codes mean, and why
# the arithmetic is float64, is said in logfmt.py.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK as BLOCK_SIZE
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.logfmt import LEVELS as LEVEL_COUNT
from fp8_safeguard.kernels.logfmt import NAN_CODE as NAN_BYTE
from fp8_safeguard.kernels.logfmt import RANGE as BINADES
from fp8_safeguard.kernels.logfmt import LogFmt8
from fp8_safeguard.kernels.moe.triton_plan import SOURCES, UNFUSED_FLOATS
from fp8_safeguard.kernels.triton_codes import is_finite
from fp8_safeguard.kernels.triton_launch import Launch
from fp8_safeguard.kernels.triton_quantize import BLOCK

ROWS = 16
"""Tiles that a program takes."""

LEVELS = tl.constexpr(LEVEL_COUNT)
NAN_CODE = tl.constexpr(NAN_BYTE)
RANGE = tl.constexpr(BINADES)
SIGN = tl.constexpr(0x80)
INFINITE = tl.constexpr(float("inf"))


EXP_TERMS = tl.constexpr(tuple(1.0 / math.factorial(power) for power in range(13, -1, -1)))
"""Of e^t for |t| <= ln 2 / 2, highest power first: the next term is below 1e-17."""
LOG_TERMS = tl.constexpr(tuple(2.0 / math.log(2.0) / (2 * power + 1) for power in range(11, -1, -1)))
"""Of log2(m) / z in powers of z^2, z = (m - 1) / (m + 1), for m next to 1 by sqrt 2: the next term is below 1e-17."""
LN_2 = tl.constexpr(math.log(2.0))
SQRT_2 = tl.constexpr(math.sqrt(2.0))
MANTISSA = tl.constexpr((1 << 52) - 1)
ONE_BITS = tl.constexpr(1023 << 52)


@triton.jit
def log2_wide(x: tl.tensor) -> tl.tensor:
    """log2 of positive normal float64 numbers, exact for powers of two; the library's flushes subnormals on its way."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & MANTISSA) | ONE_BITS).to(tl.float64, bitcast=True)
    above = mantissa > SQRT_2
    mantissa = tl.where(above, mantissa * 0.5, mantissa)
    exponent = (bits >> 52) - 1023 + tl.where(above, 1, 0)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = tl.zeros(x.shape, tl.float64)
    for term in tl.static_range(12):
        series = tl.fma(series, square, tl.full(x.shape, LOG_TERMS[term], tl.float64))
    return tl.fma(series, z, exponent.to(tl.float64))


@triton.jit
def exp2_wide(x: tl.tensor) -> tl.tensor:
    """2^x in float64 for |x| < 1022, exact for whole numbers."""
    whole = tl.floor(x + 0.5)
    t = (x - whole) * LN_2
    series = tl.zeros(x.shape, tl.float64)
    for term in tl.static_range(14):
        series = tl.fma(series, t, tl.full(x.shape, EXP_TERMS[term], tl.float64))
    return series * ((whole.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def logfmt_encode_kernel(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, low_ptr: tl.tensor, step_ptr: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, stride_r: tl.tensor, stride_c: tl.tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Codes, low and step of ROWS tiles: the nearest magnitude in linear space, the smaller one of two as near."""
    column_tiles = tl.cdiv(columns, BLOCK)
    block = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) - block * column_tiles
    row_1 = (block * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < rows) & (column_1 < columns)
    x = tl.load(x_ptr + row_1 * stride_r + column_1.to(tl.int64) * stride_c, mask=held, other=0.0).to(
        tl.float32
    )
    finite = is_finite(x)
    magnitude = tl.where(finite, tl.abs(x), 0.0).to(tl.float64)
    log = tl.where(magnitude > 0, log2_wide(tl.where(magnitude > 0, magnitude, 1.0)), -INFINITE)
    high = tl.max(log, axis=1, keep_dims=True)
    empty = high == -INFINITE
    low = tl.min(tl.where(magnitude > 0, log, INFINITE), axis=1, keep_dims=True)
    low = tl.where(empty, 0.0, tl.maximum(low, high - RANGE)).to(tl.float32)
    wide = low.to(tl.float64)
    # The rounding of low to float32 may put it above the only magnitude there is.
    span = tl.maximum(tl.where(empty, 0.0, high - wide), 0.0)
    step = (span / (LEVELS - 1)).to(tl.float32)
    spacing = step.to(tl.float64)
    flat = spacing == 0
    position = (log - wide) / tl.where(flat, 1.0, spacing)
    # Rounding may move a value across a level, never past the one behind it: two candidates are enough.
    lower = tl.floor(tl.minimum(tl.maximum(position, 0.0), LEVELS - 2.0))
    below, above = exp2_wide(wide + lower * spacing), exp2_wide(wide + (lower + 1.0) * spacing)
    index = lower + tl.where(magnitude - below > above - magnitude, 1.0, 0.0)
    index = tl.where(flat, 0.0, index)
    index = tl.where(magnitude <= 0.5 * exp2_wide(wide), -1.0, index).to(tl.int32)
    codes = index + 1 + tl.where((x < 0) & (index >= 0), SIGN, 0)
    codes = tl.where(finite, codes, NAN_CODE)
    tl.store(codes_ptr + row_1 * columns + column_1, codes.to(tl.uint8), mask=held)
    at = row_1 * column_tiles + column_tile
    tl.store(low_ptr + at, low, mask=row_1 < rows)
    tl.store(step_ptr + at, step, mask=row_1 < rows)


@triton.jit
def logfmt_decode_kernel(
    codes_ptr: tl.tensor, low_ptr: tl.tensor, step_ptr: tl.tensor, out_ptr: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, largest: tl.tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Values of ROWS tiles, computed in float64; `largest` is the largest finite one of the result's dtype."""
    column_tiles = tl.cdiv(columns, BLOCK)
    block = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) - block * column_tiles
    row_1 = (block * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < rows) & (column_1 < columns)
    codes = tl.load(codes_ptr + row_1 * columns + column_1, mask=held, other=0).to(tl.int32)
    at = row_1 * column_tiles + column_tile
    low = tl.load(low_ptr + at, mask=row_1 < rows, other=0.0).to(tl.float64)
    step = tl.load(step_ptr + at, mask=row_1 < rows, other=0.0).to(tl.float64)
    index = (codes & ~SIGN) - 1
    magnitude = exp2_wide(low + index.to(tl.float64) * step)
    limit = (tl.zeros((1, 1), tl.float32) + largest).to(tl.float64)
    magnitude = tl.minimum(magnitude, limit).to(tl.float32)
    value = tl.where(codes < SIGN, magnitude, -magnitude)
    value = tl.where(index < 0, 0.0, value)
    value = tl.where(codes == NAN_CODE, float("nan"), value)
    tl.store(out_ptr + row_1 * columns + column_1, value.to(out_ptr.dtype.element_ty), mask=held)


def logfmt8_encode(x: Tensor) -> LogFmt8:
    """x [..., C] as LogFMT-8, as logfmt.logfmt8_encode. Moves b bytes read and 1 written for each element."""
    if x.dtype not in SOURCES or x.dim() < 1:
        raise OperandError(
            f"x is {x.dtype} {list(x.shape)}: pass bfloat16, float16 or float32 of one dimension or more"
        )
    launch, encoded = plan_logfmt_encode(x)
    launch.run()
    return encoded


def plan_logfmt_encode(x: Tensor) -> tuple[Launch, LogFmt8]:
    """The kernel of `logfmt8_encode` and what it fills."""
    columns = x.shape[-1]
    tiles = -(-columns // BLOCK_SIZE)
    x_RC = x.detach().reshape(math.prod(x.shape[:-1]), columns)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    low, step = (torch.empty((*x.shape[:-1], tiles), dtype=torch.float32, device=x.device) for _ in range(2))
    arguments = {
        "x_ptr": x_RC,
        "codes_ptr": codes,
        "low_ptr": low,
        "step_ptr": step,
        "rows": x_RC.shape[0],
        "columns": columns,
        "stride_r": x_RC.stride(0),
        "stride_c": x_RC.stride(1),
        "ROWS": ROWS,
    }
    grid = (-(-x_RC.shape[0] // ROWS) * tiles,)
    launch = Launch(
        kernel=logfmt_encode_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS
    )
    return launch, LogFmt8(codes, low, step)


def logfmt8_decode(encoded: LogFmt8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, as LogFmt8.decode. Moves 1 byte read and b written for each element."""
    if dtype not in SOURCES:
        raise OperandError(f"decode to {dtype}: choose bfloat16, float16 or float32")
    launch, values = plan_logfmt_decode(encoded, dtype)
    launch.run()
    return values


def plan_logfmt_decode(encoded: LogFmt8, dtype: torch.dtype) -> tuple[Launch, Tensor]:
    """The kernel of `logfmt8_decode` and what it fills."""
    codes = encoded.codes.contiguous()
    rows, columns = math.prod(codes.shape[:-1]), codes.shape[-1]
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    arguments = {
        "codes_ptr": codes,
        "low_ptr": encoded.low.contiguous(),
        "step_ptr": encoded.step.contiguous(),
        "out_ptr": values,
        "rows": rows,
        "columns": columns,
        "largest": torch.finfo(dtype).max,
        "ROWS": ROWS,
    }
    grid = (-(-rows // ROWS) * -(-columns // BLOCK_SIZE),)
    launch = Launch(
        kernel=logfmt_decode_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS
    )
    return launch, values
