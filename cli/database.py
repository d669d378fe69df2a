"""Looks after the server's database: upgrade, status, check and backup."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_safeguard.cli.environment import chosen_settings
from fp8_safeguard.cli.options import Database, Json
from fp8_safeguard.cli.output import fail, print_json

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

    from fp8_safeguard.server.store import Store

db = typer.Typer(no_args_is_help=True, help="The server's database: upgrade, status, check, backup.")

_PAGES_AT_ONCE = 1024
_MOST_FINDINGS = 20


@db.command()
def upgrade(database_url: Database = None) -> None:
    """Bring the database to this release's schema; makes it where there is none."""
    from fp8_safeguard.server.migrate import upgrade as migrate

    with writable_store(database_url) as store:
        revision = migrate(store)
        typer.echo(f"{store.engine.url.render_as_string()} is at revision {revision}.")


@db.command()
def status(database_url: Database = None, as_json: Json = False) -> None:
    """Schema, size and contents of the database. Changes nothing."""
    from fp8_safeguard.server.migrate import current_revision, head_revision

    with readable(database_url) as (url, conn):
        stands, needed = current_revision(conn), head_revision()
        found: dict[str, Any] = {
            "database": url.render_as_string(),
            "revision": stands,
            "needed_revision": needed,
            "current": stands == needed,
            "bytes": size_of(url, conn),
            "rows": row_counts(conn),
        }
    if as_json:
        print_json(found)
        return
    typer.echo(found["database"])
    advice = "up to date" if found["current"] else f"this version needs {needed}: `fp8-safeguard db upgrade`"
    typer.echo(f"  schema   {stands or 'none'}, {advice}")
    typer.echo(f"  size     {found['bytes'] / 2**20:.1f} MiB")
    typer.echo(f"  holds    {', '.join(f'{count} {name}' for name, count in found['rows'].items())}")


@db.command()
def check(database_url: Database = None, as_json: Json = False) -> None:
    """Look for damage; exit code 1 where there is any, or the schema is old.

    Of PostgreSQL only the schema is checked; pg_amcheck looks for damage.
    """
    from fp8_safeguard.server.migrate import current_revision, head_revision

    with readable(database_url) as (url, conn):
        problems = sqlite_damage(conn) if url.get_backend_name() == "sqlite" else []
        stands, needed = current_revision(conn), head_revision()
        if stands != needed:
            problems.append(
                f"the schema is {stands}, this version needs {needed}: run `fp8-safeguard db upgrade`"
            )
        name = url.render_as_string()
    if as_json:
        print_json({"database": name, "ok": not problems, "problems": problems})
    else:
        sound = (
            "sound" if name.startswith("sqlite") else "schema as it should be; pg_amcheck looks for damage"
        )
        typer.echo("\n".join([f"{name}: {'damaged or outdated' if problems else sound}", *problems]))
    if problems:
        raise typer.Exit(1)


@db.command()
def backup(
    target: Annotated[Path, typer.Argument(help="File of the copy.")],
    database_url: Database = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Copy the database while the server runs; the copy is checked.

    SQLite only; PostgreSQL has pg_dump.

    Example:
        fp8-safeguard db backup /backup/fp8-safeguard-$(date +%F).db
    """
    url = url_of(database_url)
    if url.get_backend_name() != "sqlite":
        fail(
            f"A {url.get_backend_name()} database is copied with its own tool: pg_dump --format=custom --file={target} ..."
        )
    if target.exists() and not force:
        fail(f"{target} exists. Choose another name, or replace it with --force.")
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.local import sqlite_file

    try:
        copy_sqlite(sqlite_file(url), target)
    except ApiError as error:
        fail(str(error))
    except (OSError, sqlite3.Error) as error:
        fail(f"{target} could not be written: {error}")
    typer.echo(f"{target}: {target.stat().st_size / 2**20:.1f} MiB, checked.")


def copy_sqlite(source: Path, target: Path) -> None:
    """A consistent, checked copy, by SQLite's online backup. Raises OSError or sqlite3.Error."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        read_only = f"{source.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(read_only, uri=True)) as old, closing(sqlite3.connect(part)) as new:
            old.backup(new, pages=_PAGES_AT_ONCE, sleep=0.05)
            # One file, complete without a log beside it.
            new.execute("PRAGMA journal_mode = DELETE")
            said = new.execute("PRAGMA quick_check(1)").fetchone()[0]
            if said != "ok":
                raise sqlite3.DatabaseError(f"the copy is damaged ({said}); run `fp8-safeguard db check`")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        for name in (part, part.with_name(part.name + "-journal")):
            name.unlink(missing_ok=True)


@contextmanager
def existing_store(database_url: str | None) -> Iterator["Store"]:
    """A database that is there and has this release's schema, to be written."""
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.local import check_schema, sqlite_file

    url = url_of(database_url)
    try:
        if url.get_backend_name() == "sqlite":
            sqlite_file(url)
        with writable_store(database_url) as store:
            with store.read() as conn:
                check_schema(conn, url.render_as_string())
            yield store
    except ApiError as error:
        fail(str(error), error.exit_code)


@contextmanager
def writable_store(database_url: str | None) -> Iterator["Store"]:
    """The database as the server opens it; a mistake is one line on stderr."""
    from sqlalchemy.exc import DBAPIError, NoSuchModuleError

    from fp8_safeguard.server.store import StoreError, open_store

    url = url_of(database_url)
    try:
        store = open_store(chosen_settings(database_url=url.render_as_string(hide_password=False)))
        try:
            yield store
        finally:
            store.close()
    except StoreError as error:
        fail(str(error))
    except DBAPIError as error:
        fail(f"{url.render_as_string()} cannot be used: {error.orig}")
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        fail(f"{url.drivername!r} cannot be used ({error}); PostgreSQL needs fp8-safeguard[postgres].")


@contextmanager
def readable(database_url: str | None) -> Iterator[tuple["URL", "Connection"]]:
    """The database opened read-only, whatever its schema."""
    from sqlalchemy.exc import DBAPIError

    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.local import open_read_only

    url = url_of(database_url)
    try:
        store = open_read_only(url)
        try:
            with store.read() as conn:
                yield url, conn
        finally:
            store.close()
    except ApiError as error:
        fail(str(error), error.exit_code)
    except DBAPIError as error:
        fail(f"{url.render_as_string()} cannot be read: {error.orig}")


def url_of(database_url: str | None) -> "URL":
    """The URL that is given, or else the settings' own."""
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.local import parsed_url

    try:
        return parsed_url(database_url or chosen_settings().database_url)
    except ApiError as error:
        fail(str(error), error.exit_code)


def sqlite_damage(conn: "Connection") -> list[str]:
    """What SQLite itself finds wrong with the file."""
    said = conn.exec_driver_sql(f"PRAGMA integrity_check({_MOST_FINDINGS})").scalars().all()
    orphans = conn.exec_driver_sql("PRAGMA foreign_key_check").all()
    found = [str(line) for line in said if line != "ok"]
    return found + [f"a row of {row[0]} refers to a row of {row[2]} that is missing" for row in orphans]


def row_counts(conn: "Connection") -> dict[str, int]:
    """How many rows the tables have that people ask about; tables that are missing are left out."""
    from sqlalchemy import func, inspect, select

    from fp8_safeguard.server.tables import metadata

    there = set(inspect(conn).get_table_names())
    wanted = [name for name in ("runs", "samples", "alerts", "decisions", "tokens") if name in there]
    return {
        name: conn.execute(select(func.count()).select_from(metadata.tables[name])).scalar_one()
        for name in wanted
    }


def size_of(url: "URL", conn: "Connection") -> int:
    """Bytes on disk, the log included."""
    if url.get_backend_name() != "sqlite":
        return int(conn.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
    file = Path(url.database or "")
    return sum(path.stat().st_size for path in (file, file.with_name(file.name + "-wal")) if path.exists())
