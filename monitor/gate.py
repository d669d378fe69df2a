"""Lets candidates become decisions: dwell, pins, plan, proposals, budget and mode."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp8_safeguard.monitor.alerts import Evidence
from fp8_safeguard.monitor.budget import fallbacks, fits
from fp8_safeguard.monitor.diagnosis import Diagnosis, cause_of
from fp8_safeguard.monitor.plan import Decision, Plan, PlanEntry, Target, json_ready, step_after
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.remedies import Candidate, percent, signals
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, OPERANDS
from fp8_safeguard.monitor.state import Change, PolicyState, Proposal, place, spot
from fp8_safeguard.monitor.treatment import COSTS, Case, Choice, Remedy, clashes, shows
from fp8_safeguard.monitor.whatifs import WhatIfs

SETTLE_STEPS = 4
"""Steps that a scale change gets before the gemms behind it may fall back: it takes effect two steps after its evidence,
and two more show whether it helped."""
NO_SIGN_OF_HEALTH = ("non-finite", "late-nan")
"""Rules whose fallbacks nothing that is measured can end: people do."""
EXPIRED = "expired"
"""Rule of a restore at the end of an entry's time to live."""
WHOLLY_WRONG = 2.0
"""Relative error from which on a larger one says no more."""
LATE_STEPS = 16
"""Steps that it gets at most, where no sample says that it has been taken up."""


@dataclass
class Gate:
    """One step's decisions in the making; starts from the state and never touches it."""

    state: PolicyState
    config: PolicyConfig
    step: int
    plan_version: int
    evidence: Mapping[str, Evidence]
    causes: Sequence[Diagnosis] = ()
    newer: WhatIfs = field(default_factory=WhatIfs)
    """The step's own looks."""
    plan: Plan = field(init=False)
    changes: dict[str, Change] = field(init=False)
    proposals: dict[str, Proposal] = field(init=False)
    advised: dict[str, int] = field(init=False)
    decisions: list[Decision] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """Places of the plan that the step's evidence still asks for."""

    def __post_init__(self) -> None:
        self.plan = self.state.plan
        self.changes = dict(self.state.changes)
        # Once the mode is enforce nobody is asked any more: what the evidence still says is decided afresh.
        kept = {} if self.config.mode == "enforce" else self.state.proposals
        # Where samples are further apart than the dwell is long, one that did not ask is no sign that it is over.
        latest = self.state.looks.steps[-self.config.clear_samples :]
        fresh = min((self.step - self.config.dwell_steps, *latest))
        self.proposals = {key: made for key, made in kept.items() if made.last_step >= fresh}
        self.advised = {key: last for key, last in self.state.advised.items() if last >= fresh}

    def offer(self, candidate: Candidate, breaches: Mapping[str, Breach], *, in_bf16: bool = False) -> None:
        """Make it a decision, advice, or nothing. in_bf16: what it is about is configured so, and is left alone."""
        if candidate.action == "advice":
            self._advise(candidate, "")
        elif in_bf16:
            if candidate.rule == "non-finite":
                self._advise(candidate, "; the gemm runs in BF16 already, so the cause is not FP8")
        elif self.config.spares(candidate.layer):
            return
        elif self._resting(candidate):
            self._in_place(candidate)
        elif self._in_place(candidate):
            self._persists(candidate)
        elif candidate.action == "gradient_smoothing":
            self._decide(candidate, f"its gradients are smoothed with beta {candidate.value:g}", {})
        elif candidate.action != "bf16_fallback":
            self._decide(
                candidate, f"the multiplier of {candidate.target.operand} goes to {candidate.value:g}", {}
            )
        elif not self._held(candidate):
            self._fall_back(candidate, breaches)

    def may_take(self, layer: str, remedy: Remedy) -> bool:
        """Whether every entry of a remedy would find its spot free, and nothing in the plan that it contradicts."""
        if self.config.spares(layer) or clashes(self.plan, layer, remedy):
            return False
        if self.state.outcomes.has_failed(layer, remedy.name):
            return False
        places = [place(layer, target, remedy.action) for target in remedy.targets]
        return not any(self._rests(layer, target) for target in remedy.targets) and not any(
            key in self.proposals for key in places
        )

    def treat(self, case: Case, choice: Choice, measured_on: Sequence[str] = ()) -> None:
        """Decide a measured remedy: one decision for each entry, with one id of the remedy in their evidence.

        measured_on: the layers whose looks speak for this one; empty: its own.
        """
        remedy = choice.remedy
        found = f"{remedy.words}, the cheapest that what-ifs show to be healthy ({choice.words}"
        if measured_on:
            others = " and ".join(map(repr, measured_on))
            found += f", as measured on {others}, where the same fault began at the same time"
        name = f"{self.config.run}-{self.state.decisions_made + len(self.decisions) + 1}"
        shared = {"id": name, "name": remedy.name, "entries": len(remedy.targets)}
        looked = {**choice.to_wire(), "layers": list(measured_on or (case.layer,))}
        failed = self._failed_at(case.layer, remedy)
        for target in remedy.targets:
            candidate = Candidate(
                layer=case.layer,
                target=target,
                action=remedy.action,
                value=remedy.value,
                rule=case.rule,
                breaches=case.breaches,
                priority=0,
                because=case.because,
            )
            extra: dict[str, Any] = {"remedy": shared, "what_if": looked}
            instead = ""
            if failed:
                extra["replaces"] = [entry.decision_id for entry in failed]
                instead = (
                    f", in the place of {' and '.join(entry.action for entry in failed)}, which did not help"
                )
            self._decide(candidate, f"{found}){instead}", extra)

    def _failed_at(self, layer: str, remedy: Remedy) -> list[PlanEntry]:
        """Entries at the remedy's spots that were seen not to help."""
        spots = {spot(layer, target) for target in remedy.targets}
        found = []
        for entry in self.plan.entries:
            change = self.changes.get(spot(entry.layer, entry.target))
            name = change.remedy if change is not None and change.decision_id == entry.decision_id else None
            if spot(entry.layer, entry.target) in spots and name is not None:
                found += [entry] if self.state.outcomes.has_failed(layer, name) else []
        return found

    def restore(
        self,
        layer: str,
        target: Target,
        why: str,
        values: Mapping[str, Any],
        *,
        rule: str = "probation",
    ) -> None:
        """Back to the configured precision; the end of an entry's time was decided with it, and waits for nobody."""
        candidate = Candidate(
            layer=layer,
            target=target,
            action="restore",
            rule=rule,
            breaches=(),
            priority=4,
            because=f"{layer!r} {target.key}: {why}",
        )
        ends = rule == EXPIRED
        if ends or not (self.config.spares(layer) or self._in_place(candidate)):
            self._decide(candidate, "it goes back to the configured precision", values, ends=ends)

    def awaits(self, layer: str) -> bool:
        """Whether a scale or format of the layer waits for a person; it is kept waiting."""
        waiting = [
            key for key, made in self.proposals.items() if made.layer == layer and made.action in COSTS
        ]
        for key in waiting:
            self.proposals[key] = replace(self.proposals[key], last_step=self.step)
        return bool(waiting)

    def settles(self, layer: str) -> bool:
        """Whether a scale or format of the layer has yet to show its effect."""
        return any(self.fresh(change) for change in self._changes(layer) if change.action in COSTS)

    def falling(self, layer: str) -> bool:
        """Whether a gemm of the layer went to BF16 so lately that nobody has seen what that does."""
        return any(self.fresh(change) for change in self._changes(layer) if change.action == "bf16_fallback")

    def in_bf16(self, layer: str, gemm: str) -> bool:
        """Whether the plan runs it in BF16, or a proposal would."""
        key = place(layer, Target(gemm=gemm), "bf16_fallback")
        return (layer, gemm) in self.plan.fallen or key in self.proposals

    def rested_fallback(self, layer: str, gemm: str) -> bool:
        """Whether the policy itself put it into BF16, and that long ago."""
        change = self.changes.get(spot(layer, Target(gemm=gemm)))
        entry = self.plan.find(layer, Target(gemm=gemm), "bf16_fallback")
        mine = change is not None and entry is not None and change.decision_id == entry.decision_id
        return mine and not self._rests(layer, Target(gemm=gemm))

    def used(self, more: Sequence[tuple[str, str]] = ()) -> float:
        """Share of BF16 with what is in the plan, what is proposed, and more (layer, gemm)."""
        proposed = {
            (made.layer, made.gemm)
            for made in self.proposals.values()
            if made.action == "bf16_fallback" and made.gemm
        }
        return self.state.costs.share({*fallbacks(self.plan), *proposed, *more})

    def fits(self, more: Sequence[tuple[str, str]]) -> bool:
        """Whether the budget holds them besides."""
        return fits(self.used(more), self.config.budget_ratio)

    def _changes(self, layer: str) -> Iterator[Change]:
        targets = [Target(), *(Target(gemm=gemm) for gemm in GEMM_OPERANDS), *map(_main_target, OPERANDS)]
        found = (self.changes.get(spot(layer, target)) for target in targets)
        return (change for change in found if change is not None)

    def fresh(self, change: Change) -> bool:
        """Whether no sample has yet had the time to show what a change does."""
        unseen = self.plan_version < change.version and self.step < change.step + LATE_STEPS
        return self.step < change.step + SETTLE_STEPS or unseen

    def _rests(self, layer: str, target: Target) -> bool:
        change = self.changes.get(spot(layer, target))
        return change is not None and self.step < change.step + self.config.dwell_steps

    def _resting(self, candidate: Candidate) -> bool:
        return self._rests(candidate.layer, candidate.target)

    def _in_place(self, candidate: Candidate) -> bool:
        """Whether the plan or a proposal already asks for it; a proposal is kept alive by being asked for again."""
        key = place(candidate.layer, candidate.target, candidate.action)
        if key in self.proposals:
            self.proposals[key] = replace(self.proposals[key], last_step=self.step)
            return True
        if candidate.action == "restore":
            return False
        entry = self.plan.find(candidate.layer, candidate.target, candidate.action)
        whole = self.plan.find(candidate.layer, Target(), candidate.action)
        self.asked.add(key)
        return whole is not None or (entry is not None and entry.value == candidate.value)

    def _persists(self, candidate: Candidate) -> None:
        entry = self.plan.find(candidate.layer, candidate.target, candidate.action)
        change = self.changes.get(spot(candidate.layer, candidate.target))
        applied = change is None or self.plan_version >= change.version
        if candidate.rule == "non-finite" and entry is not None and applied:
            self._advise(candidate, "; they persist with the gemm in BF16, so the cause is not FP8")

    def _held(self, candidate: Candidate) -> bool:
        """Whether a scale change of something that the gemm reads has yet to show its effect."""
        if candidate.rule in NO_SIGN_OF_HEALTH:
            return False
        for operand, _ in GEMM_OPERANDS[candidate.target.gemm or "fprop"]:
            target = _main_target(operand)
            change = self.changes.get(spot(candidate.layer, target))
            proposal = self.proposals.get(place(candidate.layer, target, "scale_multiplier"))
            if change is not None and change.action == "scale_multiplier" and self.fresh(change):
                return True
            if proposal is not None and self.step < proposal.step + SETTLE_STEPS:
                return True
        return False

    def _fall_back(self, candidate: Candidate, breaches: Mapping[str, Breach]) -> None:
        gemm = candidate.target.gemm or ""
        before, after = self.used(), self.used([(candidate.layer, gemm)])
        budget = {"before": before, "after": after, "limit": self.config.budget_ratio}
        if not fits(after, self.config.budget_ratio):
            limit = percent(self.config.budget_ratio)
            why = f"{gemm} would take BF16 to {percent(after)} of the linear operations, beyond the budget of {limit}"
            self._advise(candidate, f"; {why}", {"budget": budget})
            return
        remark, emulation = self._emulation(candidate, gemm)
        shown = restorable(candidate, breaches) and not remark
        extra = {"budget": budget, "restorable": shown, **emulation}
        self._decide(candidate, f"{gemm} goes to BF16{remark}", extra)

    def _emulation(self, candidate: Candidate, gemm: str) -> tuple[str, dict[str, Any]]:
        """Whether the emulated result shows what the real one does: a remark where it does not, and evidence."""
        real = _judged(candidate, gemm)
        if real is None:
            return "", {}
        capped = min(real, WHOLLY_WRONG)
        look = self.newer.looks.get(candidate.layer)
        plain = None if look is None else look.plain(gemm)
        if plain is None:
            return "", {"unshown": capped}
        if shows(gemm, capped, plain):
            return "", {"emulated_error": plain.error}
        remark = f"; emulated, its FP8 result is healthy ({percent(plain.error)}) and shows nothing of it, so that no measurement says when it is over: a person restores it"
        return remark, {"emulated_error": plain.error, "unshown": capped}

    def _decide(
        self, candidate: Candidate, remedy: str, extra: Mapping[str, Any], *, ends: bool = False
    ) -> None:
        proposed = self.config.mode != "enforce" and not ends
        state = "proposed" if proposed else "sent"
        if self.config.ttl_steps is not None and candidate.action != "restore":
            extra = {**extra, "ttl_steps": self.config.ttl_steps}
        decision = self._record(candidate, candidate.action, f"{candidate.because}; {remedy}", state, extra)
        if proposed:
            key = place(candidate.layer, candidate.target, candidate.action)
            self.proposals[key] = Proposal(
                self.step, self.step, decision.id, candidate.layer, candidate.target.gemm, candidate.action
            )
        else:
            self.plan = self.plan.with_decision(decision)
            key = spot(candidate.layer, candidate.target)
            self.changes[key] = change_of(decision, self.changes.get(key), self.step, self.plan)

    def _advise(self, candidate: Candidate, remark: str, extra: Mapping[str, Any] | None = None) -> None:
        key = place(candidate.layer, candidate.target, candidate.rule)
        if key not in self.advised:
            self._record(candidate, "advice", candidate.because + remark, "proposed", extra or {})
        self.advised[key] = self.step

    def _record(
        self, candidate: Candidate, action: str, reason: str, state: str, extra: Mapping[str, Any]
    ) -> Decision:
        shown = signals(candidate.breaches, self.evidence, self.step)
        first = min((signal["first_step"] for signal in shown), default=self.step)
        evidence = {"signals": shown, "first_step": first, "plan_version": self.plan_version, **extra}
        cause = cause_of(self.causes, candidate.layer, candidate.rule)
        if cause is not None:
            evidence["cause"] = cause.to_wire()
        decision = Decision(
            id=f"{self.config.run}-{self.state.decisions_made + len(self.decisions) + 1}",
            run=self.config.run,
            step=self.step,
            layer=candidate.layer,
            target=candidate.target,
            action=action,
            value=candidate.value if action == candidate.action else None,
            rule=candidate.rule,
            reason=reason,
            evidence=json_ready(evidence),
            mode=self.config.mode,
            state=state,
            not_before_step=step_after(self.step),
        )
        self.decisions.append(decision)
        return decision

    def result(self) -> PolicyState:
        """The state with what was decided."""
        return replace(
            self.state,
            plan=self.plan,
            changes=self.changes,
            proposals=self.proposals,
            advised=self.advised,
            decisions_made=self.state.decisions_made + len(self.decisions),
        )


def change_of(decision: Decision, before: Change | None, step: int, plan: Plan) -> Change:
    """The note of a change that a decision makes at its spot. plan: the one that holds it."""
    restores = before.restores if before else 0
    remedy = decision.evidence.get("remedy")
    return Change(
        step=step,
        decision_id=decision.id,
        action=decision.action,
        restorable=bool(decision.evidence.get("restorable", False)),
        restores=restores + 1 if decision.action == "restore" else restores,
        # People's decisions and those on non-finite values have no sign of health; the first carry no such evidence.
        by_result=decision.rule not in NO_SIGN_OF_HEALTH and decision.evidence.get("restorable") is False,
        version=plan.version,
        remedy=remedy["name"] if isinstance(remedy, Mapping) else None,
        unshown=float(decision.evidence.get("unshown") or 0.0),
    )


def _judged(candidate: Candidate, gemm: str) -> float | None:
    """The real error of a GEMM whose recomputed result is what asks; infinite where it is no number."""
    found = [
        breach.value
        for breach in candidate.breaches
        if breach.slot.gemm == gemm and breach.rule.metric == "relative_error"
    ]
    return None if not found else max(math.inf if math.isnan(value) else value for value in found)


def _main_target(operand: str) -> Target:
    return Target(operand=operand, layout="tile" if operand == "w" else "row")


def restorable(candidate: Candidate, breaches: Mapping[str, Breach]) -> bool:
    """Whether an operand that the gemm reads shows the fault too, so that its health can end the fallback."""
    if candidate.rule in NO_SIGN_OF_HEALTH:
        return False
    read = GEMM_OPERANDS[candidate.target.gemm or "fprop"]
    return any(
        breach.slot.layer == candidate.layer and (breach.slot.operand, breach.slot.layout) in read
        for breach in (*breaches.values(), *candidate.breaches)
        if breach.rule.watch_over_median is None
    )
