"""What our kernels take of a GPU is read from events, without waiting for it."""

from __future__ import annotations

import pytest
import torch

from fp8_safeguard.hooks import meter
from fp8_safeguard.hooks.meter import Meter


class Device:
    """Takes as long as the test says."""

    now = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds


class Event:
    """Stands for a CUDA event: it is passed when the test says so."""

    passed = False

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, other: Event) -> float:
        assert Event.passed, "it would wait"
        return (other.at - self.at) * 1000.0


class TestDevice:
    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        """The device's own time, to which its events belong."""
        there = Device()
        monkeypatch.setattr(meter, "_event", lambda: Event(there.now))
        Event.passed = False
        return there

    def test_its_time_is_read_later_and_never_waited_for(self, device: Device) -> None:
        seconds = Meter(on_device=True)
        for layer in ("a", "b"):
            begun = seconds.begin_layer()
            device.work(1.0)
            operand = seconds.begin_operands()
            device.work(2.0)
            seconds.end_operands(operand, layer)
            device.work(4.0)
            seconds.end_layer(begun, layer)
        assert seconds.collect() == {}
        assert seconds.device_seconds == 0.0
        Event.passed = True
        found = seconds.collect()
        assert [(s.operands, s.judge) for s in found.values()] == [pytest.approx((2.0, 5.0))] * 2
        assert seconds.device_seconds == pytest.approx(14.0)
        assert seconds.collect() == {}

    def test_a_recorded_graph_keeps_no_event(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        seconds = Meter(on_device=True)
        seconds.end_layer(seconds.begin_layer(), "a")
        assert seconds.collect() == {}
        assert 0.0 < seconds.layers["a"].total <= seconds.host_seconds
