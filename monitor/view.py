"""All that one step shows, read once and handed to every rule."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.alerts import CURED_STEPS, AnyBreach, Evidence, follow_evidence
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.nonfinite import Began, Origin, broken_sums, find_origin, read_key
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.remedies import pair_up
from fp8_safeguard.monitor.runwatch import RunBreach, loss_jump, run_breaches, says_something
from fp8_safeguard.monitor.shadow import Shadow
from fp8_safeguard.monitor.sight import Sight
from fp8_safeguard.monitor.signals import Breach, Measures, SlotList, compile_slots, find_breaches
from fp8_safeguard.monitor.state import PolicyState, spot

LOWEST_SEARCH = 1.0
"""A gradient scaler that has gone below this looks for nothing: at this scale gradients overflow as they are."""


@dataclass(frozen=True, kw_only=True)
class StepView:
    """One step against the thresholds and against the run's memory. Nothing here is changed by anybody."""

    seen: StepObservation
    state: PolicyState
    """What was remembered before the step."""
    config: PolicyConfig
    compiled: SlotList
    measures: Measures
    """Columns and derived metrics, one value a slot of `seen.slots`."""
    medians: NDArray[np.float64]
    """[own, 2]: each slot's own medians before the step (`SlotList.own`, `History.medians`)."""
    found: tuple[Breach, ...]
    """Every breach, as the thresholds say it."""
    breaches: Mapping[str, Breach]
    """By key: of several experts the worst, and rules in pairs only as far as their partner agrees."""
    pairs: tuple[tuple[Breach, Breach], ...]
    """(x row, w tile) of layers whose activations and weights vanish together."""
    origin: Origin | None
    """Where non-finite values begin."""
    jump: RunBreach | None
    """A loss far above the recent ones."""
    everything: Mapping[str, AnyBreach]
    """The breaches with what is for people only: sums that are none, and the run's own values."""
    evidence: Mapping[str, Evidence]
    """How long each breach has lasted, this step included."""
    sight: Sight
    scale_falls: bool
    """Whether a gradient scaler is looking for its scale."""
    shadow: Shadow
    """What of it ran in a higher precision than FP8."""

    @property
    def clean_step(self) -> int | None:
        """The latest step, this one included, in which no tensor, loss or gradient norm was NaN or Inf."""
        told = (self.seen.run.get(name) for name in ("loss", "gradient_norm"))
        clean = self.origin is None and all(value is None or math.isfinite(value) for value in told)
        return self.seen.step if clean else self.state.clean_step

    def runs_above(self, layer: str, gemm: str) -> bool:
        """Whether a gemm did not run in FP8: as it is configured, or for long enough by the plan."""
        target = Target(gemm=gemm)
        if self.shadow.configured(layer, target) is not None:
            return True
        entry = self.state.plan.find(layer, target, "bf16_fallback")
        if entry is None or self.seen.step < entry.not_before_step + CURED_STEPS:
            return False
        change = self.state.changes.get(spot(layer, target))
        return change is None or self.seen.plan_version >= change.version


def look(state: PolicyState, step: StepObservation, config: PolicyConfig) -> StepView:
    """Hold one step against thresholds and memory."""
    compiled = compile_slots(step.slots, config.thresholds, config.baseline)
    measures = Measures(step.stats)
    medians = compiled.with_learned(state.history.medians(compiled.keys))
    found = find_breaches(compiled, measures, medians)
    breaches, pairs = pair_up(_worst_of_each_key(found))
    falls = _scale_falls(state, step)
    origin = find_origin(
        step.slots,
        step.indices,
        measures["nonfinite_count"],
        step=step.step,
        clean_step=state.clean_step,
        began=_began(state),
        scalars=step.scalars,
    )
    if origin is not None:
        breaches[origin.key] = origin.breach(_nonfinite_severity(origin, state, config, falls))
    jump = loss_jump(step.run.get("loss"), state.losses)
    everything = _with_watched(breaches, step, state, falls)
    if jump is not None:
        everything[jump.key] = jump
    if origin is not None:
        everything.update(origin.companions(breaches[origin.key].severity))
    sight = Sight(compiled, step.stats)
    observed = _observer(sight, step, falls)
    return StepView(
        seen=step,
        state=state,
        config=config,
        compiled=compiled,
        measures=measures,
        medians=medians,
        found=tuple(found),
        breaches=breaches,
        pairs=tuple(pairs),
        origin=origin,
        jump=jump,
        everything=everything,
        evidence=follow_evidence(state.evidence, everything, observed, step.step, config.clear_samples),
        sight=sight,
        scale_falls=falls,
        shadow=Shadow(compiled, measures, breaches, fallbacks(state.plan), state.history),
    )


def _worst_of_each_key(found: Iterable[Breach]) -> dict[str, Breach]:
    """Several experts of a layer share a key: the worst one speaks."""
    worst: dict[str, Breach] = {}
    for breach in found:
        key = breach.key
        if key not in worst or breach.rank > worst[key].rank:
            worst[key] = breach
    return worst


def _with_watched(
    breaches: Mapping[str, Breach], step: StepObservation, state: PolicyState, scale_falls: bool
) -> dict[str, AnyBreach]:
    """With what is for people only: sums that are none, and the run's own values."""
    rows = {key: old.watch for key, old in state.evidence.items() if not old.clear}
    spoken_of = {breach.slot.key for breach in breaches.values()}
    found = (breach for breach in broken_sums(step.slots, step.stats) if breach.slot.key not in spoken_of)
    broken = {breach.key: breach for breach in found}
    return {**breaches, **broken, **run_breaches(step.run, rows, scale_falls=scale_falls)}


def _scale_falls(state: PolicyState, step: StepObservation) -> bool:
    """A gradient scaler looks for its scale by overflowing: that is its way, not a fault."""
    scale = step.run.get("loss_scale")
    before = state.loss_scale
    return scale is not None and before is not None and LOWEST_SEARCH <= scale < before


def _observer(sight: Sight, step: StepObservation, scale_falls: bool) -> Callable[[str], bool]:
    def observed(key: str) -> bool:
        of_run = says_something(key, step.run, scale_falls=scale_falls)
        if of_run is not None:
            return of_run
        rule, _, family = key.partition("|")
        if rule == NON_FINITE.rule:
            layer, family = read_key(key)
            if not family:
                return sight.shows_layer(layer)
            return sight.shows_whole(family)
        return sight.shows(rule, family)

    return observed


def _nonfinite_severity(origin: Origin, state: PolicyState, config: PolicyConfig, scale_falls: bool) -> str:
    """act once the place has been the origin in enough consecutive samples."""
    before = state.evidence.get(origin.key)
    samples = before.watch + 1 if before is not None and before.clear == 0 else 1
    if not origin.forward and scale_falls:
        return "watch"
    return "act" if samples >= config.nonfinite_samples else "watch"


def _began(state: PolicyState) -> list[Began]:
    """Where non-finite values began that were there in the latest sample, the earliest first."""
    found = [
        signal
        for alert in state.alerts.values()
        if alert.rule == NON_FINITE.rule
        for signal in alert.live
        if signal.key in state.evidence
        and not state.evidence[signal.key].clear
        and not read_key(signal.key)[1]
    ]
    found.sort(key=lambda signal: (signal.first_step, signal.key))
    return [
        Began(signal.slot, signal.value, signal.first_step, signal.clean_step)
        for signal in found
        if signal.slot is not None
    ]
