"""Measures one use of a weight in one native call, on all threads that torch uses."""

# Shapes: T tokens, N output features, K input features, R sampled rows, V = 29 TensorStats entries.

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.kernels import native, native_exact, native_gemm, tiles
from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.team import team
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

ROW, COL, WEIGHT, PRODUCT = range(4)
"""Rows of what `measure` gives."""

_MATRIX = "5q"
_GRID = "6d 2q"
_USE = struct.Struct(f"{_MATRIX} {_MATRIX} {_MATRIX} {_GRID} {_GRID} 14q")
"""`struct Use` of cpp/use.h."""
_NO_MATRIX = (0, 0, 0, 0, 0)
_STATS_BYTES = 4 * VECTOR_LENGTH * 8
_ROOMS_AT_ONCE = 64
"""Rooms for the results of one call: one alone costs as much."""

_Room = tuple[tuple[NDArray[np.float64], ...], memoryview, int]
"""Statistics, [1, V] each, behind them the seconds, all zeros; and the address of the first."""
_rooms: list[_Room] = []
"""Not used yet."""


@dataclass(slots=True)
class Measured:
    """What one call found."""

    stats: tuple[NDArray[np.float64], ...]
    """[1, V] each: of the operand in rows, in columns, of the weight in tiles, of the product; zeros where not wanted."""
    judged: bool
    """Whether the product was compared; not for numbers that matrix tiles cannot multiply."""
    operand_seconds: float
    """What the statistics took."""


@cache
def _library() -> ctypes.CDLL | None:
    """The shared library with this call declared; None where it was not built, or from sources of another version."""
    loaded = native.library()
    size = getattr(loaded, "fp8_native_use_bytes", None)
    if loaded is None or size is None or size() != _USE.size:
        return None
    loaded.fp8_native_use.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    return loaded


@cache
def _available() -> bool:
    """Whether this processor has matrix tiles, and this process uses them by the native kernels."""
    if _library() is None or native_gemm.level() < native_exact.TILE_LEVEL:
        return False
    return tiles.multiplies_codes(torch.empty(0, device="cpu"))


def fits(operand_TC: Tensor, w_NK: Tensor, operand: OperandFormat, weight: OperandFormat) -> bool:
    """Whether `measure` takes these: float32 or bfloat16 matrices on a CPU with matrix tiles, block scales of their own."""
    return (
        operand.is_plain and weight.is_plain and _is_matrix(operand_TC) and _is_matrix(w_NK) and _available()
    )


def fits_result(y_TN: Tensor) -> bool:
    """Whether `measure` can compare with this result."""
    return _is_matrix(y_TN)


def measure(
    operand_TC: Tensor,
    w_NK: Tensor,
    rows: Tensor,
    *,
    operand: OperandFormat,
    weight: OperandFormat,
    wants: tuple[bool, bool],
    codes: QuantizedTensor,
    weighs: bool,
    y_TN: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Measured:
    """TensorStats of x [T,K] or dy [T,N] in rows and columns (`wants`), and the sampled rows of its product with w.

    With y: x w^T + b against it. Otherwise dy w against its FP8 product with the weight's codes. `weighs`: the weight is
    quantised into `codes` and measured too. `rows` are int64 [R] on the CPU, one behind the other. Sums and products are
    those of `layout_stats`, `tensor_stats`, `native_exact` and `native_gemm`. Only for what `fits`.
    """
    stats, seconds, address = _room()
    tokens, columns = operand_TC.shape
    features, inputs = w_NK.shape
    bias = bias_N
    if bias is not None and not native_exact.is_bias(bias, features):
        # One element stands for all.
        bias = bias.to(torch.float32).reshape(-1).expand(features).contiguous()
    job = _USE.pack(
        *_matrix(operand_TC),
        *_matrix(w_NK),
        *(_NO_MATRIX if y_TN is None else _matrix(y_TN)),
        *_grid(operand.fmt, operand.scale, operand.multiplier),
        tokens * columns <= native.WIDE_SUMS_ELEMENTS,
        *_grid(weight.fmt, weight.scale, weight.multiplier),
        features * inputs <= native.WIDE_SUMS_ELEMENTS,
        y_TN is not None,
        rows.data_ptr(),
        rows.shape[0],
        0 if bias is None else bias.data_ptr(),
        native.edges_address(),
        address,
        *wants,
        weighs,
        codes.data.data_ptr(),
        codes.scale.data_ptr(),
        address + _STATS_BYTES,
        *team(),
    )
    loaded = _library()
    assert loaded is not None, "the native kernels were not built"
    outcome = loaded.fp8_native_use(job, native.level(), native_gemm.level())
    if outcome < 0:
        raise MemoryError(f"no memory to measure {list(operand_TC.shape)} by {list(w_NK.shape)}")
    return Measured(stats, outcome == 0, seconds[0])


def room_for_codes(w_NK: Tensor, fmt: str) -> QuantizedTensor:
    """Where `measure` may put the codes of a weight of this shape."""
    rows, columns = w_NK.shape
    data = torch.empty((rows, columns), dtype=torch.uint8, device="cpu")
    scale = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), dtype=torch.float32, device="cpu")
    return QuantizedTensor(data.view(get_format(fmt).dtype), scale, "tile", fmt)


def _room() -> _Room:
    """Room for the results of one call."""
    try:
        return _rooms.pop()
    except IndexError:
        arena = np.zeros((_ROOMS_AT_ONCE, 4 * VECTOR_LENGTH + 1))
        stats = arena[:, :-1].reshape(_ROOMS_AT_ONCE, 4, 1, VECTOR_LENGTH)
        first, each = arena.ctypes.data, arena.strides[0]
        rooms = [(tuple(stats[at]), arena[at, -1:].data, first + at * each) for at in range(_ROOMS_AT_ONCE)]
        _rooms.extend(rooms[1:])
        return rooms[0]


def _matrix(x_RC: Tensor) -> tuple[int, int, int, int, int]:
    """`struct Matrix` of cpp/use.h."""
    rows, columns = x_RC.shape
    return x_RC.data_ptr(), x_RC.dtype == torch.bfloat16, rows, columns, x_RC.stride(0)


@lru_cache(maxsize=64)
def _grid(fmt: str, scale: str, multiplier: float) -> tuple[float, ...]:
    """`struct OperandGrid` of cpp/use.h, without its last field."""
    return *native.grid(get_format(fmt), scale, multiplier), fmt == "e5m2"


def _is_matrix(x_RC: Tensor) -> bool:
    """Whether the library can read this matrix where it lies."""
    strides = x_RC.stride()
    return len(strides) == 2 and strides[1] == 1 and 0 not in x_RC.shape and native_exact.is_read(x_RC)
