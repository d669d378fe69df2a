"""What one step speaks for: each cause at its earliest place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8_safeguard.monitor.cause import RUN, Diagnosis, Finding, numbers, percent
from fp8_safeguard.monitor.fp8causes import GROUP, fp8_findings
from fp8_safeguard.monitor.nonfinite import Origin, way_out
from fp8_safeguard.monitor.othercauses import other_findings
from fp8_safeguard.monitor.symptoms import Symptoms

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

FLUCTUATING = "fluctuating"
NONFINITE = "nonfinite-origin"
HIGH_DISTORTION = 4e-3
"""Gradient distortion of a layer, E4M3: ten times that of healthy gradients, 3e-4 to 7e-4. E5M2 has four times as much."""
LOW_SHARE = 0.25
"""Below this part of it a layer is back."""
TURNS = 3
"""Changes between high and low within the recent samples that make it fluctuate."""
_DISTORTION_PARTS = ("dy row", "dy col", "dgrad")
"""wgrad is recomputed in turns: in it a layer would seem to come and go."""


def find_causes(seen: Symptoms, held: Mapping[str, Any], *, shaken: bool = False) -> list[Finding]:
    """held: groups of findings that are told already; they stay for as long as any of their signs does.

    shaken: whether the loss has jumped lately.
    """
    view = seen.view
    if view.origin is not None:
        # Everything after it is as broken.
        return [_nonfinite(view, view.origin)]
    fp8 = fp8_findings(seen) if view.found else []
    other = other_findings(seen, held, fp8_fault=bool(fp8), shaken=shaken)
    alone = [finding for finding in other if finding.said.cause == "one-rank"]
    if alone:
        fp8 = [finding for finding in fp8 if finding.said.cause != "stale-inverse-scale"]
    if any(finding.said.kind == "fp8" and finding.said.cause != FLUCTUATING for finding in other):
        # A gain that its weight makes up for is where the outliers come from.
        fp8 = [finding for finding in fp8 if finding.said.cause != "outlier-channels"]
    if fp8 or any(group.startswith(GROUP) for group in held):
        # Gradients come and go with a fault and its remedies.
        return [*fp8, *other]
    return [*other, *_fluctuating(seen)]


def observed(seen: Symptoms) -> dict[tuple[str, str], float]:
    """Values of the step that are remembered, by (name, layer)."""
    view = seen.view
    found = {(name, RUN): value for name in _RUN_VALUES if (value := view.seen.run.get(name)) is not None}
    found |= {(name, layer): value for (layer, name), value in view.seen.scalars.items() if name in _SCALARS}
    # Twice: once as a norm, and once as it comes, for the last tokens that it got, however long ago.
    loads = {layer: load for (name, layer), load in found.items() if name == "load_min" and load > 0.0}
    found |= {("least_load", layer): load for layer, load in loads.items()}
    for layer in seen.layers:
        distortion = _distortion(seen, layer)
        if distortion is not None:
            found["distortion", layer] = distortion
        if seen.has(layer, "dy col"):
            found["dy_col_underflow", layer] = seen.value(layer, "dy col", "underflow_ratio")
        if seen.has(layer, "fprop"):
            found["fprop_energy", layer] = seen.energy(layer, "fprop")
    return found


_RUN_VALUES = ("loss", "gradient_norm")
_SCALARS = frozenset(
    {"entropy", "load_min", "load_max", "qk_logit_max", "gain_amax", "x_scale", "w_scale", "dy_scale"}
)


def _distortion(seen: Symptoms, layer: str) -> float | None:
    """Gradient distortion of a layer over its level."""
    worst = None
    for part in _DISTORTION_PARTS:
        slot = seen.slot(layer, part)
        value = seen.value(layer, part, "cosine_distortion")
        if slot is not None and np.isfinite(value):
            level = HIGH_DISTORTION * (4.0 if slot.fmt == "e5m2" else 1.0)
            worst = max(value / level, worst or 0.0)
    return worst


def _fluctuating(seen: Symptoms) -> list[Finding]:
    turns = {
        layer: _turns(seen, layer) for layer in seen.series.reaching("distortion", 1.0) & seen.rank.keys()
    }
    found = sorted((layer for layer, count in turns.items() if count >= TURNS), key=seen.rank.__getitem__)
    if not found:
        return []
    worst = min(found, key=lambda layer: (-turns[layer], seen.rank[layer]))
    level = HIGH_DISTORTION * max(seen.series.window("distortion", worst), default=0.0)
    named = ", ".join(repr(layer) for layer in found[:4]) + (", ..." if len(found) > 4 else "")
    said = Diagnosis(
        cause=FLUCTUATING,
        kind="fp8",
        layer=worst,
        slot=seen.slot(worst, "dy row"),
        summary=f"gradients of {named} come and go: {percent(level)} distortion at worst, {turns[worst]} turns in "
        f"{len(seen.series.window('distortion', worst))} samples of {worst!r}",
        evidence={**numbers(distortion=level), "turns": turns[worst], "layers": found[:32]},
        reaches=frozenset(found),
    )
    return [Finding(said=said, group=FLUCTUATING, samples=1)]


def _turns(seen: Symptoms, layer: str) -> int:
    """How often the layer's distortion went from high to low, or back, in the recent samples and this one."""
    latest = _distortion(seen, layer)
    course = [*seen.series.window("distortion", layer)[1:], *([] if latest is None else [latest])]
    sides = [value >= 1.0 for value in course if value >= 1.0 or value <= LOW_SHARE]
    return sum(a != b for a, b in itertools.pairwise(sides))


def _nonfinite(view: StepView, origin: Origin) -> Finding:
    where = f", and in {origin.other_layers} other layers after it" if origin.other_layers else ""
    helps = way_out(origin.slot, origin.first_step, origin.clean_step, weights=origin.weights)
    above = bool(origin.gemms) and all(view.runs_above(origin.slot.layer, gemm) for gemm in origin.gemms)
    if above:
        helps = "it runs in high precision already: look at the batch, at the learning rate, and at what the layer reads"
    said = Diagnosis(
        cause="nonfinite-origin",
        kind="fp8" if origin.gemms and not above else "not-fp8",
        layer=origin.slot.layer,
        slot=origin.slot,
        summary=f"{origin.words}{where}",
        evidence={"count": origin.count, "first_step": origin.first_step, "gemms": list(origin.gemms)},
        advice=helps or None,
    )
    return Finding(said=said, group=NONFINITE, samples=1)
