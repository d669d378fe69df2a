"""Breaches of one step: every slot against every threshold, vectorised.

What depends only on the slot list, the preset and the baseline (which rule speaks about which slot, and the fixed or learned
levels) is compiled once and remembered; a step then costs each derived metric once and two comparisons over all rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.history import SAMPLES_NEEDED
from fp8_safeguard.monitor.levels import learned_act, learned_factor, learned_watch
from fp8_safeguard.monitor.metrics import derive
from fp8_safeguard.monitor.pairs import Pairs, RuleOnSlots, pair_up
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import MEDIAN_CAP, Preset, Threshold

if TYPE_CHECKING:
    from fp8_safeguard.monitor.baseline import Baseline

FloatArray = NDArray[np.float64]
Severity = Literal["watch", "act"]

HISTORY_METRICS = {"operand": ("amax", "kurtosis"), "gemm": ("relative_error", "relative_error")}
"""The two metrics kept in the history of an operand slot, and of a GEMM slot (which has one: its second stays empty)."""

EXPERT_MIN_COUNT = 4096
"""Elements below which one expert's ratios are too noisy: an expert may see a handful of tokens."""


@dataclass(frozen=True)
class Breach:
    """One slot beyond one threshold at one step."""

    rule: Threshold
    slot: Slot
    value: float
    severity: Severity
    limit: float
    """The level that was crossed."""
    instant: bool
    """Whether the value is so far out that one sample is enough."""
    group: str | None = None
    """Key, if it is not that of the rule at the slot."""
    watch: float | None = None
    """The watch level in force; None: the rule's own."""

    @property
    def key(self) -> str:
        """What stays the same from sample to sample: the rule and the slot (any expert of a layer is one)."""
        return self.group or f"{self.rule.rule}|{self.slot.family}"

    @property
    def place(self) -> Slot:
        """Where it was measured."""
        return self.slot

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self.slot.layer

    @property
    def rank(self) -> tuple[Any, ...]:
        """Orders breaches of one key by how bad they are."""
        return (self.severity == "act", self.instant, self.excess, self.slot.key)

    @property
    def excess(self) -> float:
        """How far beyond the level, as a ratio of at least 1 (for dB, in amplitude)."""
        if self.rule.metric.endswith("_db"):
            return float(10.0 ** ((self.limit - self.value) / 20.0))
        if not self.rule.above:
            # A cosine: compare the distances from 1.
            return float((1.0 - self.value) / (1.0 - self.limit))
        # Where nothing at all is allowed, or the value is no number, there is no telling how far it is beyond.
        return self.value / self.limit if self.limit and math.isfinite(self.value) else math.inf


@dataclass(frozen=True)
class SlotList:
    """What a slot list and a preset fix. Variants (what-ifs) take no part."""

    slots: tuple[Slot, ...]
    rules: tuple[RuleOnSlots, ...]
    families: frozenset[str]
    layers: frozenset[str]
    keys: tuple[str, ...]
    """History keys, of the slots that have their own history (no expert: its identity changes)."""
    own: NDArray[np.intp]
    """Positions of those."""
    gemms: tuple[int, ...]
    """Positions of the GEMMs' slots."""
    is_gemm: NDArray[np.bool_]
    """[own] whether each is a GEMM."""
    own_row: Mapping[str, int]
    """Place of each key among `own`."""
    learned_medians: FloatArray | None = None
    """[own, 2]: what stands in for a median of the slot's own until there is one; NaN where nothing was learned."""

    @cached_property
    def pairs(self) -> Pairs:
        """The rules side by side; there must be some."""
        return pair_up(self.rules)

    def with_learned(self, medians: FloatArray) -> FloatArray:
        """Own medians [own, 2] with the learned ones where there is none yet."""
        if self.learned_medians is None:
            return medians
        return np.where(np.isnan(medians), self.learned_medians, medians)


@lru_cache(maxsize=64)
def compile_slots(slots: tuple[Slot, ...], preset: Preset, baseline: "Baseline | None" = None) -> SlotList:
    """The fixed part of an evaluation; the same lists come back sample after sample."""
    real = [position for position, slot in enumerate(slots) if slot.variant is None]
    own = [position for position in real if slots[position].expert is None]
    return SlotList(
        slots=slots,
        rules=tuple(
            compiled
            for rule in preset.rules
            if (compiled := _compile_rule(rule, slots, real, baseline)) is not None
        ),
        families=frozenset(slots[position].family for position in real),
        layers=frozenset(slots[position].layer for position in real),
        keys=tuple(slots[position].key for position in own),
        own=np.array(own, dtype=np.intp),
        gemms=tuple(position for position in real if slots[position].gemm is not None),
        is_gemm=np.array([slots[position].gemm is not None for position in own], dtype=bool),
        own_row={slots[position].key: row for row, position in enumerate(own)},
        learned_medians=None if baseline is None else _learned_medians(slots, own, baseline),
    )


def _learned_medians(slots: Sequence[Slot], own: Sequence[int], baseline: "Baseline") -> FloatArray:
    medians = np.full((len(own), 2), np.nan)
    for row, position in enumerate(own):
        slot = slots[position]
        for column, metric in enumerate(HISTORY_METRICS["operand" if slot.gemm is None else "gemm"]):
            healthy = baseline.healthy(slot, metric)
            if healthy is not None and healthy.samples >= SAMPLES_NEEDED and not (slot.gemm and column):
                medians[row, column] = healthy.median
    return medians


def _compile_rule(
    rule: Threshold, slots: Sequence[Slot], real: Sequence[int], baseline: "Baseline | None"
) -> RuleOnSlots | None:
    chosen = [position for position in real if rule.matches(slots[position])]
    if not chosen:
        return None

    def levels(severity: Literal["watch", "act", "instant"]) -> FloatArray:
        found = [rule.level(severity, slots[position].fmt) for position in chosen]
        return np.array([np.nan if level is None else level for level in found], dtype=np.float64)

    floors = [rule.min_count if slots[position].expert is None else EXPERT_MIN_COUNT for position in chosen]
    act = levels("act")
    plain = RuleOnSlots(
        rule,
        np.array(chosen, dtype=np.intp),
        levels("watch"),
        act,
        levels("instant"),
        np.array(floors, dtype=np.float64),
        1 if rule.metric == HISTORY_METRICS["operand"][1] else 0,
        rule.watch_over_median,
        MEDIAN_CAP * act,
    )
    return plain if baseline is None else _with_baseline(plain, slots, baseline)


def _with_baseline(plain: RuleOnSlots, slots: Sequence[Slot], baseline: "Baseline") -> RuleOnSlots:
    """The same with what the baseline learned of each slot."""
    rule = plain.rule
    known = [baseline.healthy(slots[position], rule.metric) for position in plain.positions.tolist()]

    def learned(move: Any, fixed: FloatArray, *more: float) -> FloatArray:
        pairs = zip(fixed.tolist(), known, strict=True)
        moved = [move(rule, None if math.isnan(level) else level, healthy, *more) for level, healthy in pairs]
        return np.array([np.nan if level is None else level for level in moved], dtype=np.float64)

    watch, act = learned(learned_watch, plain.watch), learned(learned_act, plain.act, MEDIAN_CAP)
    factor = plain.factor
    if factor is not None:
        factor = np.array([learned_factor(rule, healthy) for healthy in known], dtype=np.float64)
    moved = _unlike(watch, plain.watch) | _unlike(act, plain.act)
    if factor is not None:
        moved |= factor != plain.factor
    return replace(
        plain,
        watch=watch,
        act=act,
        factor=factor,
        learned=moved,
        learned_rule=replace(rule, origin=f"{baseline.origin}; {rule.origin}"),
    )


def _unlike(left: FloatArray, right: FloatArray) -> NDArray[np.bool_]:
    """Where two lists of levels differ; no level is like no level."""
    unlike: NDArray[np.bool_] = (left != right) & ~(np.isnan(left) & np.isnan(right))
    return unlike


class Measures(Mapping[str, NDArray[Any]]):
    """Columns and derived metrics of one step as float64, NaN for null, each computed once."""

    def __init__(self, table: StatsTable) -> None:
        self._columns = table.float_columns()
        self._table = table
        self._found: dict[str, FloatArray] = {}

    def __getitem__(self, name: str) -> FloatArray:
        if name not in self._found:
            known = name in self._table.columns
            self._found[name] = self._columns[name] if known else derive(name, self)
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._table.columns)

    def __len__(self) -> int:
        return len(self._table.columns)


def history_values(compiled: SlotList, measures: Measures) -> FloatArray:
    """The values [own, 2] that the history keeps of this step."""
    values = np.full((len(compiled.own), 2), np.nan)
    operand = ~compiled.is_gemm
    values[operand, 0] = measures["amax"][compiled.own[operand]]
    values[operand, 1] = measures["kurtosis"][compiled.own[operand]]
    values[compiled.is_gemm, 0] = measures["relative_error"][compiled.own[compiled.is_gemm]]
    return values


def find_breaches(
    compiled: SlotList,
    measures: Measures,
    own_medians: FloatArray,
    measured_at: NDArray[np.intp] | None = None,
) -> list[Breach]:
    """Every breach of the step. own_medians [own, 2]: NaN where a slot has no history yet.

    measured_at [S]: where `measures` has each slot of the list, one behind its end for a slot that it has not; None: in
    the list's own order.
    """
    if not compiled.rules:
        return []
    medians = np.full((len(compiled.slots), 2), np.nan)
    medians[compiled.own] = own_medians
    # A median of 0 (a dead layer) is no reference: anything is infinitely above it.
    medians[medians <= 0] = np.nan
    pairs = compiled.pairs
    at = pairs.position if measured_at is None else measured_at[pairs.position]
    value = pairs.values(measures, at)
    with np.errstate(invalid="ignore"):
        watch, act = pairs.levels(medians)
        turned = pairs.sign * value
        acts = turned > pairs.sign * act
        found = (acts | (turned > pairs.sign * watch)).nonzero()[0]
    if not found.size:
        return []
    counts, vanished = measures["count"][at[found]], measures["underflow"][at[found]]
    least = pairs.min_underflow[found]
    found = found[(counts >= pairs.min_count[found]) & ((vanished >= least) | (least == 0))]
    return [
        _breach(compiled, pair, float(value[pair]), bool(acts[pair]), float(watch[pair]), float(act[pair]))
        for pair in found.tolist()
    ]


def may_breach(compiled: SlotList, measures: Measures, measured_at: NDArray[np.intp]) -> bool:
    """Whether `find_breaches` could find anything, whatever the medians: False is certain, and far cheaper to know."""
    if not compiled.rules:
        return False
    pairs = compiled.pairs
    value = pairs.values(measures, measured_at[pairs.position])
    return bool(np.count_nonzero(pairs.sign * value > pairs.least))


def _breach(compiled: SlotList, pair: int, value: float, acts: bool, watch: float, act: float) -> Breach:
    pairs = compiled.pairs
    on = compiled.rules[pairs.rule[pair]]
    place = pair - pairs.first[pairs.rule[pair]]
    instant = on.instant[place]
    learned = on.learned is not None
    moved = on.learned_rule if on.learned is not None and on.learned[place] else None
    return Breach(
        on.rule if moved is None else moved,
        compiled.slots[pairs.position[pair]],
        value,
        "act" if acts else "watch",
        act if acts else watch,
        acts and bool(value > instant if on.rule.above else value < instant),
        watch=watch if learned else None,
    )
