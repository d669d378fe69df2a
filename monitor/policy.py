"""The policy: from a step's statistics to alerts and decisions.

`decide(state, observation, config) -> (state, decisions)` is pure: no clock, no I/O, no random number, and nothing in it
depends on the order of the slots. It runs once a step, in step order.

1. Every slot is held against the preset's thresholds (`signals`), and breaches that last become alerts (`alerts`).
2. Breaches ask for remedies (`remedies`). The cheapest that what-ifs show to be healthy is taken (`prescribing`,
   `treatment`): a scale, a format; BF16 for single gemms where nothing else helps, or where it cannot wait.
3. A remedy becomes a decision (`gate`) if its spot was at rest for the dwell, its layer is neither pinned nor excluded, it is
   not already in the plan or proposed, and the fallback budget holds it. Where the budget does not, people get advice, once.
4. Each decision is graded once it has had its time (`outcomes`); a remedy that did not help gives way to the next.
5. A gemm in fallback is restored after the dwell, once what it reads has been healthy for some samples (and its emulated
   FP8 result, where only the result showed the fault, and the emulation has shown it too: otherwise a person restores it), a
   scale or format once looks show the plain configuration to be healthy (`restoring`); each time the same spot returns, the
   wait doubles.

In `enforce` decisions change the plan; in `observe` and `advise` they are proposed, and `approve` changes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.alerts import Alert, Evidence, follow_alerts
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.diagnosis import Diagnosis, diagnose
from fp8_safeguard.monitor.gate import Gate
from fp8_safeguard.monitor.interventions import approve, kill, reject, revert
from fp8_safeguard.monitor.lastlayers import offer_last_layers
from fp8_safeguard.monitor.nonfinite import Origin
from fp8_safeguard.monitor.observation import StepObservation, observe
from fp8_safeguard.monitor.outcomes import grade
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policyconfig import PolicyConfig, PolicyConfigError
from fp8_safeguard.monitor.prescribing import prescribe
from fp8_safeguard.monitor.remedies import (
    Candidate,
    advice_candidates,
    fallback_candidates,
    nonfinite_candidates,
    pair_candidates,
    scale_candidates,
    smoothing_candidates,
)
from fp8_safeguard.monitor.restoring import restore
from fp8_safeguard.monitor.runwatch import with_loss
from fp8_safeguard.monitor.signals import Breach, SlotList, history_values
from fp8_safeguard.monitor.state import PolicyState
from fp8_safeguard.monitor.view import StepView, look
from fp8_safeguard.monitor.whatifs import WhatIfs

__all__ = [
    "Alert",
    "PolicyConfig",
    "PolicyConfigError",
    "PolicyState",
    "StepObservation",
    "approve",
    "budget_used_ratio",
    "decide",
    "kill",
    "observe",
    "reject",
    "revert",
]

RELEARN_SAMPLES = 32
"""A slot beyond a level relative to its own median for this long has a new normal: it enters the history again."""


def decide(
    state: PolicyState, step: StepObservation, config: PolicyConfig
) -> tuple[PolicyState, tuple[Decision, ...]]:
    """The state after that step and what was decided in it. A step not after the last decided one changes nothing.

    The alerts open afterwards are the new state's `alerts`.
    """
    if state.last_step is not None and step.step <= state.last_step:
        return state, ()
    view = look(state, step, config)
    trends = state.trends.added(view)
    causes = diagnose(view, trends)
    loss = step.run.get("loss")
    current = replace(
        state,
        last_step=step.step,
        clean_step=view.clean_step,
        evidence=view.evidence,
        alerts=_alerts(view),
        costs=state.costs.learned(step.slots, step.stats),
        loss_scale=step.run.get("loss_scale"),
        losses=with_loss(state.losses, loss, jumped=view.jump is not None),
        trends=trends,
    )
    newer = _looks(state, view)
    gate = Gate(current, config, step.step, step.plan_version, view.evidence, causes, newer)
    looks = state.looks.added(newer)
    prescribe(gate, view, _candidates(view, causes), looks)
    offer_last_layers(gate, view, state.underflow)
    probation = restore(gate, view, newer)
    decided = replace(gate.result(), probation=probation, underflow=state.underflow.added(view))
    return _remembered(decided, gate.decisions, view, looks), tuple(gate.decisions)


def _remembered(
    decided: PolicyState, decisions: Sequence[Decision], view: StepView, looks: WhatIfs
) -> PolicyState:
    """The state with the step in its histories, with the looks that still hold, and with the grades that are due."""
    history = decided.history
    if view.origin is None:
        # What a non-finite step measured elsewhere is no norm for anything.
        admit = _admitted(view.compiled, view.found, view.evidence)
        history = history.added(view.compiled.keys, history_values(view.compiled, view.measures), admit)
    graded, grades = grade(decided.outcomes, decided.plan, view)
    outcomes = graded.noted(decisions, decided.plan)
    return replace(
        decided,
        history=history,
        looks=looks.without(made.layer for made in decisions if made.state == "sent"),
        outcomes=outcomes,
        grades={**grades, **outcomes.crowded_out(graded, decisions)},
    )


def _looks(state: PolicyState, view: StepView) -> WhatIfs:
    """The sample's looks, of layers that have the precision that the plan gives them."""
    newer = WhatIfs.of(view)
    changed: dict[str, int] = {}
    for key, change in state.changes.items() if newer.looks else ():
        layer = key.rpartition("|")[0]
        changed[layer] = max(changed.get(layer, 0), change.version)
    return newer.without(layer for layer, version in changed.items() if view.seen.plan_version < version)


def _candidates(view: StepView, causes: Sequence[Diagnosis]) -> list[Candidate]:
    return [
        *scale_candidates(view.breaches, view.compiled.families),
        *pair_candidates(view.pairs),
        *fallback_candidates(view.breaches, view.evidence, view.compiled.families),
        *_nonfinite(view.origin, view.breaches),
        *smoothing_candidates(causes, allowed=view.config.gradient_smoothing),
        *advice_candidates(causes, {breach.layer for breach in view.breaches.values() if _is_fp8s(breach)}),
    ]


def _is_fp8s(breach: Breach) -> bool:
    """Whether it asks for a precision: then the layer has an FP8 fault, whatever else it has."""
    return breach.severity == "act" and breach.rule.remedy != "none"


def budget_used_ratio(state: PolicyState, config: PolicyConfig) -> float:
    """Part of the fallback budget that the plan uses: 1 when it is full."""
    share = state.costs.share(fallbacks(state.plan))
    return share / config.budget_ratio if config.budget_ratio else float(share > 0)


def _alerts(view: StepView) -> dict[str, Alert]:
    """Open alerts after a step. What a gemm would do in FP8 that the plan has taken out of it is no news."""
    alerts = view.state.alerts
    known = {signal.key for alert in alerts.values() for signal in alert.live}
    told = {
        key: breach
        for key, breach in view.everything.items()
        if key in known or breach.place is None or not view.shadow.fallen(breach.place)
    }
    return follow_alerts(
        alerts,
        view.evidence,
        told,
        view.seen.step,
        view.config.hysteresis,
        view.shadow.what_if,
        view.state.clean_step,
    )


def _nonfinite(origin: Origin | None, breaches: Mapping[str, Breach]) -> list[Candidate]:
    if origin is None or breaches[origin.key].severity != "act":
        return []
    return nonfinite_candidates(origin)


def _admitted(
    compiled: SlotList, found: Iterable[Breach], evidence: Mapping[str, Evidence]
) -> NDArray[np.bool_]:
    """Which values [own, 2] enter the history: not those beyond a level relative to it, unless for long.

    What reaches an act level never does: a fault is not a new normal, however long it lasts.
    """
    admit = np.ones((len(compiled.own), 2), dtype=bool)
    for breach in found:
        row = compiled.own_row.get(breach.slot.key)
        relative = breach.rule.watch_over_median is not None
        recent = breach.severity == "act" or evidence[breach.key].watch <= RELEARN_SAMPLES
        if relative and row is not None and recent:
            admit[row, 1 if breach.rule.metric == "kurtosis" else 0] = False
    return admit
