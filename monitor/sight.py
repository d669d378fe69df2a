"""What one sample can speak about: operands may be sampled by tiles."""

from collections.abc import Mapping

import numpy as np

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.metrics import ALL_COLUMNS, UnknownMetricError, metric_needs
from fp8_safeguard.monitor.signals import SlotList


class Sight:
    """Which slots a sample holds, and what it leaves open of them.

    An operand that was sampled by tiles has rates and no sums: a rule on its cosine is neither broken nor kept.
    """

    def __init__(self, compiled: SlotList, table: StatsTable) -> None:
        self._compiled = compiled
        self._metrics = {on.rule.rule: on.rule.metric for on in compiled.rules}
        self._open = _open_columns(compiled, table)

    def holds(self, family: str) -> bool:
        """Whether the slot is in the sample at all."""
        return family in self._compiled.families

    def shows(self, rule: str, family: str) -> bool:
        """Whether the sample says if that rule holds at that slot."""
        if family not in self._compiled.families:
            return False
        left_open = self._open.get(family)
        if left_open is None:
            return True
        try:
            return left_open.isdisjoint(metric_needs(self._metrics.get(rule, "sum_sq")))
        except UnknownMetricError:
            return False

    def shows_whole(self, family: str) -> bool:
        """Whether the slot was measured in full."""
        return family in self._compiled.families and family not in self._open

    def shows_layer(self, layer: str) -> bool:
        """Whether any slot of the layer was measured in full."""
        if not self._open or layer not in self._compiled.layers:
            return layer in self._compiled.layers
        slots = self._compiled.slots
        return any(slot.layer == layer and slot.operand and slot.family not in self._open for slot in slots)


def _open_columns(compiled: SlotList, table: StatsTable) -> Mapping[str, frozenset[str]]:
    """The null columns of operands without sums, by family."""
    found: dict[str, frozenset[str]] = {}
    for position in np.flatnonzero(table.nulls["sum_sq"]).tolist():
        slot = compiled.slots[position]
        if slot.operand is not None and slot.variant is None:
            found[slot.family] = frozenset(name for name in ALL_COLUMNS if table.nulls[name][position])
    return found
