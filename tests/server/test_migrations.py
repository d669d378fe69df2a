"""The schema comes from migrations alone, and a store that they did not make is refused."""

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from fp8_safeguard import migrations
from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.migrate import head_revision, upgrade
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import Store, StoreError, open_store
from fp8_safeguard.server.tables import metadata


@pytest.fixture
def store(settings: Settings) -> Store:
    return open_store(settings)


def test_migrations_make_exactly_the_tables_that_the_code_uses(store: Store) -> None:
    upgrade(store)
    with store.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []
    store.close()


def test_upgrading_twice_changes_nothing(store: Store) -> None:
    assert upgrade(store) == head_revision() == "0001"
    assert upgrade(store) == "0001"
    store.close()


def test_every_revision_can_be_undone() -> None:
    assert migrations.__file__ is not None
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    revisions = list(scripts.walk_revisions())
    assert len(scripts.get_heads()) == 1
    assert all(revision.module.downgrade.__code__.co_code for revision in revisions)


def test_b59_four_services_that_start_together_on_an_empty_store_all_become_healthy(
    settings: Settings,
) -> None:
    gate = threading.Barrier(4)
    failures: list[BaseException] = []

    def start() -> None:
        mine = open_store(settings)
        gate.wait()
        try:
            upgrade(mine)
        except BaseException as error:
            failures.append(error)
        mine.close()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store = open_store(settings)
    with store.read() as conn:
        assert conn.exec_driver_sql("SELECT version_num FROM alembic_version").all() == [("0001",)]
    store.close()


def test_b60_a_store_with_unversioned_tables_is_refused_at_start(settings: Settings, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, title TEXT)")
    database.close()
    with pytest.raises(StoreError, match="has the tables runs but no schema revision"):
        create_app(settings)


def test_b60_a_store_of_a_newer_version_is_refused_at_start(settings: Settings, tmp_path: Path) -> None:
    store = open_store(settings)
    upgrade(store)
    store.close()
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(StoreError, match="'9999', which this version does not know"):
        create_app(settings)


def test_tables_of_others_are_left_alone(settings: Settings, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("CREATE TABLE somebody_elses (id INTEGER)")
    database.close()
    store = open_store(settings)
    upgrade(store)
    with store.read() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM somebody_elses").scalar() == 0
    store.close()


def test_a_failed_migration_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("power cut")

    # The first schema makes `samples` last, after all other tables.
    import alembic.op

    create = alembic.op.create_table
    monkeypatch.setattr(
        alembic.op,
        "create_table",
        lambda name, *a, **k: fail(name) if name == "samples" else create(name, *a, **k),
    )
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(store)
    monkeypatch.undo()
    assert upgrade(store) == "0001"
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:////no/such/folder/store.db", "does not exist"),
    ],
)
def test_a_store_that_threads_cannot_share_is_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(Settings(database_url=url))
