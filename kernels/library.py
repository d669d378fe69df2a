"""Operators for torch.compile: opaque calls with known shapes and gradients."""

# Shapes: T tokens, K input features, N output features, E experts, b counts blocks of 128, S a TensorStats vector.
# Eager code does not come through here. Under torch.compile the public functions call these operators (namespace
# `fp8_safeguard`), so that a layer is one node of one graph; at run time an operator does what the eager function does,
# bit for bit. What an operator needs besides tensors travels as text and numbers; an observer as a number.
# Registering them takes longer than all else: importing this module does it, and only a compiler's trace imports it.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels import numbers
from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision, OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

_ROW_BYTES = 16
_ANY = "fp8 fp8 fp8 e4m3 fp32 e4m3 fp32 e4m3 fp32", 1.0, 1.0, 1.0
"""What stands in a graph whose layer is steered: the operator asks for the precision whenever it runs."""
_PRECISIONS: dict[LinearPrecision, int] = {}
"""Every precision that such a layer ran with, and its place in the order."""
_RAN_WITH: dict[int, LinearPrecision] = {}
"""What each such layer ran with last: a checkpoint may repeat a forward whose observer has been taken off since."""


def encoded(precision: LinearPrecision) -> tuple[str, float, float, float]:
    """A precision as an operator takes it: choices as text, multipliers as numbers."""
    x, w, dy = precision.x, precision.w, precision.dy
    text = f"{precision.fprop} {precision.dgrad} {precision.wgrad} {x.fmt} {x.scale} {w.fmt} {w.scale} {dy.fmt} {dy.scale}"
    return text, x.multiplier, w.multiplier, dy.multiplier


@cache
def decoded(text: str, *multipliers: float) -> LinearPrecision:
    """The inverse of `encoded`."""
    fprop, dgrad, wgrad, *formats = text.split()
    x, w, dy = (
        OperandFormat(fmt=fmt, scale=scale, multiplier=multiplier)
        for fmt, scale, multiplier in zip(formats[::2], formats[1::2], multipliers, strict=True)
    )
    return LinearPrecision(fprop=fprop, dgrad=dgrad, wgrad=wgrad, x=x, w=w, dy=dy)


def linear(
    x_TK: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor | None, precision: LinearPrecision,
    observer: GemmObserver | None, alignment: int, backend: str,
) -> Tensor:  # fmt: skip
    """The forward of fp8_linear or fp8_grouped_linear as one node: [T,N]."""
    recorded = torch.is_grad_enabled()
    needs = recorded and x_TK.requires_grad, recorded and w.requires_grad
    number = getattr(observer, "number", None)
    if number is None:
        options = *encoded(precision), backend, alignment, numbers.observer_number(observer)
    else:
        options = *_ANY, backend, alignment, int(recorded)
    y_TN: Tensor = linear_forward(x_TK, w, bias, offsets, *options, *needs, number)[0]
    return y_TN


@torch.library.custom_op("fp8_safeguard::linear_forward", mutates_args=())
def linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor | None, precision: str, x_multiplier: float,
    w_multiplier: float, dy_multiplier: float, backend: str, alignment: int, observer: int, needs_dx: bool,
    needs_dw: bool, number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y [T,N], codes and scales of x and w where the backward uses them (empty otherwise, and on a CPU), and which
    precision it was: int64 [1] on the CPU. With a number the observer of that number says the precision, now, and
    `observer` only whether it sees the pass.
    """
    if number is None:
        chosen, watcher = (
            decoded(precision, x_multiplier, w_multiplier, dy_multiplier),
            numbers.observers.get(observer),
        )
    else:
        steering, key = numbers.found(number), int(number)
        chosen = _RAN_WITH[key] = _RAN_WITH[key] if steering is None else steering.precision
        watcher = steering if observer else None
    call = _call(x, w, offsets, chosen, backend, alignment, watcher, needs_dx, needs_dw)
    y_TN, kept, _ = compiled_module("passes").forward(x, w, bias, call)
    codes: Any = kept.codes() if call.on_device() else (None,) * 4
    if number is not None and call.on_device():
        # The graph has one form for every precision: what this one does not keep is room without values.
        room = _room(x, w, offsets, decoded(*_ANY), alignment, needs_dx, needs_dw)
        codes = [empty if made is None else made for made, empty in zip(codes, room, strict=True)]
    x_codes, x_scale, w_codes, w_scale = (x.new_empty(0) if tensor is None else tensor for tensor in codes)
    which = torch.tensor([_PRECISIONS.setdefault(chosen, len(_PRECISIONS))])
    return y_TN, as_bytes(x_codes), x_scale, as_bytes(w_codes), w_scale, which


@linear_forward.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor | None, precision: str, x_multiplier: float,
    w_multiplier: float, dy_multiplier: float, backend: str, alignment: int, observer: int, needs_dx: bool,
    needs_dw: bool, number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    chosen = decoded(precision, x_multiplier, w_multiplier, dy_multiplier)
    y_TN, which = x.new_empty((x.shape[0], w.shape[-2])), torch.empty(1, dtype=torch.int64, device="cpu")
    empty = (
        x.new_empty(0, dtype=torch.uint8),
        x.new_empty(0),
        x.new_empty(0, dtype=torch.uint8),
        x.new_empty(0),
    )
    if backend not in DEVICE_BACKENDS:
        return y_TN, *empty, which
    room = _room(x, w, offsets, chosen, alignment, needs_dx, needs_dw)
    x_codes, x_scale, w_codes, w_scale = (b if a is None else a for a, b in zip(room, empty, strict=True))
    return y_TN, x_codes, x_scale, w_codes, w_scale, which


def _room(
    x: Tensor, w: Tensor, offsets: Tensor | None, precision: LinearPrecision, alignment: int, needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Codes and scales of x and w as a device's forward returns them for a backward, without values."""
    x_kept: tuple[Tensor | None, Tensor | None] = (None, None)
    w_kept: tuple[Tensor | None, Tensor | None] = (None, None)
    if needs_dw and _keeps_x_codes(precision):
        aligned = offsets is not None and alignment % _ROW_BYTES == 0 and x.shape[0] % _ROW_BYTES == 0
        x_kept = _promised(x, precision.x.fmt, "col", offsets, aligned)
    if needs_dx and _keeps_w_codes(precision):
        w_kept = _promised(w, precision.w.fmt, "tile")
    return *x_kept, *w_kept


def _keeps_x_codes(precision: LinearPrecision) -> bool:
    return precision.wgrad == "fp8"


def _keeps_w_codes(precision: LinearPrecision) -> bool:
    return precision.fprop == precision.dgrad == "fp8"


@torch.library.custom_op("fp8_safeguard::linear_backward", mutates_args=())
def linear_backward(
    dy: Tensor, x: Tensor | None, w: Tensor, offsets: Tensor | None, x_codes: Tensor, x_scale: Tensor,
    w_codes: Tensor, w_scale: Tensor, precision: str, x_multiplier: float, w_multiplier: float,
    dy_multiplier: float, backend: str, alignment: int, observer: int, x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, needs_dx: bool, needs_dw: bool, which: Tensor | None = None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx [T,K], dw like w and dbias [N], each empty where it is not needed."""
    passes = compiled_module("passes")
    if number is None or which is None:
        chosen, watcher = (
            decoded(precision, x_multiplier, w_multiplier, dy_multiplier),
            numbers.observers.get(observer),
        )
    else:
        chosen, watcher = list(_PRECISIONS)[int(which)], numbers.found(number) if observer else None
    call = _call(dy, w, offsets, chosen, backend, alignment, watcher, needs_dx, needs_dw)
    codes: Any = _as_codes(x_codes, chosen.x.fmt), x_scale, _as_codes(w_codes, chosen.w.fmt), w_scale
    filled = (_keeps_x_codes(chosen),) * 2 + (_keeps_w_codes(chosen),) * 2
    codes = (c if c.numel() and has else None for c, has in zip(codes, filled, strict=True))
    kept = passes.Kept.of(call, *codes)
    dx, dw = passes.backward(dy, x, w, kept, call, x_dtype)
    dbias = None if bias_dtype is None else passes.bias_gradient(dy, bias_dtype)
    results = [dy.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, dbias)]
    return results[0], results[1], results[2]


@linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor | None, w: Tensor, offsets: Tensor | None, x_codes: Tensor, x_scale: Tensor,
    w_codes: Tensor, w_scale: Tensor, precision: str, x_multiplier: float, w_multiplier: float,
    dy_multiplier: float, backend: str, alignment: int, observer: int, x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, needs_dx: bool, needs_dw: bool, which: Tensor | None = None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = dy.new_empty((dy.shape[0], w.shape[-1]), dtype=x_dtype) if needs_dx else dy.new_empty(0)
    dw = w.new_empty(w.shape) if needs_dw else dy.new_empty(0)
    dbias = dy.new_empty(0) if bias_dtype is None else dy.new_empty(w.shape[-2], dtype=bias_dtype)
    return dx, dw, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, bias, offsets, *options, _, needs_dw, number = inputs
    precision, *_, backend, _, observer = options
    # Whether an observer wants the pass is not known while a graph is made, so x waits for it.
    asked = observer != 0 or number is not None
    keeps_x = backend not in DEVICE_BACKENDS or asked or (needs_dw and precision.split()[2] == "bf16")
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if keeps_x else None, w, offsets, *output[1:], number)
    ctx.options = options
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    constants = (None,) * (len(ctx.options) + 4)
    if dy is None:
        return None, None, None, *constants
    x_dtype, bias_dtype = ctx.dtypes
    needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]
    *operands, which, number = ctx.saved_tensors
    dx, dw, dbias = linear_backward(
        dy,
        *operands,
        *ctx.options,
        x_dtype,
        bias_dtype if needs_bias else None,
        needs_dx,
        needs_dw,
        which,
        number,
    )
    return dx if needs_dx else None, dw if needs_dw else None, dbias if needs_bias else None, *constants


linear_forward.register_autograd(_gradients, setup_context=_save)


def _call(
    x: Tensor, w: Tensor, offsets: Tensor | None, precision: LinearPrecision, backend: str, alignment: int,
    observer: GemmObserver | None, needs_dx: bool, needs_dw: bool,
) -> Any:  # fmt: skip
    """The eager LinearCall; on a CPU the offsets are read here, where they have values."""
    bounds, grouped = None, compiled_module("grouped")
    if offsets is not None and backend in DEVICE_BACKENDS:
        grouped.require_offsets(offsets, w.shape[0], x.device)
    elif offsets is not None:
        bounds = grouped.expert_bounds(offsets, x.shape[0], w.shape[0], alignment)
    return compiled_module("passes").LinearCall(
        precision=precision, backend=backend, observer=observer, offsets=offsets,
        bounds=bounds, alignment=alignment, needs_dx=needs_dx, needs_dw=needs_dw,
    )  # fmt: skip


def _promised(
    x: Tensor, fmt: str, blocks: str, offsets: Tensor | None = None, aligned: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales as the device kernels will write them, from their own plan."""
    fused = compiled_module("triton_fused")
    request = fused.Request(
        row=False, blocks=blocks, code_format=get_format(fmt), fmt=fmt, aligned=aligned,
        k_major=aligned or offsets is None,
    )  # fmt: skip
    # The device kernels take whole groups of 16 columns, and cut the rest off again.
    columns = x.shape[-1]
    whole = -(-columns // _ROW_BYTES) * _ROW_BYTES if x.numel() else columns
    block: QuantizedTensor = fused.plan(x.new_empty((*x.shape[:-1], whole)), request, offsets)[1].block
    scale = block.scale[..., :columns] if blocks == "col" else block.scale
    return as_bytes(block.data[..., :columns]), scale


def quantize(
    x: Tensor, layout: str, fmt: str, scale: str, multiplier: float, stats: bool, offsets: Tensor | None
) -> QuantizedTensor | tuple[QuantizedTensor, Tensor]:
    """`quantize` as one node."""
    codes, scales, vector = quantize_tensor(x.detach(), layout, fmt, scale, multiplier, stats, offsets)
    kept = None if layout == "row" else offsets
    result = QuantizedTensor(_as_codes(codes, fmt), scales, layout, fmt, kept)
    return (result, vector) if stats else result


@torch.library.custom_op("fp8_safeguard::quantize", mutates_args=())
def quantize_tensor(
    x: Tensor, layout: str, fmt: str, scale: str, multiplier: float, stats: bool, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and statistics [S] or [E,S] (empty unless asked for)."""
    result = compiled_module("quantize").quantize(
        x, layout=layout, fmt=fmt, scale=scale, multiplier=multiplier, stats=stats, offsets=offsets
    )
    quantized, vector = result if stats else (result, x.new_empty(0, dtype=torch.float64))
    # Wherever it was computed, the layout in memory is the one promised to the compiler.
    return as_bytes(quantized.data).contiguous(), quantized.scale.contiguous(), vector.contiguous()


@quantize_tensor.register_fake
def _(
    x: Tensor, layout: str, fmt: str, scale: str, multiplier: float, stats: bool, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    get_format(fmt)
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    columns = x.shape[-1] if layout == "col" else -(-x.shape[-1] // BLOCK)
    shape: tuple[Any, ...]
    if offsets is not None and layout != "row":
        shape = (torch.library.get_ctx().new_dynamic_size(), columns)
    elif x.dim() == 1:
        shape = (columns,)
    else:
        shape = (*x.shape[:-2], x.shape[-2] if layout == "row" else -(-x.shape[-2] // BLOCK), columns)
    vector = _vectors(x, offsets) if stats else x.new_empty(0, dtype=torch.float64)
    return codes, x.new_empty(shape, dtype=torch.float32), vector


@torch.library.custom_op("fp8_safeguard::tensor_stats", mutates_args=())
def tensor_stats(
    x: Tensor, layout: str, fmt: str, scale: str, multiplier: float, offsets: Tensor | None
) -> Tensor:
    """TensorStats [S], or [E,S] with offsets."""
    vectors: Tensor = compiled_module("stats").tensor_stats(
        x, layout=layout, fmt=fmt, scale=scale, multiplier=multiplier, offsets=offsets
    )
    return vectors.contiguous()


@tensor_stats.register_fake
def _(x: Tensor, layout: str, fmt: str, scale: str, multiplier: float, offsets: Tensor | None) -> Tensor:
    return _vectors(x, offsets)


def _vectors(x: Tensor, offsets: Tensor | None) -> Tensor:
    shape = (VECTOR_LENGTH,) if offsets is None else (offsets.shape[0] - 1, VECTOR_LENGTH)
    return x.new_empty(shape, dtype=torch.float64)


@torch.library.custom_op("fp8_safeguard::gemm_nt", mutates_args=())
def gemm_nt(
    a_codes: Tensor, a_scale: Tensor, a_layout: str, a_fmt: str, b_codes: Tensor, b_scale: Tensor,
    b_layout: str, b_fmt: str, offsets: Tensor | None, out_dtype: torch.dtype, alignment: int, backend: str,
) -> Tensor:  # fmt: skip
    """fp8_gemm_nt, with offsets grouped_gemm_nt: [M,N]."""
    a = QuantizedTensor(_as_codes(a_codes, a_fmt), a_scale, a_layout, a_fmt)
    b = QuantizedTensor(_as_codes(b_codes, b_fmt), b_scale, b_layout, b_fmt)
    product: Tensor
    if offsets is None:
        product = compiled_module("gemm").fp8_gemm_nt(a, b, out_dtype, backend=backend)
    else:
        product = compiled_module("grouped").grouped_gemm_nt(
            a, b, offsets, out_dtype, alignment=alignment, backend=backend
        )
    return product


@gemm_nt.register_fake
def _(
    a_codes: Tensor, a_scale: Tensor, a_layout: str, a_fmt: str, b_codes: Tensor, b_scale: Tensor,
    b_layout: str, b_fmt: str, offsets: Tensor | None, out_dtype: torch.dtype, alignment: int, backend: str,
) -> Tensor:  # fmt: skip
    return a_codes.new_empty((a_codes.shape[0], b_codes.shape[-2]), dtype=out_dtype)


@torch.library.custom_op("fp8_safeguard::grouped_gemm_wgrad", mutates_args=())
def grouped_gemm_wgrad(
    dy_codes: Tensor, dy_scale: Tensor, dy_fmt: str, dy_offsets: Tensor | None, x_codes: Tensor,
    x_scale: Tensor, x_fmt: str, x_offsets: Tensor | None, offsets: Tensor, out_dtype: torch.dtype,
    alignment: int, backend: str,
) -> Tensor:  # fmt: skip
    """grouped_gemm_wgrad: [E,N,K]."""
    dy = QuantizedTensor(_as_codes(dy_codes, dy_fmt), dy_scale, "col", dy_fmt, dy_offsets)
    x = QuantizedTensor(_as_codes(x_codes, x_fmt), x_scale, "col", x_fmt, x_offsets)
    product: Tensor = compiled_module("grouped").grouped_gemm_wgrad(
        dy, x, offsets, out_dtype, alignment=alignment, backend=backend
    )
    return product


@grouped_gemm_wgrad.register_fake
def _(
    dy_codes: Tensor, dy_scale: Tensor, dy_fmt: str, dy_offsets: Tensor | None, x_codes: Tensor,
    x_scale: Tensor, x_fmt: str, x_offsets: Tensor | None, offsets: Tensor, out_dtype: torch.dtype,
    alignment: int, backend: str,
) -> Tensor:  # fmt: skip
    shape = (offsets.shape[0] - 1, dy_codes.shape[1], x_codes.shape[1])
    return x_codes.new_empty(shape, dtype=out_dtype)


def multiply(
    a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor | None, out_dtype: torch.dtype, alignment: int,
    backend: str,
) -> Tensor:  # fmt: skip
    """fp8_gemm_nt, or with offsets grouped_gemm_nt, as one node."""
    first = as_bytes(a.data), a.scale, a.layout, a.fmt
    second = as_bytes(b.data), b.scale, b.layout, b.fmt
    product: Tensor = gemm_nt(*first, *second, offsets, out_dtype, alignment, backend)
    return product


def multiply_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype, alignment: int,
    backend: str,
) -> Tensor:  # fmt: skip
    """grouped_gemm_wgrad as one node."""
    first = as_bytes(dy.data), dy.scale, dy.fmt, dy.offsets
    second = as_bytes(x.data), x.scale, x.fmt, x.offsets
    product: Tensor = grouped_gemm_wgrad(*first, *second, offsets, out_dtype, alignment, backend)
    return product


def as_bytes(codes: Tensor) -> Tensor:
    """Codes as the uint8 that operators exchange: float8 has few kernels, in compilers as elsewhere."""
    return codes.view(torch.uint8) if codes.numel() else codes.new_empty(codes.shape, dtype=torch.uint8)


def _as_codes(bits: Tensor, fmt: str) -> Tensor:
    return bits.view(get_format(fmt).dtype)
