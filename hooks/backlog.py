"""What waits for the server, oldest first: on disk, or in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.ownership import OwnedError
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.spool import (
    DISK_ERRORS,
    Entry,
    Owner,
    Spool,
    find_leftovers,
    is_damage,
    open_leftover,
    open_own,
)
from fp8_safeguard.monitor.wire import Sample, sample_to_wire

MEMORY_SAMPLES = 256
"""Samples that wait in memory where no disk takes them; beyond it the oldest are dropped and counted."""


class MemoryQueue:
    """The same as a spool, without a disk under it: what it holds dies with the process."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._slots: dict[str, bytes] = {}
        self._next_key = 1
        self._taken = 0
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

    def take(self, most: int, most_bytes: int) -> list[Entry]:
        """The oldest samples, at least one of them if there is any; they stay until `remove`."""
        found: list[Entry] = []
        for entry in self._entries:
            most_bytes -= len(entry.body)
            if len(found) >= most or (found and most_bytes < 0):
                break
            found.append(entry)
        self._taken = found[-1].key if found else 0
        return found

    def slots(self, slots_id: str) -> bytes:
        """The packed slot list."""
        return self._slots[slots_id]

    def put_back(self) -> None:
        """Nothing is on its way any more."""
        self._taken = 0

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
            if entry.key > self._taken:
                self._entries.remove(entry)
                self.bytes -= len(entry.body)
                return True
        return False


Store = Spool | MemoryQueue


class Backlog:
    """Leftovers of dead attempts of the run first, then this attempt's file, then what no disk would take.

    Used from one thread. Nothing that a disk does is raised to the caller: it is one log line, and samples wait in
    memory from then on, for as long as the disk goes on failing.
    """

    def __init__(
        self, options: Options, once: OnceLog, count_dropped: Callable[[str | None, int], None]
    ) -> None:
        self._options = options
        self._once = once
        self._count_dropped = count_dropped
        self._owner = Owner(options.run, options.attempt, options.group)
        self._leftovers: list[Spool] = []
        self._own: Spool | None = None
        self._memory = MemoryQueue()

    def open(self) -> None:
        """Open the attempt's file and look for those that dead owners have left, where a folder is given."""
        folder = self._options.spool_dir
        if folder is None:
            return
        try:
            self._own, damaged = open_own(folder, self._owner)
            if damaged is not None:
                self._say_damaged(self._own.path, damaged)
        except DISK_ERRORS as error:
            self._say_no_disk(folder, error)
        if self._options.server is not None:
            self._open_leftovers(folder)

    def _open_leftovers(self, folder: Path) -> None:
        for path in find_leftovers(folder, self._owner):
            if self._own is not None and path == self._own.path:
                continue
            try:
                spool = open_leftover(path, self._owner)
            except OwnedError:
                continue
            except DISK_ERRORS as error:
                self._once.warning(
                    f"leftover {path}", "samples that wait in %s cannot be read: %s", path, _words(error)
                )
                continue
            if spool.count:
                self._leftovers.append(spool)
            else:
                spool.close()
        self._leftovers.sort(key=lambda spool: spool.created)
        for spool in self._leftovers:
            logger.info(
                "%d samples of attempt %s of run %s wait in %s: they are sent first",
                spool.count, spool.owner.attempt, spool.owner.run, spool.path,
            )  # fmt: skip

    def has_files(self) -> bool:
        """Whether the run has files of earlier processes; callable from any thread."""
        folder = self._options.spool_dir
        return folder is not None and bool(find_leftovers(folder, self._owner))

    @property
    def folder(self) -> Path | None:
        """Where the files of the run are."""
        spool_dir = self._options.spool_dir
        return None if spool_dir is None else self._owner.folder(spool_dir)

    @property
    def count(self) -> int:
        """Samples that wait."""
        return sum(store.count for store in self._stores())

    @property
    def in_memory(self) -> int:
        """Those that die with the process."""
        return self._memory.count

    @property
    def place(self) -> str:
        """Where samples wait, in words."""
        if self._own is not None and not self._memory.count:
            return f"in {self._own.path}"
        return f"in memory, at most {MEMORY_SAMPLES}"

    def _stores(self) -> list[Store]:
        own = [] if self._own is None else [self._own]
        return [*self._leftovers, *own, self._memory]

    def put(self, sample: Sample) -> None:
        """Keep a sample until it has arrived."""
        import msgpack

        body: bytes = msgpack.packb(sample_to_wire(sample, binary=True, by_id=True))

        def slots() -> bytes:
            packed: bytes = msgpack.packb(sample_to_wire(sample, binary=True)["slots"])
            return packed

        arguments = (sample.step, sample.slots_id, slots, body)
        self._make_room(len(body))
        if self._own is not None and not self._memory.count:
            try:
                self._own.put(*arguments)
                return
            except DISK_ERRORS as error:
                self._fail(self._own, error)
        if self._options.server is None:
            self._count_dropped(None, 1)  # `_say_no_disk` has said it
            return
        if self._memory.count >= MEMORY_SAMPLES and self._memory.drop_oldest():
            self._count_dropped(f"{self._options.address} does not answer, and they wait in memory only", 1)
        self._memory.put(*arguments)

    def _make_room(self, size: int) -> None:
        """Drop the oldest samples until one of that many bytes fits."""
        limit = self._options.spool_max_bytes
        stores = self._stores()
        while stores and sum(store.bytes for store in self._stores()) + size > limit:
            try:
                dropped = stores[0].drop_oldest()
            except DISK_ERRORS as error:
                self._fail(stores.pop(0), error)
                continue
            if dropped:
                self._count_dropped(f"the spool holds FP8_SAFEGUARD_SPOOL_MAX_BYTES={limit}", 1)
            else:
                stores.pop(0)

    def take(self, most: int, most_bytes: int) -> tuple[Store | None, list[Entry]]:
        """The oldest samples, all of one store; they stay until they are removed or refused."""
        for store in self._stores():
            try:
                found = store.take(most, most_bytes) if store.count else []
            except DISK_ERRORS as error:
                self._fail(store, error)
                continue
            if found:
                return store, found
        return None, []

    def is_own(self, store: Store) -> bool:
        """Whether a reply to its samples is one to this attempt."""
        return store is self._own or store is self._memory

    def remove(self, store: Store, entries: Sequence[Entry]) -> None:
        """They have arrived."""
        try:
            if entries:
                store.remove(entries)
        except DISK_ERRORS as error:
            self._fail(store, error)
        self._close_empty(store)

    def refuse(self, store: Store, entry: Entry, reason: str) -> None:
        """Set a sample aside that the server will never take, count it and name it."""
        attempt, place = self._owner.attempt, "; it is lost"
        if isinstance(store, Spool):
            attempt, place = store.owner.attempt, f"; it is set aside in {store.path}"
        self._count_dropped(None, 1)
        self._once.warning(
            f"refused: {reason.split()[:2]}", "%s refuses the sample of step %d, attempt %s, of run %s: %s%s",
            self._options.address, entry.step, attempt, self._owner.run, reason, place,
        )  # fmt: skip
        try:
            store.refuse(entry, reason)
        except DISK_ERRORS as error:
            self._fail(store, error)
        self._close_empty(store)

    def _close_empty(self, store: Store) -> None:
        if store in self._leftovers and not store.count:
            self._leftovers.remove(store)
            store.close()

    def _fail(self, store: Store, error: Exception) -> None:
        """The disk has answered with an error: say so once; go on without the file where it is damaged."""
        assert isinstance(store, Spool)
        if not is_damage(error):
            self._say_no_disk(store.path, error)
            return
        self._count_dropped(None, store.count)
        if store in self._leftovers:
            self._leftovers.remove(store)
        else:
            self._own = None
        try:
            self._say_damaged(store.path, store.quarantine(), f"{store.count} ")
        except OSError as cause:
            self._say_no_disk(store.path, cause)

    def _say_no_disk(self, place: Path, error: Exception) -> None:
        then = f"they wait in memory, at most {MEMORY_SAMPLES}, and what a crash or a longer outage leaves there is lost"
        if self._options.server is None:
            then = "without a server they are lost"
        self._once.warning(
            "disk",
            "the disk does not take samples (%s: %s): %s; training goes on",
            place,
            _words(error),
            then,
        )

    def _say_damaged(self, path: Path, aside: Path, number: str = "") -> None:
        self._once.warning(
            f"damaged {path}",
            "%s is damaged: it is kept as %s, its %ssamples are not sent",
            path,
            aside,
            number,
        )

    def close(self) -> None:
        """Let the files go; those with samples in them stay for the next start of the run."""
        for spool in (*self._leftovers, *([] if self._own is None else [self._own])):
            spool.close()
        self._leftovers, self._own = [], None

    def forget_in_child(self) -> None:
        """In a forked child: leave the parent's files alone."""
        for spool in (*self._leftovers, *([] if self._own is None else [self._own])):
            spool.forget_in_child()


def full_body(store: Store, entry: Entry) -> bytes:
    """The packed sample as it travels the first time, with its slot list in place of the list's digest."""
    import msgpack

    document = msgpack.unpackb(entry.body)
    document["slots"] = msgpack.unpackb(store.slots(entry.slots_id))
    del document["slots_id"]
    packed: bytes = msgpack.packb(document)
    return packed


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
