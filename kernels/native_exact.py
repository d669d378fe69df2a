"""Sampled rows of products at float32 precision, and how they compare."""

# Shapes: R wanted rows, S the summed dimension, C columns, V = 29 TensorStats entries.

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from fp8_safeguard.kernels import native, native_gemm
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

TILE_LEVEL = native_gemm.INSTRUCTION_SETS.index("AMX")
"""Products need matrix tiles: in vectors torch is as fast."""

DTYPES = (torch.float32, torch.bfloat16)
"""What the library reads; anything else is for torch."""


_PRODUCT = struct.Struct("13q")
"""`struct ExactJob` of cpp/exact.h."""
_COMPARISON = struct.Struct("10q")
"""`struct Comparison` of cpp/exact.h."""


@cache
def _library() -> ctypes.CDLL | None:
    """The shared library with these calls declared; None where it was not built, or from sources of another version."""
    loaded = native.library()
    size = getattr(loaded, "fp8_native_exact_job_bytes", None)
    if loaded is None or size is None or size() != _PRODUCT.size + _COMPARISON.size:
        return None
    loaded.fp8_native_exact_rows.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loaded.fp8_native_compare.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loaded.fp8_native_compare.restype = None
    return loaded


def available() -> bool:
    """Whether the native comparison was built."""
    return _library() is not None


def rows_of_product(a_RS: Tensor, b_SC: Tensor, places: Tensor | None = None) -> Tensor | None:
    """a[places] @ b, float32 [R,C], as near the exact product as float32's own rounding; None where torch has to.

    Tiles multiply thirds of float32 numbers, whose products are exact, and add in float32. None without matrix tiles,
    for other dtypes, for a b without unit stride, and for numbers that tiles cannot take: non-finite ones, and a b that
    is all below 2^-60 or beyond 2^60. a may have any strides; `places` is int64 [R] on the CPU.
    """
    loaded, (b_stride, b_step) = _library(), b_SC.stride()
    if loaded is None or native_gemm.level() < TILE_LEVEL or not (is_read(a_RS) and is_read(b_SC)):
        return None
    turned = b_step != 1
    if turned and b_stride != 1:
        return None
    places = _listed(places)
    (rows, depth), (_, columns) = a_RS.shape, b_SC.shape
    rows = rows if places is None else places.shape[0]
    out_RC = torch.empty((rows, columns), dtype=torch.float32, device="cpu")
    job = _PRODUCT.pack(
        a_RS.data_ptr(),
        a_RS.dtype == torch.bfloat16,
        *a_RS.stride(),
        0 if places is None else places.data_ptr(),
        rows,
        depth,
        columns,
        b_SC.data_ptr(),
        b_SC.dtype == torch.bfloat16,
        b_step if turned else b_stride,
        turned,
        out_RC.data_ptr(),
    )
    return None if loaded.fp8_native_exact_rows(job, native_gemm.level()) else out_RC


def compare_rows(
    exact_RC: Tensor, actual_RC: Tensor, places: Tensor | None = None, bias_C: Tensor | None = None
) -> Tensor | None:
    """float64 [V]: x = exact (+ bias), xq = actual[places], in one pass; None where torch has to compare them.

    Elements that are not finite in either are counted and left out of the rest. `places` is int64 [R] on the CPU, the
    bias float32.
    """
    loaded = _library()
    if loaded is None or exact_RC.dtype != torch.float32 or not is_read(exact_RC) or not is_read(actual_RC):
        return None
    if not (_is_dense(exact_RC) and _is_dense(actual_RC)):
        return None
    if bias_C is not None and not (is_read(bias_C) and is_bias(bias_C, exact_RC.shape[1])):
        return None
    places = _listed(places)
    stats = torch.zeros(VECTOR_LENGTH, dtype=torch.float64, device="cpu")
    job = _COMPARISON.pack(
        exact_RC.data_ptr(),
        exact_RC.stride(0),
        actual_RC.data_ptr(),
        actual_RC.dtype == torch.bfloat16,
        actual_RC.stride(0),
        0 if places is None else places.data_ptr(),
        0 if bias_C is None else bias_C.data_ptr(),
        *exact_RC.shape,
        stats.data_ptr(),
    )
    loaded.fp8_native_compare(job, native.level())
    return stats


def is_bias(bias: Tensor, columns: int) -> bool:
    """Whether these are float32 numbers for so many columns, one behind the other."""
    return bias.dtype == torch.float32 and bias.shape == (columns,) and bias.is_contiguous()


def _listed(places: Tensor | None) -> Tensor | None:
    """The places, one behind the other: the library reads memory."""
    if places is None:
        return None
    if places.dtype != torch.int64 or not places.is_cpu:
        raise AssertionError(f"places are {places.dtype} on {places.device}")
    return places.contiguous()


def is_read(x: Tensor) -> bool:
    """Whether the library can read this matrix or vector where it lies."""
    if not x.is_cpu or x.dtype not in DTYPES or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # under torch.func
        return False


def _is_dense(x_RC: Tensor) -> bool:
    return x_RC.stride(-1) == 1 or x_RC.shape[-1] <= 1
