"""How far healthy runs go, beside the levels of the loop."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8_safeguard.monitor import attribution, lastlayers, othercauses
from fp8_safeguard.monitor.series import NEEDED, RECENT
from fp8_safeguard.monitor.signals import Measures

if TYPE_CHECKING:
    from fp8_safeguard.monitor.observation import StepObservation
    from fp8_safeguard.monitor.slots import Slot

Values = Mapping[str, Sequence[float]]
"""In order of steps, by place."""

LEVELS: Mapping[str, tuple[float, str]] = {
    "norm_gain": (othercauses.GAIN_JUMP, "x own median"),
    "qk_logit": (othercauses.QK_LOGIT, "bound of the largest logit"),
    "loss": (othercauses.JUMP, "x own median; with gradients that jump too"),
    "gradients": (othercauses.TOGETHER, "x own median of dy's amax, middle layer"),
    "dy_along_tokens": (othercauses.TOKEN_UNDERFLOW, f"underflow, in {othercauses.TOKEN_LAYERS} layers at once"),
    "rows": (lastlayers.LEAST_UNDERFLOW, "underflow of x and dy in rows, median of a layer"),
    "distortion": (attribution.HIGH_DISTORTION, "1 - cosine of dy in rows"),
    "gemm_error": (2.0, "x own median, fprop and dgrad"),
}  # fmt: skip
"""The level of the loop that each stands against, and its unit. The last is the act level's in preset `floor`."""


def healthy_ranges(steps: Iterable[StepObservation]) -> dict[str, float]:
    """The largest value of each name in LEVELS that a run shows; what it never shows is left out."""
    seen = list(steps)
    dy_rows = _slots(seen, "amax", lambda slot: (slot.operand, slot.layout) == ("dy", "row"))
    along_tokens = _slots(seen, "underflow_ratio", lambda slot: (slot.operand, slot.layout) == ("dy", "col"))
    rows = _slots(seen, "underflow_ratio", lambda slot: slot.operand in ("x", "dy") and slot.layout == "row")
    distortion = _slots(seen, "cosine_distortion", lambda slot: (slot.operand, slot.layout) == ("dy", "row"))
    errors = _slots(seen, "relative_error", lambda slot: slot.gemm in ("fprop", "dgrad"))
    losses = [one.run.get("loss") for one in seen]
    found = {
        "norm_gain": _largest(_jumps(_scalars(seen, "gain_amax"))),
        "qk_logit": _largest(_scalars(seen, "qk_logit_max")),
        "loss": _largest(_jumps({"": [loss for loss in losses if loss is not None]})),
        "gradients": _largest(_across(_jumps(dy_rows), lambda layers: statistics.median(layers))),
        "dy_along_tokens": _largest(_across(along_tokens, _third)),
        "rows": max((statistics.median(values) for values in rows.values()), default=math.nan),
        "distortion": _largest(distortion),
        "gemm_error": _largest(_jumps(errors)),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _third(layers: Sequence[float]) -> float:
    """What as many layers reach as a cause needs."""
    return sorted(layers, reverse=True)[: othercauses.TOKEN_LAYERS][-1]


def _scalars(seen: Sequence[StepObservation], name: str) -> Values:
    found = defaultdict(list)
    for one in seen:
        for (place, each), value in one.scalars.items():
            if each == name and math.isfinite(value):
                found[place].append(value)
    return found


def _slots(seen: Sequence[StepObservation], metric: str, wanted: Callable[[Slot], bool]) -> Values:
    """One metric of the layers' own slots."""
    found = defaultdict(list)
    for one in seen:
        values = Measures(one.stats)[metric]
        for slot, value in zip(one.slots, values.tolist(), strict=True):
            if slot.variant is None and slot.expert is None and wanted(slot) and math.isfinite(value):
                found[slot.key].append(value)
    return found


def _jumps(values: Values) -> Values:
    """Each over the median of those just before it at its place; 1 where there are too few."""
    return {place: [_jump(each, at) for at in range(len(each))] for place, each in values.items()}


def _jump(values: Sequence[float], at: int) -> float:
    before = values[max(0, at - RECENT) : at]
    median = statistics.median(before) if len(before) >= NEEDED else math.nan
    return values[at] / median if median > 0 else 1.0


def _across(values: Values, joined: Callable[[Sequence[float]], float]) -> Values:
    """All places of a step as one value."""
    return {"": [joined(step) for step in zip(*values.values(), strict=False)]}


def _largest(values: Values) -> float:
    return max((value for each in values.values() for value in each), default=math.nan)
