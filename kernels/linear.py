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
from torch.autograd.function import FunctionCtx, once_differentiable

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
    y_TN: Tensor = _Linear.apply(x_TK, w, bias, call)
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
    y_TN: Tensor = _Linear.apply(x_TK, w_ENK, None, call)
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


class _Linear(torch.autograd.Function):
    """The three GEMMs; w is [N,K], or [E,N,K] when the call has bounds."""

    @staticmethod
    def forward(ctx: FunctionCtx | Any, x_TK: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        w_exact = None
        if call.precision.fprop == "fp8":
            w_exact = round_trip(w, "tile", call.precision.w)
            y_TN = _multiply(round_trip(x_TK, "row", call.precision.x), w_exact.mT, call)
        else:
            y_TN = _multiply_bf16(x_TK, w.mT, call)
        watcher = call.watcher()
        if watcher is not None:
            watcher.fprop(x_TK, w, y_TN.to(x_TK.dtype), call.offsets)
        if bias is not None:
            y_TN = y_TN + bias
        ctx.save_for_backward(x_TK, w)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        # fprop's quantised weight serves dgrad: quantising it again would give the same values.
        ctx.w_exact = w_exact if ctx.needs_input_grad[0] and call.precision.dgrad == "fp8" else None
        return y_TN.to(x_TK.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx | Any, dy_TN: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, w = ctx.saved_tensors
        call: _Call = ctx.call
        dx_TK = _dgrad(dy_TN, w, ctx.w_exact, call).to(x_TK.dtype) if ctx.needs_input_grad[0] else None
        dw = _wgrad(dy_TN, x_TK, call).to(w.dtype) if ctx.needs_input_grad[1] else None
        watcher = call.watcher()
        if watcher is not None:
            watcher.dgrad(dy_TN, w, dx_TK, call.offsets)
            watcher.wgrad(dy_TN, x_TK, dw, call.offsets)
        needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dbias = dy_TN.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx_TK, dw, dbias, None


def _dgrad(dy_TN: Tensor, w: Tensor, w_exact: Tensor | None, call: _Call) -> Tensor:
    """dX = dY W."""
    if call.precision.dgrad == "bf16":
        return _multiply_bf16(dy_TN, w, call)
    w_exact = round_trip(w, "tile", call.precision.w) if w_exact is None else w_exact
    return _multiply(round_trip(dy_TN, "row", call.precision.dy), w_exact, call)


def _wgrad(dy_TN: Tensor, x_TK: Tensor, call: _Call) -> Tensor:
    """dW = dY^T X."""
    if call.precision.wgrad == "bf16":
        if call.bounds is None:
            return mm_bf16(dy_TN.t(), x_TK)
        return grouped_mm_wgrad_bf16(dy_TN, x_TK, call.bounds)
    dy_exact = round_trip(dy_TN, "col", call.precision.dy, call.bounds)
    x_exact = round_trip(x_TK, "col", call.precision.x, call.bounds)
    if call.bounds is None:
        return mm_exact(dy_exact.t(), x_exact)
    return grouped_mm_wgrad(dy_exact, x_exact, call.bounds)


def _multiply(a: Tensor, b: Tensor, call: _Call) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], float32 exact."""
    return mm_exact(a, b) if call.bounds is None else grouped_mm(a, b, call.bounds)


def _multiply_bf16(a: Tensor, b: Tensor, call: _Call) -> Tensor:
    """a [T,K] times b [K,N] or [E,K,N], rounded to bfloat16."""
    return mm_bf16(a, b) if call.bounds is None else grouped_mm_bf16(a, b, call.bounds)
