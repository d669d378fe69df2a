"""The database engine: pragmas, short read and write transactions."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url

from fp8_safeguard.server.settings import Settings


class StoreError(ValueError):
    """The store cannot be used as it is configured or found."""


class Store:
    """One engine, and the rule that a process has one SQLite writer at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # SQLite's own waiting is a sleep with back-off, unfair among threads; a lock queues them.
        self._writer = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one consistent snapshot."""
        with self.engine.connect() as conn, conn.begin():
            yield conn

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that holds the write lock from its start and is on disk at its end."""
        with self._writer, self.engine.connect() as conn:
            writing = conn.execution_options(fp8_safeguard_write=True)
            with writing.begin():
                yield writing

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


def freshness_of(conn: Connection) -> tuple[float, float]:
    """(the service's time now, seconds without a sample after which a run is stale)."""
    options = conn.get_execution_options()
    return options["fp8_safeguard_clock"](), options["fp8_safeguard_stale_seconds"]


def open_store(settings: Settings, clock: Callable[[], float] = time.time) -> Store:
    """Create the engine; nothing is read or written until it is used.

    Raises StoreError for a database that threads cannot share.
    """
    url = make_url(settings.database_url)
    # Every connection knows them, so that a query needs nothing but its connection.
    options = {"fp8_safeguard_clock": clock, "fp8_safeguard_stale_seconds": settings.run_stale_seconds}
    if url.get_backend_name() != "sqlite":
        return Store(create_engine(url, pool_pre_ping=True, execution_options=options))
    _check_sqlite_url(url)
    timeout = {"timeout": settings.busy_timeout_seconds}
    engine = create_engine(url, pool_size=8, max_overflow=56, connect_args=timeout, execution_options=options)
    event.listen(engine, "connect", _prepare_sqlite_connection)
    event.listen(engine, "begin", _begin_sqlite)
    return Store(engine)


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
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(conn: Connection) -> None:
    writes = conn.get_execution_options().get("fp8_safeguard_write", False)
    conn.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
