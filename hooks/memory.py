"""Samples that wait in memory, where no disk takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fp8_safeguard.hooks.spool import Entry, Spool

MEMORY_SAMPLES = 256
"""Samples that wait in memory where no disk takes them; beyond it the oldest are dropped and counted."""


class MemoryQueue:
    """The same as a spool, without a disk under it: what it holds dies with the process."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._slots: dict[str, bytes] = {}
        self._next_key = 1
        self._sent = 0
        self.bytes = 0

    @property
    def count(self) -> int:
        """Samples in it."""
        return len(self._entries)

    def put(self, step: int, slots_id: str, slots: Callable[[], bytes], body: bytes) -> None:
        """Add a sample; `slots` packs its slot list where it is not here yet."""
        if slots_id not in self._slots:
            self._slots[slots_id] = slots()
        self._entries.append(Entry(self._next_key, step, slots_id, body))
        self._next_key += 1
        self.bytes += len(body)

    def take(self, most: int, most_bytes: int, after: int = 0) -> list[Entry]:
        """The oldest samples behind that key, at least one of them if there is any; they stay until `remove`."""
        found: list[Entry] = []
        for entry in self._entries:
            if entry.key <= after:
                continue
            most_bytes -= len(entry.body)
            if len(found) >= most or (found and most_bytes < 0):
                break
            found.append(entry)
        return found

    def send(self, entries: Sequence[Entry]) -> None:
        """They are on their way: they are not dropped to make room, until `put_back`."""
        self._sent = entries[-1].key

    def slots(self, slots_id: str) -> bytes:
        """The packed slot list."""
        return self._slots[slots_id]

    def put_back(self) -> None:
        """Nothing is on its way any more."""
        self._sent = 0

    def remove(self, entries: Sequence[Entry]) -> None:
        """They have arrived."""
        gone = {entry.key for entry in entries}
        self._entries = deque(entry for entry in self._entries if entry.key not in gone)
        self.bytes = sum(len(entry.body) for entry in self._entries)
        if not self._entries:
            self._slots.clear()

    def refuse(self, entry: Entry, reason: str) -> None:
        """The server will never take it; there is nowhere to keep it."""
        self.remove([entry])

    def drop_oldest(self) -> bool:
        """Make room: give up the oldest sample that is not on its way. False where there is none."""
        for entry in self._entries:
            if entry.key > self._sent:
                self._entries.remove(entry)
                self.bytes -= len(entry.body)
                return True
        return False

    def move_to(self, spool: Spool) -> None:
        """Hand over what is not on its way, oldest first. Raises DISK_ERRORS; the rest stays then."""
        while self._entries and not self._sent:
            entry = self._entries[0]
            spool.put(entry.step, entry.slots_id, lambda: self._slots[entry.slots_id], entry.body)  # noqa: B023 (called at once)
            self.remove([entry])


Store = Spool | MemoryQueue
