"""Samples on disk until the server has them, one file an attempt."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8_safeguard.hooks.ownership import OwnedError, OwnerLock

FORMAT = 1
SUFFIX = ".sqlite"
DISK_ERRORS = (sqlite3.Error, OSError)
"""What a disk, or the file on it, may answer with."""
REFUSED_KEPT = 64
"""Refused samples of one file that are kept for whoever wants to know what was wrong with them."""
_OWNERS = 16
"""Files of one attempt and group that may be in use at once: a second guard under the same ids has its own."""
_BUSY_SECONDS = 0.25
_WAL_BYTES = 4 * 2**20
_FREE_PAGES = 1024
"""Pages of 4 KiB that a long outage has left empty and that the next samples may use again."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA = """
CREATE TABLE meta (run TEXT, attempt TEXT, report_group TEXT, created REAL);
CREATE TABLE slot_lists (slots_id TEXT PRIMARY KEY, body BLOB);
CREATE TABLE samples (
    key INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER, slots_id TEXT, size INTEGER, body BLOB
);
CREATE TABLE refused (key INTEGER PRIMARY KEY, step INTEGER, slots_id TEXT, reason TEXT, body BLOB);
"""
_PUT = "INSERT INTO samples (step, slots_id, size, body) VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample that waits, packed as it travels, its slot list named by its digest."""

    key: int
    step: int
    slots_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose samples a file holds."""

    run: str
    attempt: str
    group: str

    def folder(self, spool_dir: Path) -> Path:
        """Where the files of the run are."""
        return spool_dir / self.run

    @property
    def stem(self) -> str:
        """Name of the file: readable, and made distinct by a digest where the ids hold other characters."""
        digest = hashlib.sha256(json.dumps([self.attempt, self.group]).encode()).hexdigest()[:8]
        readable = (re.sub(r"[^A-Za-z0-9._-]", "_", part)[:40] for part in (self.attempt, self.group))
        return "-".join((*readable, digest))


_LISTS = 512
"""Slot lists that an empty file keeps: one for each turn of the recomputed weight gradients."""


class FormatError(sqlite3.DatabaseError):
    """A file of another version of this program: it is left alone."""


class Spool:
    """One file, oldest sample first. Used from one thread; never across a fork.

    Write-ahead log with synchronous=NORMAL: what is committed survives the death of the process, however it dies
    (a power cut may take the newest commits). The exclusive locking mode needs no shared memory, so that network
    file systems will do.
    """

    def __init__(self, path: Path, owner: Owner, lock: OwnerLock) -> None:
        """Open or make the file. Raises DISK_ERRORS; a damaged file raises `sqlite3.DatabaseError`."""
        self.path = path
        self.owner = owner
        self._lock = lock
        self._undeleted: set[int] = set()
        """Samples that have arrived, and that the disk did not let go of yet."""
        self._sent = 0
        """Last sample that is on its way."""
        self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            self._prepare()
            count, size = self._connection.execute("SELECT count(*), total(size) FROM samples").fetchone()
            listed = self._connection.execute("SELECT slots_id FROM slot_lists").fetchall()
        except BaseException:
            self._connection.close()
            raise
        self._file = _identity(path)
        self.count, self.bytes = int(count), int(size)
        self._listed: set[str] = {row[0] for row in listed}

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0:
            run("PRAGMA auto_vacuum=INCREMENTAL")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=NORMAL")
        run(f"PRAGMA journal_size_limit={_WAL_BYTES}")
        if version == 0:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    run(statement)
                self.created = time.time()
                row = (self.owner.run, self.owner.attempt, self.owner.group, self.created)
                run("INSERT INTO meta VALUES (?, ?, ?, ?)", row)
                run(f"PRAGMA user_version={FORMAT}")
            return
        if version != FORMAT:
            raise FormatError(f"{self.path} has format {version}; this version reads and writes {FORMAT}")
        run_id, attempt, group, self.created = run("SELECT * FROM meta").fetchone()
        self.owner = Owner(run_id, attempt, group)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def put(self, step: int, slots_id: str, slots: Callable[[], bytes], body: bytes) -> None:
        """Add a sample, on disk when this returns; `slots` packs its slot list where the file has it not yet."""
        row = (step, slots_id, len(body), body)
        if slots_id in self._listed:
            self._connection.execute(_PUT, row)  # one statement is a transaction of its own
        else:
            with self._transaction():
                self._connection.execute("INSERT INTO slot_lists VALUES (?, ?)", (slots_id, slots()))
                self._connection.execute(_PUT, row)
        self._listed.add(slots_id)
        self.count += 1
        self.bytes += len(body)

    def take(self, most: int, most_bytes: int, after: int = 0) -> list[Entry]:
        """The oldest samples behind that key, at least one of them if there is any; they stay until `remove`."""
        found: list[Entry] = []
        size = 0
        query = "SELECT key, step, slots_id, body FROM samples WHERE key > ? ORDER BY key LIMIT ?"
        limits = (after, most + len(self._undeleted))
        with contextlib.closing(self._connection.execute(query, limits)) as rows:
            for row in rows:
                size += len(row[3])
                if len(found) >= most or (found and size > most_bytes):
                    break
                if row[0] not in self._undeleted:
                    found.append(Entry(*row))
        return found

    def send(self, entries: Sequence[Entry]) -> None:
        """They are on their way: they are not dropped to make room, until `put_back`."""
        self._sent = entries[-1].key

    def slots(self, slots_id: str) -> bytes:
        """The packed slot list."""
        query = "SELECT body FROM slot_lists WHERE slots_id = ?"
        body: bytes = self._connection.execute(query, (slots_id,)).fetchone()[0]
        return body

    def remove(self, entries: Sequence[Entry]) -> None:
        """They have arrived: delete them, in one transaction. They are not taken again even where that fails."""
        self._forget(entries)
        self._delete()

    def refuse(self, entry: Entry, reason: str) -> None:
        """Set a sample aside that the server will never take."""
        self._forget([entry])
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO refused VALUES (?, ?, ?, ?, ?)",
                (entry.key, entry.step, entry.slots_id, reason, entry.body),
            )
            oldest = "SELECT key FROM refused ORDER BY key DESC LIMIT -1 OFFSET ?"
            self._connection.execute(f"DELETE FROM refused WHERE key IN ({oldest})", (REFUSED_KEPT,))
        self._delete()

    def drop_oldest(self) -> bool:
        """Make room: give up the oldest sample that is not on its way. False where there is none."""
        query = "SELECT key, size FROM samples WHERE key > ? ORDER BY key LIMIT 1"
        row = self._connection.execute(query, (self._sent,)).fetchone()
        if row is None:
            return False
        with self._transaction():
            self._connection.execute("DELETE FROM samples WHERE key = ?", (row[0],))
        self.count -= 1
        self.bytes -= row[1]
        return True

    def put_back(self) -> None:
        """Nothing is on its way any more."""
        self._sent = 0

    def _forget(self, entries: Sequence[Entry]) -> None:
        new = [entry for entry in entries if entry.key not in self._undeleted]
        self._undeleted |= {entry.key for entry in new}
        self.count -= len(new)
        self.bytes -= sum(len(entry.body) for entry in new)

    def _delete(self) -> None:
        with self._transaction():
            keys = [(key,) for key in self._undeleted]
            self._connection.executemany("DELETE FROM samples WHERE key = ?", keys)
            if not self.count and len(self._listed) > _LISTS:
                self._connection.execute("DELETE FROM slot_lists")
                self._listed.clear()
        self._undeleted.clear()
        free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        if free > _FREE_PAGES:
            self._connection.execute("PRAGMA incremental_vacuum").fetchall()

    @property
    def is_gone(self) -> bool:
        """Whether somebody has deleted the file: what it holds then dies with the process."""
        return _identity(self.path) != self._file

    def close(self) -> None:
        """Let the file go: it is deleted when empty, renamed where only refused samples are left, else kept."""
        try:
            keep = bool(self.count or self._undeleted) or self.is_gone  # another may have that name now
            refused = self._connection.execute("SELECT count(*) FROM refused").fetchone()[0]
            self._connection.close()
        except sqlite3.Error:
            keep, refused = True, 0
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        if keep:
            self._lock.release()
            return
        with contextlib.suppress(OSError):
            if refused:
                self.path.rename(_free_name(self.path, "refused"))
            else:
                self.path.unlink()
        self._lock.remove()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # only an empty folder goes

    def quarantine(self) -> Path:
        """Give up a damaged file: it keeps its contents under another name, which is returned."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        aside = set_aside(self.path)
        self._lock.remove()
        return aside

    def forget_in_child(self) -> None:
        """In a forked child: the parent's file is not to be closed here, which would write to it, nor kept locked."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._lock.release()


def open_own(spool_dir: Path, owner: Owner) -> tuple[Spool, Path | None]:
    """The file of this attempt and group, with what an earlier owner has left in it.

    The second value is where a damaged file of that name has gone. Raises DISK_ERRORS.
    """
    folder = owner.folder(spool_dir)
    for number in range(1, _OWNERS + 1):
        path = folder / (owner.stem + ("" if number == 1 else f".{number}") + SUFFIX)
        try:
            lock = OwnerLock(path.with_name(path.name + ".lock"))
        except OwnedError:
            continue
        try:
            return _opened(path, owner, lock)
        except FormatError:
            lock.release()
        except BaseException:
            lock.release()
            raise
    raise OwnedError(f"{_OWNERS} files of attempt {owner.attempt!r} are in use in {folder}")


def _opened(path: Path, owner: Owner, lock: OwnerLock) -> tuple[Spool, Path | None]:
    try:
        return Spool(path, owner, lock), None
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        aside = set_aside(path)
        return Spool(path, owner, lock), aside


def find_leftovers(spool_dir: Path, owner: Owner) -> list[Path]:
    """Files of the run; whether their owners live is for `open_leftover` to say."""
    try:
        return [path for path in sorted(owner.folder(spool_dir).glob("*" + SUFFIX)) if path.is_file()]
    except OSError:
        return []  # a folder that cannot be read is told where it is written to


def open_leftover(path: Path, owner: Owner) -> Spool:
    """The file of a dead owner. Raises OwnedError where the owner lives, DISK_ERRORS."""
    lock = OwnerLock(path.with_name(path.name + ".lock"))
    try:
        return Spool(path, owner, lock)
    except sqlite3.Error as error:
        if is_damage(error):
            set_aside(path)
            lock.remove()
        lock.release()
        raise
    except BaseException:
        lock.release()
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has that name now; None where none has, or none can be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_damage(error: BaseException) -> bool:
    """Whether the file itself is at fault, and no waiting will mend it."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def set_aside(path: Path) -> Path:
    """Rename a file that is of no use, with its log."""
    aside = _free_name(path, "damaged")
    path.rename(aside)
    for ending in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + ending)
        with contextlib.suppress(OSError):
            beside.rename(aside.with_name(aside.name + ending))
    return aside


def _free_name(path: Path, kind: str) -> Path:
    for number in range(1, 1000):
        candidate = path.with_name(f"{path.name}.{kind}" + ("" if number == 1 else f"-{number}"))
        if not candidate.exists():
            return candidate
    raise FileExistsError(f"{path.parent} holds 1000 files set aside: delete them")
