"""Forward and backward pass of a linear layer, without autograd."""

# Shapes: T tokens, K input features, N output features, E experts.
# fprop  Y[T,N]  = X[T,K]  W[N,K]^T     X in rows, W in tiles
# dgrad  dX[T,K] = dY[T,N] W[N,K]       dY in rows, W in tiles
# wgrad  dW[N,K] = dY[T,N]^T X[T,K]     both in columns: their blocks run along T, the summed dimension

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8_safeguard.kernels import tiles
from fp8_safeguard.kernels.delayed import DelayedScaling
from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS
from fp8_safeguard.kernels.errors import KernelError
from fp8_safeguard.kernels.grouped import (
    grouped_mm,
    grouped_mm_bf16,
    grouped_mm_wgrad,
    grouped_mm_wgrad_bf16,
)
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.matmul import mm_bf16, mm_exact
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.kernels.tiles import TiledWeight

Tamper = Callable[[str, str, QuantizedTensor], QuantizedTensor]
"""(gemm, operand, its codes and scales) to what is multiplied in their place: a fault to inject."""


@dataclass(frozen=True, kw_only=True)
class LinearCall:
    """What one forward and its backward share besides tensors."""

    precision: LinearPrecision
    backend: str
    """One of GEMM_BACKENDS."""
    observer: GemmObserver | None = None
    offsets: Tensor | None = None
    """int32 [E+1] of a grouped layer."""
    bounds: list[int] | None = None
    """The same on the host; None on a device, where nothing is read back."""
    alignment: int = 1
    """What every offset is a multiple of."""
    needs_dx: bool = True
    needs_dw: bool = True
    scaling: DelayedScaling | None = None
    """What the layer remembers of its operands, if a scale for a whole one is wanted."""
    records: bool = False
    """Whether x and w of this use count in its histories."""
    records_dy: bool = False
    """Whether dy does."""
    tamper: Tamper | None = None
    """Called with each operand just before its product."""

    @property
    def coded(self) -> bool:
        """Whether operands are to be made as codes before they are multiplied."""
        return self.tamper is not None or not self.precision.is_plain

    def tampered(self, gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        """What is multiplied in the place of an operand."""
        return codes if self.tamper is None else self.tamper(gemm, operand, codes)

    def begin(self, x_TK: Tensor, w: Tensor) -> LinearPrecision:
        """The precision of this use: with the scales of x and w, and that of dy where it does not depend on dy."""
        precision, scaling = self.precision, self.memory
        if precision.is_plain:
            return precision
        x, w_format, dy = (scaling.known(name, getattr(precision, name)) for name in ("x", "w", "dy"))
        x = scaling.used("x", x_TK, x, records=self.records)
        w_format = scaling.used("w", w, w_format, records=self.records)
        return replace(precision, x=x, w=w_format, dy=dy)

    @property
    def memory(self) -> DelayedScaling:
        """The layer's, or an empty one for operands that need none."""
        return DelayedScaling() if self.scaling is None else self.scaling

    def watcher(self) -> GemmObserver | None:
        """The observer, if it wants to see this pass."""
        return self.observer if self.observer is not None and self.observer.wants else None

    def keeps_w(self) -> bool:
        """Whether dgrad multiplies by the quantised weight of fprop."""
        return self.needs_dx and self.precision.dgrad == "fp8"

    def keeps_x(self, seen: bool) -> bool:
        """Whether the backward needs x itself; `seen` says that the observer saw the forward."""
        return not self.on_device() or seen or (self.needs_dw and self.precision.wgrad == "bf16")

    def on_device(self) -> bool:
        """Whether operands stay on the device."""
        return self.backend in DEVICE_BACKENDS

    def spans(self, x_TC: Tensor) -> list[int]:
        """Experts' rows; all rows are one expert's where there are none."""
        return [0, x_TC.shape[0]] if self.bounds is None else self.bounds


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Quantised operands of the forward that serve the backward: quantising them again would give the same values."""

    x: QuantizedTensor | None = None
    """x in columns, on a device, in the place of x itself."""
    w: QuantizedTensor | TiledWeight | Tensor | None = None
    """The weight as fprop used it."""
    precision: LinearPrecision | None = None
    """The precision with the scales of that use; None where blocks have all the scales."""

    def codes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Codes and scales of x and of w, for autograd to save; None where they are not kept or not quantised."""
        x_codes, x_scale = (None, None) if self.x is None else (self.x.data, self.x.scale)
        w = self.w if isinstance(self.w, QuantizedTensor) else None
        return x_codes, x_scale, None if w is None else w.data, None if w is None else w.scale

    @classmethod
    def of(
        cls,
        call: LinearCall,
        x_codes: Tensor | None,
        x_scale: Tensor | None,
        w_codes: Tensor | None,
        w_scale: Tensor | None,
    ) -> Kept:
        """The inverse of `codes`."""
        x = w = None
        if x_codes is not None and x_scale is not None:
            x = QuantizedTensor(x_codes, x_scale, "col", call.precision.x.fmt, call.offsets)
        if w_codes is not None and w_scale is not None:
            w = QuantizedTensor(w_codes, w_scale, "tile", call.precision.w.fmt)
        return cls(x=x, w=w)


def forward(x_TK: Tensor, w: Tensor, bias: Tensor | None, call: LinearCall) -> tuple[Tensor, Kept, bool]:
    """Y = X W^T + bias in x's dtype, what the backward can use, and whether the observer saw the pass."""
    if call.on_device():
        _require_blocks(call)
        y_TN, kept = compiled_module("cuda").forward(x_TK, w, call)
    elif call.coded:
        y_TN, kept = _coded_fprop(x_TK, w, call)
    else:
        y_TN, kept = _fprop(x_TK, w, call)
    watcher = call.watcher()
    if watcher is not None:
        _show(call, kept.precision)
        watcher.fprop(x_TK, w, y_TN, call.offsets)
    y_TN = y_TN if bias is None else (y_TN + bias).to(x_TK.dtype)
    return y_TN, kept, watcher is not None


def backward(
    dy_TN: Tensor, x_TK: Tensor | None, w: Tensor, kept: Kept, call: LinearCall, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """dX in dtype and dW in w's dtype, those that are needed. Without x the observer is not told."""
    dx_TK = dw = None
    precision = kept.precision
    if call.on_device():
        dx_TK, dw = compiled_module("cuda").backward(dy_TN, x_TK, w, kept, call, dtype)
    elif precision is not None:
        assert x_TK is not None
        precision = replace(
            precision, dy=call.memory.used("dy", dy_TN, precision.dy, records=call.records_dy)
        )
        dx_TK, dw = _coded_backward(dy_TN, x_TK, w, replace(kept, precision=precision), call, dtype)
    else:
        assert x_TK is not None
        dx_TK = _dgrad(dy_TN, w, kept, call, dtype) if call.needs_dx else None
        dw = _wgrad(dy_TN, x_TK, call).to(w.dtype) if call.needs_dw else None
    watcher = call.watcher()
    if watcher is not None and x_TK is not None:
        _show(call, precision)
        watcher.dgrad(dy_TN, w, dx_TK, call.offsets)
        watcher.wgrad(dy_TN, x_TK, dw, call.offsets)
    return dx_TK, dw


def bias_gradient(dy_TN: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of dy over the tokens, [N] in dtype, added up in float32."""
    return dy_TN.sum(dim=0, dtype=torch.float32).to(dtype)


def _show(call: LinearCall, precision: LinearPrecision | None) -> None:
    """Let the observer find what the pass was made with."""
    if call.scaling is not None:
        call.scaling.in_use = precision


def _require_blocks(call: LinearCall) -> None:
    """Raise KernelError for what a device's kernels cannot do."""
    if not call.precision.is_plain:
        raise KernelError(
            "a scale for a whole operand (scaling 'tensor' or 'delayed') and an amax_floor work on a CPU only so far: use "
            "scaling='block' on a device, whose scales need no history"
        )


def _coded_fprop(x_TK: Tensor, w: Tensor, call: LinearCall) -> tuple[Tensor, Kept]:
    """Y = X W^T in x's dtype by way of codes, the quantised weight, and the scales of this use."""
    coded, precision, dtype = compiled_module("coded"), call.begin(x_TK, w), x_TK.dtype
    if precision.fprop == "bf16":
        return _multiply_bf16(x_TK, w.mT, call).to(dtype), Kept(precision=precision)
    w_codes = coded.weight(w, precision.w)
    y_TN = coded.fprop(x_TK, w_codes, precision.x, call)
    return y_TN, Kept(w=w_codes if call.keeps_w() else None, precision=precision)


def _coded_backward(
    dy_TN: Tensor, x_TK: Tensor, w: Tensor, kept: Kept, call: LinearCall, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by way of codes, with the scales in `kept`."""
    coded, precision = compiled_module("coded"), kept.precision
    assert precision is not None
    dx_TK = dw = None
    if call.needs_dx and precision.dgrad == "bf16":
        dx_TK = _multiply_bf16(dy_TN, w, call).to(dtype)
    elif call.needs_dx:
        w_codes = kept.w if isinstance(kept.w, QuantizedTensor) else coded.weight(w, precision.w)
        dx_TK = coded.dgrad(dy_TN, w_codes, precision.dy, call, dtype)
    if call.needs_dw and precision.wgrad == "bf16":
        dw = _wgrad(dy_TN, x_TK, call).to(w.dtype)
    elif call.needs_dw:
        dw = coded.wgrad(dy_TN, x_TK, precision.dy, precision.x, call).to(w.dtype)
    return dx_TK, dw


def _experts(w: Tensor) -> Tensor:
    """w as [E,N,K]; one without elements too, whose E no reshape could tell."""
    return w if w.dim() == 3 else w.unsqueeze(0)


def _fprop(x_TK: Tensor, w: Tensor, call: LinearCall) -> tuple[Tensor, Kept]:
    """Y = X W^T in x's dtype, and the quantised weight."""
    precision, dtype = call.precision, x_TK.dtype
    if precision.fprop == "bf16":
        return _multiply_bf16(x_TK, w.mT, call).to(dtype), Kept()
    if _uses_tiles(x_TK, call):
        tiled = tiles.weight(_experts(w), precision.w, backend=call.backend)
        y_TN = tiles.fprop(x_TK, tiled, w.shape[-2], precision.x, call.spans(x_TK), dtype)
        return y_TN, Kept(w=tiled if call.keeps_w() else None)
    w_exact = round_trip(w, "tile", precision.w)
    y_TN = _multiply(round_trip(x_TK, "row", precision.x), w_exact.mT, call).to(dtype)
    return y_TN, Kept(w=w_exact if call.keeps_w() else None)


def _dgrad(dy_TN: Tensor, w: Tensor, kept: Kept, call: LinearCall, dtype: torch.dtype) -> Tensor:
    """dX = dY W in dtype."""
    precision = call.precision
    if precision.dgrad == "bf16":
        return _multiply_bf16(dy_TN, w, call).to(dtype)
    if _uses_tiles(dy_TN, call):
        tiled = kept.w
        if not isinstance(tiled, TiledWeight):
            tiled = tiles.weight(_experts(w), precision.w, backend=call.backend)
        return tiles.dgrad(dy_TN, tiled, w.shape[-1], precision.dy, call.spans(dy_TN), dtype)
    w_exact = kept.w if isinstance(kept.w, Tensor) else round_trip(w, "tile", precision.w)
    return _multiply(round_trip(dy_TN, "row", precision.dy), w_exact, call).to(dtype)


def _wgrad(dy_TN: Tensor, x_TK: Tensor, call: LinearCall) -> Tensor:
    """dW = dY^T X, [N,K] or [E,N,K]."""
    precision, bounds = call.precision, call.bounds
    if precision.wgrad == "bf16":
        return mm_bf16(dy_TN.t(), x_TK) if bounds is None else grouped_mm_wgrad_bf16(dy_TN, x_TK, bounds)
    if _uses_tiles(x_TK, call):
        dw_ENK = tiles.wgrad(dy_TN, x_TK, precision.dy, precision.x, call.spans(x_TK), backend=call.backend)
        return dw_ENK[0] if bounds is None else dw_ENK
    dy_exact = round_trip(dy_TN, "col", precision.dy, bounds)
    x_exact = round_trip(x_TK, "col", precision.x, bounds)
    return mm_exact(dy_exact.t(), x_exact) if bounds is None else grouped_mm_wgrad(dy_exact, x_exact, bounds)


def _uses_tiles(x: Tensor, call: LinearCall) -> bool:
    """Whether compiled kernels multiply with x."""
    return call.backend in ("native", "numba") and tiles.usable(x)


def _multiply(a: Tensor, b: Tensor, call: LinearCall) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], float32 exact."""
    return mm_exact(a, b) if call.bounds is None else grouped_mm(a, b, call.bounds)


def _multiply_bf16(a: Tensor, b: Tensor, call: LinearCall) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], rounded to bfloat16."""
    return mm_bf16(a, b) if call.bounds is None else grouped_mm_bf16(a, b, call.bounds)
