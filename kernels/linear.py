"""Linear layers with three FP8 or BF16 GEMMs, dense and grouped."""

# Shapes: T tokens, K input features, N output features, E experts.
# fprop  Y[T,N]  = X[T,K]  W[N,K]^T     X in rows, W in tiles
# dgrad  dX[T,K] = dY[T,N] W[N,K]       dY in rows, W in tiles
# wgrad  dW[N,K] = dY[T,N]^T X[T,K]     both in columns: their blocks run along T, the summed dimension

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels import tiles
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.grouped import (
    expert_bounds,
    grouped_mm,
    grouped_mm_bf16,
    grouped_mm_wgrad,
    grouped_mm_wgrad_bf16,
)
from fp8_safeguard.kernels.matmul import mm_bf16, mm_exact
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.kernels.tiles import TiledWeight

_DEFAULT = LinearPrecision()


def fp8_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    precision: LinearPrecision = _DEFAULT,
    stats: GemmObserver | None = None,
) -> Tensor:
    """x [..., K] times w [N,K] transposed, plus bias [N]: [..., N] in x's dtype, with gradients.

    Each GEMM runs in FP8 (E4M3 blocks, float32 accumulation) or BF16, as `precision` says; the backward uses
    the precision of its forward. The weight is quantised from its own dtype, so float32 master weights may be
    passed as they are, and dw comes back in that dtype. `stats` sees the real tensors (GemmObserver).
    """
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise OperandError(f"x {list(x.shape)} does not fit w {list(w.shape)}: pass x [..., K] and w [N, K]")
    x_TK = x.reshape(-1, w.shape[1])
    call = _Call(precision=precision, observer=stats, offsets=None, bounds=None)
    y_TN: Tensor = _Linear.apply(x_TK, w, bias, call)  # type: ignore[no-untyped-call]
    return y_TN.reshape(*x.shape[:-1], w.shape[0])


def fp8_grouped_linear(
    x_TK: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    *,
    precision: LinearPrecision = _DEFAULT,
    stats: GemmObserver | None = None,
) -> Tensor:
    """Each expert's rows of x [T,K] times its w [E,N,K] transposed: [T,N] in x's dtype, with gradients.

    Rows offsets[e] to offsets[e+1] (int32 [E+1]) belong to expert e; rows behind the last offset give zeros.
    An expert without rows gets an exactly zero gradient. No block is shared by two experts.
    """
    if w_ENK.dim() != 3 or x_TK.dim() != 2 or x_TK.shape[1] != w_ENK.shape[2]:
        raise OperandError(
            f"x {list(x_TK.shape)} does not fit w {list(w_ENK.shape)}: pass x [T, K] and w [E, N, K]"
        )
    bounds = expert_bounds(offsets, x_TK.shape[0], w_ENK.shape[0])
    call = _Call(precision=precision, observer=stats, offsets=offsets, bounds=bounds)
    y_TN: Tensor = _Linear.apply(x_TK, w_ENK, None, call)  # type: ignore[no-untyped-call]
    return y_TN


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What one forward and its backward share besides tensors."""

    precision: LinearPrecision
    observer: GemmObserver | None
    offsets: Tensor | None
    bounds: list[int] | None

    def watcher(self) -> GemmObserver | None:
        """The observer, if it wants to see this pass."""
        return self.observer if self.observer is not None and self.observer.wants else None

    def spans(self, x_TC: Tensor) -> list[int]:
        """Experts' rows; all rows are one expert's where there are none."""
        return [0, x_TC.shape[0]] if self.bounds is None else self.bounds


class _Linear(torch.autograd.Function):
    """The three GEMMs; w is [N,K], or [E,N,K] when the call has bounds."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        y_TN, w_kept = _fprop(x_TK, w, call)
        watcher = call.watcher()
        if watcher is not None:
            watcher.fprop(x_TK, w, y_TN, call.offsets)
        ctx.save_for_backward(x_TK, w)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        # fprop's quantised weight serves dgrad: quantising it again would give the same values.
        ctx.w_kept = w_kept if ctx.needs_input_grad[0] else None
        return y_TN if bias is None else (y_TN + bias).to(x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, w = ctx.saved_tensors
        call: _Call = ctx.call
        dx_TK = _dgrad(dy_TN, w, ctx.w_kept, call, x_TK.dtype) if ctx.needs_input_grad[0] else None
        dw = _wgrad(dy_TN, x_TK, call).to(w.dtype) if ctx.needs_input_grad[1] else None
        watcher = call.watcher()
        if watcher is not None:
            watcher.dgrad(dy_TN, w, dx_TK, call.offsets)
            watcher.wgrad(dy_TN, x_TK, dw, call.offsets)
        needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dbias = dy_TN.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx_TK, dw, dbias, None


def _fprop(x_TK: Tensor, w: Tensor, call: _Call) -> tuple[Tensor, TiledWeight | Tensor | None]:
    """Y = X W^T in x's dtype, and the quantised weight."""
    precision, dtype = call.precision, x_TK.dtype
    if precision.fprop == "bf16":
        return _multiply_bf16(x_TK, w.mT, call).to(dtype), None
    if tiles.usable(x_TK):
        tiled = tiles.weight(w.reshape(-1, *w.shape[-2:]), precision.w)
        return tiles.fprop(x_TK, tiled, w.shape[-2], precision.x, call.spans(x_TK), dtype), tiled
    w_exact = round_trip(w, "tile", precision.w)
    return _multiply(round_trip(x_TK, "row", precision.x), w_exact.mT, call).to(dtype), w_exact


def _dgrad(
    dy_TN: Tensor, w: Tensor, kept: TiledWeight | Tensor | None, call: _Call, dtype: torch.dtype
) -> Tensor:
    """dX = dY W in dtype; `kept` is the quantised weight of fprop."""
    precision = call.precision
    if precision.dgrad == "bf16":
        return _multiply_bf16(dy_TN, w, call).to(dtype)
    if tiles.usable(dy_TN):
        tiled = (
            kept if isinstance(kept, TiledWeight) else tiles.weight(w.reshape(-1, *w.shape[-2:]), precision.w)
        )
        return tiles.dgrad(dy_TN, tiled, w.shape[-1], precision.dy, call.spans(dy_TN), dtype)
    w_exact = kept if isinstance(kept, Tensor) else round_trip(w, "tile", precision.w)
    return _multiply(round_trip(dy_TN, "row", precision.dy), w_exact, call).to(dtype)


def _wgrad(dy_TN: Tensor, x_TK: Tensor, call: _Call) -> Tensor:
    """dW = dY^T X, [N,K] or [E,N,K]."""
    precision, bounds = call.precision, call.bounds
    if precision.wgrad == "bf16":
        return mm_bf16(dy_TN.t(), x_TK) if bounds is None else grouped_mm_wgrad_bf16(dy_TN, x_TK, bounds)
    if tiles.usable(x_TK):
        dw_ENK = tiles.wgrad(dy_TN, x_TK, precision.dy, precision.x, call.spans(x_TK))
        return dw_ENK[0] if bounds is None else dw_ENK
    dy_exact = round_trip(dy_TN, "col", precision.dy, bounds)
    x_exact = round_trip(x_TK, "col", precision.x, bounds)
    return mm_exact(dy_exact.t(), x_exact) if bounds is None else grouped_mm_wgrad(dy_exact, x_exact, bounds)


def _multiply(a: Tensor, b: Tensor, call: _Call) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], float32 exact."""
    return mm_exact(a, b) if call.bounds is None else grouped_mm(a, b, call.bounds)


def _multiply_bf16(a: Tensor, b: Tensor, call: _Call) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], rounded to bfloat16."""
    return mm_bf16(a, b) if call.bounds is None else grouped_mm_bf16(a, b, call.bounds)
