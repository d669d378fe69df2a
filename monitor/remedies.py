"""From breaches to candidate changes: which rule asks for which remedy where.

Candidates say what the evidence asks for; `policy` says what may be done (dwell, budget, pins, mode).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8_safeguard.monitor.alerts import Evidence
from fp8_safeguard.monitor.diagnosis import RUN, Diagnosis
from fp8_safeguard.monitor.nonfinite import Origin, way_out
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, GEMMS, Slot, gemm_slot, gemms_of

ACT_SAMPLES = 2
"""Consecutive samples at the act level that lead to a fallback, unless one is beyond the rule's instant level."""

NEUTRAL_MULTIPLIER = 1.0
"""The multiplier at which block scales neither saturate nor flush."""

FLUCTUATING = "fluctuating"
"""Cause of metrics that go up and down."""
SPOKEN_FOR = (FLUCTUATING, "nonfinite-origin")
"""Causes for which other candidates speak."""
SMOOTHING_BETA = 0.1
"""g_s = beta g_s of the step before + (1 - beta) g, as the recipe goes; no evidence for it is published."""

Breaches = Mapping[str, Breach]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One change that the evidence asks for."""

    layer: str
    target: Target
    action: str
    value: float | str | None = None
    rule: str
    breaches: tuple[Breach, ...]
    priority: int
    """Lower goes first when the budget is short."""
    because: str
    """First half of the reason."""
    measured: bool = False
    """Whether a close look at the layer may find something cheaper."""
    instant: bool = False
    """Whether it is too bad to wait for that look."""

    @property
    def order(self) -> tuple[Any, ...]:
        """Total order, whatever the order of the slots."""
        gemm = GEMMS.index(self.target.gemm) if self.target.gemm else -1
        worst = max((breach.excess for breach in self.breaches if breach.limit), default=0.0)
        return (self.priority, gemm, -worst, self.layer, self.target.key, self.action)


def pair_up(breaches: Breaches) -> tuple[dict[str, Breach], list[tuple[Breach, Breach]]]:
    """Breaches with lone pair rules lowered to watch, and the pairs (x row, w tile) of one layer that do act.

    Weights vanish by 0.3 % only together with activations by 0.5 % in an FP8 fault; either alone has other causes. The
    other way round, activations by 20 % need weights by 0.1 %.
    """
    lowered, pairs = dict(breaches), []
    paired = {key: breach for key, breach in breaches.items() if breach.rule.remedy == "pair"}
    for weight in paired.values():
        if weight.slot.operand != "w":
            continue
        partner = replace(weight.slot, operand="x", layout="row", fmt=None)
        activation = paired.get(f"{weight.rule.rule}|{partner.family}")
        if activation is not None and "act" in (weight.severity, activation.severity):
            pairs.append((activation, weight))
    acting = {breach.key for pair in pairs for breach in pair}
    for key, breach in paired.items():
        if key not in acting and breach.severity == "act":
            limit = breach.rule.level("watch", breach.slot.fmt) if breach.watch is None else breach.watch
            if limit is not None and breach.value <= limit:
                # What was learned calls it healthy, and it has no partner.
                del lowered[key]
                continue
            lowered[key] = replace(breach, severity="watch", limit=limit or 0.0, instant=False)
        elif key in acting:
            lowered[key] = replace(breach, severity="act")
    return lowered, pairs


def pair_candidates(pairs: Iterable[tuple[Breach, Breach]]) -> list[Candidate]:
    """fprop and dgrad of the layer: the two gemms that read the weight."""
    return [
        Candidate(
            layer=weight.slot.layer,
            target=Target(gemm=gemm),
            action="bf16_fallback",
            rule="weight-underflow",
            breaches=(activation, weight),
            priority=1,
            because=f"{weight.slot.layer!r}: {percent(weight.value)} of w and {percent(activation.value)} of x vanish in quantisation "
            f"(limits together: {percent(weight.limit)} and {percent(activation.limit)})",
            measured=True,
            instant=_gross(activation),
        )
        for activation, weight in pairs
        for gemm in ("fprop", "dgrad")
    ]


def _gross(activation: Breach) -> bool:
    """Whether so much of x vanishes that the result is wrong already."""
    alone = activation.rule.level("act", activation.slot.fmt)
    return alone is not None and activation.value > alone


def scale_candidates(breaches: Breaches, families: frozenset[str]) -> list[Candidate]:
    """Saturation and flushed rows: what block scales never do by themselves, so the multiplier goes back to 1.

    Where a gemm that reads the operand was recomputed, and is healthy, there is nothing to mend.
    """
    return [
        Candidate(
            layer=breach.slot.layer,
            target=scale_target(breach.slot),
            action="scale_multiplier",
            value=NEUTRAL_MULTIPLIER,
            rule=breach.rule.rule,
            breaches=(breach,),
            priority=0,
            because=describe(breach) + ", which block scales never do by themselves",
            measured=_is_judged(breach.slot.layer, families),
        )
        for breach in breaches.values()
        if breach.rule.remedy == "scale" and breach.severity == "act"
        for judges in [_judges(breach, families)]
        if not judges or any(key in breaches for key in judges)
    ]


def _is_judged(layer: str, families: frozenset[str]) -> bool:
    """Whether any gemm of the layer was recomputed."""
    return any(gemm_slot(layer, gemm).family in families for gemm in GEMMS)


def _judges(breach: Breach, families: frozenset[str]) -> list[str]:
    """Keys of the recomputed results of what reads an operand, in whatever layout: a wgrad is recomputed in turn."""
    readers = (gemm for gemm, read in GEMM_OPERANDS.items() if breach.slot.operand in dict(read))
    found = (gemm_slot(breach.slot.layer, gemm).family for gemm in readers)
    return [f"gemm-error|{family}" for family in found if family in families]


def scale_target(slot: Slot) -> Target:
    """The operand whose scale is at fault, in its main layout: a multiplier belongs to the operand."""
    return Target(operand=slot.operand, layout="tile" if slot.operand == "w" else "row")


def fallback_candidates(
    breaches: Breaches, evidence: Mapping[str, Evidence], families: frozenset[str]
) -> list[Candidate]:
    """Gemms that their own recomputed error, or the operands that they read, ask to run in BF16.

    Where a recomputed result is at hand it alone judges: an operand then asks for nothing (but in preset seed).
    """
    found = []
    for key, breach in breaches.items():
        rule = breach.rule
        if breach.severity != "act" or rule.remedy not in ("fallback", "unjudged", "scale"):
            continue
        flushed = _flushed_wgrad(breach, breaches)
        at_once = breach.instant or flushed
        if evidence[key].act < ACT_SAMPLES and not at_once:
            continue
        judge = rule.metric == "relative_error"
        for gemm in gemms_of(breach.slot):
            if rule.remedy != "fallback" and gemm_slot(breach.slot.layer, gemm).family in families:
                continue
            found.append(
                Candidate(
                    layer=breach.slot.layer,
                    target=Target(gemm=gemm),
                    action="bf16_fallback",
                    rule=rule.rule,
                    breaches=(breach,),
                    priority=4 if _leaf(breach) and not flushed else 2 if judge else 3,
                    because=describe(breach),
                    # A gemm that is recomputed in turn is one that a close look measures.
                    measured=judge or (rule.remedy != "fallback" and _is_judged(breach.slot.layer, families)),
                    instant=at_once and judge,
                )
            )
    return found


def nonfinite_candidates(origin: Origin) -> list[Candidate]:
    """Fallback of the gemms at the origin; advice where what they read, or the weights, are non-finite."""
    breaches = (origin.breach("act"), *origin.companions("act").values())
    where = f", and in {origin.other_layers} other layers after it" if origin.other_layers else ""
    because = f"{origin.words}{where}"
    common: dict[str, Any] = {"layer": origin.slot.layer, "rule": "non-finite", "breaches": breaches}
    if not origin.gemms:
        helps = way_out(origin.slot, origin.first_step, origin.clean_step, weights=origin.weights)
        why = f"{because}; no precision helps: {helps}"
        return [Candidate(target=Target(), action="advice", priority=0, because=why, **common)]
    return [
        Candidate(target=Target(gemm=gemm), action="bf16_fallback", priority=0, because=because, **common)
        for gemm in origin.gemms
    ]


def advice_candidates(causes: Iterable[Diagnosis], in_fp8_breach: Collection[str] = ()) -> list[Candidate]:
    """Advice on causes that no precision helps against; an FP8 fault of the same layer speaks instead of it."""
    return [
        Candidate(
            layer=cause.layer or RUN,
            target=Target(),
            action="advice",
            value=cause.value,
            rule=cause.cause,
            breaches=(),
            priority=0,
            because=cause.summary if cause.advice is None else f"{cause.summary}; {cause.advice}",
        )
        for cause in causes
        if cause.kind != "fp8"
        and cause.cause not in SPOKEN_FOR
        and (cause.kind == "hardware" or cause.layer not in in_fp8_breach)
    ]


def smoothing_candidates(causes: Iterable[Diagnosis], *, allowed: bool) -> list[Candidate]:
    """Gradient smoothing of the layers whose metrics fluctuate; one advice where nobody has opted for it."""
    found = []
    for cause in causes:
        if cause.cause != FLUCTUATING:
            continue
        common: dict[str, Any] = {"target": Target(), "rule": cause.cause, "breaches": (), "priority": 0}
        if not allowed:
            why = f"{cause.summary}; whether to smooth them is left to you"
            found.append(Candidate(layer=cause.layer or RUN, action="advice", because=why, **common))
            continue
        found += [
            Candidate(
                layer=layer,
                action="gradient_smoothing",
                value=SMOOTHING_BETA,
                because=cause.summary,
                **common,
            )
            for layer in _layers_of(cause)
        ]
    return found


def _layers_of(cause: Diagnosis) -> list[str]:
    named = cause.evidence.get("layers") or ([] if cause.layer is None else [cause.layer])
    return sorted({str(layer) for layer in named})


def _leaf(breach: Breach) -> bool:
    """A wgrad that is noisy or saturated: that goes no further, so it comes last when the budget is short."""
    return breach.slot.gemm == "wgrad" and not breach.instant


def _flushed_wgrad(breach: Breach, breaches: Breaches) -> bool:
    """A flushed wgrad harms more than a flushed dgrad: with flushed rows of dy, one sample is enough."""
    if breach.slot.gemm != "wgrad":
        return False
    dy = breaches.get(f"rows-flushed|{Slot(breach.slot.layer, operand='dy', layout='row').family}")
    return dy is not None and dy.severity == "act"


_WORDS = {
    "underflow_ratio": "vanishes in quantisation",
    "saturation_ratio": "saturates",
    "rows_flushed_ratio": "of the rows are flushed to zero",
    "relative_error": "off the high-precision result",
}


def describe(breach: Breach) -> str:
    """One breach in words: `'blocks.3.qkv' dgrad is 12 % off the high-precision result (limit 5 %)`."""
    label, metric, value = breach.slot.phrase, breach.rule.metric, breach.value
    if metric == "relative_error":
        return f"{label} is {percent(value)} {_WORDS[metric]} (limit {percent(breach.limit)})"
    if metric in _WORDS:
        return f"{label}: {percent(value)} {_WORDS[metric]} (limit {percent(breach.limit)})"
    if metric.endswith("_db"):
        return f"{label}: signal to quantisation noise is {value:.3g} dB (limit {breach.limit:.3g} dB)"
    return f"{label}: {metric} is {value:.4g} (limit {breach.limit:.4g})"


def percent(ratio: float) -> str:
    """`0.45 %`, three significant digits."""
    return f"{100.0 * ratio:.3g} %"


def signals(breaches: Iterable[Breach], evidence: Mapping[str, Evidence], step: int) -> list[dict[str, Any]]:
    """Breaches as the evidence of a decision."""
    return [
        {
            "rule": breach.rule.rule,
            "slot": breach.slot.to_wire(),
            "metric": breach.rule.metric,
            "value": breach.value,
            "threshold": breach.limit,
            "severity": breach.severity,
            "origin": breach.rule.origin,
            "first_step": evidence[breach.key].first_step if breach.key in evidence else step,
        }
        for breach in breaches
    ]
