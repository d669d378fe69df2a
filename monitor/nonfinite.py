"""Finds the one place where NaN and Inf values began.

When every slot holds them, one place is to blame. A NaN in one expert makes the whole step non-finite downstream, so the
earliest layer of the forward pass is named; only where the forward pass is clean, the earliest of the backward pass, which
is the last layer.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMMS, Slot, reads
from fp8_safeguard.monitor.thresholds import Threshold

RULE = Threshold(
    rule="non-finite",
    metric="nonfinite_count",
    watch=0.0,
    origin="a healthy tensor holds none; one isolated sample alerts, two in a row act",
)


BROKEN = Threshold(
    rule="nonfinite-statistics",
    metric="sum_sq_err",
    watch=0.0,
    origin="sums over finite elements are finite: the result or its measurement overflowed",
)
_SUMS = ("sum_sq_err", "sum_sq_q", "sum_sq", "amax", "sum_4th")


@dataclass(frozen=True)
class Origin:
    """The layer and direction in which non-finite values first appear."""

    slot: Slot
    """The slot to show: a GEMM before the operands it reads."""
    count: float
    forward: bool
    gemms: tuple[str, ...]
    """The gemms affected there; none where the weights themselves are non-finite."""
    other_layers: int
    """Layers that hold non-finite values besides."""

    @property
    def key(self) -> str:
        """Evidence key: the layer and direction."""
        return key_of(self.slot.layer, self.forward)

    def breach(self, severity: str) -> Breach:
        """As a breach, for alerts and reasons. Instant: even an isolated one is worth an alert."""
        level: Any = severity
        return Breach(RULE, self.slot, self.count, level, 0.0, True, self.key)


def key_of(layer: str, forward: bool) -> str:
    """Evidence key of one layer and direction."""
    return f"{RULE.rule}|{json.dumps([layer, 'forward' if forward else 'backward'])}"


def layer_of(key: str) -> str:
    """The layer in such a key."""
    return str(json.loads(key.partition("|")[2])[0])


def find_origin(slots: Sequence[Slot], indices: Sequence[int], counts: NDArray[np.float64]) -> Origin | None:
    """counts: non-finite elements of each slot (NaN: null). indices: the slots' order in the model, or empty."""
    with np.errstate(invalid="ignore"):
        bad = [at for at in np.flatnonzero(counts > 0).tolist() if slots[at].variant is None]
    if not bad:
        return None
    forward = [at for at in bad if _is_forward(slots[at])]
    order = _layer_order(slots, indices, {slots[at].layer for at in bad})
    if forward:
        layer = min((slots[at].layer for at in forward), key=order.__getitem__)
    else:
        layer = max((slots[at].layer for at in bad), key=order.__getitem__)
    here = [at for at in (forward or bad) if slots[at].layer == layer]
    shown = min(here, key=lambda at: (slots[at].gemm is None, slots[at].layout != "row", slots[at].key))
    return Origin(
        slots[shown],
        float(counts[shown]),
        bool(forward),
        _gemms([slots[at] for at in here], bool(forward)),
        len({slots[at].layer for at in bad}) - 1,
    )


def broken_sums(slots: Sequence[Slot], table: StatsTable) -> list[Breach]:
    """Slots that report no NaN or Inf element and yet a sum that is none: no metric can be derived from it."""
    columns, nulls = table.columns, table.nulls
    clean = (columns["nan"] + columns["inf"]) == 0
    found: dict[int, Breach] = {}
    for name in _SUMS:
        bad = ~np.isfinite(columns[name]) & ~nulls[name] & clean
        for at in np.flatnonzero(bad).tolist():
            if at not in found and slots[at].variant is None:
                rule = replace(BROKEN, metric=name)
                found[at] = Breach(rule, slots[at], float(columns[name][at]), "watch", math.inf, True)
    return list(found.values())


def _is_forward(slot: Slot) -> bool:
    return slot.gemm == "fprop" or slot.operand in ("x", "w")


def _gemms(bad: Sequence[Slot], forward: bool) -> tuple[str, ...]:
    if any(slot.operand == "w" for slot in bad):
        return ()
    if forward:
        return ("fprop",)
    named = {slot.gemm for slot in bad} | {
        gemm for slot in bad for gemm in GEMMS if slot.operand and reads(gemm, slot.operand, slot.layout)
    }
    return tuple(gemm for gemm in GEMMS if gemm in named)


def _layer_order(
    slots: Sequence[Slot], indices: Sequence[int], layers: set[str]
) -> Mapping[str, tuple[Any, ...]]:
    """Sort key of each layer: its first index in the model, then its name with numbers as numbers."""
    first: dict[str, int] = {}
    for slot, index in zip(slots, indices, strict=False):
        if slot.layer in layers:
            first[slot.layer] = min(index, first.get(slot.layer, index))
    return {layer: (first.get(layer, 0), _natural(layer)) for layer in layers}


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    parts = re.split(r"([0-9]+)", name)
    # The captured digits stand at the odd places.
    return tuple((bool(at % 2), int(part) if at % 2 else 0, part) for at, part in enumerate(parts))
