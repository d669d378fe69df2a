"""Learns what a sample costs, by layer and kind of measurement."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from fp8_safeguard.hooks.meter import LayerSeconds

KEPT = 7
TILE_GUESS = 0.25
"""Share of the full statistics that tiles take, until some were read."""
WGRAD_GUESS = 2.0
"""How much longer a layer is judged with its weight gradient, until one was."""
_LARGEST_BIAS = 8.0


def median(values: Iterable[float]) -> float:
    """Of one value at least. `statistics` would take five milliseconds to import."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2.0


class Latest:
    """Median of the latest values; the first one is cold, and left out once there is another."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=KEPT)
        self._added = 0
        self.median: float | None = None

    def add(self, value: float) -> None:
        """One more value."""
        if self._added == 1:
            self._values.clear()
        self._values.append(value)
        self._added += 1
        self.median = median(self._values)

    def correct(self, value: float) -> None:
        """The last value was this."""
        self._values[-1] = value
        self.median = median(self._values)


class Costs:
    """Seconds of each layer's full statistics, its tiles, its judged rows and its weight gradient, and of the rest."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = list(layers)
        self._full, self._tiles, self._rows, self._wgrad = (
            {name: Latest() for name in layers} for _ in range(4)
        )
        self._fixed = Latest()
        self._late = Latest()
        self._bias = Latest()
        self._bias.add(1.0)
        self._bias.add(1.0)
        self._last: tuple[float, list[tuple[str, Latest, Latest | None]]] = (0.0, [])
        self._picks = 0
        self._sums: tuple[float, float, float, float] | None = None
        """Of all layers: full, tiles, rows, and what their weight gradients add."""

    def learn(
        self,
        spent: float,
        seconds: Mapping[str, LayerSeconds],
        *,
        full: Collection[str],
        judged: bool,
        picked: Collection[str],
        predicted: float,
    ) -> None:
        """One sample took `spent` seconds, and of its layers so many; full: those measured in full."""
        added: list[tuple[str, Latest, Latest | None]] = []
        for name, took in seconds.items():
            operands = (self._full if name in full else self._tiles)[name]
            operands.add(took.operands)
            judge = (self._wgrad if name in picked else self._rows)[name] if judged or name in full else None
            if judge is not None:
                judge.add(took.judge)
            added.append((name, operands, judge))
        self._fixed.add(max(0.0, spent - sum(took.total for took in seconds.values())))
        if predicted > 0:
            ratio = spent / (predicted / self.bias)
            self._bias.add(min(_LARGEST_BIAS, max(1.0 / _LARGEST_BIAS, ratio)))
        self._last, self._picks, self._sums = (spent, added), len(picked), None

    def amend(self, seconds: Mapping[str, LayerSeconds]) -> float:
        """The last sample's layers took so long on the device; how much more that is than what was learnt."""
        spent, added = self._last
        total = sum(took.total for took in seconds.values())
        if total <= spent:
            return 0.0
        for name, operands, judge in added:
            if name in seconds:
                operands.correct(seconds[name].operands)
                if judge is not None:
                    judge.correct(seconds[name].judge)
        self._last, self._sums = (total, added), None
        return total - spent

    def late(self, seconds: float) -> None:
        """What a sample took after its step."""
        self._late.add(seconds)
        self._sums = None

    @property
    def bias(self) -> float:
        """What samples took over what they were predicted to take."""
        return self._bias.median or 1.0

    def of_sample(self, full: Collection[str], *, judged: bool, picked: Iterable[str]) -> float:
        """Seconds that a sample with these layers in full will take."""
        all_full, all_tiles, all_rows, _ = self._summed()
        base, extra = self._base(judged=judged), all_full - all_tiles + (0.0 if judged else all_rows)
        if len(full) < len(self.layers):
            extra = sum(self._full_of(name) - self._tiles_of(name) for name in full)
            extra += 0.0 if judged else sum(map(self._rows_of, full))
        wgrads = sum(self._wgrad_of(name) - self._rows_of(name) for name in picked)
        return self.bias * (base + max(0.0, extra) + max(0.0, wgrads))

    def base_and_extra(self, *, judged: bool) -> tuple[float, float]:
        """Seconds of a sample with no layer in full, and of each layer more in full, on average."""
        all_full, all_tiles, all_rows, all_wgrads = self._summed()
        count = max(1, len(self.layers))
        base = self._base(judged=judged) + self._picks * max(0.0, all_wgrads) / count
        extra = all_full - all_tiles + (0.0 if judged else all_rows)
        return self.bias * base + (self._late.median or 0.0), self.bias * max(0.0, extra) / count

    def _base(self, *, judged: bool) -> float:
        _, all_tiles, all_rows, _ = self._summed()
        return (self._fixed.median or 0.0) + all_tiles + (all_rows if judged else 0.0)

    def _summed(self) -> tuple[float, float, float, float]:
        if self._sums is None:
            self._sums = (
                sum(map(self._full_of, self.layers)),
                sum(map(self._tiles_of, self.layers)),
                sum(map(self._rows_of, self.layers)),
                sum(self._wgrad_of(name) - self._rows_of(name) for name in self.layers),
            )
        return self._sums

    def _full_of(self, name: str) -> float:
        return self._full[name].median or 0.0

    def _tiles_of(self, name: str) -> float:
        known = self._tiles[name].median
        return TILE_GUESS * self._full_of(name) if known is None else min(known, self._full_of(name))

    def _rows_of(self, name: str) -> float:
        return self._rows[name].median or 0.0

    def _wgrad_of(self, name: str) -> float:
        known = self._wgrad[name].median
        return WGRAD_GUESS * self._rows_of(name) if known is None else known
