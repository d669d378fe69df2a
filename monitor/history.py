"""Each slot's own recent values, for thresholds relative to its median.

Eight samples of two metrics a slot, in float32: relative_error for a recomputed GEMM, amax and kurtosis for an operand.
The history of 200 slots is 13 kB, so it travels with the policy's state in every transaction.

Shapes: S slots of one observation, H slots in the history, 2 metrics, 8 samples.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

SAMPLES = 8
"""Latest healthy values of a slot that its median is made of: what is in breach is no norm."""
SAMPLES_NEEDED = 4
"""A median of fewer says nothing: there is none until then."""

METRICS_KEPT = 2
"""Of an operand amax and kurtosis, of a recomputed GEMM its error."""

Float32Array = NDArray[np.float32]


def _no_values() -> Float32Array:
    return np.empty((0, METRICS_KEPT, SAMPLES), dtype=np.float32)


@dataclass(frozen=True)
class History:
    """Immutable: `added` gives a new one."""

    rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Row of each slot key."""
    values: Float32Array = field(default_factory=_no_values)
    """[H, 2, 8], oldest first, NaN where there is no value yet."""

    def __post_init__(self) -> None:
        self.values.setflags(write=False)

    def medians(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """Median of each slot's two metrics, [S, 2]; NaN with fewer than SAMPLES_NEEDED values."""
        found = np.array([self.rows.get(key, -1) for key in keys], dtype=np.intp)
        result = np.full((len(keys), METRICS_KEPT), np.nan)
        known = found >= 0
        if known.any():
            result[known] = _medians(self.values[found[known]])
        return result

    def latest(self, key: str) -> float:
        """The newest value of a slot's first metric; NaN where there is none."""
        row = self.rows.get(key)
        return float("nan") if row is None else float(self.values[row, 0, -1])

    def added(self, keys: Sequence[str], values: NDArray[np.float64], admit: NDArray[np.bool_]) -> "History":
        """With one more value for each slot and metric [S, 2] where `admit` holds ([S, 2] or [S, 1]) and it is finite."""
        new = [key for key in keys if key not in self.rows]
        rows = self.rows
        grown = np.full((len(self.values) + len(new), METRICS_KEPT, SAMPLES), np.nan, dtype=np.float32)
        grown[: len(self.values)] = self.values
        if new:
            rows = MappingProxyType({**rows, **{key: len(self.values) + at for at, key in enumerate(new)}})
        with np.errstate(over="ignore"):
            incoming = values.astype(np.float32)
        place = np.array([rows[key] for key in keys], dtype=np.intp)
        slot, metric = (admit & np.isfinite(incoming)).nonzero()
        into = place[slot]
        grown[into, metric, :-1] = grown[into, metric, 1:]
        grown[into, metric, -1] = incoming[slot, metric]
        return History(rows, grown)

    def to_dict(self) -> dict[str, Any]:
        """JSON object: the keys in row order, and the values packed."""
        packed = base64.b64encode(self.values.astype("<f4").tobytes()).decode("ascii")
        return {"slots": sorted(self.rows, key=self.rows.__getitem__), "values": packed}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        rows = {key: row for row, key in enumerate(stored["slots"])}
        values = np.frombuffer(base64.b64decode(stored["values"]), dtype="<f4").astype(np.float32)
        return cls(MappingProxyType(rows), values.reshape(len(rows), METRICS_KEPT, SAMPLES))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return dict(self.rows) == dict(other.rows) and np.array_equal(
            self.values, other.values, equal_nan=True
        )

    __hash__ = None  # type: ignore[assignment]


def _medians(values: Float32Array) -> NDArray[np.float64]:
    """Median over the last axis of the values that are there (NaN sorts last)."""
    held = SAMPLES - np.isnan(values).sum(axis=-1)
    ordered = np.sort(values, axis=-1).astype(np.float64).ravel()
    first = np.arange(0, values.size, SAMPLES).reshape(held.shape)
    low, high = np.maximum(held - 1, 0) // 2, held // 2
    return np.where(held >= SAMPLES_NEEDED, (ordered[first + low] + ordered[first + high]) / 2.0, np.nan)
