"""Fused MoE operations against the eager ones in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu.case import Bench, Case, Row, checked, kernels, mismatches
from gpu.moe_calls import ALIGNMENT, CHECKED, OPERATIONS, SMALL, Inputs, chosen, elsewhere, router_options
from gpu.quantise_checks import SUM_TOLERANCE, differing, differing_stats
from torch import Tensor

NEEDS = ("moe.eager", "moe.triton_ops")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23, torch.float16: 2.0**-11}
"""Largest relative error of one rounding to that dtype, and a little more."""
TOLERANCE = 3e-5
"""Of the tensor's root mean square, beyond that rounding: float32 sums along up to 8,192 elements."""


FP8_ERROR = 0.12
"""Relative error of two FP8 GEMMs in a row on Gaussian data, gradients included: about 0.04 each."""


def tensors_of(result: Any) -> list[Tensor]:
    """Every tensor of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if result is None or isinstance(result, int | str):
        return []
    if hasattr(result, "dequantize"):
        return [result.data, result.scale]
    fields = result if isinstance(result, tuple | list) else vars(result).values()
    return [tensor for field in fields for tensor in tensors_of(field)]


def apart(got: Tensor, wanted: Tensor) -> float:
    """Largest error beyond one rounding, over the root mean square of what is wanted (float64)."""
    got64 = got.cpu().double()
    size = wanted.square().mean().sqrt().clamp(min=1e-30)
    error = (got64 - wanted).abs() - ROUNDING[got.dtype] * wanted.abs()
    return float((error / size).nan_to_num(nan=torch.inf).clamp(min=0).max()) if got.numel() else 0.0


def operation(bench: Bench, name: str, *, operation: str) -> Sequence[Row]:
    """Values close to float64's; codes, scales and statistics those of the values, bit for bit."""
    moe, made = OPERATIONS[operation], kernels("moe.routing")
    inputs = moe.inputs(bench, SMALL if bench.small else CHECKED)
    wanted = made.Wanted(values=True, row=True, blocks="col", stats=True)
    got = moe.call(kernels("moe.triton_ops"), inputs, wanted)
    oracle = moe.call(kernels("moe.eager"), elsewhere(inputs), made.Wanted(values=True))
    parts = zip(_parts(got), _parts(oracle), strict=True)
    error = max(apart(mine, theirs) for mine, theirs in parts)
    rows = [checked(name, error, "of the rms", TOLERANCE)]
    if moe.quantises:
        rows += quantised(name, got if isinstance(got, made.Produced) else got[0], wanted, inputs)
    return rows


def _parts(result: Any) -> list[Tensor]:
    """The floating results that are no codes: values and whatever comes beside a Produced."""
    items = result if isinstance(result, tuple) and not hasattr(result, "values") else (result,)
    found = [item.values if hasattr(item, "block") else item for item in items]
    return [item for item in found if isinstance(item, Tensor)]


def quantised(name: str, got: Any, wanted: Any, inputs: Inputs) -> Sequence[Row]:
    """Codes, scales, statistics of a Produced against the eager quantisation of its own values."""
    held = inputs.get("routing_map")
    offsets = held.offsets if held is not None else inputs.get("offsets")
    ends = None if offsets is None else offsets.cpu()
    values = got.values.cpu()
    reference = kernels("moe.eager").produced(values, wanted, ends)
    end, blocks = values.shape[0] if ends is None else int(ends[-1]), reference.block.scale.shape[0]
    wrong = differing(got.row.data, reference.row.data) + differing(got.row.scale, reference.row.scale)
    wrong += differing(got.block.data[:end], reference.block.data[:end])
    wrong += differing(got.block.scale[:blocks], reference.block.scale)
    counts, sums = differing_stats(got.stats, reference.stats)
    return [
        mismatches(f"{name} codes", wrong + counts),
        checked(f"{name} sums", sums, "relative", SUM_TOLERANCE),
    ]


def topk(bench: Bench, name: str) -> Sequence[Row]:
    """The choice: as good as float64's (numbers closer than float32 tells may change places), with its weights."""
    moe = OPERATIONS["topk"]
    inputs = moe.inputs(bench, SMALL if bench.small else CHECKED)
    expert_Tk, weight_Tk = moe.call(kernels("moe.triton_ops"), inputs, None)
    exact = elsewhere(inputs)
    wanted_Tk, _ = moe.call(kernels("moe.eager"), exact, None)
    score_TE = torch.sigmoid(exact["logits_TE"])
    choice_TE, index_Tk = score_TE + exact["bias_E"], expert_Tk.cpu().long()
    lost = (choice_TE.gather(1, wanted_Tk.long()) - choice_TE.gather(1, index_Tk)).abs().max()
    chosen_Tk = score_TE.gather(1, index_Tk)
    weights_Tk = chosen_Tk / chosen_Tk.sum(dim=1, keepdim=True) * router_options(inputs)["scale"]
    repeated = sum(len(set(row)) != len(row) for row in index_Tk.tolist())
    return [
        checked(name, float(lost), "of the score", 1e-6),
        checked(f"{name} weights", apart(weight_Tk, weights_Tk), "of the rms", TOLERANCE),
        mismatches(f"{name} repeated experts", repeated),
    ]


def routing(bench: Bench, name: str) -> Sequence[Row]:
    """The map, number for number."""
    moe = OPERATIONS["routing"]
    inputs = moe.inputs(bench, SMALL if bench.small else CHECKED)
    got = tensors_of(moe.call(kernels("moe.triton_ops"), inputs, None))
    wanted = tensors_of(moe.call(kernels("moe.eager"), elsewhere(inputs), None))
    return [mismatches(name, sum(differing(mine, theirs) for mine, theirs in zip(got, wanted, strict=True)))]


def gather(bench: Bench, name: str) -> Sequence[Row]:
    """Rows moved, none computed: every bit is the same, padding and the rows behind included."""
    rows = operation(bench, name, operation="gather")
    inputs = OPERATIONS["gather"].inputs(bench, SMALL if bench.small else CHECKED)
    wanted = kernels("moe.routing").Wanted(values=True, row=True)
    got = kernels("moe.triton_ops").gather(inputs["x_TD"], inputs["routing_map"], wanted).values
    theirs = (
        kernels("moe.eager")
        .gather(inputs["x_TD"], inputs["routing_map"], kernels("moe.routing").Wanted())
        .values
    )
    wrong = int((got.view(torch.int16) != theirs.view(torch.int16)).sum())
    return [*rows, mismatches(f"{name} values", wrong)]


def experts(bench: Bench) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """fast_moe as a function of recompute, alignment and precision, and the tensors it is differentiated by."""
    moe = kernels("moe")
    size = SMALL if bench.small else CHECKED
    tokens, width, hidden = size.tokens, 128, 64
    ids = chosen(bench, size)["expert_Tk"]
    x = bench.normal(tokens, width)
    up, down = bench.normal(size.experts, 2 * hidden, width), bench.normal(size.experts, width, hidden)
    leaves = [x, up, down, bench.uniform(tokens, size.copies)]
    for leaf in leaves:
        leaf.requires_grad_()

    def call(recompute: bool, alignment: int = ALIGNMENT, **more: Any) -> Tensor:
        route = moe.routing_map(ids, size.experts, alignment=alignment)
        result: Tensor = moe.fast_moe(*leaves[:3], route, leaves[3], recompute=recompute, **more)
        return result

    return call, leaves


def fast_moe(bench: Bench, name: str) -> Sequence[Row]:
    """Padding and recomputation change no bit of the result and of any gradient; FP8 changes them little."""
    function, leaves = experts(bench)
    in_bf16 = kernels("precision").LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")
    variants: dict[str, dict[str, Any]] = {
        "plain": {"recompute": False},
        "recompute": {"recompute": True},
        "padding": {"recompute": True, "alignment": 1},
        "bf16": {"recompute": False, "precision": in_bf16},
    }
    results = {}
    for variant, options in variants.items():
        y = function(**options)
        results[variant] = [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    rows = []
    for variant in ("recompute", "padding"):
        pairs = zip(results["plain"], results[variant], strict=True)
        wrong = sum(int((one.float() != other.float()).sum()) for one, other in pairs)
        rows.append(mismatches(f"{name} {variant}", wrong))
    pairs = zip(results["plain"], results["bf16"], strict=True)
    away = max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)
    return [*rows, checked(f"{name} against BF16", away, "relative", FP8_ERROR)]


def cases() -> Iterator[Case]:
    """The checks of the MoE operations."""
    special = {"topk": topk, "routing": routing, "gather": gather}
    name = "moe fast_moe"
    yield Case(
        name=name, kind="check", run=partial(fast_moe, name=name), seconds=12, needs=NEEDS, interpreted=True
    )
    for name in OPERATIONS:
        run = special.get(name, partial(operation, operation=name))
        yield Case(
            name=f"moe {name}", kind="check", run=partial(run, name=f"moe {name}"), seconds=6, needs=NEEDS, interpreted=True
        )  # fmt: skip
