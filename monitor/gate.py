"""Lets candidates become decisions: dwell, pins, plan, proposals, budget and mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp8_safeguard.monitor.alerts import Evidence
from fp8_safeguard.monitor.budget import fallbacks, fits
from fp8_safeguard.monitor.diagnosis import Diagnosis
from fp8_safeguard.monitor.plan import Decision, Plan, Target, json_ready
from fp8_safeguard.monitor.remedies import Candidate, percent, signals
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMM_OPERANDS
from fp8_safeguard.monitor.state import Change, PolicyState, Proposal, place, spot
from fp8_safeguard.monitor.thresholds import Preset, get_preset
from fp8_safeguard.monitor.wire import MODES

SETTLE_STEPS = 4
"""Steps that a scale change gets before the gemms behind it may fall back: it takes effect two steps after its evidence,
and two more show whether it helped."""


class PolicyConfigError(ValueError):
    """A policy setting outside what is allowed."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How a run is judged and what may be done about it. Validated when made; raises PolicyConfigError."""

    run: str = "run"
    """The run's id: decisions are named after it, `{run}-1` first."""
    preset: str = "floor"
    """Name of the threshold preset."""
    mode: str = "observe"
    """observe or advise: decisions are proposals. enforce: decisions change the plan."""
    hysteresis: int = 2
    """Consecutive samples in breach of a watch level that open an alert."""
    clear_samples: int = 3
    """Consecutive clear samples that resolve an alert."""
    nonfinite_samples: int = 2
    """Consecutive samples with NaN or Inf from one place that lead to a fallback there; a single one only alerts."""
    dwell_steps: int = 50
    """Steps that a spot rests after a change, in which it does not change again."""
    restore_samples: int = 5
    """Consecutive healthy samples that a gemm in fallback needs, after the dwell, to be restored."""
    budget_ratio: float = 0.15
    """Largest part of the linear layers' operations that may fall back to BF16."""
    pins: frozenset[str] = frozenset()
    """Layers that are left as they are."""

    def __post_init__(self) -> None:
        get_preset(self.preset)
        if self.mode not in MODES:
            raise PolicyConfigError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        for name in ("hysteresis", "clear_samples", "nonfinite_samples", "restore_samples"):
            if getattr(self, name) < 1:
                raise PolicyConfigError(
                    f"{name} is a number of samples from 1 upward, not {getattr(self, name)}"
                )
        if self.dwell_steps < 0:
            raise PolicyConfigError(f"dwell_steps is a number of steps from 0 upward, not {self.dwell_steps}")
        if not 0 <= self.budget_ratio <= 1:
            raise PolicyConfigError(f"budget_ratio is between 0 and 1, not {self.budget_ratio}")

    @property
    def thresholds(self) -> Preset:
        """The preset itself."""
        return get_preset(self.preset)


@dataclass
class Gate:
    """One step's decisions in the making; starts from the state and never touches it."""

    state: PolicyState
    config: PolicyConfig
    step: int
    plan_version: int
    evidence: Mapping[str, Evidence]
    causes: Sequence[Diagnosis] = ()
    plan: Plan = field(init=False)
    changes: dict[str, Change] = field(init=False)
    proposals: dict[str, Proposal] = field(init=False)
    advised: dict[str, int] = field(init=False)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = self.state.plan
        self.changes = dict(self.state.changes)
        # Once the mode is enforce nobody is asked any more: what the evidence still says is decided afresh.
        kept = {} if self.config.mode == "enforce" else self.state.proposals
        fresh = self.step - self.config.dwell_steps
        self.proposals = {key: made for key, made in kept.items() if made.last_step >= fresh}
        self.advised = {key: last for key, last in self.state.advised.items() if last >= fresh}

    def offer(self, candidate: Candidate, breaches: Mapping[str, Breach], *, in_bf16: bool = False) -> None:
        """Make it a decision, advice, or nothing. in_bf16: what it is about is configured so, and is left alone."""
        if candidate.action == "advice":
            self._advise(candidate, "")
        elif in_bf16:
            if candidate.rule == "non-finite":
                self._advise(candidate, "; the gemm runs in BF16 already, so the cause is not FP8")
        elif candidate.layer in self.config.pins or self._resting(candidate):
            return
        elif self._in_place(candidate):
            self._persists(candidate)
        elif candidate.action != "bf16_fallback":
            self._decide(
                candidate, f"the multiplier of {candidate.target.operand} goes to {candidate.value:g}", {}
            )
        elif not self._held(candidate):
            self._fall_back(candidate, breaches)

    def restore(self, layer: str, target: Target, healthy: int, values: Mapping[str, float]) -> None:
        """Back to the configured precision."""
        change = self.changes.get(spot(layer, target))
        seen = "its emulated result and all" if change is not None and change.by_result else "all"
        candidate = Candidate(
            layer=layer,
            target=target,
            action="restore",
            rule="probation",
            breaches=(),
            priority=4,
            because=f"{layer!r} {target.gemm}: {seen} that it reads was healthy in {healthy} samples",
        )
        if layer not in self.config.pins and not self._in_place(candidate):
            self._decide(
                candidate, "it goes back to FP8", {"healthy_samples": healthy, "values": dict(values)}
            )

    def _resting(self, candidate: Candidate) -> bool:
        change = self.changes.get(spot(candidate.layer, candidate.target))
        return change is not None and self.step < change.step + self.config.dwell_steps

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
        return whole is not None or (entry is not None and entry.value == candidate.value)

    def _persists(self, candidate: Candidate) -> None:
        entry = self.plan.find(candidate.layer, candidate.target, candidate.action)
        if candidate.rule == "non-finite" and entry is not None:
            self._advise(candidate, "; they persist with the gemm in BF16, so the cause is not FP8")

    def _held(self, candidate: Candidate) -> bool:
        """Whether a scale change of something that the gemm reads has yet to show its effect."""
        if candidate.rule == "non-finite":
            return False
        operands = {operand for operand, _ in GEMM_OPERANDS[candidate.target.gemm or "fprop"]}
        for operand in operands:
            target = Target(operand=operand, layout="tile" if operand == "w" else "row")
            change = self.changes.get(spot(candidate.layer, target))
            proposal = self.proposals.get(place(candidate.layer, target, "scale_multiplier"))
            steps = [made.step for made in (change, proposal) if made and made.action == "scale_multiplier"]
            if steps and self.step < max(steps) + SETTLE_STEPS:
                return True
        return False

    def _fall_back(self, candidate: Candidate, breaches: Mapping[str, Breach]) -> None:
        gemm = candidate.target.gemm or ""
        used = fallbacks(self.plan) | {
            (proposal.layer, proposal.gemm)
            for proposal in self.proposals.values()
            if proposal.action == "bf16_fallback" and proposal.gemm
        }
        before = self.state.costs.share(used)
        after = self.state.costs.share({*used, (candidate.layer, gemm)})
        budget = {"before": before, "after": after, "limit": self.config.budget_ratio}
        if not fits(after, self.config.budget_ratio):
            limit = percent(self.config.budget_ratio)
            why = f"{gemm} would take BF16 to {percent(after)} of the linear operations, beyond the budget of {limit}"
            self._advise(candidate, f"; {why}", {"budget": budget})
            return
        extra = {"budget": budget, "restorable": restorable(candidate, breaches)}
        self._decide(candidate, f"{gemm} goes to BF16", extra)

    def _decide(self, candidate: Candidate, remedy: str, extra: Mapping[str, Any]) -> None:
        proposed = self.config.mode != "enforce"
        state = "proposed" if proposed else "sent"
        decision = self._record(candidate, candidate.action, f"{candidate.because}; {remedy}", state, extra)
        if proposed:
            key = place(candidate.layer, candidate.target, candidate.action)
            self.proposals[key] = Proposal(
                self.step, self.step, decision.id, candidate.layer, candidate.target.gemm, candidate.action
            )
        else:
            self.plan = self.plan.with_decision(decision)
            key = spot(candidate.layer, candidate.target)
            self.changes[key] = change_of(decision, self.changes.get(key), self.step)

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
        cause = next((cause for cause in self.causes if cause.layer == candidate.layer), None)
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
            not_before_step=self.step + 1,
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


def change_of(decision: Decision, before: Change | None, step: int) -> Change:
    """The note of a change that a decision makes at its spot."""
    restores = before.restores if before else 0
    return Change(
        step=step,
        decision_id=decision.id,
        action=decision.action,
        restorable=bool(decision.evidence.get("restorable", False)),
        restores=restores + 1 if decision.action == "restore" else restores,
        # People's decisions and those on non-finite values have no sign of health; the first carry no such evidence.
        by_result=decision.rule != "non-finite" and decision.evidence.get("restorable") is False,
    )


def restorable(candidate: Candidate, breaches: Mapping[str, Breach]) -> bool:
    """Whether an operand that the gemm reads shows the fault too, so that its health can end the fallback."""
    if candidate.rule == "non-finite":
        return False
    read = GEMM_OPERANDS[candidate.target.gemm or "fprop"]
    return any(
        breach.slot.layer == candidate.layer and (breach.slot.operand, breach.slot.layout) in read
        for breach in (*breaches.values(), *candidate.breaches)
        if breach.rule.watch_over_median is None
    )
