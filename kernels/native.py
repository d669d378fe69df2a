"""Calls into the native kernels, a shared library built with the package."""

# Shapes: R rows, C columns, S segments of rows that no block crosses.

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, CodeFormat
from fp8_safeguard.kernels.compiled import grid_of
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.reference import SQNR_RATIO_EDGES
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

INSTRUCTION_SETS = ("SSE2", "AVX2", "AVX-512")
"""By the level that the library reports; `plain` C++ is what SSE2 stands for elsewhere."""

WIDE_SUMS_ELEMENTS = 2**18
"""Up to this many elements all sums are float64 throughout. In larger tensors those of one block are float32, off by
about 2e-8: a hundred thousandth of what cosine and SQNR are read for."""

_NOTHING, _CODES, _VALUES = range(3)


class _Layout(ctypes.Structure):
    """`struct Layout` of cpp/job.h."""

    _fields_ = (
        ("wanted", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
    )


class _Job(ctypes.Structure):
    """`struct Job` of cpp/job.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("is_bfloat16", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("grid", ctypes.c_double * 6),
        ("edges", ctypes.c_void_p),
        ("wide_sums", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("row", _Layout),
        ("tile", _Layout),
        ("col", _Layout),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The shared library; None where it was not built, or from sources of another version."""
    found = importlib.util.find_spec("fp8_safeguard.kernels._native")
    if found is None or found.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(found.origin)
    except OSError:
        return None
    if not hasattr(loaded, "fp8_native_job_bytes") or loaded.fp8_native_job_bytes() != ctypes.sizeof(_Job):
        return None
    loaded.fp8_native_quantize.argtypes = (ctypes.POINTER(_Job), ctypes.c_int)
    loaded.fp8_native_quantize.restype = None
    return loaded


@cache
def level() -> int:
    """Best instruction set of this processor, an index of INSTRUCTION_SETS."""
    loaded = library()
    return 0 if loaded is None else int(loaded.fp8_native_level())


def quantize_rows(
    x_RC: Tensor, bounds: Sequence[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor]:
    """Codes [R,C] and float32 scales of all row blocks, those of each segment after the one before."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _CODES)
    codes, scales = call.want_output(layout, torch.uint8), call.want_scales(layout)
    call.run()
    return codes.view(code_format.dtype), scales


def measured_rows(
    x_RC: Tensor, bounds: Sequence[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same and the TensorStats vectors of the segments, float64 [S,29], from one read of x."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _CODES)
    codes, scales = call.want_output(layout, torch.uint8), call.want_scales(layout)
    stats_S = call.want_stats(layout)
    call.run()
    return codes.view(code_format.dtype), scales, stats_S


def layouts_of_rows(
    x_RC: Tensor,
    bounds: Sequence[int],
    layouts: Sequence[str],
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    stats: bool,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layout codes [R,C], scales and TensorStats vectors (none unless wanted), from one read of x."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _CODES)
    rooms = [
        (
            call.want_output(layout, torch.uint8),
            call.want_scales(layout),
            call.want_stats(layout)
            if stats
            else torch.zeros((0, VECTOR_LENGTH), dtype=torch.float64, device="cpu"),
        )
        for layout in layouts
    ]
    call.run()
    return [(codes.view(code_format.dtype), scales, vectors_S) for codes, scales, vectors_S in rooms]


def round_trip_rows(
    x_RC: Tensor, bounds: Sequence[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> Tensor:
    """Codes times scales, float32 [R,C]; rows outside the segments are unspecified."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _VALUES)
    values_RC = call.want_output(layout, torch.float32)
    call.run()
    return values_RC


def stats_of_rows(
    x_RC: Tensor, bounds: Sequence[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> Tensor:
    """TensorStats vectors of the segments, float64 [S,29]."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _NOTHING)
    stats_S = call.want_stats(layout)
    call.run()
    return stats_S


def layout_stats_of_rows(
    x_RC: Tensor,
    bounds: Sequence[int],
    layouts: Sequence[str],
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
) -> Tensor:
    """The same of several layouts from one read of x: float64 [layouts,S,29]."""
    call = _Call(x_RC, bounds, code_format, scale, multiplier, _NOTHING)
    room = torch.zeros((len(layouts), len(bounds) - 1, VECTOR_LENGTH), dtype=torch.float64, device="cpu")
    for index, layout in enumerate(layouts):
        call.want_stats(layout, room[index])
    call.run()
    return room


def address(tensor: Tensor) -> int:
    """Where a CPU tensor's memory begins. Raises OperandError for one that has none the library could read."""
    try:
        first = tensor.data_ptr() if tensor.device.type == "cpu" else 0
    except RuntimeError:  # under torch.func
        first = 0
    if not first and tensor.numel():
        raise OperandError(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} on {tensor.device} has no memory on this CPU (a "
            "meta, fake or torch.func tensor, or one of another device): pass all operands as CPU tensors"
        )
    return first


class _Call:
    """One job and the tensors it points to, which have to outlive it."""

    def __init__(
        self,
        x_RC: Tensor,
        bounds: Sequence[int],
        code_format: CodeFormat,
        scale: str,
        multiplier: float,
        output: int,
    ) -> None:
        # The library reads memory: a negative bit (the imaginary part of a conjugate) has to be in it.
        self._x_RC = (x_RC if x_RC.dtype == torch.bfloat16 else x_RC.float()).resolve_neg()
        if x_RC.shape[1] > 1 and self._x_RC.stride(1) != 1:
            self._x_RC = self._x_RC.contiguous()
        self._bounds, self._firsts = bounds, (ctypes.c_int64 * len(bounds))(*bounds)
        self._kept: list[Tensor] = []
        self._job = _Job(
            x=address(self._x_RC),
            is_bfloat16=self._x_RC.dtype == torch.bfloat16,
            columns=x_RC.shape[1],
            stride=self._x_RC.stride(0),
            bounds=ctypes.addressof(self._firsts),
            segments=len(bounds) - 1,
            grid=_grid(code_format, scale, multiplier),
            edges=ctypes.addressof(_EDGES),
            wide_sums=x_RC.numel() <= WIDE_SUMS_ELEMENTS,
            output=output,
        )

    def want_output(self, layout: str, dtype: torch.dtype) -> Tensor:
        """Room for codes or values in this layout."""
        return self._room(layout, "output", torch.empty(self._x_RC.shape, dtype=dtype, device="cpu"))

    def want_scales(self, layout: str) -> Tensor:
        """Room for the scales of this layout."""
        rows, columns = self._x_RC.shape
        if layout != "row":
            rows = sum(-(-(end - start) // BLOCK) for start, end in pairwise(self._bounds))
        shape = (rows, columns if layout == "col" else -(-columns // BLOCK))
        # Said in full: the library writes what it was told, whatever torch's default dtype and device are.
        return self._room(layout, "scales", torch.empty(shape, dtype=torch.float32, device="cpu"))

    def want_stats(self, layout: str, room: Tensor | None = None) -> Tensor:
        """Room for the statistics of this layout: these zeros, or new ones."""
        if room is None:
            shape = (len(self._bounds) - 1, VECTOR_LENGTH)
            room = torch.zeros(shape, dtype=torch.float64, device="cpu")
        return self._room(layout, "stats", room)

    def run(self) -> None:
        """Fill the rooms. Releases the interpreter lock."""
        loaded = library()
        assert loaded is not None, "the native kernels were not built"
        loaded.fp8_native_quantize(ctypes.byref(self._job), level())

    def _room(self, layout: str, what: str, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        wanted = getattr(self._job, layout)
        wanted.wanted = 1
        setattr(wanted, what, tensor.data_ptr())
        return tensor


_EDGES = (ctypes.c_double * len(SQNR_RATIO_EDGES))(*SQNR_RATIO_EDGES)


@lru_cache(maxsize=256)
def _grid(code_format: CodeFormat, scale: str, multiplier: float) -> ctypes.Array[ctypes.c_double]:
    """`struct Grid` of cpp/job.h."""
    return (ctypes.c_double * 6)(*grid_of(code_format, scale, multiplier))
