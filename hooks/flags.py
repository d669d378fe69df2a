"""Remembers which layers are in breach, for a closer look at them."""

# Shapes: S slots of a sample, F places (each slot of the model, and behind it its worst expert).

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.monitor.history import METRICS_KEPT, History
from fp8_safeguard.monitor.nonfinite import find_origin
from fp8_safeguard.monitor.signals import Measures, SlotList, compile_slots, find_breaches, may_breach
from fp8_safeguard.monitor.thresholds import Preset, get_preset
from fp8_safeguard.monitor.wire import Sample

FLAG_SAMPLES = 3
"""How many samples of a layer go on being looked at closely after its last breach."""
FLAGGED_LAYERS = 8
"""Layers that are flagged at once: the latest and then the worst. A fault that breaks all of them needs no more evidence."""
CLOSE_LAYERS = 2
"""Flagged layers that one sample looks at closely, in turn. It is what bounds the cost of a sample: the three whole GEMMs of
a layer once more in float32, and a few hundred rows of each for the alternatives."""
LOOKS_AT_ONCE = 4
"""After so many looks at a layer that stays flagged one sample more passes between any two of them, and so on."""
LONGEST_WAIT = 8
"""Samples from one look to the next, at most: what is in breach for good costs an eighth of what a new fault may."""
TREATED_EVERY = 32
"""Samples from one look at a layer to which a plan gives another scale or format to the next such layer: nothing else shows
whether it still needs that."""
STEPS_KEPT = 4
"""Agreed choices that are kept: the one that holds and those of the next steps."""
MIN_COUNT = 1024
"""Elements below which a slot is too noisy to flag its layer."""

_NEVER = -LONGEST_WAIT
_Rank = tuple[bool, bool, float]
_WORST: _Rank = (True, True, math.inf)


@dataclass(frozen=True, slots=True)
class Flag:
    """A layer in breach, or lately so."""

    layer: str
    rank: _Rank
    """Act level, instant level, how far beyond: larger is worse."""
    samples_left: int

    @property
    def order(self) -> tuple[int, _Rank]:
        """The latest breaches first, the worst of them before the others."""
        return self.samples_left, self.rank

    @property
    def urgency(self) -> int:
        """`order` in a byte, above 0."""
        acts, instant, excess = self.rank
        beyond = min(14, int(2 * math.log2(1 + min(max(excess, 0.0), 2.0**14))))
        return 64 * min(self.samples_left, 3) + 32 * acts + 16 * instant + beyond + 1


class Flags:
    """Which layers deserve whole GEMMs and what-ifs.

    The sender's thread writes: it builds the samples and hears the server. The training thread reads one immutable
    tuple, and so never waits for it.
    """

    def __init__(self, layers: Sequence[ObservedLayer], thresholds: str) -> None:
        self._preset = _judged_alone(get_preset(thresholds))
        self._slots = [layer.slots[part] for layer in layers for part in Part]
        self._names = frozenset(layer.name for layer in layers)
        gemms = [index for index, slot in enumerate(self._slots) if slot.gemm is not None]
        self._gemms = np.array(gemms, dtype=np.intp)
        """Those of the slots that are a GEMM's: only they have a history."""
        self._gemm_keys = [self._slots[index].key for index in gemms]
        self._gemm_layers = [self._slots[index].layer for index in gemms]
        self._compiled: dict[tuple[str | None, ...], SlotList] = {}
        self._history = History()
        self._looked_at: int | None = None
        self._writing = threading.Lock()
        self._flagged: tuple[Flag, ...] = ()
        self._looks: dict[str, tuple[int, int]] = {}
        """How often each flagged layer was chosen, and at which choice the last time."""
        self._choices = 0
        self._treated: tuple[str, ...] = ()
        """Layers to which the latest plan gives another scale or format."""
        self._samples = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the flagged layers, those that need a closer look most first."""
        return tuple(flag.layer for flag in self._flagged)

    def choose(self, measured: Callable[[str], bool]) -> frozenset[str]:
        """The layers to look at closely in the step that begins, of those that it measures. Training thread only."""
        return self._choose(self.layers, measured)

    def _choose(self, flagged: Sequence[str], measured: Callable[[str], bool]) -> frozenset[str]:
        if not flagged:
            self._looks = {}
            return frozenset()
        looks = {layer: self._looks.get(layer, (0, _NEVER)) for layer in flagged}
        due = [layer for layer, (count, at) in looks.items() if self._choices - at >= _wait(count)]
        due.sort(key=lambda layer: looks[layer][1])
        chosen = [layer for layer in due if measured(layer)][:CLOSE_LAYERS]
        self._looks = {**looks, **{layer: (looks[layer][0] + 1, self._choices) for layer in chosen}}
        self._choices += 1
        return frozenset(chosen)

    @property
    def urgency(self) -> dict[str, int]:
        """1 to 255 for each flagged layer, to be compared among ranks: the latest breaches, then the worst."""
        return {flag.layer: flag.urgency for flag in self._flagged}

    def look(self, sample: Sample) -> None:
        """Flag the layers of a finished sample that are beyond a level; the others' flags grow old."""
        with self._writing:
            if sample.step == self._looked_at:
                return
            self._looked_at = sample.step
            ranks = {**self._revisited(), **self._in_breach(sample)}
            if ranks or self._flagged:
                self._update(ranks, {slot.layer for slot in sample.slots})

    def hear(self, reply: Mapping[str, Any]) -> None:
        """Flag the layers that the server's alerts and decisions name, and remember those that a plan changes."""
        told: dict[str, _Rank] = {}
        for kind in ("alerts", "decisions"):
            listed = reply.get(kind)
            for item in listed if isinstance(listed, list | tuple) else ():
                layer = item.get("layer") if isinstance(item, Mapping) else None
                if isinstance(layer, str) and layer in self._names and item.get("action") != "restore":
                    acts = kind == "decisions" or item.get("severity") == "act"
                    told[layer] = max(told.get(layer, (False, False, 0.0)), (acts, False, 0.0))
        treated = self._treated_by(reply.get("plan"))
        with self._writing:
            self._treated = self._treated if treated is None else treated
            if told:
                self._update(told, set())

    def _treated_by(self, plan: Any) -> tuple[str, ...] | None:
        """Layers to which that plan gives another scale or format; None where it is none."""
        entries = plan.get("entries") if isinstance(plan, Mapping) else None
        if not isinstance(entries, list | tuple):
            return None
        listed = (entry for entry in entries if isinstance(entry, Mapping))
        named = {str(entry.get("layer")) for entry in listed if entry.get("action") != "bf16_fallback"}
        return tuple(sorted(named & self._names))

    def _revisited(self) -> dict[str, _Rank]:
        """The treated layer whose turn it is, behind all that are in breach."""
        self._samples += 1
        turn, left = divmod(self._samples, TREATED_EVERY)
        return (
            {}
            if left or not self._treated
            else {self._treated[turn % len(self._treated)]: (False, False, 0.0)}
        )

    def _update(self, ranks: Mapping[str, _Rank], seen: set[str]) -> None:
        """`seen`: the layers of the sample."""
        kept = {flag.layer: flag for flag in self._flagged}
        for layer, flag in list(kept.items()):
            if layer in seen:
                kept[layer] = replace(flag, samples_left=flag.samples_left - 1)
        kept.update({layer: Flag(layer, rank, FLAG_SAMPLES) for layer, rank in ranks.items()})
        lasting = sorted(
            (f for f in kept.values() if f.samples_left > 0), key=lambda f: f.order, reverse=True
        )
        self._flagged = tuple(lasting[:FLAGGED_LAYERS])

    def _in_breach(self, sample: Sample) -> dict[str, _Rank]:
        """How bad each layer is that is beyond a level, by the rules that the server has too."""
        found: dict[str, _Rank] = {}
        if np.count_nonzero(sample.columns["nan"]) or np.count_nonzero(sample.columns["inf"]):
            counts = sample.table.derive("nonfinite_count")
            origin = find_origin(sample.slots, sample.indices, counts)
            if origin is not None:
                # Downstream of it everything is non-finite; only where it begins there is something to learn.
                found[origin.slot.layer] = _WORST
        measures, measured_at = Measures(sample.table), self._measured_at(sample)
        compiled = self._slot_list(sample)
        if may_breach(compiled, measures, measured_at):
            for breach in find_breaches(compiled, measures, self._medians(), measured_at):
                rank = (breach.severity == "act", breach.instant, breach.excess)
                found[breach.layer] = max(found.get(breach.layer, rank), rank)
        self._remember(np.append(measures["relative_error"], np.nan)[measured_at[2 * self._gemms]], found)
        return found

    def _medians(self) -> NDArray[np.float64]:
        """Of each slot of the model, and two metrics; NaN but for the GEMMs."""
        medians = np.full((len(self._slots), METRICS_KEPT), np.nan)
        medians[self._gemms] = self._history.medians(self._gemm_keys)
        return medians

    def _remember(self, errors: NDArray[np.float64], found: Collection[str]) -> None:
        """Errors of the GEMMs, for the medians of those that are in no breach."""
        values = np.full((len(errors), METRICS_KEPT), np.nan)
        values[:, 0] = errors
        calm = np.array([[layer not in found] for layer in self._gemm_layers], dtype=bool)
        self._history = self._history.added(self._gemm_keys, values, calm)

    def _slot_list(self, sample: Sample) -> SlotList:
        """Places of all slots, whatever this sample holds: the list stays the same while the formats do."""
        fmts: list[str | None] = [None] * len(self._slots)
        for slot, index in zip(sample.slots, sample.indices, strict=True):
            if slot.variant is None:
                fmts[index] = slot.fmt
        key = tuple(fmts)
        if key not in self._compiled:
            named = [replace(slot, fmt=fmt) for slot, fmt in zip(self._slots, fmts, strict=True)]
            # Which expert is worst changes from sample to sample; which one it is does not matter here.
            both = tuple(place for slot in named for place in (slot, replace(slot, expert=0)))
            self._compiled = {key: compile_slots(both, self._preset)}
        return self._compiled[key]

    def _measured_at(self, sample: Sample) -> NDArray[np.intp]:
        """Which slot of the sample stands at each place [F]; one behind its last where none does."""
        large = (sample.columns["count"] >= MIN_COUNT).tolist()
        sources = [len(large)] * (2 * len(self._slots))
        for position, (slot, index) in enumerate(zip(sample.slots, sample.indices, strict=True)):
            if slot.variant is None and large[position]:
                sources[2 * index + (slot.expert is not None)] = position
        return np.array(sources, dtype=np.intp)


class AgreedFlags(Flags):
    """Flags of one of several ranks: all of them look closely at the same layers in the same step.

    What the ranks have flagged is known to all of them with a round, and each makes the same choice of it, for the steps
    from the round's second next one on.
    """

    def __init__(self, layers: Sequence[ObservedLayer], thresholds: str, step: Callable[[], int]) -> None:
        super().__init__(layers, thresholds)
        self._step = step
        self._agreed: tuple[tuple[int, tuple[str, ...], frozenset[str]], ...] = ()
        """First step, all flagged layers, and those to look at: what holds now, and what follows."""

    def agree(self, flagged: Sequence[str], first_step: int) -> None:
        """What all ranks have flagged, the most urgent first. From the thread of the rounds."""
        names = tuple(flagged[:FLAGGED_LAYERS])
        chosen = self._choose(names, lambda name: True)
        self._agreed = (*self._agreed[-STEPS_KEPT:], (first_step, names, chosen))

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that any rank has flagged, the most urgent first."""
        return self._now()[1]

    def choose(self, measured: Callable[[str], bool]) -> frozenset[str]:
        """The agreed layers, of those that this rank measures."""
        return frozenset(filter(measured, self._now()[2]))

    def _now(self) -> tuple[int, tuple[str, ...], frozenset[str]]:
        step = self._step()
        held = [each for each in self._agreed if each[0] <= step]
        return held[-1] if held else (0, (), frozenset())


def _judged_alone(preset: Preset) -> Preset:
    """Without the rules that only hold an operand against its own median: a jump of amax or kurtosis is never FP8's fault."""
    relative = [rule for rule in preset.rules if rule.operand and rule.watch is None and rule.act is None]
    return replace(preset, rules=tuple(rule for rule in preset.rules if rule not in relative))


def _wait(looks: int) -> int:
    """Choices from one look at a layer to its next, after so many."""
    return min(1 + looks // LOOKS_AT_ONCE, LONGEST_WAIT)
