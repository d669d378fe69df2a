"""The schema comes from migrations alone, and a store that they did not make is refused."""

import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, inspect
from starlette.testclient import TestClient

from fp8_safeguard import migrations
from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.migrate import head_revision, migration_config, upgrade
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import Store, StoreError, open_store
from fp8_safeguard.server.tables import metadata

# A store that version 0.1.0 wrote: seven samples, an acknowledged alert, another one, a decision in force.
FIRST_SCHEMA = Path(__file__).with_name("store_0001.sql")


@pytest.fixture
def store(settings: Settings) -> Store:
    return open_store(settings)


@pytest.fixture
def first(tmp_path: Path, settings: Settings) -> Settings:
    """Settings of a store of the first schema with data."""
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.executescript(FIRST_SCHEMA.read_text(encoding="utf-8"))
    database.close()
    return settings


def start_together(settings: Settings) -> None:
    """Four services upgrade the store at once; any failure is raised."""
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


def revisions(settings: Settings) -> list[Any]:
    store = open_store(settings)
    with store.read() as conn:
        found = conn.exec_driver_sql("SELECT version_num FROM alembic_version").all()
    store.close()
    return [row[0] for row in found]


def test_migrations_make_exactly_the_tables_that_the_code_uses(store: Store) -> None:
    upgrade(store)
    with store.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []
    store.close()


def test_upgrading_twice_changes_nothing(store: Store) -> None:
    assert upgrade(store) == head_revision() == "0006"
    assert upgrade(store) == "0006"
    store.close()


def schema_of(conn: Connection) -> dict[str, Any]:
    """Tables with their columns, keys and indexes, as the database itself tells them."""
    found = inspect(conn)
    return {
        name: {
            "columns": [
                (c["name"], str(c["type"]), c["nullable"], c["default"]) for c in found.get_columns(name)
            ],
            "key": found.get_pk_constraint(name)["constrained_columns"],
            "indexes": sorted(
                (index["name"] or "", index["column_names"]) for index in found.get_indexes(name)
            ),
            "unique": sorted(one["column_names"] for one in found.get_unique_constraints(name)),
            "foreign": sorted(
                (one["constrained_columns"], one["referred_table"]) for one in found.get_foreign_keys(name)
            ),
        }
        for name in found.get_table_names()
        if name != "alembic_version"
    }


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_every_revision_can_be_undone_and_done_again(settings: Settings) -> None:
    assert migrations.__file__ is not None
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert len(scripts.get_heads()) == 1
    store = open_store(settings)
    with store.write() as conn:
        config = migration_config(conn)
        for revision in reversed([script.revision for script in scripts.walk_revisions()]):
            before = schema_of(conn)
            command.upgrade(config, revision)
            after = schema_of(conn)
            assert after != before, f"{revision} changes nothing"
            command.downgrade(config, "-1")
            assert schema_of(conn) == before, f"{revision} is not undone"
            command.upgrade(config, revision)
            assert schema_of(conn) == after, f"{revision} differs the second time"
    store.close()


def test_b59_four_services_that_start_together_on_an_empty_store_all_become_healthy(
    settings: Settings,
) -> None:
    start_together(settings)
    assert revisions(settings) == ["0006"]


def test_b59_a_new_file_that_another_connection_locks_for_a_moment_is_waited_for(
    settings: Settings, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE somebody_elses (id INTEGER)")
    other.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    release.start()
    store = open_store(settings.model_copy(update={"busy_timeout_seconds": 0.01}))
    with store.read() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    store.close()
    release.join()
    other.close()


def test_b59_four_services_that_start_together_upgrade_a_store_of_the_first_schema_once(
    first: Settings,
) -> None:
    start_together(first)
    assert revisions(first) == ["0006"]


def test_a_store_of_the_first_schema_keeps_its_data_and_goes_on(first: Settings, documents: Any) -> None:
    with TestClient(create_app(first)) as client:
        listed = client.get("/api/v1/runs/demo/alerts").json()["items"]
        # What were two alerts of one rule and layer, fprop's and dgrad's, are one from here on.
        assert [(item["rule"], item["state"], item["acknowledged_by"]) for item in listed] == [
            ("underflow", "open", None),
            ("gemm-error", "resolved", None),
            ("gemm-error", "open", "ada"),
        ]
        assert [item["slots"][0]["slot"].get("gemm") for item in listed] == [None, "dgrad", "fprop"]
        assert {item["occurrences"] for item in listed} == {1}
        detail = client.get("/api/v1/runs/demo").json()
        assert (detail["last_step"], detail["loss"], detail["conflicts"]) == (6, 1.9, 0)
        decided = client.get("/api/v1/runs/demo/decisions").json()["items"]
        assert [item["state"] for item in decided] == ["proposed", "sent"]
        kinds = ({"operand": "x", "layout": "row"}, {"operand": "w", "layout": "tile"})
        sample = documents.sample(7, documents.slots(3, kinds), mode="enforce", plan_version=1)
        reply = client.post("/api/v1/runs/demo/samples", json=sample)
        assert (reply.status_code, reply.json()["plan_version"], reply.json()["alerts"]) == (200, 1, [])
        # Its dgrad is beyond the budget, so the alert is not held.
        after = client.get("/api/v1/runs/demo/alerts").json()["items"]
        assert [item["state"] for item in after] == ["open", "resolved", "open"]


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_postgresql_store_of_the_first_schema_is_upgraded_with_its_data(
    settings: Settings, tmp_path: Path
) -> None:
    store = open_store(settings)
    with store.write() as conn:
        command.upgrade(migration_config(conn), "0001")
        _copy_first_schema(tmp_path / "first.db", conn)
    assert upgrade(store) == "0006"
    with store.read() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []
    with TestClient(create_app(settings)) as client:
        listed = client.get("/api/v1/runs/demo/alerts").json()["items"]
        assert [item["state"] for item in listed] == ["open", "resolved", "open"]
        assert client.get("/api/v1/runs/demo").json()["last_step"] == 6
    with store.write() as conn:
        command.downgrade(migration_config(conn), "0001")
        assert conn.exec_driver_sql("SELECT count(*) FROM alerts").scalar() == 3
    store.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_a_store_of_the_third_schema_goes_on_with_its_proposal(settings: Settings, documents: Any) -> None:
    """Nothing of the baselines and the audit log that came after it is needed to act on what it holds."""
    slots = documents.slots(8)
    ill = [slot["layer"] == "blocks.0.mlp" and slot.get("gemm") == "dgrad" for slot in slots]
    values = [
        documents.values(slot, **({"sum_sq_err": 16384.0} if bad else {}))
        for slot, bad in zip(slots, ill, strict=True)
    ]
    url = "/api/v1/runs/demo"
    with TestClient(create_app(settings)) as client:
        sample = documents.sample(4, slots, values, mode="advise")
        (asked,) = client.post(f"{url}/samples", json=sample).json()["decisions"]
    store = open_store(settings)
    with store.write() as conn:
        command.downgrade(migration_config(conn), "0003")
        assert not {"baselines", "audit_log"} & {*inspect(conn).get_table_names()}
    store.close()
    with TestClient(create_app(settings)) as client:
        (held,) = client.get(f"{url}/decisions").json()["items"]
        assert (held["id"], held["state"], held["history"]) == (asked["id"], "proposed", [])
        assert client.get(f"{url}/baselines").json()["items"] == []
        approved = client.post(f"/api/v1/decisions/{asked['id']}:approve", json={"by": "ada"}).json()
        assert [(act["what"], act["actor"]) for act in approved["history"]] == [("approved", "ada")]
        reply = client.post(f"{url}/samples", json=documents.sample(5, slots, mode="advise")).json()
        assert [entry["decision_id"] for entry in reply["plan"]["entries"]] == [asked["id"]]


def _copy_first_schema(path: Path, conn: Connection) -> None:
    with sqlite3.connect(path) as database:
        database.executescript(FIRST_SCHEMA.read_text(encoding="utf-8"))
        database.row_factory = sqlite3.Row
        tables = MetaData()
        tables.reflect(conn)
        for table in tables.sorted_tables:
            rows = [dict(row) for row in database.execute(f'SELECT * FROM "{table.name}"')]
            if rows and table.name != "alembic_version":
                conn.execute(table.insert(), rows)
    database.close()


def test_the_second_schema_can_be_undone_without_losing_data(first: Settings) -> None:
    store = open_store(first)
    upgrade(store)
    with store.write() as conn:
        command.downgrade(migration_config(conn), "0001")
        assert conn.exec_driver_sql("SELECT count(*) FROM samples").scalar() == 7
        assert "occurrences" not in {column["name"] for column in inspect(conn).get_columns("alerts")}
    assert upgrade(store) == "0006"
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
    assert upgrade(store) == "0006"
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:////no/such/folder/store.db", "does not exist"),
        ("mysql://ada:secret@host/x", "^a database mysql:// is not supported; for example sqlite"),
        ("ada:secret@host", "^the address of the database is no URL; for example sqlite"),
    ],
)
def test_a_store_that_threads_cannot_share_is_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(Settings(database_url=url))


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_database_that_does_not_answer_is_named_without_its_password(
    scheme: str, settings: Settings
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        url = f"{scheme}://ada:topsecret@127.0.0.1:{port}/x?application_name=topsecret"
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StoreError) as refused:
                create_app(settings.model_copy(update={"database_url": url, "host": host}))
            told = str(refused.value)
            assert "topsecret" not in told
            assert "\n" not in told
            assert f"postgresql+psycopg://ada:***@127.0.0.1:{port}/x cannot be used: " in told
            assert told.endswith("or give another FP8_SAFEGUARD_DATABASE_URL")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    (tmp_path / "text.db").write_text("no database" * 1000)
    for name, reason in (("folder", "unable to open"), ("text", "file is not a database")):
        with pytest.raises(StoreError, match=rf"{name}\.db cannot be used: {reason}.*; check that"):
            create_app(Settings(database_url=f"sqlite:///{tmp_path}/{name}.db"))
