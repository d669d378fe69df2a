"""Preallocated ring of device buffers that collect one step's statistics."""

# Shapes: S slots of the model, V = 29 entries of a TensorStats vector, E experts of a slot (1 where dense).

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

AMAX = COLUMNS.index("amax")


@dataclass(frozen=True, slots=True)
class VariantRows:
    """Where a snapshot has what an alternative would do to a slot."""

    slot_row: int
    """First row of the slot itself."""
    name: str
    """The variant's."""
    fmt: str
    """Format that it is judged by."""
    first_row: int
    experts: int


class Frame:
    """Statistics of one step: vectors add up over micro-batches, amax is their maximum."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._values = torch.zeros(rows, VECTOR_LENGTH, dtype=torch.float64, device=device)
        self._here: NDArray[np.float64] | None = self._values.numpy() if self._values.is_cpu else None
        """The same memory on a CPU, where numpy writes a row in half the time."""
        self._waiting: list[tuple[int, NDArray[np.float64]]] = []
        """Rows that are not in there yet: all of them take little more than one."""
        self.filled: set[int] = set()
        """First rows of the slots that were measured: a slot outside is absent, not zero."""
        self.closely: frozenset[str] | None = None
        """Layers that are looked at more closely in this step; None until somebody asks."""
        self._variants: dict[tuple[int, str], tuple[str, Tensor]] = {}
        """Format and [E, V] by first row of the slot and name: a step has few, and not always the same."""
        self._in_flight: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Empty, for another step."""
        self.filled = set()
        self.closely = None
        self._variants = {}
        self._waiting.clear()

    @property
    def values(self) -> Tensor:
        """[rows, V] with all that was added."""
        if self._here is not None and self._waiting:
            for row, vector_1V in self._waiting:
                self._here[row] = vector_1V[0]
            self._waiting.clear()
        return self._values

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a GPU."""
        return self._values.is_cuda

    def add(self, first_row: int, vectors_EV: Tensor) -> None:
        """Merge the vectors of one slot into its rows; never waits for the device."""
        end_row = first_row + vectors_EV.shape[0]
        if first_row in self.filled:
            _merge(self.values[first_row:end_row], vectors_EV.to(self.values.device, non_blocking=True))
            return
        if self._here is not None and vectors_EV.is_cpu:
            self._here[first_row:end_row] = vectors_EV.numpy()
        else:
            self.values[first_row:end_row].copy_(vectors_EV, non_blocking=True)
        self.filled.add(first_row)

    def add_row(self, row: int, vector_1V: NDArray[np.float64]) -> None:
        """The same for a slot of one row, from a CPU. The vector must stay as it is."""
        if self._here is None or row in self.filled:
            self.add(row, torch.from_numpy(vector_1V))
            return
        self._waiting.append((row, vector_1V))
        self.filled.add(row)

    def add_variant(
        self, slot_row: int, name: str, fmt: str, vectors_EV: Tensor, *, experts: int = 1, first: int = 0
    ) -> None:
        """The same for an alternative to a slot of so many experts: `first` is the first of those measured.

        Its rows come behind those of all slots.
        """
        vectors_EV = vectors_EV.to(self.values.device, non_blocking=True)
        if (slot_row, name) not in self._variants:
            self._variants[slot_row, name] = fmt, vectors_EV.new_zeros(experts, VECTOR_LENGTH)
        _, total_EV = self._variants[slot_row, name]
        _merge(total_EV[first : first + vectors_EV.shape[0]], vectors_EV)

    def variants_of(self, slot_rows: Collection[int]) -> list[Tensor]:
        """What was added of the alternatives to these slots: [E, V] each, not copied."""
        return [vectors_EV for (row, _), (_, vectors_EV) in self._variants.items() if row in slot_rows]

    @property
    def free(self) -> bool:
        """Whether the copy of the last sample has left this buffer."""
        return self._in_flight is None or bool(self._in_flight.query())  # type: ignore[no-untyped-call]

    def snapshot(self) -> Snapshot:
        """Copy to the host without waiting; the frame stays taken until the copy is done."""
        variants = self._variant_rows()
        parts = [vectors_EV for _, vectors_EV in self._variants.values()]
        values = torch.cat([self.values, *parts]) if parts else self.values
        if not values.is_cuda:
            return Snapshot(values.to("cpu", copy=True), None, variants)
        host = torch.empty(values.shape, dtype=torch.float64, pin_memory=True)
        host.copy_(values, non_blocking=True)
        self._in_flight = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._in_flight.record()
        return Snapshot(host, self._in_flight, variants)

    def _variant_rows(self) -> tuple[VariantRows, ...]:
        """Where each variant stands once they are put behind the slots, in the order of their slots."""
        first_row, rows = self.values.shape[0], []
        self._variants = dict(sorted(self._variants.items(), key=lambda item: item[0][0]))
        for (slot_row, name), (fmt, vectors_EV) in self._variants.items():
            rows.append(VariantRows(slot_row, name, fmt, first_row, vectors_EV.shape[0]))
            first_row += vectors_EV.shape[0]
        return tuple(rows)


def _merge(total_EV: Tensor, vectors_EV: Tensor) -> None:
    # maximum() passes a NaN on; a sum of maxima would be wrong.
    amax_E = torch.maximum(total_EV[:, AMAX], vectors_EV[:, AMAX])
    total_EV.add_(vectors_EV)
    total_EV[:, AMAX] = amax_E


class Snapshot:
    """A frame's values on the host, perhaps still on their way there."""

    def __init__(self, host: Tensor, arrival: Any, variants: tuple[VariantRows, ...] = ()) -> None:
        self._host = host
        self._arrival = arrival
        self.variants = variants
        """Rows behind the slots'."""

    def numpy(self) -> NDArray[np.float64]:
        """The values [rows, V], the variants' rows last; waits for the device, so never called on the training thread by us."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        values: NDArray[np.float64] = self._host.numpy()
        return values


class Ring:
    """Frames that take turns, so that a sample on its way to the host never holds up the next one."""

    def __init__(self, rows: int, device: torch.device, size: int = 3) -> None:
        self.device = device
        # The first sampled step may begin inside a transform of torch.func, and what is made there is the transform's.
        with torch._C._DisableFuncTorch():
            self._frames = [Frame(rows, device) for _ in range(size)]
        self._next = 0

    def acquire(self) -> Frame | None:
        """The next free frame, empty; None when every copy is still under way: the sample is dropped."""
        for offset in range(len(self._frames)):
            index = (self._next + offset) % len(self._frames)
            frame = self._frames[index]
            if frame.free:
                self._next = index + 1
                frame.begin()
                return frame
        return None
