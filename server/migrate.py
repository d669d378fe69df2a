"""Bring the store to the current schema at start, or refuse clearly."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from fp8_safeguard import migrations
from fp8_safeguard.server.store import Store, StoreError
from fp8_safeguard.server.tables import metadata

# Any number does, as long as every process of this service uses the same.
_POSTGRES_LOCK = 0x0F85AFE


def upgrade(store: Store) -> str:
    """Run the missing migrations in one transaction, one process at a time; return the revision.

    Raises StoreError for a database that cannot be used, for tables that no migration of ours made, or a newer schema than
    this version knows.
    """
    with store.opening(), store.write() as conn:
        if conn.dialect.name == "postgresql":
            conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRES_LOCK})
        config = migration_config(conn)
        _check_known(conn, ScriptDirectory.from_config(config))
        command.upgrade(config, "head")
        return current_revision(conn) or ""


def current_revision(conn: Connection) -> str | None:
    """The schema revision that the store says it has."""
    return MigrationContext.configure(conn).get_current_revision()


def head_revision() -> str | None:
    """The schema revision that this version of the service needs."""
    return ScriptDirectory(_script_folder()).get_current_head()


def _script_folder() -> str:
    assert migrations.__file__ is not None
    return str(Path(migrations.__file__).parent)


def migration_config(conn: Connection) -> Config:
    """Alembic's configuration for the migrations on one connection."""
    config = Config(attributes={"connection": conn})
    # "%" starts an interpolation in Alembic's options.
    config.set_main_option("script_location", _script_folder().replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _check_known(conn: Connection, scripts: ScriptDirectory) -> None:
    revision = current_revision(conn)
    if revision is None:
        ours = sorted(set(inspect(conn).get_table_names()) & set(metadata.tables))
        if ours:
            raise StoreError(
                f"the database has the tables {', '.join(ours)} but no schema revision, so it was not made by "
                "this service's migrations. Start with an empty database, or stamp the matching revision."
            )
        return
    known = {script.revision for script in scripts.walk_revisions()}
    if revision not in known:
        raise StoreError(
            f"the database has schema revision {revision!r}, which this version does not know "
            f"(it knows {', '.join(sorted(known))}). Upgrade fp8-safeguard, or use the database's own version."
        )
