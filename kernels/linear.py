"""Linear layers with three FP8 or BF16 GEMMs, dense and grouped."""

# Shapes: T tokens, K input features, N output features, E experts.

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels import passes, uncompiled
from fp8_safeguard.kernels.delayed import DelayedScaling
from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS, gemm_backend_of
from fp8_safeguard.kernels.errors import KernelError, OperandError
from fp8_safeguard.kernels.grouped import expert_bounds, require_offsets
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.operands import check_together
from fp8_safeguard.kernels.passes import Kept, LinearCall, Tamper
from fp8_safeguard.kernels.precision import OPERANDS, LinearPrecision

_DEFAULT = LinearPrecision()


def fp8_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    precision: LinearPrecision = _DEFAULT,
    stats: GemmObserver | None = None,
    backend: str | None = None,
    scaling: DelayedScaling | None = None,
    tamper: Tamper | None = None,
) -> Tensor:
    """x [..., K] times w [N,K] transposed, plus bias [N]: [..., N] in x's dtype, with gradients.

    Each GEMM runs in FP8 (E4M3 blocks, float32 accumulation) or BF16, as `precision` says; the backward uses
    the precision and the backend of its forward. The weight is quantised from its own dtype, so float32 master weights
    may be passed as they are, and dw comes back in that dtype. `stats` sees the real tensors (GemmObserver); on a
    device, where only FP8 copies wait for the backward, one that wants a backward without its forward is not told.
    `backend` is one of GEMM_BACKENDS, by default what gemm_backend_of x's device says. `scaling` remembers the amax of
    operands whose scaling is `delayed`; its enter() comes before each call. `tamper` is given each operand's codes and
    scales just before its product, and returns what is multiplied: a fault to inject.
    """
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise OperandError(f"x {list(x.shape)} does not fit w {list(w.shape)}: pass x [..., K] and w [N, K]")
    check_together(x=x, w=w, bias=bias)
    if bias is not None and bias.shape != w.shape[:1]:
        raise OperandError(
            f"bias {list(bias.shape)} does not fit w {list(w.shape)}: pass one number a feature [N]"
        )
    # Not -1: with no features it could be anything.
    x_TK = x.reshape(math.prod(x.shape[:-1]), w.shape[1])
    chosen = gemm_backend_of(x.device, backend)
    y_TN: Tensor
    if torch.compiler.is_compiling():
        if tamper is not None or not precision.is_plain:
            uncompiled.prepare()
            y_TN = uncompiled.linear(
                x, w, bias, precision=precision, stats=stats, backend=chosen, scaling=scaling, tamper=tamper
            )
            return y_TN
        from fp8_safeguard.kernels import library

        y_TN = library.linear(x_TK, w, bias, None, precision, stats, 1, chosen)
        return y_TN.reshape(*x.shape[:-1], w.shape[0])
    needs_dx, needs_dw = _needs(x_TK, w)
    call = LinearCall(
        precision=precision, observer=stats, backend=chosen, needs_dx=needs_dx, needs_dw=needs_dw,
        tamper=tamper, **_memory(precision, scaling),
    )  # fmt: skip
    y_TN = _Linear.apply(x_TK, w, bias, call)  # type: ignore[no-untyped-call]
    return y_TN.reshape(*x.shape[:-1], w.shape[0])


def fp8_grouped_linear(
    x_TK: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    *,
    precision: LinearPrecision = _DEFAULT,
    stats: GemmObserver | None = None,
    alignment: int = 1,
    backend: str | None = None,
    scaling: DelayedScaling | None = None,
    tamper: Tamper | None = None,
) -> Tensor:
    """Each expert's rows of x [T,K] times its w [E,N,K] transposed: [T,N] in x's dtype, with gradients.

    Rows offsets[e] to offsets[e+1] (int32 [E+1]) belong to expert e; rows behind the last offset give zeros.
    An expert without rows gets an exactly zero gradient. No block is shared by two experts. `alignment` promises that
    every offset is a multiple of it, as a padded routing map makes them: from 16 on wgrad loads faster on a device,
    which reads no offset back and checks none; a CPU checks them. `scaling` and `tamper` as for fp8_linear; a scale for
    a whole operand is one for all experts.
    """
    if w_ENK.dim() != 3 or x_TK.dim() != 2 or x_TK.shape[1] != w_ENK.shape[2]:
        raise OperandError(
            f"x {list(x_TK.shape)} does not fit w {list(w_ENK.shape)}: pass x [T, K] and w [E, N, K]"
        )
    check_together(x=x_TK, w=w_ENK)
    chosen, bounds = gemm_backend_of(x_TK.device, backend), None
    if torch.compiler.is_compiling():
        if tamper is not None or not precision.is_plain:
            uncompiled.prepare()
            y_TN = uncompiled.grouped_linear(
                x_TK, w_ENK, offsets, precision=precision, stats=stats, alignment=alignment, backend=chosen,
                scaling=scaling, tamper=tamper,
            )  # fmt: skip
            return cast(Tensor, y_TN)
        from fp8_safeguard.kernels import library

        return library.linear(x_TK, w_ENK, None, offsets, precision, stats, alignment, chosen)
    if chosen in DEVICE_BACKENDS:
        require_offsets(offsets, w_ENK.shape[0], x_TK.device)
    else:
        bounds = expert_bounds(offsets, x_TK.shape[0], w_ENK.shape[0], alignment)
    needs_dx, needs_dw = _needs(x_TK, w_ENK)
    call = LinearCall(
        precision=precision, observer=stats, offsets=offsets, bounds=bounds, alignment=alignment, backend=chosen,
        needs_dx=needs_dx, needs_dw=needs_dw, tamper=tamper, **_memory(precision, scaling),
    )  # fmt: skip
    out_TN: Tensor = _Linear.apply(x_TK, w_ENK, None, call)  # type: ignore[no-untyped-call]
    return out_TN


def _needs(x_TK: Tensor, w: Tensor) -> tuple[bool, bool]:
    """Whether dx and dw will be asked for; read here, because an autograd function runs without grad mode."""
    recorded = torch.is_grad_enabled()
    return recorded and x_TK.requires_grad, recorded and w.requires_grad


def _memory(precision: LinearPrecision, scaling: DelayedScaling | None) -> dict[str, Any]:
    """What a call knows of earlier ones: nothing where blocks have all the scales."""
    if precision.is_plain:
        return {}
    if scaling is None:
        if any(getattr(precision, name).scaling == "delayed" for name in OPERANDS):
            raise KernelError(
                "an operand's scaling is 'delayed', but nothing remembers its amax: pass scaling=DelayedScaling() and "
                "call its enter() before each forward, use Fp8Linear, which does, or scaling='tensor'"
            )
        return {}
    return {"scaling": scaling, "records": scaling.recording, "records_dy": scaling.training}


class _Linear(torch.autograd.Function):
    """The three GEMMs; w is [N,K], or [E,N,K] when the call has offsets."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        y_TN, kept, seen = passes.forward(x_TK, w, bias, call)
        ctx.save_for_backward(x_TK if call.keeps_x(seen) else None, w, *kept.codes())
        # The host's operands are no tensors that autograd could save.
        ctx.kept = None if call.on_device() else kept
        ctx.call, ctx.x_dtype, ctx.bias_dtype = call, x_TK.dtype, None if bias is None else bias.dtype
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TK, w, *codes = ctx.saved_tensors
        call: LinearCall = ctx.call
        kept = Kept.of(call, *codes) if ctx.kept is None else ctx.kept
        dx_TK, dw = passes.backward(dy_TN, x_TK, w, kept, call, ctx.x_dtype)
        needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        return dx_TK, dw, passes.bias_gradient(dy_TN, ctx.bias_dtype) if needs_bias else None, None
