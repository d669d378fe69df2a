"""The database engine: pragmas, short read and write transactions."""

import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.server.recent import Recent
from fp8_safeguard.server.settings import Settings

# PostgreSQL's advisory locks are named by two numbers; any do, as long as every process uses the same.
_LOCK_SPACE, _RUN_SPACE = 0x0F85AFE, 0x0F85AFF
_ALL_RUNS, _SLOT_LISTS = 0, 1
_CONNECT_SECONDS = 10
_MODE_SECONDS = 10.0
_KEPT_SLOT_LISTS = 256
_EXAMPLES = "for example sqlite:///fp8-safeguard.db or postgresql://user@host/name"


class StoreError(ValueError):
    """The store cannot be used as it is configured or found."""


class StoreBusyError(RuntimeError):
    """Other writers held the store for longer than a request may wait."""


class Store:
    """One engine, and the rule that no two writers ever see each other's halves."""

    def __init__(self, engine: Engine, busy_timeout_seconds: float = 30.0) -> None:
        self.engine = engine
        self.accepted_slots: Recent[str, tuple[Slot, ...]] = Recent(_KEPT_SLOT_LISTS)
        """Slot lists by the digest under which one was accepted."""
        self._busy_timeout_seconds = busy_timeout_seconds
        self._one_writer = engine.dialect.name == "sqlite"
        # SQLite's own waiting is a sleep with back-off, unfair among threads; a lock queues them.
        self._writer = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one consistent snapshot."""
        with self.engine.connect() as conn:
            if not self._one_writer:
                conn = conn.execution_options(isolation_level="REPEATABLE READ")
            with conn.begin():
                yield conn

    @contextmanager
    def write(self, run: str | None = None) -> Iterator[Connection]:
        """A transaction that holds the write lock from its start and is on disk at its end.

        On PostgreSQL writers that name different runs go side by side; one that names none has the store to itself.
        Raises StoreBusyError, or SQLAlchemy's OperationalError, where the lock is not to be had in time.
        """
        with self._writing_alone(), self.engine.connect() as conn:
            writing = conn.execution_options(fp8_safeguard_write=True)
            with writing.begin():
                if not self._one_writer:
                    _lock_postgresql(writing, run)
                yield writing

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the first use of a store. Raises StoreError, which names its address, where the database cannot be used."""
        try:
            yield
        except DatabaseError as error:
            # Its other kinds speak of a statement, which is ours; a file of something else has no kind of its own.
            if type(error) not in (OperationalError, DatabaseError):
                raise
            raise StoreError(_unusable(self.engine.url, error)) from error

    @contextmanager
    def _writing_alone(self) -> Iterator[None]:
        if not self._one_writer:
            yield
            return
        if not self._writer.acquire(timeout=self._busy_timeout_seconds):
            raise StoreBusyError(f"no turn to write within {self._busy_timeout_seconds:g} s")
        try:
            yield
        finally:
            self._writer.release()

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def freshness_of(conn: Connection) -> tuple[float, float]:
    """(the service's time now, seconds without a sample after which a run is stale)."""
    options = conn.get_execution_options()
    return options["fp8_safeguard_clock"](), options["fp8_safeguard_stale_seconds"]


def policy_of(conn: Connection) -> PolicyConfig:
    """What the policies of all runs have in common; a reader of the database alone has the defaults."""
    shared = conn.get_execution_options().get("fp8_safeguard_policy")
    return shared if isinstance(shared, PolicyConfig) else PolicyConfig()


def open_store(
    settings: Settings, clock: Callable[[], float] = time.time, policy: PolicyConfig | None = None
) -> Store:
    """Create the engine; nothing is read or written until it is used.

    policy: what the policies of all runs have in common; None: the defaults.
    Raises StoreError for an address that is none, and for a database that threads cannot share.
    """
    url = database_url_of(settings.database_url)
    # Every connection knows them, so that a query needs nothing but its connection.
    options = {
        "fp8_safeguard_clock": clock,
        "fp8_safeguard_stale_seconds": settings.run_stale_seconds,
        "fp8_safeguard_policy": policy or PolicyConfig(),
    }
    if url.get_backend_name() == "sqlite":
        _check_sqlite_url(url)
        arguments: dict[str, Any] = {"timeout": settings.busy_timeout_seconds}
    else:
        arguments = _postgresql_arguments(settings)
    engine = create_engine(
        url,
        pool_size=8,
        max_overflow=56,
        pool_timeout=settings.busy_timeout_seconds,
        pool_pre_ping=url.get_backend_name() != "sqlite",
        connect_args=arguments,
        execution_options=options,
    )
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite_connection)
        event.listen(engine, "begin", _begin_sqlite)
    return Store(engine, settings.busy_timeout_seconds)


def database_url_of(text: str) -> URL:
    """The address of a database; `postgresql://` means the driver that is installed with this package.

    Raises StoreError.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        # It may be anything, a password among it, so it is not quoted.
        raise StoreError(f"the address of the database is no URL; {_EXAMPLES}") from error
    backend, _, driver = url.drivername.partition("+")
    if backend not in ("sqlite", "postgresql", "postgres"):
        raise StoreError(f"a database {backend}:// is not supported; {_EXAMPLES}")
    if backend == "sqlite" or driver:
        return url
    return url.set(drivername="postgresql+psycopg")


def _unusable(url: URL, error: DatabaseError) -> str:
    """Why a database cannot be used, without its password, which may also stand in the URL's query."""
    known = {name: value for name, value in url.query.items() if name in ("host", "port")}
    reason = str(error.orig).strip().splitlines()[0]
    if url.get_backend_name() == "sqlite":
        advice = "check that it is a database, that this user may write it and its folder, and that the disk is not full"
    else:
        advice = "check that PostgreSQL runs there and lets this user in, or give another FP8_SAFEGUARD_DATABASE_URL"
    shown = url.set(query=known).render_as_string()
    return f"the database {shown} cannot be used: {reason}; {advice}"


def _postgresql_arguments(settings: Settings) -> dict[str, Any]:
    # A database that was set to acknowledge before its disk does would break the promise of an acknowledgement.
    waiting = f"-c lock_timeout={round(settings.busy_timeout_seconds * 1000)} -c synchronous_commit=on"
    return {"options": waiting, "connect_timeout": _CONNECT_SECONDS}


def lock_slot_lists(conn: Connection) -> None:
    """Let one transaction at a time add slot lists, which runs share. SQLite has one writer anyway."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(_LOCK_SPACE, _SLOT_LISTS)))


def _lock_postgresql(conn: Connection, run: str | None) -> None:
    """All writers share one lock, and those of a run exclude each other; who names no run takes it alone."""
    if run is None:
        conn.execute(select(func.pg_advisory_xact_lock(_LOCK_SPACE, _ALL_RUNS)))
        return
    conn.execute(select(func.pg_advisory_xact_lock_shared(_LOCK_SPACE, _ALL_RUNS)))
    # Two runs whose names hash alike merely wait for each other.
    conn.execute(select(func.pg_advisory_xact_lock(_RUN_SPACE, zlib.crc32(run.encode()) - 2**31)))


def _check_sqlite_url(url: URL) -> None:
    if not url.database or url.database == ":memory:":
        raise StoreError(
            f"{url.render_as_string()} keeps samples in memory of one connection; "
            "give a file, for example sqlite:///fp8-safeguard.db"
        )
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise StoreError(f"the folder {str(folder)!r} of the database does not exist; create it first")


def _prepare_sqlite_connection(connection: Any, record: Any) -> None:
    # Transactions are begun by _begin_sqlite; the driver would begin them late and as readers.
    connection.isolation_level = None
    cursor = connection.cursor()
    _use_write_ahead_log(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _use_write_ahead_log(cursor: Any) -> None:
    """The first connections to a new file change its mode at once, and SQLite does not wait for that lock by itself."""
    deadline = time.monotonic() + _MODE_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_BUSY,
                sqlite3.SQLITE_LOCKED,
            )
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _begin_sqlite(conn: Connection) -> None:
    writes = conn.get_execution_options().get("fp8_safeguard_write", False)
    conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
