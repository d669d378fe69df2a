"""Where answers come from: the same JSON from a server and from its database, and which one is asked."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from fp8_safeguard.cli import source as sources
from fp8_safeguard.cli.local import database_source
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

QUESTIONS = {
    ("status", "sick-7b"): "/runs/sick-7b",
    ("runs",): "/runs",
    ("layers", "sick-7b"): "/runs/sick-7b/layers",
    ("alerts", "sick-7b"): "/runs/sick-7b/alerts",
    ("decisions", "sick-7b"): "/runs/sick-7b/decisions",
    ("report", "sick-7b"): "/runs/sick-7b/readiness",
}


@pytest.fixture
def no_default_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default address becomes one where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for module in (sources, __import__("fp8_safeguard.cli.api", fromlist=["api"])):
        monkeypatch.setattr(module, "DEFAULT_SERVER", f"http://127.0.0.1:{port}")


@pytest.fixture
def stranger() -> Iterator[str]:
    """Another service that answers everything, in HTML or as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"[]" if "layers" in self.path else b"<html>Sign in</html>"
            if "decisions" in self.path:
                self.send_response(301)
                self.send_header("Location", "https://elsewhere/")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("command", QUESTIONS, ids=lambda command: command[0])
def test_json_is_what_the_server_answers(
    service: Any, cli: Callable[..., Any], command: tuple[str, ...]
) -> None:
    said = cli(*command, "--json", "--server", service.url)
    assert (said.code, said.err) == (0, "")
    assert said.json == service.get(QUESTIONS[command])


@pytest.mark.parametrize("command", QUESTIONS, ids=lambda command: command[0])
def test_a_database_answers_as_its_server_does(
    service: Any, cli: Callable[..., Any], command: tuple[str, ...]
) -> None:
    said = cli(*command, "--json", "--database-url", service.database_url)
    assert (said.code, said.err) == (0, "")
    assert said.json == service.get(QUESTIONS[command])


@pytest.mark.parametrize("command", ["status", "layers", "alerts", "decisions"])
def test_without_a_name_the_run_that_reported_last_is_meant(
    service: Any, cli: Callable[..., Any], command: str
) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        said = cli(command, "--json", *where)
        assert said.json == service.get(QUESTIONS[command, "sick-7b"])
        assert said.err == "sick-7b reported last; `fp8-safeguard runs` lists all 2, name one to see it.\n"


def test_of_runs_that_reported_at_once_the_newest_is_meant(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    assert cli("db", "backup", str(copy), "--database-url", service.database_url).code == 0
    with closing(sqlite3.connect(copy)) as conn, conn:
        conn.execute("UPDATE runs SET last_report_at = 1.7e9")
    said = cli("status", "--json", "--database-url", f"sqlite:///{copy}")
    assert said.json["id"] == "sick-7b"


def test_filters_and_limits_reach_both_sources(service: Any, cli: Callable[..., Any]) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        few = cli("layers", "sick-7b", "--q", "MLP", "--limit", "1", "--order-by", "name", "--json", *where)
        assert [item["layer"] for item in few.json["items"]] == ["blocks.0.mlp.up"]
        none = cli("layers", "sick-7b", "--state", "healthy", "--json", *where)
        assert none.json["items"] == []
        one = cli("decisions", "sick-7b", "--layer", "blocks.0.mlp.up", "--json", *where)
        assert {item["layer"] for item in one.json["items"]} == {"blocks.0.mlp.up"}


def test_a_wrong_filter_is_a_usage_error_that_lists_what_is_allowed(
    service: Any, cli: Callable[..., Any]
) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        said = cli("layers", "sick-7b", "--state", "ill", *where)
        assert (said.code, said.out) == (2, "")
        assert "'ill' is not one of healthy, watch" in said.err


def test_a_misspelt_run_brings_close_matches(service: Any, cli: Callable[..., Any]) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        said = cli("layers", "sik-7b", *where)
        assert (said.code, said.out) == (1, "")
        assert "no run 'sik-7b' (404)" in said.err
        assert "Did you mean sick-7b or healthy-7b?" in said.err or "Did you mean sick-7b?" in said.err


@pytest.mark.parametrize("run", ["../health", "..", "a/b", "a?b#c", "\x1b[31m", "%2e%2e"])
def test_no_run_name_leads_elsewhere_or_steers_the_terminal(
    service: Any, cli: Callable[..., Any], run: str
) -> None:
    said = cli("status", run, "--server", service.url)
    assert (said.code, said.out) == (1, "")
    assert "404" in said.err
    assert "\x1b" not in said.err


def test_reading_a_database_changes_no_byte_of_it(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    assert cli("db", "backup", str(copy), "--database-url", service.database_url).code == 0
    before = copy.read_bytes()
    assert cli("layers", "sick-7b", "--database-url", f"sqlite:///{copy}").code == 0
    assert copy.read_bytes() == before


def test_the_database_itself_refuses_to_be_written(service: Any) -> None:
    with (
        database_source(service.database_url) as opened,
        opened.store.read() as conn,
        pytest.raises(OperationalError, match="readonly"),
    ):
        conn.exec_driver_sql("DELETE FROM alerts")


def test_a_database_in_a_folder_that_nobody_can_write_is_read(
    service: Any, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite wants to put its lock files there, unless told that nothing changes."""
    from fp8_safeguard.cli import local

    copy = tmp_path / "copy.db"
    assert cli("db", "backup", str(copy), "--database-url", service.database_url).code == 0
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    assert "immutable=1" in local._read_only(copy)
    assert cli("status", "sick-7b", "--database-url", f"sqlite:///{copy}").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db"]


class TestWhichSource:
    """--server or --database-url; then the variables; then the default address; then this folder's database."""

    def test_two_sources_are_a_usage_error(self, service: Any, cli: Callable[..., Any]) -> None:
        said = cli("status", "--server", service.url, "--database-url", service.database_url)
        assert said.code == 2
        assert "not both" in said.err

    def test_an_option_wins_over_the_variables(
        self, service: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", "http://127.0.0.1:9")
        assert cli("status", "sick-7b", "--database-url", service.database_url).code == 0

    def test_the_server_variable_wins_over_the_database_variable(
        self, service: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", service.url)
        monkeypatch.setenv("FP8_SAFEGUARD_DATABASE_URL", "sqlite:///missing.db")
        assert cli("status", "sick-7b").code == 0

    def test_the_database_variable_is_read_where_no_server_is_named(
        self, service: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", "")
        monkeypatch.setenv("FP8_SAFEGUARD_DATABASE_URL", service.database_url)
        assert cli("status", "sick-7b").code == 0

    @pytest.mark.usefixtures("no_default_server")
    @pytest.mark.parametrize("name", ["fp8-safeguard.db", "demo-data/demo.db"])
    def test_the_folders_database_is_read_where_nobody_serves(
        self, service: Any, cli: Callable[..., Any], tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "demo-data").mkdir()
        cli("db", "backup", str(tmp_path / name), "--database-url", service.database_url)
        said = cli("status", "sick-7b", "--json")
        assert said.json == service.get("/runs/sick-7b")
        assert f"reading {name} of this folder" in said.err

    @pytest.mark.usefixtures("no_default_server")
    def test_of_two_databases_none_is_guessed(self, cli: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "demo-data").mkdir()
        for name in sources.USUAL_FILES:
            (tmp_path / name).touch()
        said = cli("status")
        assert said.code == 1
        assert "--database-url sqlite:///demo-data/demo.db" in said.err

    @pytest.mark.usefixtures("no_default_server")
    def test_nothing_at_all_says_how_to_start(self, cli: Callable[..., Any]) -> None:
        said = cli("status")
        assert said.code == 1
        assert "fp8-safeguard serve" in said.err


class TestAddresses:
    """A server's address as people type it."""

    def test_host_and_port_are_enough(self, service: Any, cli: Callable[..., Any]) -> None:
        assert cli("status", "sick-7b", "--server", service.url.removeprefix("http://")).code == 0
        assert cli("status", "sick-7b", "--server", service.url + "/").code == 0

    @pytest.mark.parametrize(
        "address",
        [
            "ftp://host",
            "http://",
            "host:port",
            "http://h:99999",
            "http://h:0",
            "http://u:p@h",
            "http://h?x=1",
            "http://[::1",
            "ho st",
        ],
    )
    def test_what_is_no_address_is_a_usage_error_with_an_example(
        self, cli: Callable[..., Any], address: str
    ) -> None:
        said = cli("status", "--server", address)
        assert said.code in ((2,) if address != "ho st" else (1, 2))
        assert said.err.count("\n") == 1
        assert "http://127.0.0.1:8787" in said.err or "No answer" in said.err

    def test_no_proxy_stands_between_this_machine_and_itself(
        self, service: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        assert cli("status", "sick-7b", "--server", service.url).code == 0

    @pytest.mark.parametrize("command", ["status", "layers"])
    def test_another_service_is_recognised(
        self, stranger: str, cli: Callable[..., Any], command: str
    ) -> None:
        said = cli(command, "r1", "--server", stranger)
        assert (said.code, said.out) == (1, "")
        assert "is it an fp8-safeguard server?" in said.err

    def test_a_redirect_is_named_and_not_followed(self, stranger: str, cli: Callable[..., Any]) -> None:
        said = cli("decisions", "r1", "--server", stranger, "--token", "secret")
        assert (said.code, said.out) == (1, "")
        assert "sends on to https://elsewhere/ (301)" in said.err


class TestTokens:
    """What a refused request says."""

    @pytest.fixture
    def guarded(self, tmp_path: Path) -> Iterator[str]:
        settings = Settings(database_url=f"sqlite:///{tmp_path}/guarded.db", tokens={"reader": ["read"]})
        with running_server(settings) as url:
            yield url

    def test_a_missing_token_names_the_variable_and_the_scope(
        self, guarded: str, cli: Callable[..., Any]
    ) -> None:
        said = cli("status", "r1", "--server", guarded)
        assert said.code == 1
        for word in ("401", "No token was sent", "scope read", "FP8_SAFEGUARD_TOKEN"):
            assert word in said.err

    def test_a_token_without_the_scope_names_the_scope(
        self, guarded: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_TOKEN", "reader")
        said = cli("alert", "ack", "1", "--server", guarded)
        assert said.code == 1
        for word in ("403", "The token sent does not do", "scope control"):
            assert word in said.err

    @pytest.mark.parametrize("token", ["a\nb", "ü"])
    def test_a_token_that_cannot_be_sent_is_one_line(self, cli: Callable[..., Any], token: str) -> None:
        said = cli("status", "--server", "http://127.0.0.1:9", "--token", token)
        assert said.code == 2
        assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("demo-data/demo.db", 2, "sqlite:///demo-data/demo.db"),
        ("sqlite://", 2, "names no file"),
        ("sqlite:///missing.db", 1, "no database file"),
        ("sqlite:///.", 1, "no database file"),
        ("sqlite:///text.db", 1, "cannot be read"),
        ("sqlite:///empty.db", 1, "not an fp8-safeguard database"),
        ("mysql://u:secret@h/d", 1, "cannot be used"),
        ("postgresql+psycopg://u:secret@127.0.0.1:9/d", 1, "cannot be read"),
    ],
)
def test_a_database_that_cannot_be_read_says_why(
    cli: Callable[..., Any], tmp_path: Path, url: str, code: int, words: str
) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at" * 50)
    with closing(sqlite3.connect(tmp_path / "empty.db")) as conn, conn:
        conn.execute("CREATE TABLE other (x)")
    said = cli("status", "--database-url", url)
    assert (said.code, said.out) == (code, "")
    assert words in said.err
    assert "secret" not in said.err


@pytest.mark.parametrize(
    ("revision", "words"), [("0000", "fp8-safeguard db upgrade"), ("9999", "newer version")]
)
def test_another_schema_is_named_with_the_way_out(
    service: Any, cli: Callable[..., Any], tmp_path: Path, revision: str, words: str
) -> None:
    copy = tmp_path / "copy.db"
    cli("db", "backup", str(copy), "--database-url", service.database_url)
    with closing(sqlite3.connect(copy)) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    said = cli("status", "--database-url", f"sqlite:///{copy}")
    assert (said.code, said.out) == (1, "")
    assert words in said.err
    assert json.dumps(revision)[1:-1] in said.err
