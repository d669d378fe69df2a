"""Calls into the native kernels, a shared library built with the package."""

# Shapes: R rows, C columns, S segments of rows that no block crosses.

from __future__ import annotations

import ctypes
import importlib.util
import struct
from array import array
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


_JOB = struct.Struct("6q 6d 3q 12q")
"""`struct Job` of cpp/job.h, packed in one go: a ctypes structure takes ten times as long to fill."""
_AT = {"row": 0, "tile": 4, "col": 8}
"""Where each `struct Layout` stands among the last twelve."""
_WANTED, _SCALES, _OUTPUT, _STATS = range(4)
"""Its fields."""


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
    if not hasattr(loaded, "fp8_native_job_bytes") or loaded.fp8_native_job_bytes() != _JOB.size:
        return None
    loaded.fp8_native_quantize.argtypes = (ctypes.c_char_p, ctypes.c_int)
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
    call.want_all_stats(layouts, room)
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
        x = (x_RC if x_RC.dtype == torch.bfloat16 else x_RC.float()).resolve_neg()
        rows, columns = x_RC.shape
        if columns > 1 and x.stride(1) != 1:
            x = x.contiguous()
        self._x_RC = x
        self._bounds, self._firsts = bounds, array("q", bounds)
        self._kept: list[Tensor] = []
        self._layouts = [0] * 12
        self._job = (
            address(x),
            x.dtype == torch.bfloat16,
            columns,
            x.stride(0),
            self._firsts.buffer_info()[0],
            len(bounds) - 1,
            *grid(code_format, scale, multiplier),
            edges_address(),
            rows * columns <= WIDE_SUMS_ELEMENTS,
            output,
        )

    def want_output(self, layout: str, dtype: torch.dtype) -> Tensor:
        """Room for codes or values in this layout."""
        return self._room(layout, _OUTPUT, torch.empty(self._x_RC.shape, dtype=dtype, device="cpu"))

    def want_scales(self, layout: str) -> Tensor:
        """Room for the scales of this layout."""
        rows, columns = self._x_RC.shape
        if layout != "row":
            rows = sum(-(-(end - start) // BLOCK) for start, end in pairwise(self._bounds))
        shape = (rows, columns if layout == "col" else -(-columns // BLOCK))
        # Said in full: the library writes what it was told, whatever torch's default dtype and device are.
        return self._room(layout, _SCALES, torch.empty(shape, dtype=torch.float32, device="cpu"))

    def want_stats(self, layout: str) -> Tensor:
        """Room for the statistics of this layout."""
        shape = (len(self._bounds) - 1, VECTOR_LENGTH)
        return self._room(layout, _STATS, torch.zeros(shape, dtype=torch.float64, device="cpu"))

    def want_all_stats(self, layouts: Sequence[str], room: Tensor) -> None:
        """Put the statistics of these layouts into that room, zeros [layouts,S,29]."""
        self._kept.append(room)
        first, each = room.data_ptr(), room.stride(0) * room.element_size()
        for index, layout in enumerate(layouts):
            at = _AT[layout]
            self._layouts[at + _WANTED], self._layouts[at + _STATS] = 1, first + index * each

    def run(self) -> None:
        """Fill the rooms. Releases the interpreter lock."""
        loaded = library()
        assert loaded is not None, "the native kernels were not built"
        loaded.fp8_native_quantize(_JOB.pack(*self._job, *self._layouts), level())

    def _room(self, layout: str, what: int, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        at = _AT[layout]
        self._layouts[at + _WANTED] = 1
        self._layouts[at + what] = tensor.data_ptr()
        return tensor


_EDGES = array("d", SQNR_RATIO_EDGES)


@cache
def edges_address() -> int:
    """Where the inner edges of the SQNR histogram begin."""
    return _EDGES.buffer_info()[0]


@lru_cache(maxsize=256)
def grid(code_format: CodeFormat, scale: str, multiplier: float) -> tuple[float, ...]:
    """`struct Grid` of cpp/job.h."""
    return tuple(map(float, grid_of(code_format, scale, multiplier)))
