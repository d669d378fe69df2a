"""What a run's healthy window shows, slot by slot and metric by metric.

A baseline keeps, for each slot family (all experts of a layer are one) and each metric that a preset judges, how many samples
there were, their median, the 99 % quantile on the bad side, and the worst value. `levels` says what thresholds make of it.

Counts and worst values are of every sample; quantiles are of at most SAMPLES_KEPT of them, evenly spaced, so that a window of
any length is learned in bounded memory, and the same window always gives the same baseline.

Shapes: S slots of one observation, P pairs of a family and a metric, K samples kept of each.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.history import SAMPLES_NEEDED
from fp8_safeguard.monitor.levels import Healthy
from fp8_safeguard.monitor.metrics import worst
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.signals import EXPERT_MIN_COUNT, Measures
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import PRESETS

LEAST_STEPS = 20
"""Sampled steps below which a window says nothing about what is healthy."""
MOST_FAMILIES = 8192
"""Slots that a baseline holds at most."""
SAMPLES_KEPT = 256
"""Values of a slot that its quantiles are made of: of a longer window every second, then every fourth."""
HIGH_QUANTILE = 0.99
"""What is called high of a slot's values in the window; the largest of all stands beside it."""
SCHEMA = 1
"""Of the stored form."""

FloatArray = NDArray[np.float64]


class BaselineError(ValueError):
    """A window that nothing can be learned from, or a document that is no baseline."""


@dataclass(frozen=True)
class Family:
    """One slot family over the window."""

    fmt: str | None
    """Format that was measured, as in `Slot.fmt`; values of another one say nothing."""
    metrics: Mapping[str, Healthy]


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """What one healthy window showed. Equal ones have equal `digest`s."""

    run: str
    attempt: str
    preset: str
    """Of the run when it was learned."""
    from_step: int
    to_step: int
    steps: int
    """Sampled steps of the window."""
    families: Mapping[str, Family]

    @property
    def origin(self) -> str:
        """Where its levels come from, for people."""
        return f"learned from run {self.run}, steps {self.from_step} to {self.to_step}"

    def healthy(self, slot: Slot, metric: str) -> Healthy | None:
        """What was learned of one metric of a slot; None for what was not seen in that format."""
        family = self.families.get(slot.family)
        return family.metrics.get(metric) if family is not None and family.fmt == slot.fmt else None

    def summary(self) -> dict[str, Any]:
        """JSON object without the values."""
        slots = {"slots": len(self.families)}
        names = ("run", "attempt", "preset", "from_step", "to_step", "steps")
        return {**{name: getattr(self, name) for name in names}, **slots, "digest": self.digest}

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal baseline. A metric is [samples, median, high, extremum]."""
        names = ("run", "attempt", "preset", "from_step", "to_step", "steps")
        listed = {
            name: {
                "fmt": family.fmt,
                "metrics": {
                    metric: [each.samples, each.median, each.high, each.extremum]
                    for metric, each in family.metrics.items()
                },
            }
            for name, family in self.families.items()
        }
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in names}, "families": listed}

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """The inverse of to_dict. Raises BaselineError."""
        if not isinstance(stored, Mapping) or stored.get("schema") != SCHEMA:
            raise BaselineError(
                f"this is no baseline of schema {SCHEMA}: {quoted(stored)[:200]}; `baseline learn --output` writes one"
            )
        try:
            families = {
                name: Family(
                    family["fmt"], {metric: _healthy(row) for metric, row in family["metrics"].items()}
                )
                for name, family in stored["families"].items()
            }
            texts = {name: str(stored[name]) for name in ("run", "attempt", "preset")}
            counts = {name: int(stored[name]) for name in ("from_step", "to_step", "steps")}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BaselineError(f"the baseline is incomplete: {type(error).__name__} at {error}") from error
        return cls(**texts, **counts, families=families)  # type: ignore[arg-type]

    @cached_property
    def digest(self) -> str:
        """sha256, in hex, of its JSON form."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Baseline) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)


def slot_of(family: str, fmt: str | None) -> Slot:
    """A slot of that family; of an expert layer's any expert."""
    layer, operand, layout, gemm, expert, variant = json.loads(family)
    number = None if expert is None else 0
    return Slot(layer, operand, layout, gemm, expert=number, variant=variant, fmt=fmt)


def _healthy(row: Sequence[Any]) -> Healthy:
    samples, *values = row
    median, high, extremum = (float(value) for value in values)
    if not all(map(math.isfinite, (median, high, extremum))) or int(samples) < 1:
        raise ValueError(quoted(row))
    return Healthy(int(samples), median, high, extremum)


@lru_cache(maxsize=64)
def metrics_of(operand: str | None, layout: str | None, gemm: str | None) -> tuple[str, ...]:
    """The metrics of a kind of slot that any preset judges, and its non-finite values."""
    slot = Slot("any", operand=operand, layout=layout, gemm=gemm)
    judged = (rule.metric for preset in PRESETS.values() for rule in preset.matching(slot))
    return tuple(dict.fromkeys((*judged, "nonfinite_count")))


@dataclass(frozen=True)
class _Places:
    """Where the values of one slot list go: slots and pairs by metric."""

    by_metric: tuple[tuple[str, NDArray[np.intp], NDArray[np.intp]], ...]
    few: NDArray[np.float64]
    """[S] elements that a slot must have."""


class Learner:
    """Learns a baseline step by step."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], int] = {}
        self._formats: dict[str, str | None] = {}
        self._places: dict[tuple[Slot, ...], _Places] = {}
        self._kept = np.empty((0, SAMPLES_KEPT))
        self._used = np.empty(0, dtype=np.intp)
        self._stride = np.empty(0, dtype=np.int64)
        self._seen = np.empty(0, dtype=np.int64)
        self._worst = np.empty(0)
        self.steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.troubles: list[str] = []
        """What is not healthy, the first of each kind."""
        self._kinds: set[str] = set()
        self._without_loss = 0

    def add(self, seen: StepObservation) -> None:
        """One more step; steps come in order. Raises BaselineError for more slots than a baseline holds."""
        self.steps += 1
        self.first_step = seen.step if self.first_step is None else self.first_step
        self.last_step = seen.step
        self._note_run(seen)
        places = self._places_of(seen.slots)
        measures = Measures(seen.stats)
        self._note_nonfinite(seen, measures)
        enough = measures["count"] >= places.few
        # More is worse in all of them once those where less is worse are turned.
        found = np.full(len(self._pairs), np.nan)
        for metric, positions, pairs in places.by_metric:
            sign = -1.0 if worst(metric) == "min" else 1.0
            values = np.where(enough[positions], sign * measures[metric][positions], np.nan)
            values[~np.isfinite(values)] = np.nan
            np.fmax.at(found, pairs, values)
        self._keep(found)

    def finish(self, *, run: str = "run", attempt: str = "0", preset: str = "floor") -> Baseline:
        """The baseline. Raises BaselineError where no step was seen."""
        if self.first_step is None or self.last_step is None:
            raise BaselineError(
                "the window holds no sampled step; `fp8-safeguard status` says how far the run is"
            )
        metrics: dict[str, dict[str, Healthy]] = {}
        for (family, metric), pair in self._pairs.items():
            if self._seen[pair] >= SAMPLES_NEEDED:
                metrics.setdefault(family, {})[metric] = self._healthy(metric, pair)
        return Baseline(
            run=run,
            attempt=attempt,
            preset=preset,
            from_step=self.first_step,
            to_step=self.last_step,
            steps=self.steps,
            families={name: Family(self._formats[name], metrics[name]) for name in sorted(metrics)},
        )

    def refusals(self) -> list[str]:
        """Why nothing healthy can be learned from these steps; empty where it can."""
        said = list(self.troubles)
        if 0 < self._without_loss < self.steps:
            said.append(
                f"{self._without_loss} of {self.steps} steps have no loss, as skipped ones; choose steps that were all taken"
            )
        if self.steps < LEAST_STEPS:
            said.append(
                f"the window holds {self.steps} sampled steps and needs {LEAST_STEPS}; widen it, or sample more often"
            )
        return said

    def _note_run(self, seen: StepObservation) -> None:
        for name in ("loss", "gradient_norm"):
            value = seen.run.get(name)
            if value is not None and not math.isfinite(value):
                self._trouble(name, f"{name} is {value} at step {seen.step}; choose steps before or after it")
        self._without_loss += seen.run.get("loss") is None

    def _note_nonfinite(self, seen: StepObservation, measures: Measures) -> None:
        bad = np.nan_to_num(measures["nonfinite_count"])
        real = [at for at in np.flatnonzero(bad > 0).tolist() if seen.slots[at].variant is None]
        if real:
            slot, count = seen.slots[real[0]], int(bad[real[0]])
            self._trouble(
                "nonfinite",
                f"{slot.label} has {count} non-finite values at step {seen.step}; choose steps before or after it",
            )

    def _trouble(self, kind: str, said: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.troubles.append(said)

    def _places_of(self, slots: tuple[Slot, ...]) -> _Places:
        known = self._places.get(slots)
        if known is not None:
            return known
        by_metric: dict[str, list[tuple[int, int]]] = {}
        for position, slot in enumerate(slots):
            if slot.variant is None:
                for metric in metrics_of(slot.operand, slot.layout, slot.gemm):
                    by_metric.setdefault(metric, []).append((position, self._pair(slot, metric)))
        tables = {metric: np.array(pairs, dtype=np.intp) for metric, pairs in by_metric.items()}
        few = [0 if slot.expert is None else EXPERT_MIN_COUNT for slot in slots]
        places = _Places(
            tuple((metric, table[:, 0], table[:, 1]) for metric, table in tables.items()),
            np.array(few, dtype=np.float64),
        )
        if len(self._places) >= SAMPLES_KEPT:
            self._places.pop(next(iter(self._places)))
        self._places[slots] = places
        return places

    def _pair(self, slot: Slot, metric: str) -> int:
        known = self._pairs.get((slot.family, metric))
        if known is not None:
            return known
        self._formats.setdefault(slot.family, slot.fmt)
        if len(self._formats) > MOST_FAMILIES:
            raise BaselineError(
                f"the window holds more than {MOST_FAMILIES} slots; attach with a filter, so that fewer layers are watched"
            )
        return self._pairs.setdefault((slot.family, metric), len(self._pairs))

    def _keep(self, found: FloatArray) -> None:
        self._grow(len(found))
        held = ~np.isnan(found)
        self._worst[held] = np.fmax(self._worst[held], found[held])
        kept = np.flatnonzero(held & (self._seen % self._stride == 0))
        self._seen[held] += 1
        self._kept[kept, self._used[kept]] = found[kept]
        self._used[kept] += 1
        full = np.flatnonzero(self._used == SAMPLES_KEPT)
        if full.size:
            half = SAMPLES_KEPT // 2
            self._kept[full, :half] = self._kept[full, ::2]
            self._used[full] = half
            self._stride[full] *= 2

    def _grow(self, pairs: int) -> None:
        more = pairs - len(self._seen)
        if more <= 0:
            return
        self._kept = np.concatenate([self._kept, np.empty((more, SAMPLES_KEPT))])
        self._used = np.concatenate([self._used, np.zeros(more, dtype=np.intp)])
        self._stride = np.concatenate([self._stride, np.ones(more, dtype=np.int64)])
        self._seen = np.concatenate([self._seen, np.zeros(more, dtype=np.int64)])
        self._worst = np.concatenate([self._worst, np.full(more, -np.inf)])

    def _healthy(self, metric: str, pair: int) -> Healthy:
        values = np.sort(self._kept[pair, : self._used[pair]])
        # The order statistic at or above the quantile: with few samples the worst one.
        high = values[math.ceil(HIGH_QUANTILE * (len(values) - 1))]
        sign = -1.0 if worst(metric) == "min" else 1.0
        turned = (float(sign * value) for value in (np.median(values), high, self._worst[pair]))
        return Healthy(int(self._seen[pair]), *map(_rounded, turned))


def _rounded(value: float) -> float:
    """Six significant digits: what a level needs, and the same on every machine."""
    return float(f"{value:.6g}") + 0.0


def learn(
    observations: Iterable[StepObservation],
    *,
    run: str = "run",
    attempt: str = "0",
    preset: str = "floor",
) -> Baseline:
    """The baseline of steps in order. Raises BaselineError where they are too few, or not healthy."""
    learner = Learner()
    for seen in observations:
        learner.add(seen)
    refused = learner.refusals()
    if refused:
        raise BaselineError("; ".join(refused))
    return learner.finish(run=run, attempt=attempt, preset=preset)
