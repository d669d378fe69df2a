"""Adds up the time that our own code takes of the training."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class LayerSeconds:
    """What one sample took of one layer."""

    operands: float = 0.0
    """Statistics of x, w and dy."""
    judge: float = 0.0
    """Everything else: the recomputed GEMMs above all."""

    @property
    def total(self) -> float:
        """Both."""
        return self.operands + self.judge


@dataclass(slots=True)
class _Span:
    layer: str
    begin: Any
    end: Any
    operands: bool


@dataclass(slots=True)
class Meter:
    """The time of the training thread inside our code, and on a GPU what our kernels take there.

    The training thread only starts kernels on a GPU. There, events before and behind each measurement say how long the
    device took for it; they are read with the next sample, when they have long passed, so nothing waits for them. Where
    the device outruns the training thread its idle moments in between are counted too: the sum is an upper bound.
    """

    host_seconds: float = 0.0
    device_seconds: float = 0.0
    """Of the samples before the last one; 0 on a CPU."""
    layers: dict[str, LayerSeconds] = field(default_factory=dict)
    """The sample in progress, on the host."""
    on_device: bool = False
    _operands: float = 0.0
    _layer_begun: float = 0.0
    _inside: float = 0.0
    """When the section in progress began; 0.0 outside."""
    _event: Any = None
    _operand_event: Any = None
    _spans: list[_Span] = field(default_factory=list)

    def begin(self) -> float:
        """Start a section of our code; 0.0 within another one, whose time it is part of."""
        if self._inside:
            return 0.0
        self._inside = time.perf_counter()
        return self._inside

    def end(self, begun: float) -> float:
        """End it; the seconds that it took."""
        if not begun:
            return 0.0
        self._inside = 0.0
        seconds = time.perf_counter() - begun
        self.host_seconds += seconds
        return seconds

    def begin_layer(self) -> float:
        """Start a measurement of one layer."""
        self._layer_begun = now = time.perf_counter()
        self._operands = 0.0
        self._event = _event() if self.on_device else None
        if self._inside:
            return 0.0
        self._inside = now
        return now

    def end_layer(self, begun: float, layer: str) -> None:
        """End it."""
        if self._event is not None:
            self._spans.append(_Span(layer, self._event, _event(), operands=False))
            self._event = None
        now = time.perf_counter()
        seconds = now - self._layer_begun
        if begun:
            self._inside = 0.0
            self.host_seconds += now - begun
        spent = self.layers.get(layer)
        if spent is None:
            spent = self.layers[layer] = LayerSeconds()
        spent.operands += self._operands
        spent.judge += max(0.0, seconds - self._operands)

    def begin_operands(self) -> float:
        """Start the statistics of operands, within a measurement."""
        self._operand_event = _event() if self.on_device else None
        return time.perf_counter()

    def end_operands(self, begun: float, layer: str) -> None:
        """End them."""
        if self._operand_event is not None:
            self._spans.append(_Span(layer, self._operand_event, _event(), operands=True))
            self._operand_event = None
        self._operands += time.perf_counter() - begun

    def operands_took(self, seconds: float) -> None:
        """So much of the measurement in progress was statistics of operands, on a CPU."""
        self._operands += seconds

    @property
    def now(self) -> float:
        """host_seconds with those of the section in progress."""
        return self.host_seconds + (time.perf_counter() - self._inside if self._inside else 0.0)

    def collect(self) -> dict[str, LayerSeconds]:
        """What the last sample took of the device, once that has passed all of it; nothing before, and only once."""
        # Events are passed in their order.
        if not self._spans or (self._spans[-1].end is not None and not self._spans[-1].end.query()):
            return {}
        found, self._spans = _by_layer(self._spans), []
        self.device_seconds += sum(seconds.total for seconds in found.values())
        return found

    def new_sample(self) -> None:
        """Begin another sample."""
        self.layers, self._spans = {}, []


def _by_layer(spans: list[_Span]) -> dict[str, LayerSeconds]:
    found: dict[str, LayerSeconds] = {}
    for span in spans:
        if span.end is None:
            continue
        seconds = span.begin.elapsed_time(span.end) / 1000.0
        of_layer = found.setdefault(span.layer, LayerSeconds())
        if span.operands:
            # They lie within a measurement, whose own span holds them too.
            of_layer.operands += seconds
            of_layer.judge -= seconds
        else:
            of_layer.judge += seconds
    return found


def _event() -> Any:
    """An event on the current stream, now; None while a CUDA graph is recorded, which would keep it."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
