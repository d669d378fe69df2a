"""Preallocated ring of device buffers that collect one step's statistics."""

# Shapes: S slots of the model, V = 29 entries of a TensorStats vector, E experts of a slot (1 where dense).

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

AMAX = COLUMNS.index("amax")


class Frame:
    """Statistics of one step: vectors add up over micro-batches, amax is their maximum."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, VECTOR_LENGTH, dtype=torch.float64, device=device)
        self.filled: set[int] = set()
        """First rows of the slots that were measured: a slot outside is absent, not zero."""
        self._in_flight: torch.cuda.Event | None = None

    def add(self, first_row: int, vectors_EV: Tensor) -> None:
        """Merge the vectors of one slot into its rows; never waits for the device."""
        vectors_EV = vectors_EV.to(self.values.device, non_blocking=True)
        target_EV = self.values[first_row : first_row + vectors_EV.shape[0]]
        if first_row not in self.filled:
            target_EV.copy_(vectors_EV)
            self.filled.add(first_row)
            return
        # maximum() passes a NaN on; a sum of maxima would be wrong.
        amax_E = torch.maximum(target_EV[:, AMAX], vectors_EV[:, AMAX])
        target_EV.add_(vectors_EV)
        target_EV[:, AMAX] = amax_E

    @property
    def free(self) -> bool:
        """Whether the copy of the last sample has left this buffer."""
        return self._in_flight is None or bool(self._in_flight.query())  # type: ignore[no-untyped-call]

    def snapshot(self) -> Snapshot:
        """Copy to the host without waiting; the frame stays taken until the copy is done."""
        if self.values.device.type != "cuda":
            return Snapshot(self.values.to("cpu", copy=True), None)
        host = torch.empty(self.values.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(self.values, non_blocking=True)
        self._in_flight = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._in_flight.record()
        return Snapshot(host, self._in_flight)


class Snapshot:
    """A frame's values on the host, perhaps still on their way there."""

    def __init__(self, host: Tensor, arrival: Any) -> None:
        self._host = host
        self._arrival = arrival

    def numpy(self) -> NDArray[np.float64]:
        """The values [rows, V]; waits for the device, so never called on the training thread by us."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        values: NDArray[np.float64] = self._host.numpy()
        return values


class Ring:
    """Frames that take turns, so that a sample on its way to the host never holds up the next one."""

    def __init__(self, rows: int, device: torch.device, size: int = 3) -> None:
        self.device = device
        self._frames = [Frame(rows, device) for _ in range(size)]
        self._next = 0

    def acquire(self) -> Frame | None:
        """The next free frame, empty; None when every copy is still under way: the sample is dropped."""
        for offset in range(len(self._frames)):
            index = (self._next + offset) % len(self._frames)
            frame = self._frames[index]
            if frame.free:
                self._next = index + 1
                frame.filled = set()
                return frame
        return None
