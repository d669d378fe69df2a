"""Native FP8 GEMMs on a CPU, dense and grouped."""

# Shapes: M x N the result, K the summed dimension, E experts, S segments: at most 128 of K with one scale in each operand.

from __future__ import annotations

import ctypes
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels import native
from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.errors import OffsetsError
from fp8_safeguard.kernels.quantized import QuantizedTensor

INSTRUCTION_SETS = (*native.INSTRUCTION_SETS, "AMX")
"""By the level that the library reports. All give the same bits: they add in the order of the matrix tiles."""


_JOB = struct.Struct("10q 10q 9q")
"""`struct GemmJob` of cpp/gemm.h: two of `struct GemmOperand`, and what becomes of their product."""


@cache
def _library() -> ctypes.CDLL | None:
    """The shared library with its GEMM declared; None where it was not built, or from sources of another version."""
    loaded = native.library()
    size = getattr(loaded, "fp8_native_gemm_job_bytes", None)
    if loaded is None or size is None or size() != _JOB.size:
        return None
    loaded.fp8_native_gemm.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return loaded


def available() -> bool:
    """Whether the native GEMM was built."""
    return _library() is not None


@cache
def level() -> int:
    """Best instruction set of this processor, an index of INSTRUCTION_SETS. Asks Linux for matrix tiles."""
    loaded = _library()
    return 0 if loaded is None else int(loaded.fp8_native_gemm_level())


def gemm_nt(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """a [M,K] (row or tile) times b [N,K] (row or tile) transposed: [M,N] in out_dtype, or added to `out`.

    Codes and scales may have any strides. Within 1e-6 x sum |a||b| of the exact product, before the one rounding to
    out_dtype.
    """
    rows, depth = a.shape
    segments_S = _blocks(depth)
    groups = [(0, rows, 0, 0, 0, len(segments_S) // _FIELDS)]
    result = _Result((rows, b.shape[0]), out_dtype, out)
    return result.multiplied(_operand(a), _operand(b), groups, segments_S)


def grouped_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bounds: list[int],
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Rows bounds[e] to bounds[e+1] of a [M,K] (row) times b[e] of [E,N,K] transposed: [M,N] in out_dtype.

    Rows behind the last bound are zeros, or stay as they are in `out`, to which the product is added.
    """
    segments_S = _blocks(a.shape[1])
    last = len(segments_S) // _FIELDS
    groups = [(start, end, expert, 0, 0, last) for expert, (start, end) in enumerate(pairwise(bounds))]
    result = _Result((a.shape[0], b.shape[1]), out_dtype, out)
    if not result.adds and bounds[-1] < a.shape[0]:
        result.room[bounds[-1] :] = 0
    return result.multiplied(_operand(a), _operand(b), groups, segments_S)


def grouped_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    bounds: list[int],
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """dy [M,N] (col) transposed times x [M,K] (col), rows bounds[e] to bounds[e+1]: [E,N,K] in out_dtype.

    An expert without rows gives exact zeros. With `out` the products are added to it.
    """
    experts, features = len(bounds) - 1, dy.shape[1]
    firsts, segments_S = _cuts(tuple(bounds), _offsets(dy), _offsets(x))
    _require_blocks("dy", dy, segments_S[2::_FIELDS])
    _require_blocks("x", x, segments_S[3::_FIELDS])
    groups = [(0, features, 0, expert, first, last) for expert, (first, last) in enumerate(pairwise(firsts))]
    result = _Result((experts, features, x.shape[1]), out_dtype, out)
    return result.multiplied(_operand(dy, summed=0), _operand(x, summed=0), groups, segments_S)


class _Result:
    """Where a product goes: new memory, or `out`, to which it is added."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None) -> None:
        self._out, self._dtype = out, dtype
        self.adds = out is not None and _is_written_to(out)
        narrow = out is None and dtype == torch.bfloat16
        room_dtype = torch.bfloat16 if narrow else torch.float32
        new = torch.empty(0 if self.adds else shape, dtype=room_dtype, device="cpu")
        self.room = out if out is not None and self.adds else new

    def multiplied(
        self, a: _Operand, b: _Operand, groups: Sequence[tuple[int, ...]], segments_S: array[int]
    ) -> Tensor:
        """The product of all groups (`struct GemmGroup` of cpp/gemm.h) in its dtype."""
        room = self.room
        fields = array("q", [field for group in groups for field in group])
        job = _JOB.pack(
            *a,
            *b,
            room.shape[-1],
            room.data_ptr(),
            room.dtype == torch.bfloat16,
            room.stride(-2),
            room.stride(0),
            self.adds,
            fields.buffer_info()[0],
            len(groups),
            segments_S.buffer_info()[0],
        )
        loaded = _library()
        assert loaded is not None, "the native kernels were not built"
        if loaded.fp8_native_gemm(job, level()):
            raise MemoryError("the native GEMM found no memory for its panels")
        if self._out is None:
            return room.to(self._dtype)
        return self._out if self.adds else self._out.copy_(self._out.float() + room)


def _is_written_to(out: Tensor) -> bool:
    """Whether the library can add to this tensor itself."""
    return out.dtype in (torch.float32, torch.bfloat16) and (out.stride(-1) == 1 or out.shape[-1] <= 1)


_Operand = tuple[int, ...]
"""Fields of `struct GemmOperand` of cpp/gemm.h."""


def _operand(operand: QuantizedTensor, summed: int = 1) -> _Operand:
    """Codes and scales of [rows, K], or [E, rows, K]; with `summed` 0, of [K, rows]."""
    data, scale = operand.data, operand.scale
    assert scale.dtype == torch.float32, f"scales are {scale.dtype}"
    return (
        native.address(data),
        *_strides(data, summed),
        operand.fmt == "e5m2",
        native.address(scale),
        *_strides(scale, summed),
        BLOCK if operand.layout == "tile" else 1,
    )


def _strides(tensor: Tensor, summed: int) -> tuple[int, int, int]:
    """Between rows, along K and between experts."""
    *expert, outer, inner = tensor.stride()
    row, k = (outer, inner) if summed else (inner, outer)
    return row, k, expert[0] if expert else 0


_FIELDS = 4
"""Of `struct GemmSegment` of cpp/gemm.h: first and last row along K, block of a, block of b."""


@lru_cache(maxsize=256)
def _blocks(depth: int) -> array[int]:
    """Segments of blocks that start at 0, the same in both operands."""
    starts = enumerate(range(0, depth, BLOCK))
    segments = [(start, min(start + BLOCK, depth), block, block) for block, start in starts]
    return array("q", [field for segment in segments for field in segment])


@lru_cache(maxsize=256)
def _cuts(
    bounds: tuple[int, ...], a_offsets: tuple[int, ...], b_offsets: tuple[int, ...]
) -> tuple[list[int], array[int]]:
    """Segments of each expert's rows, cut where a block of either operand begins; the first one of each expert."""
    a_starts, b_starts = _block_starts(a_offsets), _block_starts(b_offsets)
    firsts, segments = [0], array("q")
    for start, end in pairwise(bounds):
        inside = {
            *a_starts[bisect_right(a_starts, start) : bisect_left(a_starts, end)],
            *b_starts[bisect_right(b_starts, start) : bisect_left(b_starts, end)],
        }
        for first, last in pairwise([start, *sorted(inside), end] if end > start else []):
            blocks = bisect_right(a_starts, first) - 1, bisect_right(b_starts, first) - 1
            segments.extend((first, last, *blocks))
        firsts.append(len(segments) // _FIELDS)
    return firsts, segments


def _offsets(operand: QuantizedTensor) -> tuple[int, ...]:
    """Rows where the blocks of a col tensor start anew, and its last."""
    return (0, operand.shape[0]) if operand.offsets is None else tuple(operand.offsets.tolist())


def _require_blocks(name: str, operand: QuantizedTensor, blocks: array[int]) -> None:
    """Raise OffsetsError unless the operand has scales of those row blocks, which rise."""
    if blocks and not (blocks[0] >= 0 and blocks[-1] < operand.scale.shape[0]):
        raise OffsetsError(
            f"{name} has scales of {operand.scale.shape[0]} row blocks, its offsets need {blocks[-1] + 1}: pass the "
            "tensor with the offsets that it was quantised with"
        )


def _block_starts(offsets: tuple[int, ...]) -> list[int]:
    """First rows of all blocks."""
    return [top for start, end in pairwise(offsets) for top in range(start, end, BLOCK)]
