"""Makes Triton's interpreter round narrow floats as the GPU does.

The stock interpreter truncates float32 to bfloat16, drops rounding carries and saturation on the way to FP8, multiplies
bfloat16 bit patterns in tl.dot, and rounds tl.fma twice. All of it silently, in every version from 3.7.0 to 3.9.0.
`install` replaces the four private entry points; test_interpreter_fix.py fails when a Triton release moves them.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_SATURATES_AT = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_DECODED = {
    name: torch.arange(256, dtype=torch.int16).to(torch.uint8).view(_DTYPES[name]).float().numpy()
    for name in _SATURATES_AT
}

_stock_convert = interpreter._convert_float


def install() -> None:
    """Patch the interpreter of this process; calling it again changes nothing."""
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_fma = create_fma


def convert_float(values: NDArray[Any], source: Any, target: Any, rounding_mode: Any) -> NDArray[Any]:
    """Round to nearest even; FP8 saturates as cvt.rn.satfinite does, and NaN stays NaN."""
    known = source.name in _DTYPES and target.name in _DTYPES
    if not known or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
        return _stock_convert(values, source, target, rounding_mode)
    wide = _as_torch(np.ascontiguousarray(values), source.name)
    if target.name in _SATURATES_AT:
        limit = _SATURATES_AT[target.name]
        wide = wide.clamp(-limit, limit)
    width = target.primitive_bitwidth
    bits = wide.to(_DTYPES[target.name]).contiguous().view(_SIGNED[width]).numpy()
    return bits.view(_UNSIGNED[width]).reshape(values.shape)


def _as_torch(values: NDArray[Any], name: str) -> torch.Tensor:
    """The numbers that an array of bit patterns (or of real floats) stands for."""
    if name in _DECODED:
        return torch.from_numpy(_DECODED[name][values.view(np.uint8)])
    if name == "bf16":
        return torch.from_numpy((values.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    kind = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[name]
    return torch.from_numpy(values.view(kind).copy())


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """d + a b, the operands widened exactly."""
    product = np.matmul(_widened(a), _widened(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _widened(handle: Any) -> NDArray[Any]:
    scalar = handle.dtype.scalar
    if scalar.name not in _DTYPES or scalar.name in ("fp32", "fp64"):
        data: NDArray[Any] = handle.data
        return data
    return convert_float(handle.data, scalar, tl.float32, None).view(np.float32).reshape(handle.data.shape)


def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z with one rounding: float64 holds every float32 product."""
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)
