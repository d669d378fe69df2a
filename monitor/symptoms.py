"""One step by layer: values, breaches, and the order of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from fp8_safeguard.monitor.nonfinite import layer_order
from fp8_safeguard.monitor.signals import Breach, compile_slots, find_breaches
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.monitor.thresholds import FLOOR

if TYPE_CHECKING:
    from fp8_safeguard.monitor.series import Series
    from fp8_safeguard.monitor.view import StepView

MAIN = {"x": "x row", "w": "w tile", "dy": "dy row"}
"""The layout in which an operand is named."""
INPUT_GROWN = 2.0
"""amax over its median from which on an input has grown with the gain of the norm before it."""
RELATIVE = ("amax-jump", "kurtosis-jump")
"""Rules about what a tensor is, not about what FP8 makes of it."""


@dataclass(frozen=True)
class Layout:
    """Where a slot list has each layer's own slots."""

    layers: tuple[str, ...]
    """In forward order."""
    places: Mapping[tuple[str, str], int]
    """By layer and part: `x row`, or the name of a gemm."""


@lru_cache(maxsize=64)
def lay_out(slots: tuple[Slot, ...], indices: tuple[int, ...]) -> Layout:
    """The same lists come back sample after sample."""
    order = layer_order(slots, indices, {slot.layer for slot in slots})
    own = {
        (slot.layer, part_of(slot)): at
        for at, slot in enumerate(slots)
        if slot.variant is None and slot.expert is None
    }
    return Layout(tuple(sorted(order, key=order.__getitem__)), own)


def part_of(slot: Slot) -> str:
    """`x row` of an operand, the name of a gemm."""
    return slot.gemm or f"{slot.operand} {slot.layout}"


class Symptoms:
    """What one step shows, looked up by layer. Rules are those of preset floor, whatever preset decides."""

    def __init__(self, view: StepView, series: Series) -> None:
        self.view, self.series = view, series
        self.layout = lay_out(view.seen.slots, view.seen.indices)
        self.layers = self.layout.layers

    @cached_property
    def rank(self) -> Mapping[str, int]:
        """Place of each layer in the forward pass."""
        return {layer: at for at, layer in enumerate(self.layers)}

    @cached_property
    def breaches(self) -> Mapping[str, Mapping[tuple[str, str], Breach]]:
        """The worst breach by layer, rule and part. Weights alone and activations alone are not yet a pair."""
        found: dict[str, dict[tuple[str, str], Breach]] = {}
        for breach in self._found():
            held = found.setdefault(breach.layer, {})
            key = breach.rule.rule, part_of(breach.slot)
            if key not in held or breach.rank > held[key].rank:
                held[key] = breach
        return found

    def breach(self, layer: str, rule: str, part: str) -> Breach | None:
        """That breach, if there is one."""
        return self.breaches.get(layer, {}).get((rule, part))

    def acts(self, layer: str, gemm: str) -> Breach | None:
        """A gemm whose recomputed error is at the act level."""
        breach = self.breach(layer, "gemm-error", gemm)
        return breach if breach is not None and breach.severity == "act" else None

    def is_healthy(self, layer: str, operand: str, layout: str) -> bool:
        """Whether an operand breaks no rule about what FP8 makes of it."""
        return not any(
            (breach.slot.operand, breach.slot.layout) == (operand, layout) and rule not in RELATIVE
            for (rule, _), breach in self.breaches.get(layer, {}).items()
        )

    def reads_healthy(self, layer: str, gemm: str) -> bool:
        """Whether both operands of a gemm do."""
        return all(self.is_healthy(layer, *operand) for operand in GEMM_OPERANDS[gemm])

    def has(self, layer: str, part: str) -> bool:
        """Whether the step holds that slot."""
        return (layer, part) in self.layout.places

    def slot(self, layer: str, part: str) -> Slot | None:
        """The layer's own slot."""
        place = self.layout.places.get((layer, part))
        return None if place is None else self.view.seen.slots[place]

    def value(self, layer: str, part: str, metric: str) -> float:
        """A column or derived metric of the layer's own slot; NaN where it is null or not there."""
        place = self.layout.places.get((layer, part))
        return math.nan if place is None else float(self.view.measures[metric][place])

    def median(self, layer: str, part: str) -> float:
        """The slot's own median before the step: amax of an operand, error of a gemm; NaN without one."""
        slot = self.slot(layer, part)
        row = None if slot is None else self.view.compiled.own_row.get(slot.key)
        return math.nan if row is None else float(self.view.medians[row, 0])

    def amax_growth(self, layer: str, part: str) -> float:
        """amax over the slot's own median; NaN without one."""
        median = self.median(layer, part)
        return self.value(layer, part, "amax") / median if median > 0 else math.nan

    def scalar(self, module: str, name: str) -> float:
        """A scalar of the step; NaN where there is none."""
        return self.view.seen.scalars.get((module, name), math.nan)

    def energy(self, layer: str, gemm: str) -> float:
        """Mean square of a gemm's right result, over the rows that were recomputed."""
        count = self.value(layer, gemm, "count")
        return self.value(layer, gemm, "sum_sq") / count if count > 0 else math.nan

    def fed_by(self, module: str) -> list[str]:
        """Layers that a norm or router feeds, as far as names tell: of its parent, or of what is named as it is (`mlp_norm`,
        `mlp`)."""
        return self._named_as(module) or self._beside(module)

    def grown_with(self, module: str) -> list[str]:
        """Layers that a norm whose gain has jumped feeds: their inputs have grown with it.

        Of those that are named as it is, or else of its parent, or else of all. Names alone decide only where no input tells.
        """
        named = self._named_as(module)
        for among in (named, self._beside(module), self.layers):
            growth = {layer: self.amax_growth(layer, "x row") for layer in among}
            largest = max((value for value in growth.values() if math.isfinite(value)), default=0.0)
            if largest >= INPUT_GROWN:
                least = max(INPUT_GROWN, largest / 4.0)
                return [layer for layer, value in growth.items() if value >= least]
        return named

    def _named_as(self, module: str) -> list[str]:
        parent, _, own = module.rpartition(".")
        named = own.removesuffix("_norm").removesuffix("_layernorm")
        return [layer for layer in self.layers if parent and layer.startswith(f"{parent}.{named}.")]

    def _beside(self, module: str) -> list[str]:
        parent = module.rpartition(".")[0]
        return [layer for layer in self.layers if parent and layer.startswith(f"{parent}.")]

    def first(self, layers: Iterable[str], *, forward: bool = True) -> str:
        """The earliest of them in the direction of the pass."""
        return (min if forward else max)(layers, key=self.rank.__getitem__)

    def _found(self) -> Iterable[Breach]:
        view = self.view
        if view.config.thresholds is FLOOR:
            return view.found
        return find_breaches(compile_slots(view.seen.slots, FLOOR), view.measures, view.medians)
