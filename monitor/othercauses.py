"""Causes that no precision helps against: the model, the data, one rank.

Each has evidence of its own beside healthy recomputed GEMMs, as measured on seven faults that hurt BF16 as much:

    norm-gain             the gain of a norm far above its median; what it feeds gives larger results, or (the next weight
                          makes up for it) the same: then it is an FP8 fault, and the gain belongs into the weight
    qk-growth             the largest attention logit, or the gain of a norm of q or k, far above its median
    token-imbalance       dy vanishes along tokens in several layers, and not along features
    data-spike, loss-spike   the loss jumps; the activations or gradients of all layers with it, or not
    starved-expert        an expert that had its share gets no token at all
    dead-layer            the input of a layer that was alive is all zeros
    gradient-norm-growth  the gradient's norm lies far above what it was for long, and goes on rising
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from fp8_safeguard.monitor.cause import RUN, Diagnosis, Finding, Kind, numbers, percent
from fp8_safeguard.monitor.rankcauses import rank_findings
from fp8_safeguard.monitor.series import RECENT
from fp8_safeguard.monitor.symptoms import Symptoms

GAIN_JUMP = 8.0
"""A norm's largest gain over its own median: healthy ones stay within 1 %."""
QK_JUMP = 4.0
"""The largest attention logit, or the gain of a norm of q or k, over its own median."""
QK_LOGIT = 30.0
"""Below it attention is not hard: healthy logits reach 16."""
QK_LOGIT_HARD = 100.0
"""The level at which QK-Clip (Kimi K2) rescales the heads, however slowly it was reached."""
QK_UNDERFLOW, TOKEN_UNDERFLOW = 0.05, 0.05
"""Share of dy that vanishes along tokens: of a projection of q or k alone, where no logits are reported; of any layer."""
TOKEN_LAYERS = 3
"""A change of domain brings 2 % of dy along tokens in four layers, token weights over six decades 20 % in six."""
JUMP = 2.0
"""Loss over its median for a data spike; a change of domain reaches 3.5, random bytes 3.2 to 5.5."""
SPIKE = 3.5
"""Loss over its median for a spike that the layers' gradients and results do not show."""
DEVIATIONS = 6.0
"""How far the loss lies above its median besides, in standard deviations (1.4826 MAD)."""
TOGETHER = 4.0
"""Largest gradient over its median, in the middle one of all layers: 3.9 with a change of domain, 5.8 to 11 in a spike."""
UNLIKE = 0.35
"""log of the energy of the results over its median, in the middle layer, either way: 0.1 with a change of domain."""
ALIVE_SHARE, ALIVE_MEDIAN = 0.05, 0.1
"""Least and median share of an expert, of the mean, that make it one which had its share: in healthy young runs experts
come down to nothing by and by, and stay there for a dozen steps."""
STARVED_SAMPLES = 8
"""Consecutive samples without a token before an expert is called starved."""
GROWTH_SUM = 6.0
"""How far above twice its long mean the gradient's norm has been in all, in log units; a sample adds at most 0.3."""
_QK_NORM = re.compile(r"^(q|k|qk|query|key)_")
_QK_LAYER = re.compile(r"(qkv|query_key_value|(^|_)(q|k|query|key)(_|$)|c_attn|in_proj|^w[qk]$)")


def other_findings(
    seen: Symptoms, held: Mapping[str, Any], *, fp8_fault: bool, shaken: bool = False
) -> list[Finding]:
    """What the step speaks for.

    held: groups that are told already. fp8_fault: what FP8 did explains the rest. shaken: whether the loss has jumped lately,
    so that what starts in gradients and routers follows from that.
    """
    found = [*_dead_layers(seen, held), *_norms(seen, held), *_attention(seen, held), *rank_findings(seen)]
    # A loss that jumps with a gain, a layer or a rank follows from it.
    spikes = [] if fp8_fault or found else list(_loss(seen))
    follows = [] if fp8_fault else [*_tokens(seen, held), *_gradients(seen, held)]
    explained = {finding.said.layer for finding in (*found, *spikes, *follows)}
    follows += _routers(seen, held, explained)
    if spikes or shaken:
        follows = [finding for finding in follows if finding.group in held]
    return [*found, *spikes, *follows]


def is_spike(cause: str) -> bool:
    """Whether a cause shakes everything that comes after it."""
    return cause in ("data-spike", "loss-spike")


def group_of(cause: str, place: str) -> str:
    """Findings of one cause at one place are one."""
    return f"{cause} {place}"


def _finding(cause: str, place: str, samples: int, *, kind: Kind = "not-fp8", **said: Any) -> Finding:
    module = said.pop("module", None)
    diagnosis = Diagnosis(cause=cause, kind=kind, **said)
    return Finding(said=diagnosis, group=group_of(cause, place), samples=samples, module=module)


def _norms(seen: Symptoms, held: Mapping[str, Any]) -> Iterator[Finding]:
    for (module, name), gain in seen.view.seen.scalars.items():
        if name != "gain_amax" or _is_qk(module):
            continue
        before = seen.series.median("gain_amax", module)
        jump = gain / before if before > 0 else math.nan
        if jump < GAIN_JUMP or jump != jump:
            continue
        # What is told stays what it was while the gain is high: inputs and results come to be their own norm.
        told = next((held[group] for cause in _OF_NORMS if (group := group_of(cause, module)) in held), None)
        if told is not None:
            yield _norm_finding(
                seen, module, [told.said["layer"]], told.said["name"] == "norm-gain", gain, before
            )
            continue
        fed = seen.grown_with(module)
        energies = [value for layer in fed if (value := _energy_growth(seen, layer)) == value]
        # Without a result nobody knows whether the weight behind the norm makes up for it.
        if energies:
            yield _norm_finding(seen, module, fed, max(energies) >= GAIN_JUMP, gain, before)


_OF_NORMS = ("norm-gain", "outlier-channels")


def _norm_finding(
    seen: Symptoms, module: str, fed: Sequence[str], raw: bool, gain: float, before: float
) -> Finding:
    """raw: what it feeds is larger by as much in any precision."""
    layer = fed[0]
    scale = 2.0 ** round(math.log2(gain / before))
    said = f"the largest gain of norm {module!r} is {gain:.4g}, {gain / before:.3g} times its median of {before:.3g}"
    evidence = numbers(
        gain_amax=gain,
        gain_amax_median=before,
        gain_median=seen.scalar(module, "gain_median"),
        factor=scale,
        energy_growth=max((e for each in fed if (e := _energy_growth(seen, each)) == e), default=math.nan),
        amax_growth=max(seen.amax_growth(layer, "x row") for layer in fed),
    )
    common: dict[str, Any] = {
        "layer": layer,
        "slot": seen.slot(layer, "x row"),
        "value": gain / scale,
        "evidence": {**evidence, "norm": module, "compensated": not raw},
        "module": module,
    }
    if raw:
        return _finding(
            "norm-gain",
            module,
            2,
            summary=f"{said}, and what it feeds is larger by as much in any precision",
            advice=f"set it back to {gain / scale:.3g} (divide by {scale:g}), or go back to an earlier checkpoint",
            **common,
        )
    return _finding(
        "outlier-channels",
        module,
        2,
        kind="fp8",
        summary=f"{said}, and the weight behind it makes up for it: exact in BF16, outlier channels in FP8",
        advice=f"fold the gain into the weight: divide the gain by {scale:g} (to {gain / scale:.3g}) and multiply the "
        "weight's columns by as much, which changes no result",
        **common,
    )


def _energy_growth(seen: Symptoms, layer: str) -> float:
    """Mean square of the right fprop over its median; NaN without one."""
    before = seen.series.median("fprop_energy", layer)
    return seen.energy(layer, "fprop") / before if before > 0 else math.nan


def _attention(seen: Symptoms, held: Mapping[str, Any]) -> Iterator[Finding]:
    told: set[str] = set()
    for (module, name), value in seen.view.seen.scalars.items():
        place = module if name == "qk_logit_max" else module.rpartition(".")[0]
        if place in told:
            continue
        if name == "qk_logit_max":
            before, slow = seen.series.median(name, module), seen.series.slow(name, module)
            hard = value >= QK_LOGIT_HARD and value >= 2.0 * slow
            grown = hard or (value >= QK_LOGIT and value >= QK_JUMP * before)
            words = f"the largest attention logit is {value:.4g}"
        elif name == "gain_amax" and _is_qk(module):
            before = seen.series.median(name, module)
            grown = value >= QK_JUMP * before
            words = f"the largest gain of {module!r} is {value:.4g}"
        else:
            continue
        if grown:
            told.add(place)
            yield _qk_finding(seen, place, module, name, value, before, words)
    yield from _quiet_attention(seen, told)


def _qk_finding(
    seen: Symptoms, place: str, module: str, name: str, value: float, before: float, words: str
) -> Finding:
    inside = [layer for layer in seen.layers if layer.startswith(f"{place}.")]
    layer = inside[0] if inside else place
    reference = f", {value / before:.3g} times its median" if before > 0 else ""
    return _finding(
        "qk-growth",
        place,
        2,
        layer=layer,
        slot=seen.slot(layer, "dy col"),
        summary=f"{place!r}: {words}{reference}, and its GEMMs are right: attention hardens in any precision",
        advice="rescale the weights or gains of q and k, clip them (QK-Clip), or lower the learning rate",
        evidence={
            **numbers(
                **{name: value, f"{name}_median": before},
                dy_col_underflow=seen.value(layer, "dy col", "underflow_ratio"),
            ),
            "module": module,
        },
        module=module,
    )


def _quiet_attention(seen: Symptoms, told: set[str]) -> Iterator[Finding]:
    """No logits are reported: dy of the projections of q and k vanishes along tokens, and nowhere else."""
    rising = _vanishing_along_tokens(seen, QK_UNDERFLOW)
    if told or not rising or len(rising) >= TOKEN_LAYERS:
        return
    if any(name == "qk_logit_max" for _, name in seen.view.seen.scalars):
        return
    for layer in rising:
        # An output layer has such gradients for good, healthy and early: only what has grown is news.
        before = seen.series.median("dy_col_underflow", layer)
        value = seen.value(layer, "dy col", "underflow_ratio")
        if _QK_LAYER.search(layer.rpartition(".")[2]) and value >= 8.0 * max(before, 1e-3):
            yield _finding(
                "qk-growth",
                layer,
                3,
                layer=layer,
                slot=seen.slot(layer, "dy col"),
                summary=f"{layer!r}: {percent(value)} of dy vanishes along tokens (median {percent(before)}) and its "
                "GEMMs are right: attention hardens in any precision",
                advice="look at the largest attention logits (log_scalar(module, 'qk_logit_max', value))",
                evidence=numbers(dy_col_underflow=value, dy_col_underflow_median=before),
            )


def _vanishing_along_tokens(seen: Symptoms, level: float) -> list[str]:
    """Layers whose dy underflows in columns, whose dgrad is not wrong, in forward order."""
    found = []
    for layer in seen.layers:
        breach = seen.breach(layer, "underflow", "dy col")
        if breach is not None and breach.value >= level and seen.acts(layer, "dgrad") is None:
            found.append(layer)
    return found


def _tokens(seen: Symptoms, held: Mapping[str, Any]) -> Iterator[Finding]:
    """Tokens whose gradients differ by decades: columns of dy mix them, rows do not."""
    known = group_of("token-imbalance", RUN) in held
    along, rising = [], False
    for layer in _vanishing_along_tokens(seen, TOKEN_UNDERFLOW):
        columns, rows = (seen.value(layer, part, "underflow_ratio") for part in ("dy col", "dy row"))
        before = seen.series.median("dy_col_underflow", layer)
        if rows < 0.1 * columns and (known or not columns < 4.0 * before):
            along.append((columns, layer))
            rising |= columns >= 4.0 * before
    if len(along) < TOKEN_LAYERS:
        return
    worst, layer = max(along)
    first = seen.first([layer for _, layer in along], forward=False)
    yield _finding(
        "token-imbalance",
        RUN,
        # Where it has been so from the start there is nothing to hold it against.
        2 if rising else 4,
        layer=first,
        slot=seen.slot(first, "dy col"),
        summary=f"{percent(worst)} of dy vanishes along tokens in {layer!r}, and in {len(along) - 1} more layers, but not "
        "along features, and the recomputed gradients are right: tokens differ by decades in weight",
        advice="look at the loss weights of the tokens, and at masked or repeated ones",
        evidence={
            **numbers(
                dy_col_underflow=worst, dy_row_underflow=seen.value(layer, "dy row", "underflow_ratio")
            ),
            "layers": [layer for _, layer in along[:32]],
        },
    )


def _loss(seen: Symptoms) -> Iterator[Finding]:
    loss = seen.view.seen.run.get("loss")
    before, spread = seen.series.median("loss", RUN), seen.series.deviation("loss", RUN)
    if loss is None or not math.isfinite(loss) or not before > 0:
        return
    if loss < max(JUMP * before, before + DEVIATIONS * 1.4826 * spread):
        return
    gradients, energy = _all_layers(seen)
    together = gradients >= TOGETHER or abs(energy) >= UNLIKE
    said = f"the loss is {loss:.4g}, {loss / before:.3g} times its median, and the recomputed GEMMs are right"
    evidence = numbers(loss=loss, loss_median=before, gradient_growth=gradients, log_energy_growth=energy)
    if together:
        yield _finding(
            "data-spike",
            RUN,
            2,
            summary=f"{said}: the inputs of all layers changed together, so look at the data",
            advice="look at the batches since then; skip them and go on from a checkpoint before",
            evidence=evidence,
        )
    elif loss >= SPIKE * before:
        yield _finding(
            "loss-spike",
            RUN,
            3,
            summary=f"{said}: no precision helps",
            advice="lower the learning rate, or go back to a checkpoint and skip the batches",
            evidence=evidence,
        )


def _all_layers(seen: Symptoms) -> tuple[float, float]:
    """Of the middle one of all layers: amax of dy over its median, and log of the energy of fprop over its median."""
    gradients = [value for layer in seen.layers if (value := seen.amax_growth(layer, "dy row")) == value]
    energies = [value for layer in seen.layers if (value := _energy_growth(seen, layer)) == value and value]
    return (
        median(gradients) if len(gradients) >= TOKEN_LAYERS else math.nan,
        math.log(median(energies)) if len(energies) >= TOKEN_LAYERS else math.nan,
    )


def _gradients(seen: Symptoms, held: Mapping[str, Any]) -> Iterator[Finding]:
    """A slow rise, in many samples: one large norm, or one that is no number, is none."""
    group = group_of("gradient-norm-growth", RUN)
    total, norm = seen.series.growth("gradient_norm", RUN), seen.view.seen.run.get("gradient_norm")
    window, slow = seen.series.window("gradient_norm", RUN), seen.series.slow("gradient_norm", RUN)
    if norm is None or not math.isfinite(norm) or not total >= (1.0 if group in held else GROWTH_SUM):
        return
    half = len(window) // 2
    rises = half >= 2 and median(window[half:]) >= median(window[:half])
    if rises or group in held:
        yield _finding(
            "gradient-norm-growth",
            RUN,
            3,
            summary=f"the gradient's norm is {norm:.4g} and rising, {norm / slow:.3g} times what it was for long, and the "
            "recomputed gradients are right",
            advice="lower the learning rate or the clipping norm before it diverges",
            evidence=numbers(gradient_norm=norm, gradient_norm_before=slow, sum=total),
        )


def _routers(seen: Symptoms, held: Mapping[str, Any], explained: set[str | None]) -> Iterator[Finding]:
    for (module, name), share in seen.view.seen.scalars.items():
        if name != "load_min" or share != 0.0:
            continue
        fed = seen.fed_by(module)
        window = seen.series.window("load_min", module)
        alive = len(window) == RECENT and min(window) >= ALIVE_SHARE and median(window) >= ALIVE_MEDIAN
        # What dwindles first is the router's own doing: a young run and a change of domain do that.
        before = [share for share in seen.series.window("least_load", module) if share > 0.0]
        alive = alive and (not before or before[-1] >= max(ALIVE_SHARE, median(window) / 2.0))
        known = group_of("starved-expert", module) in held
        if not explained.isdisjoint(fed) or not (alive or known):
            continue
        entropy = seen.scalar(module, "entropy")
        yield _finding(
            "starved-expert",
            module,
            STARVED_SAMPLES,
            layer=module,
            summary=f"an expert of {module!r} gets no token any more (its share was {median(window):.3g} of the mean), and "
            "the GEMMs are right",
            advice="look at the router's bias and its balancing",
            evidence=numbers(load_min=share, load_min_median=median(window), entropy=entropy),
            module=module,
        )


def _dead_layers(seen: Symptoms, held: Mapping[str, Any]) -> Iterator[Finding]:
    dead = []
    for layer in seen.layers:
        zeros = seen.value(layer, "x row", "sum_sq") == 0.0 and seen.value(layer, "x row", "count") > 0
        if zeros and (seen.median(layer, "x row") > 0 or group_of("dead-layer", layer) in held):
            dead.append(layer)
    if not dead:
        return
    first = seen.first(dead)
    more = f", and of {len(dead) - 1} more layers" if len(dead) > 1 else ""
    said = _finding(
        "dead-layer",
        first,
        2,
        layer=first,
        slot=seen.slot(first, "x row"),
        summary=f"the input of {first!r} is all zeros{more}; it was not (amax {seen.median(first, 'x row'):.3g})",
        advice="look at the gain of the norm before it, and at what else feeds it",
        evidence={**numbers(amax_median=seen.median(first, "x row")), "layers": dead[:32]},
    )
    yield said


def _is_qk(module: str) -> bool:
    """Whether a norm is one of queries or keys."""
    return _QK_NORM.search(module.rpartition(".")[2]) is not None
