"""What the policy remembers of slow signals, and the causes that last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from fp8_safeguard.monitor.attribution import NONFINITE, find_causes, observed
from fp8_safeguard.monitor.cause import Finding
from fp8_safeguard.monitor.fp8causes import GROUP, SCALE_CAUSES
from fp8_safeguard.monitor.othercauses import is_spike
from fp8_safeguard.monitor.plan import json_ready
from fp8_safeguard.monitor.series import AS_THEY_COME, Series
from fp8_safeguard.monitor.symptoms import Symptoms

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

STUCK = "stuck-scale"
SHARPENS = 3
"""Samples within which a scale that is off may turn out to stand still: what it is and what it follows may be unknown at
first. After that a cause stays as it was told."""

SHAKEN_SAMPLES = 32
"""Samples after a jump of the loss in which what starts in gradients and routers is its consequence: unusual data are the norm
of the loss after half a dozen samples, and empty experts for longer."""

_ALONG_TOKENS = ("token-imbalance", "qk-growth")


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """A cause that samples have spoken for, told or not yet."""

    said: Mapping[str, Any]
    """The diagnosis, as on the wire. Once told it stays as it is for as long as it lasts, but for SHARPENS."""
    first_step: int
    samples: int = 1
    """In a row."""
    clear: int = 0
    """Samples in a row that could have shown it and did not."""
    told: bool = False
    module: str | None = None


@dataclass(frozen=True)
class Trends:
    """Immutable: `added` gives a new one."""

    series: Series = field(default_factory=Series)
    causes: Mapping[str, Lasting] = field(default_factory=dict)
    """By group: of one group one cause at a time."""
    nonfinite_steps: int = 0
    """Samples with a loss, a gradient norm or a tensor that is not finite, but for gradients of a scaler that looks for its
    scale. Counted with or without a scaler."""
    shaken: int = 0
    """Samples for which a jump of the loss explains what starts."""
    reaches: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)
    """Layers that show each cause at the latest step; not stored."""

    def added(self, view: StepView) -> Trends:
        """With one more step."""
        told = {group: lasting for group, lasting in self.causes.items() if lasting.told}
        seen = Symptoms(view, self.series)
        found, values = find_causes(seen, told, shaken=self.shaken > 0), observed(seen)
        if self.shaken:
            # The layers get used to unusual data before the loss does.
            found = [
                finding
                for finding in found
                if finding.said.cause != "loss-spike" or finding.group in self.causes
            ]
        spiking = any(is_spike(lasting.said["name"]) for lasting in told.values())
        spiking |= any(is_spike(finding.said.cause) for finding in found)
        shaken = SHAKEN_SAMPLES if spiking else max(self.shaken - 1, 0)
        if view.origin is not None:
            values = {}
        elif any(finding.group.startswith(GROUP) for finding in found):
            # What a fault measures is no norm, and gradients that come and go with it do not fluctuate by themselves.
            kept = AS_THEY_COME - {"distortion"}
            values = {key: value for key, value in values.items() if key[0] in kept}
        reaches = {finding.group: finding.said.reaches for finding in found}
        values = {
            key: value
            for key, value in values.items()
            # What routers do meanwhile is no norm either: an expert that stays empty is told afterwards.
            if not _is_spoken_of(key, told) and not (shaken and key[0] == "load_min")
        }
        broken = self.nonfinite_steps + _is_broken(view)
        return Trends(self.series.added(values), self._followed(found, view), broken, shaken, reaches)

    def _followed(self, found: list[Finding], view: StepView) -> dict[str, Lasting]:
        after = {finding.group: self._lasting(finding, view) for finding in found}
        for group, lasting in self.causes.items():
            if group in after:
                continue
            clear = lasting.clear + (1 if _could_show(lasting, view) else 0)
            if clear < view.config.clear_samples:
                after[group] = replace(lasting, clear=clear, samples=0 if clear else lasting.samples)
        return dict(sorted(after.items()))

    def _lasting(self, finding: Finding, view: StepView) -> Lasting:
        before = self.causes.get(finding.group)
        step = view.seen.step
        if before is None or (before.clear and not before.told):
            told = finding.samples <= 1
            return Lasting(said=finding.said.to_wire(), first_step=step, told=told, module=finding.module)
        if before.told:
            said = finding.said.to_wire() if _is_sharper(finding, before) else before.said
            return replace(before, said=said, samples=before.samples + 1, clear=0)
        samples = before.samples + 1
        return Lasting(
            said=finding.said.to_wire(),
            first_step=before.first_step,
            samples=samples,
            told=samples >= finding.samples,
            module=finding.module,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal one."""
        causes = {
            group: {**vars(lasting), "said": json_ready(lasting.said)}
            for group, lasting in self.causes.items()
        }
        return {
            "series": self.series.to_dict(),
            "causes": causes,
            "nonfinite_steps": self.nonfinite_steps,
            "shaken": self.shaken,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; nothing stored is an empty one."""
        causes = {
            group: Lasting(**{**lasting, "said": json_ready(lasting["said"])})
            for group, lasting in stored.get("causes", {}).items()
        }
        counts = stored.get("nonfinite_steps", 0), stored.get("shaken", 0)
        return cls(Series.from_dict(stored.get("series", {})), causes, *counts)


def _is_sharper(finding: Finding, before: Lasting) -> bool:
    """Whether a sample says more of a cause than what was told first."""
    name = finding.said.cause
    if name == NONFINITE:
        # What no precision helps stays so: a later sample may leave the weight open that showed it.
        return finding.said.kind == "not-fp8" and finding.said.advice != before.said["advice"]
    return name == STUCK and before.said["name"] in SCALE_CAUSES and before.samples < SHARPENS


def _is_spoken_of(key: tuple[str, str], told: Mapping[str, Lasting]) -> bool:
    """Whether a cause that is told rests on that series: it does not become the norm, however long it lasts."""
    name, layer = key
    if name == "dy_col_underflow":
        return any(lasting.said["name"] in _ALONG_TOKENS for lasting in told.values())
    return name not in AS_THEY_COME and any(lasting.module == layer for lasting in told.values())


def _is_broken(view: StepView) -> bool:
    loss, norm = (view.seen.run.get(name) for name in ("loss", "gradient_norm"))
    if (loss is not None and not math.isfinite(loss)) or (view.origin is not None and view.origin.forward):
        return True
    # A scaler that looks for its scale explains what begins in a gradient, and nothing before.
    broken = view.origin is not None or (norm is not None and not math.isfinite(norm))
    return broken and not view.scale_falls


def _could_show(lasting: Lasting, view: StepView) -> bool:
    """Whether a sample without a sign of the cause says that it is over."""
    if lasting.module is not None:
        return any(layer == lasting.module for layer, _ in view.seen.scalars)
    layer = lasting.said["layer"]
    if layer is None:
        return view.seen.run.get("loss") is not None or view.seen.run.get("gradient_norm") is not None
    return view.sight.shows_layer(layer)
