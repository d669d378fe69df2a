"""Chooses, layer by layer, what to do about what a step asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8_safeguard.monitor.alongside import waits_for_scale
from fp8_safeguard.monitor.gate import SETTLE_STEPS, Gate
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.precision import BF16
from fp8_safeguard.monitor.remedies import Candidate
from fp8_safeguard.monitor.slots import Slot, gemms_of
from fp8_safeguard.monitor.treatment import Case, Choice, choices, common, healthy, is_reproduced, reaches
from fp8_safeguard.monitor.whatifs import Look, WhatIfs

if TYPE_CHECKING:
    from fp8_safeguard.monitor.shadow import Shadow
    from fp8_safeguard.monitor.view import StepView

LOOK_WAIT = 4
"""Samples from a layer's first breach, its own included, that the close look at it is waited for: eight layers at once are
looked at two a sample, and a client that has not by then does not."""
LAYERS_LOOKED_AT = 2
"""Layers that have to be measured before a remedy is given to others with the same fault."""
SHORT_BUDGET = 0.5
"""Part of the budget in use from which BF16 is worth replacing by what costs nothing."""


@dataclass(frozen=True, kw_only=True)
class _Ill:
    """A layer with what it asks for and what was measured of it."""

    case: Case
    fallbacks: tuple[Candidate, ...]
    """Of gemms that are not in BF16 yet."""
    scales: tuple[Candidate, ...]
    look: Look | None
    found: tuple[Choice, ...]
    waited: bool
    """Whether no look is to be expected any more."""

    @property
    def is_judged(self) -> bool:
        """Whether a look of now has said that nothing cheaper helps."""
        fresh = self.look is not None and self.look.age == 0
        seen = self.look is not None and (fresh or is_reproduced(self.case, self.look))
        return seen and not self.found


def prescribe(gate: Gate, view: StepView, candidates: Sequence[Candidate], looks: WhatIfs) -> None:
    """Offer every candidate, or a measured remedy in the place of those of its layer."""
    offers = [each for each in candidates if not each.measured]
    asked: dict[str, list[Candidate]] = {}
    for each in candidates:
        if each.measured and not _is_cleared(each, looks):
            asked.setdefault(each.layer, []).append(each)
    ill = []
    for layer in sorted(asked):
        found = _examine(gate, view, sorted(asked[layer], key=lambda each: each.order), looks)
        if found is not None:
            ill.append(found)
        else:
            # In BF16 by now: that they still ask for it keeps it there.
            offers += [each for each in asked[layer] if each.target.gemm]
            _replace_fallback(gate, view, asked[layer], looks)
    treated = _treat(gate, ill)
    for group in _groups([each for each in ill if each.case.layer not in treated]):
        alike = _treat_alike(gate, group, ill)
        left = [each for each in group if each.case.layer not in alike]
        at_once = gate.fits([(each.case.layer, gemm) for each in left for gemm in each.case.concerned])
        blind = not looks.looks
        offers += [
            candidate for each in left for candidate in _without_remedy(each, at_once=at_once, blind=blind)
        ]
    began = {each.case.layer: each.case.first_step for each in ill}
    # Scales come first in their order.
    for each in sorted(offers, key=lambda candidate: candidate.order):
        if each.layer in began and waits_for_scale(gate, each, began[each.layer]):
            continue
        # In float32 there is no format to blame, but a plan may still have to say which gemm must not go to FP8.
        in_bf16 = view.shadow.configured(each.layer, each.target) == BF16
        gate.offer(each, view.breaches, in_bf16=in_bf16)


def _examine(gate: Gate, view: StepView, asked: Sequence[Candidate], looks: WhatIfs) -> _Ill | None:
    """None where all that is ill runs in BF16, by the plan or as it is configured."""
    layer = asked[0].layer
    open_ = [
        each for each in asked if each.target.gemm and not _is_out(gate, view.shadow, layer, each.target.gemm)
    ]
    scales = [each for each in asked if not each.target.gemm]
    if not open_ and not (scales and not _all_out(gate, view.shadow, scales)):
        return None
    case = _case(view, layer, open_, scales)
    seen = looks.looks.get(layer)
    found = (
        () if seen is None else choices(case, seen, gate.plan, lambda remedy: gate.may_take(layer, remedy))
    )
    return _Ill(
        case=case,
        fallbacks=tuple(open_),
        scales=tuple(scales),
        look=seen,
        found=tuple(found),
        waited=_waited(view, layer, looks) >= LOOK_WAIT,
    )


def _case(view: StepView, layer: str, open_: Sequence[Candidate], scales: Sequence[Candidate]) -> Case:
    asking = [*open_, *scales]
    breaches = {breach.key: breach for each in asking for breach in each.breaches}
    judged: dict[str, float] = {}
    for each in open_:
        for breach in each.breaches:
            if breach.slot.gemm:
                judged[breach.slot.gemm] = max(judged.get(breach.slot.gemm, 0.0), breach.value)
    # A GEMM in breach that waits for its second sample is cured with the others, or made no worse.
    failing = {each.target.gemm for each in open_ if each.target.gemm}
    lost = {each.target.operand for each in scales if each.target.operand}
    steps = [view.evidence[key].first_step for key in breaches if key in view.evidence]
    first = asking[0]
    return Case(
        layer=layer,
        breaches=tuple(breaches.values()),
        failing=frozenset(failing),
        judged=judged,
        vanishing=any(len(each.breaches) > 1 for each in open_),
        lost=frozenset(lost),
        first_step=min(steps, default=view.seen.step),
        because=first.because,
        rule=first.rule,
    )


def _treat(gate: Gate, ill: Iterable[_Ill]) -> set[str]:
    """Give the layers that were looked at the cheapest remedy that helps; those that are settled for now."""
    settled = set()
    for each in ill:
        layer = each.case.layer
        if gate.awaits(layer) or gate.settles(layer):
            settled.add(layer)
        elif each.found and not gate.falling(layer):
            gate.treat(each.case, each.found[0])
            settled.add(layer)
    return settled


def _groups(ill: Sequence[_Ill]) -> Iterator[list[_Ill]]:
    """Layers by their fault: the same gemm fails first, or the same operand is lost, and it began at the same time."""
    rest = list(ill)
    while rest:
        yield [each for each in rest if _alike(rest[0].case, each.case)]
        rest = [each for each in rest if not _alike(rest[0].case, each.case)]


def _alike(one: Case, other: Case) -> bool:
    began = abs(one.first_step - other.first_step)
    # Where hardly anything of an operand is lost its rule is silent.
    same_operand = not (one.lost and other.lost) or one.lost == other.lost
    return one.kind == other.kind and same_operand and began <= SETTLE_STEPS


def _treat_alike(gate: Gate, group: Sequence[_Ill], everyone: Sequence[_Ill]) -> set[str]:
    """Where one fault hits more layers than the budget holds: the remedy measured on some of them for the others."""
    unseen = [each for each in group if each.fallbacks and not each.found and not each.is_judged]
    gemms = [(each.case.layer, gemm) for each in unseen for gemm in each.case.concerned]
    looked = [each for each in everyone if each.found and _alike(group[0].case, each.case)]
    if len(looked) < LAYERS_LOOKED_AT or gate.fits(gemms):
        return set()
    choice = common([list(each.found) for each in looked])
    if choice is None:
        return set()
    treated: set[str] = set()
    for each in unseen:
        layer, remedy = each.case.layer, choice.remedy
        if reaches(each.case, remedy) and gate.may_take(layer, remedy) and not gate.falling(layer):
            gate.treat(each.case, choice, [other.case.layer for other in looked])
            treated.add(layer)
    return treated


def _is_cleared(candidate: Candidate, looks: WhatIfs) -> bool:
    """Whether an operand alone asks for a gemm's fallback, and the look of now shows the gemm to be healthy."""
    seen, gemm = looks.looks.get(candidate.layer), candidate.target.gemm
    if seen is None or seen.age or gemm is None or len(candidate.breaches) != 1:
        return False
    plain = seen.plain(gemm)
    return candidate.breaches[0].slot.gemm is None and plain is not None and healthy(gemm, plain)


def _without_remedy(ill: _Ill, *, at_once: bool, blind: bool) -> list[Candidate]:
    """BF16 once the look has come and shown nothing cheaper, or does not come; at once for what is too bad to wait.

    at_once: whether the budget holds all layers with the same fault. Where it does not, BF16 is no cure, and the look may
    show one. blind: whether nothing at all is looked at; then the neutral scale is worth a try.
    """
    if ill.is_judged or (ill.waited and not ill.found):
        return [*ill.fallbacks, *(ill.scales if blind else ())]
    return [each for each in ill.fallbacks if each.instant and at_once]


def _replace_fallback(gate: Gate, view: StepView, asked: Sequence[Candidate], looks: WhatIfs) -> None:
    """Once a fault has outlived the dwell in BF16 and the budget is short: the remedy that costs nothing, if there is one.

    The gemms go back to FP8 when their emulated results have been healthy with it.
    """
    layer = asked[0].layer
    seen = looks.looks.get(layer)
    gemms = {each.target.gemm for each in asked if each.target.gemm}
    if seen is None or seen.age or not gemms or gate.awaits(layer) or gate.settles(layer):
        return
    if gate.used() < SHORT_BUDGET * gate.config.budget_ratio:
        return
    if not all(gate.rested_fallback(layer, gemm) for gemm in gemms):
        return
    case = _case(view, layer, [each for each in asked if each.target.gemm], [])
    found = choices(case, seen, gate.plan, lambda remedy: gate.may_take(layer, remedy))
    if found:
        why = f"{case.because}, and has been for as long as it runs in BF16"
        gate.treat(replace(case, because=why), found[0])


def _is_out(gate: Gate, shadow: Shadow, layer: str, gemm: str) -> bool:
    return gate.in_bf16(layer, gemm) or shadow.configured(layer, Target(gemm=gemm)) == BF16


def _all_out(gate: Gate, shadow: Shadow, scales: Iterable[Candidate]) -> bool:
    return all(
        _is_out(gate, shadow, each.layer, gemm)
        for each in scales
        for gemm in gemms_of(Slot(each.layer, operand=each.target.operand, layout=each.target.layout))
    )


def _waited(view: StepView, layer: str, looks: WhatIfs) -> int:
    """Samples since the layer's first breach that a client flags it for."""
    began = [
        view.evidence[key].first_step
        for key, breach in view.breaches.items()
        if breach.layer == layer and (breach.slot.gemm or breach.rule.watch_over_median is None)
    ]
    return looks.samples_since(min(began, default=view.seen.step))
