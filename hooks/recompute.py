"""Recomputes sampled output rows of a GEMM in high precision."""

# Shapes: T tokens, N output features, K input features, R sampled rows, E experts, V = 29 TensorStats entries.
# fprop Y_TN = X_TK W_NK^T, dgrad dX_TK = dY_TN W_NK, wgrad dW_NK = dY_TN^T X_TK.

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TypedDict

import torch
from torch import Tensor

from fp8_safeguard.kernels import LinearPrecision
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

SAMPLED_ROWS = 64
"""Output rows of each GEMM: the error is a ratio of sums over rows, so a random sample of them is exact in it."""

GEMM_COLUMNS = ("count", "nan", "inf", "amax", "sum_sq", "sum_sq_q", "sum_sq_err")
"""What a recomputed GEMM reports; every other column is null."""

_AT = {name: COLUMNS.index(name) for name in GEMM_COLUMNS}


class Judged(TypedDict):
    """How a gradient GEMM is judged: the layer's input gain, and the precision to emulate."""

    gain_K: Tensor | None
    emulate: LinearPrecision | None


class RowSampler:
    """Draws rows from a generator of its own: the global random state is the trainer's."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, total: int, device: torch.device) -> Tensor:
        """int64 [min(total, 64)], rising: one row from each of 64 equal strata, every row equally likely."""
        if total <= SAMPLED_ROWS:
            return torch.arange(total, device=device)
        jitter = torch.rand(SAMPLED_ROWS, generator=self.generator, dtype=torch.float64)
        position = (torch.arange(SAMPLED_ROWS) + jitter) * (total / SAMPLED_ROWS)
        return position.to(torch.int64).clamp_(max=total - 1).to(device, non_blocking=True)


def compare(exact: Tensor, actual: Tensor) -> Tensor:
    """float64 [V]: x = the high-precision result, xq = the actual one, as `monitor.stats.compare` defines it."""
    high, low = exact.double().flatten(), actual.double().flatten()
    error = high - low
    sums = [high.dot(high), low.dot(low), error.dot(error)]
    # On a CPU reading three numbers is free and spares every masked pass; on a GPU it would stall the step.
    if high.is_cpu and all(math.isfinite(value) for value in torch.stack(sums).tolist()):
        amax = high.abs().max() if high.numel() else high.new_zeros(())
        return _vector(high, nan=0, inf=0, amax=amax, sums=sums)
    return _compare_masked(high, low)


def _compare_masked(high: Tensor, low: Tensor) -> Tensor:
    """The same with elements that are non-finite in either counted and left out of sums and amax."""
    finite = torch.isfinite(high) & torch.isfinite(low)
    nan = torch.isnan(high) | torch.isnan(low)
    kept_high, kept_low = torch.where(finite, high, 0.0), torch.where(finite, low, 0.0)
    error = kept_high - kept_low
    sums = [kept_high.dot(kept_high), kept_low.dot(kept_low), error.dot(error)]
    amax = kept_high.abs().max() if high.numel() else high.new_zeros(())
    return _vector(high, nan=nan.sum(), inf=(~finite & ~nan).sum(), amax=amax, sums=sums)


def _vector(
    like: Tensor, *, nan: Tensor | int, inf: Tensor | int, amax: Tensor, sums: list[Tensor]
) -> Tensor:
    vector = torch.zeros(VECTOR_LENGTH, dtype=torch.float64, device=like.device)
    vector[_AT["count"]] = like.numel()
    vector[_AT["nan"]] = nan
    vector[_AT["inf"]] = inf
    vector[_AT["amax"]] = amax
    for name, value in zip(("sum_sq", "sum_sq_q", "sum_sq_err"), sums, strict=True):
        vector[_AT[name]] = value
    return vector


def fprop_error(
    x_TK: Tensor,
    w_NK: Tensor,
    y_TN: Tensor,
    rows: Tensor,
    bias_N: Tensor | None = None,
    *,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [V]: the layer's real output against X W^T + b of the sampled rows.

    With `emulate`, the output that FP8 of that precision would give takes the place of the real one.
    """
    exact_RN = matmul(x_TK[rows], w_NK.mT)
    if emulate is not None:
        xq_RK, wq_NK = round_trip(x_TK[rows], "row", emulate.x), round_trip(w_NK, "tile", emulate.w)
        return compare(exact_RN, matmul(xq_RK, wq_NK.mT))
    if bias_N is not None:
        exact_RN = exact_RN + bias_N.to(exact_RN.dtype)
    return compare(exact_RN, y_TN[rows])


def dgrad_error(
    dy_TN: Tensor,
    w_NK: Tensor,
    dx_TK: Tensor | None,
    rows: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [V]: the layer's real input gradient against dY W of the sampled rows.

    A layer with an input gain sends dX * gain on: that is what is compared, since it is what the layers before
    it learn from. `emulate` as in fprop_error; dx may then be None.
    """
    dy_RN = dy_TN[rows]
    if emulate is not None:
        actual_RK = matmul(round_trip(dy_RN, "row", emulate.dy), round_trip(w_NK, "tile", emulate.w))
    else:
        assert dx_TK is not None
        actual_RK = dx_TK[rows]
    exact_RK = matmul(dy_RN, w_NK)
    if gain_K is not None:
        exact_RK, actual_RK = exact_RK * gain_K, actual_RK * gain_K
    return compare(exact_RK, actual_RK)


def wgrad_error(
    dy_TN: Tensor,
    x_TK: Tensor,
    dw_NK: Tensor | None,
    rows: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [V]: the layer's real weight gradient against dY^T X of the sampled rows (output features).

    A layer with an input gain hands dW / gain to the optimizer: that is compared. `emulate` as in dgrad_error.
    """
    dy_TR = dy_TN[:, rows]
    if emulate is not None:
        actual_RK = matmul(round_trip(dy_TR, "col", emulate.dy).mT, round_trip(x_TK, "col", emulate.x))
    else:
        assert dw_NK is not None
        actual_RK = dw_NK[rows]
    exact_RK = matmul(dy_TR.mT, x_TK)
    if gain_K is not None:
        exact_RK, actual_RK = exact_RK / gain_K, actual_RK / gain_K
    return compare(exact_RK, actual_RK)


def grouped_fprop_error(
    x_TK: Tensor,
    w_ENK: Tensor,
    y_TN: Tensor,
    bounds: list[int],
    sampler: RowSampler,
    *,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `fprop_error` by expert; the 64 rows fall on experts by their share of the tokens."""
    parts = _split(sampler.rows(bounds[-1], x_TK.device), bounds)
    pairs = zip(w_ENK, parts, strict=True)
    return torch.stack([fprop_error(x_TK, w_NK, y_TN, rows, emulate=emulate) for w_NK, rows in pairs])


def grouped_dgrad_error(
    dy_TN: Tensor,
    w_ENK: Tensor,
    dx_TK: Tensor | None,
    bounds: list[int],
    sampler: RowSampler,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `dgrad_error` by expert."""
    parts = _split(sampler.rows(bounds[-1], dy_TN.device), bounds)
    how: Judged = {"gain_K": gain_K, "emulate": emulate}
    return torch.stack(
        [dgrad_error(dy_TN, w_NK, dx_TK, rows, **how) for w_NK, rows in zip(w_ENK, parts, strict=True)]
    )


def grouped_wgrad_error(
    dy_TN: Tensor,
    x_TK: Tensor,
    dw_ENK: Tensor,
    bounds: list[int],
    rows: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `wgrad_error` by expert, the same output features of each."""
    spans = zip(bounds, bounds[1:], dw_ENK, strict=False)
    how: Judged = {"gain_K": gain_K, "emulate": emulate}
    return torch.stack([wgrad_error(dy_TN[a:b], x_TK[a:b], dw_NK, rows, **how) for a, b, dw_NK in spans])


def _split(rows: Tensor, bounds: list[int]) -> list[Tensor]:
    """Rising rows cut at the experts' bounds."""
    edges = torch.tensor(bounds, device=rows.device)
    cuts: list[int] = torch.searchsorted(rows, edges).tolist()
    return [rows[a:b] for a, b in itertools.pairwise(cuts)]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b at IEEE precision whatever the trainer's autocast, TF32 or bfloat16 settings, which stay as they are.

    float32 where torch multiplies it exactly as IEEE says, float64 (which has no fast modes) where it does not.
    """
    dtype = torch.float32 if _float32_is_ieee(a.device.type) else torch.float64
    with _without_autocast(a.device.type):
        return torch.mm(a.to(dtype), b.to(dtype))


def _float32_is_ieee(device_type: str) -> bool:
    """Whether float32 matrix products on this device run in float32; what cannot be read counts as no."""
    try:
        backend = getattr(torch.backends, "cuda" if device_type == "cuda" else "mkldnn")
        precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
        if precision is not None:  # torch 2.9 and later
            return precision in ("ieee", "none")
        return torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    except (AttributeError, RuntimeError):
        return False


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
