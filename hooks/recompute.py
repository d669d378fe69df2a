"""Recomputes sampled output rows of a GEMM in high precision."""

# Shapes: T tokens, N output features, K input features, R sampled rows, E experts, V = 29 TensorStats entries.
# fprop Y_TN = X_TK W_NK^T, dgrad dX_TK = dY_TN W_NK, wgrad dW_NK = dY_TN^T X_TK.

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from fp8_safeguard.kernels import (
    LinearPrecision,
    OperandFormat,
    QuantizedTensor,
    native_exact,
    tensor_stats,
    tiles,
)
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

SAMPLED_ROWS = 64
"""Output rows of each GEMM: the error is a ratio of sums over rows, so a random sample of them is exact in it."""

DRAWN_AT_ONCE = 32
"""Samples of rows of one total: one alone costs as much."""
_TOTALS_KEPT = 8
_CPU = torch.device("cpu")
_STRATA_END = SAMPLED_ROWS * (1 - 2**-50)
"""The last place of the last stratum: still below the total when its product with total / 64 has been rounded."""

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
        self._drawn: dict[int, list[Tensor]] = {}
        """By total, what was drawn and not asked for yet."""

    def rows(self, total: int, device: torch.device) -> Tensor:
        """int64 [min(total, 64)], rising: one row from each of 64 equal strata, every row equally likely."""
        if total <= SAMPLED_ROWS:
            return torch.arange(total, device=device)
        drawn = self._drawn.get(total) or self._draw(total)
        rows = drawn.pop()
        return rows if device == _CPU else rows.to(device, non_blocking=True)

    def _draw(self, total: int) -> list[Tensor]:
        """More samples of that many rows."""
        shape, double = (DRAWN_AT_ONCE, SAMPLED_ROWS), torch.float64
        places = torch.rand(shape, generator=self.generator, dtype=double, device="cpu")
        places += torch.arange(SAMPLED_ROWS, dtype=double, device="cpu")
        rows = (places.clamp_(max=_STRATA_END) * (total / SAMPLED_ROWS)).to(torch.int64)
        if len(self._drawn) >= _TOTALS_KEPT:  # totals that change all the time must not add up
            self._drawn.clear()
        drawn = self._drawn[total] = list(rows.unbind())
        return drawn


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight's FP8 codes from the read that measured it, for its emulated GEMMs: 1 byte a weight."""

    codes: QuantizedTensor
    """[N, K] or [E, N, K] in tiles."""
    operand: OperandFormat

    def expert(self, index: int) -> QuantisedWeight:
        """One expert's."""
        codes = self.codes
        one = QuantizedTensor(codes.data[index], codes.scale[index], codes.layout, codes.fmt)
        return QuantisedWeight(one, self.operand)


def weigh(w: Tensor, operand: OperandFormat) -> tuple[Tensor, QuantisedWeight | None]:
    """TensorStats of a weight [N, K] or [E, N, K] in tiles, float64 [E, V], and its codes where products can use them.

    One read gives both. No tile straddles two experts.
    """
    experts, features = w.shape[:2] if w.dim() == 3 else (1, w.shape[0])
    if tiles.multiplies_codes(w) and w.is_floating_point():
        vectors_EV, codes = tiles.measured_weight(w, operand)
        return vectors_EV, QuantisedWeight(codes, operand)
    how: Any = {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}
    how |= {"tensor_scale": operand.tensor_scale, "amax_floor": operand.amax_floor}
    if w.dim() == 3:
        how["offsets"] = torch.arange(experts + 1, dtype=torch.int32, device=w.device) * features
    vectors = tensor_stats(w.reshape(-1, w.shape[-1]), layout="tile", **how)
    return vectors.reshape(-1, VECTOR_LENGTH), None


def compare(
    exact: Tensor, actual: Tensor, rows: Tensor | None = None, bias_N: Tensor | None = None
) -> Tensor:
    """float64 [V]: x = the high-precision result, xq = the actual one, as `monitor.stats.compare` defines it.

    `rows` are those of `actual` to take, all by default; a bias is added to `exact`.
    """
    if exact.dim() == 2 and exact.is_cpu and actual.is_cpu:
        bias = None if bias_N is None else bias_N.to(exact.dtype)
        vector = native_exact.compare_rows(exact, actual, rows, bias)
        if vector is not None:
            return vector
    actual = actual if rows is None else actual[rows]
    exact = exact if bias_N is None else exact + bias_N.to(exact.dtype)
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
    weight: QuantisedWeight | None = None,
) -> Tensor:
    """float64 [V]: the layer's real output against X W^T + b of the sampled rows.

    With `emulate`, the output that FP8 of that precision would give takes the place of the real one; `weight` are w's
    codes where they are there already.
    """
    exact_RN = matmul(x_TK, w_NK.mT, rows)
    if emulate is None:
        return compare(exact_RN, y_TN, rows, bias_N)
    ready, x_RK = _ready(w_NK, emulate.w, weight), x_TK.index_select(0, rows)
    if ready is not None:
        return compare(
            exact_RN, tiles.fprop(x_RK, ready, w_NK.shape[0], emulate.x, [0, len(rows)], torch.float32)
        )
    xq_RK, wq_NK = round_trip(x_RK, "row", emulate.x), round_trip(w_NK, "tile", emulate.w)
    return compare(exact_RN, matmul(xq_RK, wq_NK.mT))


def dgrad_error(
    dy_TN: Tensor,
    w_NK: Tensor,
    dx_TK: Tensor | None,
    rows: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
    weight: QuantisedWeight | None = None,
) -> Tensor:
    """float64 [V]: the layer's real input gradient against dY W of the sampled rows.

    A layer with an input gain sends dX * gain on: that is what is compared, since it is what the layers before
    it learn from. `emulate` and `weight` as in fprop_error; dx may then be None.
    """
    exact_RK = matmul(dy_TN, w_NK, rows)
    if emulate is None:
        assert dx_TK is not None
        return _compare_scaled(exact_RK, dx_TK, gain_K, rows)
    ready, dy_RN = _ready(w_NK, emulate.w, weight), dy_TN.index_select(0, rows)
    if ready is not None:
        actual_RK = tiles.dgrad(dy_RN, ready, w_NK.shape[1], emulate.dy, [0, dy_RN.shape[0]], torch.float32)
    else:
        actual_RK = matmul(round_trip(dy_RN, "row", emulate.dy), round_trip(w_NK, "tile", emulate.w))
    return _compare_scaled(exact_RK, actual_RK, gain_K)


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
    exact_RK = matmul(dy_TR.mT, x_TK)
    gain = None if gain_K is None else 1.0 / gain_K
    if emulate is None:
        assert dw_NK is not None
        return _compare_scaled(exact_RK, dw_NK, gain, rows)
    if tiles.usable(x_TK):
        actual_RK = tiles.wgrad(dy_TR, x_TK, emulate.dy, emulate.x, [0, x_TK.shape[0]])[0]
    else:
        actual_RK = matmul(round_trip(dy_TR, "col", emulate.dy).mT, round_trip(x_TK, "col", emulate.x))
    return _compare_scaled(exact_RK, actual_RK, gain)


def _ready(w_NK: Tensor, operand: OperandFormat, weight: QuantisedWeight | None) -> tiles.TiledWeight | None:
    """w as the FP8 products read it, quantised now unless its codes are there; None where there are no such products."""
    if weight is not None and weight.operand == operand and tiles.multiplies_codes(w_NK):
        return tiles.TiledWeight(weight.codes)
    return tiles.weight(w_NK[None], operand) if tiles.usable(w_NK) else None


def _compare_scaled(
    exact_RK: Tensor, actual: Tensor, gain_K: Tensor | None, rows: Tensor | None = None
) -> Tensor:
    """The comparison, both sides multiplied by the gain."""
    if gain_K is None:
        return compare(exact_RK, actual, rows)
    actual = actual if rows is None else actual[rows]
    return compare(exact_RK * gain_K, actual * gain_K)


def grouped_fprop_error(
    x_TK: Tensor,
    w_ENK: Tensor,
    y_TN: Tensor,
    bounds: list[int],
    sampler: RowSampler,
    *,
    emulate: LinearPrecision | None = None,
    weight: QuantisedWeight | None = None,
) -> Tensor:
    """float64 [E, V]: `fprop_error` by expert; the 64 rows fall on experts by their share of the tokens."""
    parts = _split(sampler.rows(bounds[-1], x_TK.device), bounds)
    pairs = zip(w_ENK, parts, _by_expert(weight, len(parts)), strict=True)
    return torch.stack(
        [fprop_error(x_TK, w_NK, y_TN, rows, emulate=emulate, weight=each) for w_NK, rows, each in pairs]
    )


def grouped_dgrad_error(
    dy_TN: Tensor,
    w_ENK: Tensor,
    dx_TK: Tensor | None,
    bounds: list[int],
    sampler: RowSampler,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
    weight: QuantisedWeight | None = None,
) -> Tensor:
    """float64 [E, V]: `dgrad_error` by expert."""
    parts = _split(sampler.rows(bounds[-1], dy_TN.device), bounds)
    how: Judged = {"gain_K": gain_K, "emulate": emulate}
    pairs = zip(w_ENK, parts, _by_expert(weight, len(parts)), strict=True)
    return torch.stack(
        [dgrad_error(dy_TN, w_NK, dx_TK, rows, weight=each, **how) for w_NK, rows, each in pairs]
    )


def grouped_wgrad_error(
    dy_TN: Tensor,
    x_TK: Tensor,
    dw_ENK: Tensor | None,
    bounds: list[int],
    rows: Tensor,
    *,
    gain_K: Tensor | None = None,
    emulate: LinearPrecision | None = None,
) -> Tensor:
    """float64 [E, V]: `wgrad_error` by expert, the same output features of each."""
    each = [None] * (len(bounds) - 1) if dw_ENK is None else dw_ENK
    spans = zip(bounds, bounds[1:], each, strict=False)
    how: Judged = {"gain_K": gain_K, "emulate": emulate}
    return torch.stack([wgrad_error(dy_TN[a:b], x_TK[a:b], dw_NK, rows, **how) for a, b, dw_NK in spans])


def _by_expert(weight: QuantisedWeight | None, experts: int) -> list[QuantisedWeight | None]:
    return [None if weight is None else weight.expert(index) for index in range(experts)]


def _split(rows: Tensor, bounds: list[int]) -> list[Tensor]:
    """Rising rows cut at the experts' bounds."""
    edges = torch.tensor(bounds, device=rows.device)
    cuts: list[int] = torch.searchsorted(rows, edges).tolist()
    return [rows[a:b] for a, b in itertools.pairwise(cuts)]


def matmul(a: Tensor, b: Tensor, rows: Tensor | None = None) -> Tensor:
    """a @ b (a[rows] @ b), matrices or batches of them, as exactly as IEEE float32 multiplies.

    Whatever the trainer's autocast, TF32 or bfloat16 settings, which stay as they are: on matrix tiles where the CPU has
    them, in float32 where torch multiplies it as IEEE says, in float64 (which has no fast modes) where it does not.
    """
    if a.is_cpu and b.is_cpu and a.dim() == b.dim() == 2 and not _torch_is_faster(a, b, rows):
        product = native_exact.rows_of_product(a, b, rows)
        if product is not None:
            return product
    a = a if rows is None else a[rows]
    dtype = torch.float32 if _float32_is_ieee(a.device.type) else torch.float64
    with _without_autocast(a.device.type):
        return torch.matmul(a.to(dtype), b.to(dtype))


def _torch_is_faster(a: Tensor, b: Tensor, rows: Tensor | None) -> bool:
    """Few rows of float32 by float32, and b in the order that they are multiplied in: splitting it costs as much."""
    if not (a.dtype == b.dtype == torch.float32 and b.stride(-1) == 1):
        return False
    return (a if rows is None else rows).shape[0] <= 2 * SAMPLED_ROWS and _float32_is_ieee("cpu")


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
