"""Reads a database without a server: read-only, never migrating, the same JSON."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from fp8_safeguard.cli.api import MOST_PAGE, ApiError
from fp8_safeguard.cli.environment import chosen_settings
from fp8_safeguard.cli.output import Item
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.server import query
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.baselines import baseline_detail, baselines_of
from fp8_safeguard.server.control import pins_of
from fp8_safeguard.server.export import export_run
from fp8_safeguard.server.migrate import current_revision, head_revision
from fp8_safeguard.server.observations import observations
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.store import Store

DRIVER_EXTRAS = {"postgresql": "fp8-safeguard[postgres]"}


class DatabaseSource:
    """A database's answers, each one consistent snapshot."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name

    def runs(self) -> list[Item]:
        """All runs, the newest first."""
        return self._pages(query.list_runs, None)

    def run(self, run: str) -> Item:
        """One run with its verdict."""
        return self._one(query.run_detail, run)

    def plan(self, run: str) -> Item:
        """The plan in force."""
        return self._one(query.plan, run)

    def layers(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Layers; filters are state, order_by and q."""
        return self._pages(query.layers, limit, run, **filters)

    def alerts(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Alerts, the newest first; the filter is state."""
        return self._pages(query.alerts, limit, run, **filters)

    def decisions(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Decisions, the newest first; filters are state and layer."""
        return self._pages(query.decisions, limit, run, **filters)

    def audit(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Who did what, the newest first; the filter is decision."""
        return self._pages(query.audit, limit, run, **filters)

    def readiness(self, run: str, *, from_step: int | None = None, to_step: int | None = None) -> Item:
        """Whether each GEMM could run in FP8, over a range of steps."""
        return self._one(partial(query.readiness, from_step=from_step, to_step=to_step), run)

    def compare(self, a: str, b: str) -> Item:
        """The losses of two runs at the steps that both have."""
        return self._one(partial(query.compare, b=b), a)

    def heatmap(self, run: str, **wanted: Any) -> Item:
        """One metric of all layers over steps; wanted are metric, from_step, to_step and max_cols."""
        return self._one(partial(query.heatmap, **wanted), run)

    def attempts(self, run: str) -> list[Item]:
        """The tree of attempts."""
        return self._items(query.attempts_of, run)

    def pins(self, run: str) -> list[Item]:
        """What people have fixed."""
        return self._items(pins_of, run)

    def baselines(self, run: str) -> list[Item]:
        """Baselines, the newest first."""
        return self._items(baselines_of, run)

    def baseline(self, run: str, number: int) -> Item:
        """One baseline with its values."""
        return self._one(lambda conn, name: baseline_detail(conn, name, number), run)

    def observations(
        self, run: str, from_step: int | None = None, to_step: int | None = None
    ) -> Iterator[StepObservation]:
        """What the policy sees of each step of the live branch, in order."""
        with _as_api_errors(self.name):
            yield from observations(self.store, run, from_step, to_step)

    @contextmanager
    def export(self, run: str, form: str) -> Iterator[Iterator[bytes]]:
        """Everything stored of a run, in pieces."""
        with self._reading() as conn:
            find_run(conn, run)
        with _as_api_errors(self.name):
            yield (piece.encode() for piece in export_run(self.store, run, form))  # type: ignore[arg-type]

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _as_api_errors(self.name), self.store.read() as conn:
            yield conn

    def _one(self, ask: Callable[..., Mapping[str, Any]], run: str) -> Item:
        with self._reading() as conn:
            found: Item = _as_json(ask(conn, run))
        return found

    def _items(self, ask: Callable[..., Mapping[str, Any]], run: str) -> list[Item]:
        found: list[Item] = list(self._one(ask, run)["items"])
        return found

    def _pages(
        self, ask: Callable[..., Mapping[str, Any]], limit: int | None, *names: str, **filters: str | None
    ) -> list[Item]:
        wanted = {name: value for name, value in filters.items() if value is not None}
        found: list[Item] = []
        token: str | None = None
        with self._reading() as conn:
            while True:
                size = min(limit or MOST_PAGE, MOST_PAGE)
                page = _as_json(ask(conn, *names, page_size=size, page_token=token, **wanted))
                found.extend(page["items"])
                token = page["next_page_token"]
                if not token or (limit is not None and len(found) >= limit):
                    return found[:limit]


@contextmanager
def database_source(database_url: str) -> Iterator[DatabaseSource]:
    """The database's answers. Raises ApiError where it is missing, of another schema, or none of ours."""
    url = parsed_url(database_url)
    name = url.render_as_string()
    store = open_read_only(url)
    try:
        with _as_api_errors(name), store.read() as conn:
            check_schema(conn, database_url)
        yield DatabaseSource(store, name)
    finally:
        store.close()


def parsed_url(database_url: str) -> URL:
    """The URL, checked as far as it goes without opening anything. Raises ApiError."""
    try:
        url = make_url(database_url)
    except ArgumentError as error:
        raise ApiError(
            f"{database_url!r} is not a database URL. For a file of this folder type sqlite:///{database_url}",
            status=400,
        ) from error
    if url.get_backend_name() == "sqlite" and (not url.database or url.database == ":memory:"):
        raise ApiError(
            f"{database_url!r} names no file; give for example sqlite:///demo-data/demo.db", status=400
        )
    return url


def sqlite_file(url: URL) -> Path:
    """The existing file of an SQLite URL. Raises ApiError."""
    path = Path(url.database or "")
    if not path.is_file():
        raise ApiError(
            f"There is no database file {str(path)!r} (looked from {Path.cwd()}). `fp8-safeguard serve` and "
            "`fp8-safeguard db upgrade` make one; name another with --database-url."
        )
    return path


def open_read_only(url: URL) -> Store:
    """A store that cannot write. Raises ApiError for a missing file or driver."""
    options = {
        "fp8_safeguard_clock": time.time,
        "fp8_safeguard_stale_seconds": chosen_settings().run_stale_seconds,
    }
    if url.get_backend_name() != "sqlite":
        return Store(_server_engine(url, options))
    engine = create_engine(_read_only(sqlite_file(url)), execution_options=options)
    event.listen(engine, "connect", _leave_transactions_to_us)
    event.listen(engine, "begin", _begin)
    return Store(engine)


def check_schema(conn: Connection, database_url: str) -> None:
    """Refuse a schema that this version does not read. Raises ApiError that says what to do."""
    stands, needed = current_revision(conn), head_revision()
    if stands == needed:
        return
    if stands is None:
        raise ApiError("This is not an fp8-safeguard database: it says no schema revision.")
    if needed is not None and stands > needed:
        raise ApiError(
            f"The database has schema {stands}, made by a newer version; this one reads {needed}. Upgrade fp8-safeguard."
        )
    raise ApiError(
        f"The database has schema {stands}, this version reads {needed}. Bring it up to date with "
        f"`fp8-safeguard db upgrade --database-url {parsed_url(database_url).render_as_string()}` (after a `db backup`)."
    )


def _read_only(path: Path) -> str:
    """The file's URL. A log that nobody wrote and nobody can write needs no lock files beside it."""
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    mode = "immutable=1" if frozen else "mode=ro"
    return f"sqlite:///file:{quote(str(path.resolve()))}?{mode}&uri=true"


def _server_engine(url: URL, options: Mapping[str, Any]) -> Any:
    try:
        return create_engine(
            url,
            connect_args={"options": "-c default_transaction_read_only=on"},
            execution_options=dict(options),
        )
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        extra = DRIVER_EXTRAS.get(url.get_backend_name())
        way_out = f"install {extra}" if extra else "sqlite and postgresql are supported"
        raise ApiError(f"{url.drivername!r} cannot be used ({error}); {way_out}") from error


def _leave_transactions_to_us(connection: Any, record: Any) -> None:
    # The driver would not begin one for a SELECT, and two SELECTs would see two states.
    connection.isolation_level = None


def _begin(conn: Connection) -> None:
    conn.exec_driver_sql("BEGIN")


def _as_json(answer: Mapping[str, Any]) -> Any:
    """The answer as a reader of the server's JSON gets it."""
    return json.loads(strict_dumps(answer))


@contextmanager
def _as_api_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Problem as problem:
        raise ApiError(f"{name}: {problem.detail}", status=problem.status, kind=problem.kind) from problem
    except DBAPIError as error:
        raise ApiError(f"{name} cannot be read: {error.orig}") from error
    except OverflowError as error:
        raise ApiError(
            f"{name} holds whole numbers up to 2^63 - 1, and one beyond was asked for", status=422
        ) from error
