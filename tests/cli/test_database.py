"""The database's own commands: upgrade, status, check, backup."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings


def test_a_new_database_is_made_current_and_sound(cli: Callable[..., Any], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    assert cli("db", "upgrade", "--database-url", url).code == 0
    found = cli("db", "status", "--database-url", url, "--json").json
    assert found["current"] is True
    assert found["rows"] == {"runs": 0, "samples": 0, "alerts": 0, "decisions": 0, "tokens": 0}
    assert found["bytes"] >= (tmp_path / "new.db").stat().st_size
    said = cli("db", "check", "--database-url", url)
    assert said.code == 0
    assert said.out.endswith("sound\n")


def test_status_counts_what_is_there(service: Any, cli: Callable[..., Any]) -> None:
    found = cli("db", "status", "--database-url", service.database_url, "--json").json
    assert (found["rows"]["runs"], found["rows"]["samples"]) == (2, 9)


def test_a_missing_database_is_not_made_by_looking(cli: Callable[..., Any], tmp_path: Path) -> None:
    for command in (["db", "status"], ["db", "check"], ["db", "backup", "copy.db"], ["token", "list"]):
        said = cli(*command, "--database-url", f"sqlite:///{tmp_path}/missing.db")
        assert (said.code, said.out) == (1, "")
        assert "no database file" in said.err
    assert list(tmp_path.iterdir()) == []


def test_check_finds_damage_and_an_old_schema(service: Any, cli: Callable[..., Any], tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    url = f"sqlite:///{copy}"
    cli("db", "backup", str(copy), "--database-url", service.database_url)
    with closing(sqlite3.connect(copy)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = '0000'")
        conn.execute("UPDATE samples SET attempt_id = 999 WHERE id = 1")
    said = cli("db", "check", "--database-url", url, "--json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert any("refers to a row of attempts that is missing" in text for text in said.json["problems"])
    assert any("db upgrade" in text for text in said.json["problems"])


def test_check_finds_pages_that_were_overwritten(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    cli("db", "backup", str(copy), "--database-url", service.database_url)
    whole = bytearray(copy.read_bytes())
    whole[4096 * 3 : 4096 * 6] = b"\xff" * (4096 * 3)
    copy.write_bytes(whole)
    said = cli("db", "check", "--database-url", f"sqlite:///{copy}")
    assert said.code == 1
    assert "Traceback" not in said.err


def test_a_backup_of_a_busy_server_is_one_whole_state(
    cli: Callable[..., Any], send_run: Callable[..., None], tmp_path: Path
) -> None:
    """Samples keep coming; the copy holds all of an earlier moment, in one file."""
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/busy.db")) as url:
        send_run(url, "r0", 3, sick=False, mode="observe")
        writers = [
            threading.Thread(
                target=send_run, args=(url, f"w{n}", 20), kwargs={"sick": False, "mode": "observe"}
            )
            for n in range(2)
        ]
        for writer in writers:
            writer.start()
        said = cli(
            "db", "backup", str(tmp_path / "copy.db"), "--database-url", f"sqlite:///{tmp_path}/busy.db"
        )
        for writer in writers:
            writer.join()
    assert said.code == 0
    assert not list(tmp_path.glob("copy.db-*"))
    assert not list(tmp_path.glob(".copy.db*"))
    assert cli("db", "check", "--database-url", f"sqlite:///{tmp_path}/copy.db").code == 0
    with closing(sqlite3.connect(tmp_path / "copy.db")) as conn:
        counts = dict(
            conn.execute(
                "SELECT runs.name, count(*) FROM samples JOIN attempts ON attempts.id = samples.attempt_id "
                "JOIN runs ON runs.id = attempts.run_id GROUP BY 1"
            ).fetchall()
        )
    assert counts["r0"] == 3
    restored = cli("status", "r0", "--json", "--database-url", f"sqlite:///{tmp_path}/copy.db").json
    assert restored["last_step"] == 2


def test_a_backup_replaces_nothing_unasked(service: Any, cli: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("mine")
    question = ("db", "backup", str(target), "--database-url", service.database_url)
    assert cli(*question).code == 1
    assert target.read_text() == "mine"
    assert cli(*question, "--force").code == 0
    assert target.read_bytes().startswith(b"SQLite format 3\0")


def test_a_backup_that_cannot_be_written_leaves_nothing(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    said = cli("db", "backup", str(tmp_path / "no" / "copy.db"), "--database-url", service.database_url)
    assert (said.code, said.out) == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_postgresql_is_left_to_pg_dump(cli: Callable[..., Any]) -> None:
    said = cli("db", "backup", "copy.dump", "--database-url", "postgresql+psycopg://u:secret@h/d")
    assert said.code == 1
    assert "pg_dump" in said.err
    assert "secret" not in said.err


@pytest.mark.parametrize("command", ["upgrade", "status", "check"])
def test_a_bad_url_is_a_usage_error(cli: Callable[..., Any], command: str) -> None:
    said = cli("db", command, "--database-url", "nowhere")
    assert (said.code, said.out) == (2, "")
    assert "sqlite:///nowhere" in said.err
