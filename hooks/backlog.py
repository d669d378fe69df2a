"""What waits for the server, oldest first: on disk, or in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fp8_safeguard.hooks.memory import MEMORY_SAMPLES, MemoryQueue, Store
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

DISK_RETRY_SECONDS = 5.0
"""After this long a disk that has failed is tried again."""


class Backlog:
    """Leftovers of dead attempts of the run first, then this attempt's file, then what no disk would take.

    Used from one thread. Nothing that a disk does is raised to the caller: it is one log line, and samples wait in
    memory from then on, for as long as the disk goes on failing; every few seconds it is tried again.
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
        self._disk_due: float | None = None
        """When the disk is tried again; None while it works."""

    def open(self) -> None:
        """Open the attempt's file and look for those that dead owners have left, where a folder is given."""
        folder = self._options.spool_dir
        if folder is None:
            return
        try:
            self._open_own(folder)
        except DISK_ERRORS as error:
            self._say_no_disk(folder, error)
        if self._options.server is not None:
            self._open_leftovers(folder)

    def _open_own(self, folder: Path) -> Spool:
        """Raises DISK_ERRORS."""
        self._own, damaged = open_own(folder, self._owner)
        if damaged is not None:
            self._say_damaged(self._own.path, damaged)
        return self._own

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
        deleted = (spool.count for spool in self._spools() if spool.count and spool.is_gone)
        return self._memory.count + sum(deleted)

    @property
    def place(self) -> str:
        """Where samples wait, in words."""
        if self._own is not None and self._disk_due is None:
            return f"in {self._own.path}"
        return f"in memory, at most {MEMORY_SAMPLES}"

    def _spools(self) -> list[Spool]:
        return [*self._leftovers, *([] if self._own is None else [self._own])]

    def _stores(self) -> list[Store]:
        return [*self._spools(), self._memory]

    def put(self, sample: Sample) -> None:
        """Keep a sample until it has arrived."""
        import msgpack

        body: bytes = msgpack.packb(sample_to_wire(sample, binary=True, by_id=True))

        def slots() -> bytes:
            packed: bytes = msgpack.packb(sample_to_wire(sample, binary=True)["slots"])
            return packed

        arguments = (sample.step, sample.slots_id, slots, body)
        self._make_room(len(body))
        own = self._usable_disk()
        if own is not None:
            try:
                own.put(*arguments)
                return
            except DISK_ERRORS as error:
                self._fail(own, error)
        if self._options.server is None:
            self._count_dropped(None, 1)  # `_say_no_disk` has said it
            return
        if self._memory.count >= MEMORY_SAMPLES and self._memory.drop_oldest():
            self._count_dropped(f"{self._options.address} does not answer, and they wait in memory only", 1)
        self._memory.put(*arguments)

    def _usable_disk(self) -> Spool | None:
        """The attempt's file, with everything in it that waited in memory; None while the disk fails."""
        folder = self._options.spool_dir
        if folder is None or (self._disk_due is not None and time.monotonic() < self._disk_due):
            return None
        try:
            if self._own is not None and self._own.is_gone:
                self._leave_deleted(self._own)
            own = self._own or self._open_own(folder)
            self._memory.move_to(own)
        except DISK_ERRORS as error:
            if self._own is None:
                self._say_no_disk(folder, error)
            else:
                self._fail(self._own, error)
            return None
        if self._memory.count:  # on its way to the server: what follows waits behind it
            return None
        self._disk_due = None
        return own

    def _leave_deleted(self, own: Spool) -> None:
        """Somebody has deleted the file: it is sent from for as long as this process lives, and a new one is made."""
        self._own = None
        self._once.warning(
            f"deleted {own.path}", "%s was deleted: what waited in it is lost if this process ends before it is sent",
            own.path,
        )  # fmt: skip
        if own.count:
            self._leftovers.append(own)
        else:
            own.close()

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

    def take(
        self, most: int, most_bytes: int, behind: tuple[Store, int] | None = None
    ) -> tuple[Store | None, list[Entry]]:
        """The oldest samples, those up to a key of one store left out; all of one store, where they stay."""
        stores = self._stores()
        passed = 0 if behind is None or behind[0] not in stores else stores.index(behind[0])
        for store in stores[passed:]:
            after = behind[1] if behind is not None and store is behind[0] else 0
            try:
                found = store.take(most, most_bytes, after) if store.count else []
            except DISK_ERRORS as error:
                self._fail(store, error)
                continue
            if found:
                return store, found
        return None, []

    def is_own(self, store: Store) -> bool:
        """Whether a reply to its samples is one to this attempt."""
        return not isinstance(store, Spool) or store.owner == self._owner

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
        self._disk_due = time.monotonic() + DISK_RETRY_SECONDS
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
        for spool in self._spools():
            spool.close()
        self._leftovers, self._own = [], None

    def forget_in_child(self) -> None:
        """In a forked child: leave the parent's files alone."""
        for spool in self._spools():
            spool.forget_in_child()


def together(entries: list[Entry], accepted: Collection[str]) -> list[Entry]:
    """The first ones that go in one request: a slot list that the server has not accepted goes alone."""
    if entries[0].slots_id not in accepted:
        return entries[:1]
    unknown = (n for n, entry in enumerate(entries) if entry.slots_id not in accepted)
    return entries[: next(unknown, len(entries))]


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
