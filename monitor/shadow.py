"""What layers in higher precision would do in FP8, told from what they do."""

import math
from collections.abc import Collection, Mapping
from functools import cached_property

from fp8_safeguard.monitor.alerts import AnyBreach
from fp8_safeguard.monitor.history import History
from fp8_safeguard.monitor.nonfinite import BROKEN
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.precision import BF16, HIGH, precisions_of
from fp8_safeguard.monitor.runwatch import RunBreach
from fp8_safeguard.monitor.signals import Measures, SlotList
from fp8_safeguard.monitor.slots import GEMMS, Slot, gemms_of

_REAL_METRICS = ("amax", "kurtosis")
"""What the tensors are, whatever they are rounded to."""


class Shadow:
    """One step's layers by the precision they ran in; looked up only where something is in breach."""

    def __init__(
        self,
        compiled: SlotList,
        measures: Measures,
        breaches: Mapping[str, AnyBreach],
        fallen: Collection[tuple[str, str]],
        history: History,
    ) -> None:
        self._compiled = compiled
        self._measures = measures
        self._layers = {breach.layer for breach in breaches.values()}
        self._fallen = fallen
        self._history = history

    @cached_property
    def _precisions(self) -> dict[str, dict[str, str | None]]:
        slots = self._compiled.slots
        places = [place for place in self._compiled.gemms if slots[place].layer in self._layers]
        if not any(slots[place].emulated for place in places):
            return {}
        errors = {slots[place]: float(self._measures["relative_error"][place]) for place in places}
        # A result that is NaN all over has no error, and says nothing of its precision: the one before it does.
        seen = [
            (slot, self._history.latest(slot.key) if math.isnan(error) else error)
            for slot, error in errors.items()
        ]
        return precisions_of(seen, self._fallen)

    def configured(self, layer: str, target: Target) -> str | None:
        """BF16 or HIGH where all that a target is about runs in it without the plan; None elsewhere."""
        if not self._precisions:
            return None
        if target.operand is not None:
            gemms = gemms_of(Slot(layer, operand=target.operand, layout=target.layout))
        else:
            gemms = (target.gemm,) if target.gemm else GEMMS
        found = {self._own(layer, gemm) for gemm in gemms}
        return found.pop() if len(found) == 1 else None

    def what_if(self, breach: AnyBreach) -> bool:
        """Whether a breach says what FP8 would do to gemms that are configured otherwise."""
        slot = breach.place
        if slot is None or isinstance(breach, RunBreach) or not self._precisions:
            return False
        if breach.rule.rule in (NON_FINITE.rule, BROKEN.rule) or breach.rule.metric in _REAL_METRICS:
            return False
        return all(self._own(slot.layer, gemm) is not None for gemm in gemms_of(slot))

    def fallen(self, slot: Slot) -> bool:
        """Whether a slot is the emulated result of a gemm that the plan runs in BF16."""
        return slot.gemm is not None and slot.emulated and (slot.layer, slot.gemm) in self._fallen

    def _own(self, layer: str, gemm: str) -> str | None:
        precision = self._precisions.get(layer, {}).get(gemm)
        own = precision in (BF16, HIGH) and (layer, gemm) not in self._fallen
        return precision if own else None
