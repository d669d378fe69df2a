"""The MoE operations in plain torch: what the fused kernels must equal."""

# Shapes: T tokens, k experts of a token, E experts, R permuted rows, D model width, F SwiGLU width, G = 2 F,
# H heads, C channels of a head.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels.layouts import quantize_layouts
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted, capacity, spread

WEIGHT_FLOOR = 1e-20
"""A token whose scores are all 0 in float32 has weight 0 rather than 0/0."""


def topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Expert ids int32 [T, k] in falling order of sigmoid score + bias, and weights [T, k] from the scores alone."""
    score_TE = torch.sigmoid(_wide(logits_TE))
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    if top_groups < groups:
        candidate_TC = _candidates(choice_TE, groups, top_groups)
        best_Tk = _best(choice_TE.gather(1, candidate_TC), top_k)
        expert_Tk = candidate_TC.gather(1, best_Tk)
    else:
        expert_Tk = _best(choice_TE, top_k)
    weight_Tk = score_TE.gather(1, expert_Tk)
    if normalise:
        weight_Tk = weight_Tk / weight_Tk.sum(dim=-1, keepdim=True).clamp_min(WEIGHT_FLOOR)
    return expert_Tk.to(torch.int32), weight_Tk * scale if scale != 1.0 else weight_Tk


def topk_backward(
    dweight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor, *, normalise: bool, scale: float
) -> Tensor:
    """Gradient of the logits [T, E]; the selection has none."""
    score_TE = torch.sigmoid(_wide(logits_TE))
    index_Tk = expert_Tk.long()
    dscore_Tk = dweight_Tk * scale if scale != 1.0 else dweight_Tk
    if normalise:
        chosen_Tk = score_TE.gather(1, index_Tk)
        sum_T1 = chosen_Tk.sum(dim=-1, keepdim=True)
        floored_T1 = sum_T1.clamp_min(WEIGHT_FLOOR)
        dsum_T1 = (-dscore_Tk * (chosen_Tk / floored_T1 / floored_T1)).sum(dim=-1, keepdim=True)
        dscore_Tk = dscore_Tk / floored_T1 + dsum_T1 * (sum_T1 >= WEIGHT_FLOOR)
    dscore_TE = torch.zeros_like(score_TE).scatter_add_(1, index_Tk, dscore_Tk)
    dlogits_TE: Tensor = torch.ops.aten.sigmoid_backward(dscore_TE, score_TE)
    return dlogits_TE.to(logits_TE.dtype)


def routing(expert_Tk: Tensor, experts: int, alignment: int) -> RoutingMap:
    """The routing map of those expert ids; an id below 0 is a copy that goes nowhere."""
    tokens, top_k = expert_Tk.shape
    key_N = expert_Tk.reshape(-1).long()
    gapless = alignment == 1 and key_N.device.type == "cpu" and not bool((key_N < 0).any())
    if not gapless:
        key_N = torch.where(key_N < 0, experts, key_N)
    order_N = key_N.argsort(stable=True)
    count_E = key_N.bincount(minlength=experts + 1)[:experts]
    aligned_E = count_E if alignment == 1 else count_E + -count_E % alignment
    offsets = F.pad(aligned_E.cumsum(0), (1, 0)).to(torch.int32)
    token_N = order_N.div(max(top_k, 1), rounding_mode="floor").to(torch.int32)
    row_N = torch.arange(order_N.numel(), dtype=torch.int32, device=order_N.device)
    source_R = token_N
    if not gapless:
        row_N = _padded_rows(row_N, key_N[order_N], count_E, offsets)
        # Copies that go nowhere land in one row too many, which is cut off.
        rows = capacity(order_N.numel(), experts, alignment)
        source_R = torch.full((rows + 1,), -1, dtype=torch.int32, device=order_N.device)
        source_R[torch.where(row_N < 0, rows, row_N)] = token_N
        source_R = source_R[:rows]
    position_N = torch.empty_like(row_N)
    position_N[order_N] = row_N
    return RoutingMap(
        source_R,
        position_N.view(tokens, top_k),
        offsets,
        count_E.to(torch.int32),
        alignment=alignment,
        gapless=gapless,
    )


def _padded_rows(index_N: Tensor, expert_N: Tensor, count_E: Tensor, offsets: Tensor) -> Tensor:
    """int32 [N]: the row of each sorted copy, further down by the padding of the experts before its own; -1 for none."""
    shift_E = F.pad(offsets[:-1] - (count_E.cumsum(0) - count_E), (0, 1))
    row_N = index_N + shift_E[expert_N]
    return torch.where(expert_N == count_E.numel(), -1, row_N).to(torch.int32)


def gather(x_TD: Tensor, routing_map: RoutingMap, wanted: Wanted) -> Produced:
    """Rows [R, D] of the map: x[source], zero where there is none."""
    return produced(_rows_of(x_TD, routing_map), wanted, routing_map.offsets)


def sum_copies(y_RD: Tensor, routing_map: RoutingMap, weight_Tk: Tensor | None) -> Tensor:
    """[T, D]: sum over the slots of [weight x] y[position], in slot order, in float32, rounded once to y's dtype."""
    if not routing_map.position_Tk.shape[1]:
        return y_RD.new_zeros(routing_map.position_Tk.shape[0], y_RD.shape[1])
    total_TD = _wide(_copies(y_RD, routing_map, 0))
    if weight_Tk is not None:
        total_TD = total_TD * weight_Tk[:, :1]
    for slot in range(1, routing_map.position_Tk.shape[1]):
        copy_TD = _copies(y_RD, routing_map, slot)
        total_TD += copy_TD if weight_Tk is None else copy_TD * weight_Tk[:, slot : slot + 1]
    return total_TD.to(y_RD.dtype)


def combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weight_Tk: Tensor, routing_map: RoutingMap, wanted: Wanted
) -> tuple[Produced, Tensor]:
    """Gradient of the rows, weight x dy[source], and of the weights [T, k], the dot products dy . y[position]."""
    weight_R = spread(weight_Tk, routing_map)
    rows_RD = _wide(_rows_of(dy_TD, routing_map)) * weight_R.unsqueeze(-1)
    wide_TD = _wide(dy_TD)
    slots = range(routing_map.position_Tk.shape[1])
    dots = [(wide_TD * _copies(y_RD, routing_map, slot)).sum(dim=-1) for slot in slots]
    dweight_Tk = torch.stack(dots, dim=-1) if dots else wide_TD.new_zeros(weight_Tk.shape)
    return produced(rows_RD.to(dy_TD.dtype), wanted, routing_map.offsets), dweight_Tk


def swiglu(
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None,
    *,
    aligned: bool = False,
) -> Produced:
    """silu(gate) * up [* probability of the row]; gate and up are the two halves. Zero behind the last offset.

    `aligned` promises that R and every offset are multiples of 16. Fused kernels then store `col` codes as tensor
    cores read them; nothing here depends on it.
    """
    # In place: on a CPU a fresh tensor costs more than the arithmetic on it.
    gate_RF, up_RF = _wide_copy(gate_up_RG).chunk(2, dim=-1)
    value_RF = F.silu(gate_RF, inplace=True).mul_(up_RF)
    if probability_R is not None:
        value_RF.mul_(probability_R.unsqueeze(-1))
    return produced(_cut(value_RF, offsets).to(gate_up_RG.dtype), wanted, offsets)


def swiglu_backward(
    dh_RF: Tensor,
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None,
    *,
    aligned: bool = False,
) -> tuple[Produced, Tensor | None]:
    """Gradients of gate_up [R, 2F] and of the probability [R]; `aligned` as in `swiglu`."""
    gate_RF, up_RF = _wide_copy(gate_up_RG).chunk(2, dim=-1)
    dh_RF = _wide_copy(dh_RF)
    silu_RF = F.silu(gate_RF)
    dprobability_R = None
    if probability_R is not None:
        dprobability_R = _cut((silu_RF * up_RF).mul_(dh_RF).sum(dim=-1), offsets)
        dh_RF.mul_(probability_R.unsqueeze(-1))
    dgate_RF = up_RF.mul_(dh_RF)
    torch.ops.aten.silu_backward.grad_input(dgate_RF, gate_RF, grad_input=dgate_RF)
    dgate_up_RG = torch.empty_like(gate_up_RG, memory_format=torch.contiguous_format)
    for half_RF, gradient_RF in zip(
        dgate_up_RG.chunk(2, dim=-1), (dgate_RF, silu_RF.mul_(dh_RF)), strict=True
    ):
        half_RF.copy_(gradient_RF)
    return produced(_cut(dgate_up_RG, offsets), wanted, offsets), dprobability_R


def rms_norm(x_TD: Tensor, gain_D: Tensor, epsilon: float, wanted: Wanted) -> tuple[Produced, Tensor]:
    """x * rstd * gain in that order, rstd = 1 / sqrt(mean x^2 + epsilon) [T]."""
    wide_TD = _wide(x_TD)
    rstd_T = _rstd(wide_TD, epsilon)
    value_TD = wide_TD * rstd_T.unsqueeze(-1) * gain_D
    return produced(value_TD.to(x_TD.dtype), wanted, None), rstd_T


def rms_norm_backward(dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, D] and of the gain [D]."""
    return _norm_backward(_wide(dy_TD), x_TD, gain_D, rstd_T)


def qk_norm_rope(
    x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head, then the rotation of channel pairs (i, i + C/2); float32. And rstd [T, H].

    Token t stands at position t mod S.
    """
    wide_THC = _wide(x_THC)
    rstd_TH = _rstd(wide_THC, epsilon)
    normed_THC = (wide_THC * rstd_TH.unsqueeze(-1)).mul_(gain_C)
    low, high = normed_THC.chunk(2, dim=-1)
    turned_THC = torch.cat([-high, low], dim=-1)
    return _times(normed_THC, cos_SC).add_(_times(turned_THC, sin_SC)), rstd_TH


def qk_norm_rope_backward(
    dy_THC: Tensor, x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, rstd_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H, C] and of the gain [C]."""
    low, high = _times(_wide_copy(dy_THC), sin_SC).chunk(2, dim=-1)
    dnormed_THC = _times(_wide_copy(dy_THC), cos_SC).add_(torch.cat([high, -low], dim=-1))
    return _norm_backward(dnormed_THC, x_THC, gain_C, rstd_TH)


def _times(x_THC: Tensor, table_SC: Tensor) -> Tensor:
    """x, in place, times the table row of its token's position."""
    if x_THC.numel():
        x_THC.view(-1, table_SC.shape[0], *x_THC.shape[1:]).mul_(table_SC.unsqueeze(1))
    return x_THC


def produced(values: Tensor, wanted: Wanted, offsets: Tensor | None) -> Produced:
    """The values, quantised and measured as wanted, each in a pass of its own."""
    if not (wanted.row or wanted.blocks):
        return Produced(values, None, None, None)
    layouts = quantize_layouts(
        values, row=wanted.row, blocks=wanted.blocks, fmt=wanted.fmt, scale=wanted.scale,
        multiplier=wanted.multiplier, stats=wanted.stats, offsets=offsets,
    )  # fmt: skip
    return Produced(values if wanted.values else None, *layouts)


def _wide(x: Tensor) -> Tensor:
    """x as arithmetic sees it: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def _wide_copy(x: Tensor) -> Tensor:
    """The same in memory of its own, contiguous."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _best(choice_TC: Tensor, top_k: int) -> Tensor:
    """int64 [T, k]: the largest in falling order, the lower index first where two are equal; NaN is the largest."""
    return choice_TC.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def _candidates(choice_TE: Tensor, groups: int, top_groups: int) -> Tensor:
    """int64 [T, C]: experts of the best groups in rising order; a group counts for the sum of its best two."""
    tokens, experts = choice_TE.shape
    size = experts // groups
    grouped_TGS = choice_TE.view(tokens, groups, size)
    group_score_TG = grouped_TGS.topk(min(2, size), dim=-1).values.sum(dim=-1)
    group_T = _best(group_score_TG, top_groups).sort(dim=-1).values
    return (group_T.unsqueeze(-1) * size + torch.arange(size, device=choice_TE.device)).flatten(1)


def _rows_of(x_TD: Tensor, routing_map: RoutingMap) -> Tensor:
    """x[source] [R, D], zero where the source is -1."""
    return _taken(x_TD, routing_map.source_R, routing_map.gapless)


def _copies(y_RD: Tensor, routing_map: RoutingMap, slot: int) -> Tensor:
    """y[position] [T, D] of one slot, zero where the copy went nowhere."""
    return _taken(y_RD, routing_map.position_Tk[:, slot], routing_map.gapless)


def _taken(x_MD: Tensor, index_N: Tensor, gapless: bool) -> Tensor:
    """x[index] [N, D], zero, whatever x holds, where the index is -1."""
    if gapless:
        return x_MD.index_select(0, index_N)
    if not x_MD.shape[0]:
        return x_MD.new_zeros(index_N.shape[0], x_MD.shape[1])
    taken_ND = x_MD.index_select(0, index_N.clamp_min(0))
    return taken_ND.masked_fill_((index_N < 0).unsqueeze(-1), 0.0)


def _cut(values: Tensor, offsets: Tensor | None) -> Tensor:
    """values with zeros, in place, behind the last offset."""
    if offsets is None:
        return values
    if offsets.device.type == "cpu":
        values[int(offsets[-1]) :] = 0.0
        return values
    behind_R = torch.arange(values.shape[0], device=values.device) >= offsets[-1]
    return values.masked_fill_(behind_R.view(-1, *[1] * (values.dim() - 1)), 0.0)


def _rstd(wide: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean of squares + epsilon) over the last dimension."""
    return (wide.pow(2).mean(dim=-1) + epsilon).rsqrt()


def _norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm over the last dimension: of x, and of the gain summed over all others.

    dx = dxhat rstd - x rstd^3 mean(dxhat x) with dxhat = dy gain, operation by operation what autograd of the forward
    does.
    """
    wide, rstd = _wide(x), rstd.unsqueeze(-1)
    dgain = (dy * (wide * rstd)).reshape(-1, x.shape[-1]).sum(dim=0)
    dnormed = dy * gain
    along = (dnormed * wide).sum(dim=-1, keepdim=True)
    pull = -0.5 * along * rstd.pow(3) / x.shape[-1]
    dx = dnormed.mul_(rstd).add_(wide * (2.0 * pull))
    return dx.to(x.dtype), dgain.to(gain.dtype)
