"""Block-scaled FP8 products on a processor's matrix tiles (Intel AMX)."""

# Shapes: M x N the result, K the summed dimension, b counts blocks of 128 along it, P pairs along K (K / 2).
# Every FP8 code is exact in bfloat16, so TDPBF16PS (A [16,32] times B [32,16], float32 sums) multiplies codes without
# error. It reads B as pairs: row p of a tile holds B[2p, n], B[2p + 1, n] side by side, one int32 for each n.
# A block's sums are scaled and added in float32 before the next block starts: acc += (sum x s_b) x s_a.

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import config, types

from fp8_safeguard.kernels.numba_bits import exact, instruction, wide_vectors

PANEL = 32
"""Rows and columns of the result that are summed at once: two by two tiles of 16 x 16."""
TILE_BYTES = 64
"""A tile's row: 32 bfloat16, 16 pairs or 16 float32."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux x86-64: a process asks once before it may use tile registers (Documentation/arch/x86/xstate.rst)."""


@cache
def available() -> bool:
    """Whether this processor has bfloat16 tiles, and Linux lets this process use them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    # numba can be told to compile for another processor than this one, which then has no tiles.
    told = [getattr(config, name, None) for name in ("CPU_NAME", "CPU_FEATURES")]
    if any(told) or not llvm.get_host_cpu_features().get("amx-bf16", False):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def tile_configuration() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Palette 1 with eight tiles of 16 rows of 64 bytes, as LDTILECFG reads it."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    configuration[16:32:2] = TILE_BYTES
    configuration[48:56] = 16
    return configuration


def _tile_instruction(name: str, *tiles: int, memory: int = 0) -> Any:
    """An AMX instruction on fixed tile registers, with `memory` int64 operands: an address, then a stride."""

    def declare(typing_context: Any, *operands: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte = ir.IntType(8)
            values = [ir.Constant(byte, tile) for tile in tiles]
            if memory:
                values += [builder.inttoptr(arguments[0], byte.as_pointer()), *arguments[1:]]
            signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
            builder.call(function, values)
            return context.get_dummy_value()

        return types.none(*[types.int64] * memory), generate

    signatures: dict[int, Callable[..., Any]] = {
        0: lambda typing_context: declare(typing_context),
        1: lambda typing_context, address: declare(typing_context, address),
        2: lambda typing_context, address, stride: declare(typing_context, address, stride),
    }
    return instruction(signatures[memory])


_configure = _tile_instruction("llvm.x86.ldtilecfg", memory=1)
_release = _tile_instruction("llvm.x86.tilerelease")
_zero_0, _zero_1, _zero_2, _zero_3 = (_tile_instruction("llvm.x86.tilezero", tile) for tile in range(4))
_load_4, _load_5, _load_6, _load_7 = (
    _tile_instruction("llvm.x86.tileloadd64", tile, memory=2) for tile in range(4, 8)
)
_store_0, _store_1, _store_2, _store_3 = (
    _tile_instruction("llvm.x86.tilestored64", tile, memory=2) for tile in range(4)
)
_multiply_0, _multiply_1, _multiply_2, _multiply_3 = (
    _tile_instruction("llvm.x86.tdpbf16ps", result, 4 + result // 2, 6 + result % 2) for result in range(4)
)


@instruction
def _as_element(typing_context: Any, value: Any, line: Any) -> Any:
    """A float32 as line's element: itself, or in uint16 the bits of its bfloat16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if line.dtype == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        near = builder.add(bits, builder.add(odd, word(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(
            builder.lshr(builder.select(is_nan, word(0x7FC00000), near), word(16)), ir.IntType(16)
        )

    return line.dtype(types.float32, line), generate


@instruction
def _add_scaled_line(typing_context: Any, sums: Any, scale_W: Any, scale: Any, target: Any) -> Any:
    """target += (sums x scale_W) x scale for the 32 float32 at these addresses, two vectors of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), 16)
        lane = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.IntType(32)(0))
        scales = builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))
        for offset in (0, 64):
            places = [
                builder.inttoptr(builder.add(address, ir.IntType(64)(offset)), vector.as_pointer())
                for address in (arguments[0], arguments[1], arguments[3])
            ]
            block, column_scales, total = (builder.load(place, align=4) for place in places)
            scaled = builder.fmul(builder.fmul(block, column_scales), scales)
            builder.store(builder.fadd(total, scaled), places[2], align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32, types.int64), generate


@exact
def grouped_nt(
    configuration: Any, bounds: Any, a_MK: Any, scale_bM: Any, b_EPN: Any, scale_EbN: Any, out_MN: Any
) -> None:
    """Rows bounds[e] to bounds[e+1] of a times expert e's b: out [M,N] in float32, or bfloat16 bits if uint16.

    a has 32 rows more than out and b's columns are padded to a multiple of 32, with anything; K is padded with zeros.
    """
    _configure(configuration.ctypes.data)
    block, total = np.empty((PANEL, PANEL), np.float32), np.empty((PANEL, PANEL), np.float32)
    for expert in range(len(bounds) - 1):
        b_PN, scale_bN = b_EPN[expert], scale_EbN[expert]
        for column in range(0, out_MN.shape[1], PANEL):
            for row in range(bounds[expert], bounds[expert + 1], PANEL):
                total[:] = np.float32(0.0)
                for k_block in range(scale_bM.shape[0]):
                    _block_sums(a_MK, row, b_PN, column, k_block, block)
                    _add_scaled(block, scale_bM[k_block], row, scale_bN[k_block], column, total)
                _write(total, out_MN, row, bounds[expert + 1], column)
    _release()


@exact
def grouped_tn(
    configuration: Any, blocks: Any, a_NK: Any, scale_aN: Any, b_PK: Any, scale_bK: Any, out_ENK: Any
) -> None:
    """Each expert's own stretch of the summed dimension: blocks[e] to blocks[e+1] of 128; zeros for an empty one."""
    _configure(configuration.ctypes.data)
    block, total = np.empty((PANEL, PANEL), np.float32), np.empty((PANEL, PANEL), np.float32)
    for expert in range(len(blocks) - 1):
        out_NK = out_ENK[expert]
        for column in range(0, out_NK.shape[1], PANEL):
            for row in range(0, out_NK.shape[0], PANEL):
                total[:] = np.float32(0.0)
                for k_block in range(blocks[expert], blocks[expert + 1]):
                    _block_sums(a_NK, row, b_PK, column, k_block, block)
                    _add_scaled(block, scale_aN[k_block], row, scale_bK[k_block], column, total)
                _write(total, out_NK, row, out_NK.shape[0], column)
    _release()


@exact
def _block_sums(a_MK: Any, row: Any, b_PN: Any, column: Any, k_block: Any, block: Any) -> None:
    """Products of codes summed over one block of 128, for a panel of 32 x 32 results."""
    a_stride, b_stride = np.int64(a_MK.shape[1] * 2), np.int64(b_PN.shape[1] * 4)
    a = np.int64(a_MK.ctypes.data) + row * a_stride + k_block * 256
    b = np.int64(b_PN.ctypes.data) + k_block * 64 * b_stride + column * 4
    _zero_0()
    _zero_1()
    _zero_2()
    _zero_3()
    for _ in range(4):
        _load_4(a, a_stride)
        _load_5(a + 16 * a_stride, a_stride)
        _load_6(b, b_stride)
        _load_7(b + TILE_BYTES, b_stride)
        _multiply_0()
        _multiply_1()
        _multiply_2()
        _multiply_3()
        a += TILE_BYTES
        b += 16 * b_stride
    out, stride = np.int64(block.ctypes.data), np.int64(PANEL * 4)
    _store_0(out, stride)
    _store_1(out + TILE_BYTES, stride)
    _store_2(out + 16 * stride, stride)
    _store_3(out + 16 * stride + TILE_BYTES, stride)


@exact
def _add_scaled(block: Any, scale_M: Any, row: Any, scale_N: Any, column: Any, total: Any) -> None:
    """total += (block x scale of its column) x scale of its row.

    In that order, because s_a x s_b alone can underflow where the product does not.
    """
    step = np.int64(PANEL * 4)
    sums, target = np.int64(block.ctypes.data), np.int64(total.ctypes.data)
    scale_W = np.int64(scale_N.ctypes.data) + column * 4
    for i in range(PANEL):
        _add_scaled_line(sums + i * step, scale_W, scale_M[row + i], target + i * step)


@exact
def _write(total: Any, out_MN: Any, row: Any, end: Any, column: Any) -> None:
    """A panel into the result, cut at its edges."""
    wide_vectors()
    width = min(PANEL, out_MN.shape[1] - column)
    for i in range(min(PANEL, end - row)):
        line = out_MN[row + i, column : column + width]
        for j in range(width):
            line[j] = _as_element(total[i, j], line)
