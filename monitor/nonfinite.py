"""Finds the one place where NaN and Inf values began.

When every slot holds them, one place is to blame. A NaN in one expert makes the whole step non-finite downstream, so the
earliest layer of the forward pass is named; only where the forward pass is clean, the earliest of the backward pass, which
is the last layer. One poisoned update makes every weight non-finite, so the first sample's origin stays the origin for as long
as its layer goes on holding such values.
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
WGRAD_NORM = "wgrad_norm"
"""Scalar of a layer: L2 norm of its weight gradient as it arrived, whatever the hooks recomputed of it."""
_SUMS = ("sum_sq_err", "sum_sq_q", "sum_sq", "amax", "sum_4th")


@dataclass(frozen=True)
class Origin:
    """The layer and direction in which non-finite values first appear."""

    slot: Slot
    """The slot to show: where it began, an operand before the GEMM that reads it."""
    count: float
    forward: bool
    gemms: tuple[str, ...]
    """The gemms whose precision may be to blame; none where their inputs or the weights are non-finite."""
    other_layers: int
    """Layers that hold non-finite values besides."""
    others: tuple[tuple[Slot, float], ...] = ()
    """The layer's other slots that hold them now, with their counts."""
    first_step: int = 0
    clean_step: int | None = None
    """The latest sample before `first_step` in which nothing was NaN or Inf; None: there was none."""

    @property
    def key(self) -> str:
        """Evidence key: the layer and direction."""
        return key_of(self.slot.layer, self.forward)

    @property
    def words(self) -> str:
        """How many began where and when: `3 non-finite values begin in '0' fprop at step 7`."""
        many = "a non-finite value begins" if self.count == 1 else f"{self.count:.0f} non-finite values begin"
        return f"{many} in {place_of(self.slot)} {when(self.first_step, self.clean_step)}"

    @property
    def weights(self) -> bool:
        """Whether the layer's weights hold them by now."""
        return any(slot.operand == "w" for slot, _ in ((self.slot, self.count), *self.others))

    def breach(self, severity: str) -> Breach:
        """As a breach, for alerts and reasons. Instant: even an isolated one is worth an alert."""
        level: Any = severity
        return Breach(RULE, self.slot, self.count, level, 0.0, True, self.key)

    def companions(self, severity: str) -> dict[str, Breach]:
        """The layer's other slots as breaches by key: each of them is a signal of the same alert."""
        level: Any = severity
        found: dict[str, Breach] = {}
        for slot, count in self.others:
            # Behind the origin's own key, so that the origin speaks for the alert.
            key = f"{self.key}|{slot.family}"
            if slot.family != self.slot.family and (key not in found or found[key].value < count):
                found[key] = Breach(RULE, slot, count, level, 0.0, True, key)
        return found


@dataclass(frozen=True)
class Began:
    """Where non-finite values that are still there were seen first."""

    slot: Slot
    count: float
    step: int
    clean_step: int | None = None
    """As in `Origin`."""


def key_of(layer: str, forward: bool) -> str:
    """Evidence key of one layer and direction."""
    return f"{RULE.rule}|{json.dumps([layer, 'forward' if forward else 'backward'])}"


def read_key(key: str) -> tuple[str, str]:
    """The layer in such a key, and the family of the slot in a companion's ("" in the origin's own)."""
    text = key.partition("|")[2]
    place, end = json.JSONDecoder().raw_decode(text)
    return str(place[0]), text[end + 1 :]


def find_origin(
    slots: Sequence[Slot],
    indices: Sequence[int],
    counts: NDArray[np.float64],
    *,
    step: int = 0,
    clean_step: int | None = None,
    began: Sequence[Began] = (),
    scalars: Mapping[tuple[str, str], float] | None = None,
) -> Origin | None:
    """counts: non-finite elements of each slot (NaN: null). indices: the slots' order in the model, or empty.

    clean_step: the latest sample in which nothing was NaN or Inf. began: what earlier samples blamed, the earliest first; it
    stays to blame while its layer holds such values.
    scalars by (layer, name): where every slot is clean, a weight gradient's norm that is no number is all there is.
    """
    with np.errstate(invalid="ignore"):
        bad = [at for at in np.flatnonzero(counts > 0).tolist() if slots[at].variant is None]
    layers = {slots[at].layer for at in bad} or _bad_gradients(slots, scalars or {})
    if not layers:
        return None
    before = next((first for first in began if first.slot.layer in layers), None)
    if before is None and bad:
        shown = _first(slots, indices, bad)
        before = Began(slots[shown], float(counts[shown]), step, clean_step)
    elif before is None:
        last = max(layers, key=layer_order(slots, indices, layers).__getitem__)
        before = Began(Slot(layer=last, gemm="wgrad"), 1.0, step, clean_step)
    layer, forward = before.slot.layer, _is_forward(before.slot)
    # In a fixed order: the signals of a stored decision must not depend on that of the slots.
    here = sorted((at for at in bad if slots[at].layer == layer), key=lambda at: slots[at].key)
    now = max((float(counts[at]) for at in here if slots[at].key == before.slot.key), default=0.0)
    return Origin(
        before.slot,
        max(before.count, now),
        forward,
        _gemms(before.slot, [slots[at] for at in here]),
        len(layers) - 1,
        tuple((slots[at], float(counts[at])) for at in here if slots[at].key != before.slot.key),
        before.step,
        before.clean_step,
    )


def _bad_gradients(slots: Sequence[Slot], scalars: Mapping[tuple[str, str], float]) -> set[str]:
    """Measured layers whose weight gradient is not finite."""
    bad = {layer for (layer, name), norm in scalars.items() if name == WGRAD_NORM and not math.isfinite(norm)}
    return bad & {slot.layer for slot in slots}


def _first(slots: Sequence[Slot], indices: Sequence[int], bad: Sequence[int]) -> int:
    """Position of the slot in which one sample's non-finite values begin."""
    forward = [at for at in bad if _is_forward(slots[at])]
    order = layer_order(slots, indices, {slots[at].layer for at in bad})
    choose = min if forward else max
    layer = choose((slots[at].layer for at in forward or bad), key=order.__getitem__)

    def rank(at: int) -> tuple[Any, ...]:
        # What a GEMM reads before what it gives, an input before the weights: those are bad by an earlier update.
        slot = slots[at]
        return (slot.gemm is not None, slot.operand == "w", slot.layout != "row", slot.key)

    return min((at for at in (forward or bad) if slots[at].layer == layer), key=rank)


def place_of(slot: Slot) -> str:
    """Where non-finite values begin, in words: `the input of layer '0'`, `'0' fprop`."""
    named = {"x": "the input", "w": "the weight", "dy": "the output gradient"}.get(slot.operand or "")
    return f"{named} of layer {slot.layer!r}" if named else slot.phrase


def when(first_step: int, clean_step: int | None) -> str:
    """When non-finite values began, in words: between the last sample without any and the first with them."""
    if clean_step is None or clean_step >= first_step - 1:
        return f"at step {first_step}"
    return f"between step {clean_step} (last clean sample) and step {first_step}"


def remark(first_step: int, clean_step: int | None) -> str:
    """The last clean sample, in words for where the first step with them is told already; empty where that is exact."""
    exact = clean_step is None or clean_step >= first_step - 1
    return "" if exact else f"began after step {clean_step}, the last clean sample"


def way_out(slot: Slot, first_step: int, clean_step: int | None, *, weights: bool) -> str:
    """What helps where no precision does; empty where the GEMM itself, or its precision, may be to blame."""
    unseen = clean_step is not None and clean_step < first_step - 1
    last_good = f"of step {clean_step} or earlier" if unseen else f"before step {first_step}"
    back = f"go back to a checkpoint {last_good}"
    if slot.operand == "x":
        look = "look at the batch, or at what comes before this layer"
        return f"{look}; its weight holds them by now, too: {back}" if weights else look
    return f"the weight of layer {slot.layer!r} holds them: {back}" if weights else ""


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


def _gemms(began: Slot, bad: Sequence[Slot]) -> tuple[str, ...]:
    """bad: the layer's slots that hold non-finite values now."""
    if began.operand in ("x", "w") or any(slot.operand == "w" for slot in bad):
        return ()
    if _is_forward(began):
        return ("fprop",)
    backward = [began, *(slot for slot in bad if not _is_forward(slot))]
    named = {slot.gemm for slot in backward} | {
        gemm for slot in backward for gemm in GEMMS if slot.operand and reads(gemm, slot.operand, slot.layout)
    }
    return tuple(gemm for gemm in GEMMS if gemm in named)


def layer_order(
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
