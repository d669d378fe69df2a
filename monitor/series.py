"""The recent values of slow signals, packed: run values, scalars, layers.

Eight recent values a series, what it was over a long time, and a sum that grows while it lies above that (a CUSUM). A value
far off the recent median is no norm: it is left out until it has stayed for RELEARN_SAMPLES. 150 series are 10 kB of JSON, so
that they travel with the policy's state.

Shapes: S values of one step, H series.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

RECENT = 8
NEEDED = 4
"""A median of fewer says nothing."""
RELEARN_SAMPLES = 32
"""What lies far off its median for so long is the new norm."""
LONG_SAMPLES = 64
"""Samples over which the slow reference forgets."""
SETTLED_SAMPLES = 16
"""Samples of a series before anything is said about its growth."""
GROWN = math.log(2.0)
"""What the sum allows: below twice its slow reference a series does not grow."""
MOST_SERIES = 8192
"""A run with more is not remembered in full: state travels with each transaction."""

FAR = {"loss": 2.0}
"""How far off its median a value is no norm, as a factor; 4 for the others."""
FLOORS = {"dy_col_underflow": 1e-3, "load_min": 1e-2}
"""Below these a value is as good as this: their ratios to a median say nothing."""
AS_THEY_COME = frozenset({"distortion", "least_load", "x_scale", "w_scale", "dy_scale"})
"""Whose every value is kept: their course is what matters, not their norm."""

_SLOW, _SUM, _COUNT, _REFUSED = range(RECENT, RECENT + 4)
WIDTH = RECENT + 4

Key = tuple[str, str]
"""(name, layer)."""
Float32Array = NDArray[np.float32]
FloatArray = NDArray[np.float64]


def _nothing() -> Float32Array:
    return np.empty((0, WIDTH), dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Series:
    """Immutable: `added` gives a new one. Rows are sorted by key, so that the order of slots leaves no trace."""

    rows: Mapping[Key, int] = field(default_factory=lambda: MappingProxyType({}))
    values: Float32Array = field(default_factory=_nothing)
    """[H, 12]: recent values (oldest first, NaN where there is none), mean of the log, sum, samples, refused in a row."""

    def __post_init__(self) -> None:
        self.values.setflags(write=False)

    def window(self, name: str, layer: str) -> FloatArray:
        """The recent values that were taken up, oldest first."""
        row = self.rows.get((name, layer))
        recent = self.values[row, :RECENT] if row is not None else np.empty(0)
        return recent[~np.isnan(recent)].astype(np.float64)

    def median(self, name: str, layer: str) -> float:
        """Of the recent values; NaN with fewer than NEEDED."""
        row = self.rows.get((name, layer))
        return math.nan if row is None else float(self._medians[row])

    @cached_property
    def _medians(self) -> FloatArray:
        return _medians(self.values[:, :RECENT].astype(np.float64))

    def reaching(self, name: str, level: float) -> set[str]:
        """Layers of which a recent value reaches the level."""
        high = np.any(self.values[:, :RECENT] >= level, axis=1).tolist()
        return {layer for (named, layer), row in self.rows.items() if high[row] and named == name}

    def deviation(self, name: str, layer: str) -> float:
        """Median distance of the recent values from their median (MAD); NaN with fewer than NEEDED."""
        window = self.window(name, layer)
        return float(np.median(np.abs(window - np.median(window)))) if len(window) >= NEEDED else math.nan

    def slow(self, name: str, layer: str) -> float:
        """What it was over a long time; NaN before SETTLED_SAMPLES."""
        row = self.rows.get((name, layer))
        if row is None or self.values[row, _COUNT] < SETTLED_SAMPLES:
            return math.nan
        return float(np.exp(np.float64(self.values[row, _SLOW])))

    def growth(self, name: str, layer: str) -> float:
        """The sum of how far it lay above twice its slow reference, in log units; one sample adds at most 0.3."""
        row = self.rows.get((name, layer))
        return 0.0 if row is None else float(self.values[row, _SUM])

    def added(self, found: Mapping[Key, float]) -> Series:
        """With one more value of each series. What is no finite number is passed over."""
        taken = {key: value for key, value in found.items() if math.isfinite(value)}
        rows, values = self._grown(taken)
        keys = [key for key in taken if key in rows]
        if not keys:
            return self
        at = np.array([rows[key] for key in keys], dtype=np.intp)
        values[at] = _extended(values[at], np.array([taken[key] for key in keys]), keys)
        return Series(rows, values)

    def _grown(self, found: Mapping[Key, float]) -> tuple[Mapping[Key, int], Float32Array]:
        new = sorted(key for key in found if key not in self.rows)[: max(0, MOST_SERIES - len(self.rows))]
        if not new:
            return self.rows, self.values.copy()
        keys = sorted([*self.rows, *new])
        rows = MappingProxyType({key: at for at, key in enumerate(keys)})
        values = np.full((len(keys), WIDTH), np.nan, dtype=np.float32)
        values[:, _SLOW:] = 0.0
        for key, at in self.rows.items():
            values[rows[key]] = self.values[at]
        return rows, values

    def to_dict(self) -> dict[str, Any]:
        """JSON object: layers by name, in row order, and the values packed."""
        layers: dict[str, list[str]] = {}
        for name, layer in sorted(self.rows):
            layers.setdefault(name, []).append(layer)
        packed = base64.b64encode(self.values.astype("<f4").tobytes()).decode("ascii")
        return {"layers": layers, "values": packed}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; nothing stored is an empty one."""
        if not stored:
            return cls()
        keys = [(name, layer) for name, layers in sorted(stored["layers"].items()) for layer in layers]
        values = np.frombuffer(base64.b64decode(stored["values"]), dtype="<f4").astype(np.float32)
        rows = MappingProxyType({key: at for at, key in enumerate(keys)})
        return cls(rows, values.reshape(len(keys), WIDTH))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        return dict(self.rows) == dict(other.rows) and np.array_equal(
            self.values, other.values, equal_nan=True
        )

    __hash__ = None  # type: ignore[assignment]


def _extended(held: Float32Array, value: FloatArray, keys: Sequence[Key]) -> Float32Array:
    """Rows [S, 12] with one more value each."""
    after = held.astype(np.float64)
    count, refused = after[:, _COUNT], after[:, _REFUSED]
    always = np.array([name in AS_THEY_COME for name, _ in keys])
    factor = np.array([FAR.get(name, 4.0) for name, _ in keys])
    floor = np.array([FLOORS.get(name, 0.0) for name, _ in keys])
    median = _medians(after[:, :RECENT])
    low, high = np.fmax(median, floor), np.fmax(value, floor)
    far = ~always & ~np.isnan(median) & ((high > factor * low) | (high * factor < low))
    take = ~far | (refused >= RELEARN_SAMPLES)
    level = np.log(np.where(value > 0, value, 1.0))
    positive = (value > 0) & ~always
    settled = positive & (count >= SETTLED_SAMPLES)
    step = np.clip(level - after[:, _SLOW], -1.0, 1.0)
    after[settled, _SUM] = np.clip(after[settled, _SUM] + step[settled] - GROWN, 0.0, 12.0)
    rate = 1.0 / np.minimum(count + 1, LONG_SAMPLES)
    learns = positive & take
    # The first few say where it starts, whatever zero the row began with.
    moved = np.where(count < RECENT, level - after[:, _SLOW], step) * rate
    after[learns, _SLOW] += moved[learns]
    after[:, _REFUSED] = np.where(take, np.where(far, refused, 0), refused + 1)
    after[take, _COUNT] += 1
    after[take, : RECENT - 1] = after[take, 1:RECENT]
    after[take, RECENT - 1] = value[take]
    with np.errstate(over="ignore"):
        return after.astype(np.float32)


def _medians(recent: FloatArray) -> FloatArray:
    """[S]: NaN with fewer than NEEDED values."""
    held = np.count_nonzero(~np.isnan(recent), axis=1)
    ordered = np.sort(recent, axis=1)  # NaN comes last
    row, low, high = np.arange(len(recent)), np.maximum(held - 1, 0) // 2, np.minimum(held // 2, RECENT - 1)
    return np.where(held >= NEEDED, (ordered[row, low] + ordered[row, high]) / 2.0, np.nan)
