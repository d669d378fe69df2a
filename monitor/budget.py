"""The fallback budget: how much arithmetic may run in BF16.

A GEMM of a layer costs 2 T K N operations, and all three of a layer cost the same. T, K and N come from the statistics: x
has T K elements, dy has T N, and either has T rows, so 2 T K N = 2 (x.count) (dy.count) / rows. For an expert layer that
counts each token once for each expert that it visits, which is what is computed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.slots import GEMMS, Slot

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Costs:
    """Operations of one GEMM of every layer seen, None until its x and dy were measured together."""

    layers: Mapping[str, float | None] = field(default_factory=dict)

    def learned(self, slots: Iterable[Slot], table: StatsTable) -> "Costs":
        """With the layers of one more sample; what is known stays as it is."""
        operands: dict[str, dict[str, int]] = {}
        for position, slot in enumerate(slots):
            if slot.variant is None and self.layers.get(slot.layer) is None:
                of_layer = operands.setdefault(slot.layer, {})
                # Of an operand without sums only some tiles were counted.
                whole = not table.nulls["sum_sq"][position]
                if slot.operand in ("x", "dy") and slot.expert is None and whole:
                    of_layer.setdefault(slot.operand, position)
        if not operands:
            return self
        found = {layer: _operations(places, table) for layer, places in operands.items()}
        return (
            self
            if not any(found.values()) and set(found) <= set(self.layers)
            else Costs({**self.layers, **found})
        )

    @cached_property
    def _average(self) -> float:
        known = [cost for cost in self.layers.values() if cost]
        return sum(known) / len(known) if known else 1.0

    @cached_property
    def _total(self) -> float:
        return len(GEMMS) * sum(cost or self._average for cost in self.layers.values())

    def of(self, layer: str) -> float:
        """Operations of one GEMM of the layer; a layer not measured yet counts as an average one."""
        return self.layers.get(layer) or self._average

    def share(self, gemms: Iterable[tuple[str, str]]) -> float:
        """Part of all GEMMs' operations that these (layer, gemm) make; 0 where no layer is known."""
        if not self._total:
            return 0.0
        # In a fixed order: a sum of floats must not depend on that of a set.
        return sum(self.of(layer) for layer, _ in sorted(set(gemms))) / self._total


def fallbacks(plan: Plan) -> frozenset[tuple[str, str]]:
    """(layer, gemm) of everything that the plan runs in BF16."""
    return plan.fallen


def fits(share: float, budget_ratio: float) -> bool:
    """Whether a share is within the budget, but for rounding."""
    return share <= budget_ratio + _ROUNDING


def _operations(places: Mapping[str, int], table: StatsTable) -> float | None:
    if "x" not in places or "dy" not in places:
        return None
    x, dy = places["x"], places["dy"]
    counts, rows = table.columns["count"], table.columns["rows"]
    tokens = int(np.maximum(rows[x], rows[dy]))
    operations = 2.0 * float(counts[x]) * float(counts[dy])
    return operations / tokens if tokens and operations else None
