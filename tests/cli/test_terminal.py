"""How answers look and how the command behaves in a shell: width, colour, pipes, imports, speed."""

import os
import pty
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli.output import show_facts
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

COMMAND = [sys.executable, "-m", "fp8_safeguard.cli.main"]
HELP_CPU_SECONDS = 0.8
READING = ["status", "runs", "layers", "alerts", "decisions"]


def on_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """What a command shows on a terminal of that width."""
    master, slave = pty.openpty()
    surroundings = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment}
    shown = subprocess.Popen([*COMMAND, *arguments], stdout=slave, stderr=slave, env=surroundings)
    os.close(slave)
    text = b""
    try:
        while piece := os.read(master, 65536):
            text += piece
    except OSError:
        pass  # Linux says so when the other end is closed.
    finally:
        os.close(master)
    assert shown.wait(60) == 0, text
    return text.decode()


def plain(text: str) -> list[str]:
    """The lines without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("command", [*READING, "report"])
def test_a_terminal_of_80_columns_is_never_overrun(service: Any, command: str) -> None:
    shown = plain(on_terminal(command, "--server", service.url, columns=80))
    assert max(map(len, shown)) <= 80
    if command == "status":
        assert "UNSTABLE  sick-7b" in shown
    if command in ("layers", "alerts", "decisions"):
        assert any("blocks.0.mlp.up" in line for line in shown)


def test_a_narrow_terminal_keeps_every_word_of_an_alert(service: Any) -> None:
    shown = " ".join(plain(on_terminal("alerts", "sick-7b", "--server", service.url, columns=60)))
    for word in (
        "id 1",
        "severity act",
        "state open",
        "slot dgrad",
        "rule gemm-error",
        "value 0.5",
        "limit 0.05",
    ):
        assert word in shown


def test_a_wide_terminal_gets_a_table(service: Any) -> None:
    shown = plain(on_terminal("alerts", "sick-7b", "--server", service.url, columns=160))
    (header,) = [line for line in shown if "severity" in line]
    assert " ".join(header.split()) == "id since severity state layer slot rule value limit cause"


def test_colour_only_where_it_is_wanted(service: Any, cli: Callable[..., Any]) -> None:
    question = ("alerts", "sick-7b", "--server", service.url)
    assert "\x1b[1;31mact" in on_terminal(*question, columns=160)
    assert "\x1b[1;31m" not in on_terminal(*question, columns=160, NO_COLOR="1")
    assert "\x1b" not in cli(*question).out


def test_a_layers_name_cannot_steer_the_terminal(service: Any, cli: Callable[..., Any]) -> None:
    shown = on_terminal("layers", "sick-7b", "--server", service.url, columns=160, NO_COLOR="1")
    assert 'blocks.1/a "b"\\n\\x1b[31m%' in shown
    assert "\x1b[31m" not in shown
    said = cli("layers", "sick-7b", "--server", service.url)
    assert len(said.out.splitlines()) == 2 + 2
    assert "\x1b" not in said.out


@pytest.mark.parametrize("command", READING)
def test_elsewhere_every_item_is_one_line(service: Any, cli: Callable[..., Any], command: str) -> None:
    said = cli(command, "--database-url", service.database_url)
    assert said.code == 0
    if command not in ("status", "runs"):
        items = service.get(f"/runs/sick-7b/{command}")["items"]
        assert len(said.out.splitlines()) == 2 + len(items)


def test_status_answers_the_questions_in_order(service: Any, cli: Callable[..., Any]) -> None:
    said = cli("status", "sick-7b", "--server", service.url)
    first, *rest = said.out.splitlines()
    assert first == "sick-7b: UNSTABLE"
    questions = ["why", "next", "cause", "step", "plan", "alerts", "reported"]
    assert [line.split()[0] for line in rest] == questions
    assert "4 open, 0 held, 0 silenced" in said.out


def test_a_long_reason_is_folded_under_its_question(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_facts(
        "r1", "stale", [("why", "no sample for 132.7 min: the trainer stopped, or the network is down")]
    )
    first, *rest = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("  why       no sample")
    assert rest
    assert all(line.startswith(" " * 12) and len(line) <= 40 for line in rest)


def test_an_exit_code_for_a_bad_verdict_only_where_asked(
    service: Any, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--database-url", service.database_url)
    assert cli("status", "sick-7b", *where).code == 0
    assert cli("status", "sick-7b", "--exit-code", *where).code == 1
    assert cli("status", "healthy-7b", "--exit-code", *where).code == 0
    monkeypatch.setenv("FP8_SAFEGUARD_RUN_STALE_SECONDS", "0.001")
    stale = cli("status", "healthy-7b", "--exit-code", *where)
    assert (stale.code, stale.out.splitlines()[0]) == (1, "healthy-7b: STALE")


@pytest.mark.parametrize(
    ("sick", "code", "words"), [(True, 1, "ended unstable"), (False, 0, "ended healthy")]
)
def test_an_end_heals_nothing(
    cli: Callable[..., Any],
    send_run: Callable[..., None],
    tmp_path: Path,
    sick: bool,
    code: int,
    words: str,
) -> None:
    """A cron job that asks about a run which ended in trouble overnight has to hear of it."""
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/ended.db")) as url:
        send_run(url, "over", 6, sick=sick, mode="observe")
        assert cli("run", "end", "over", "--server", url).code == 0
        said = cli("status", "over", "--exit-code", "--server", url)
    assert said.out.splitlines()[0] == "over: ENDED"
    assert words in said.out
    assert said.code == code


def test_a_reader_that_leaves_early_ends_it_silently(service: Any) -> None:
    question = [*COMMAND, "export", "sick-7b", "--database-url", service.database_url]
    for arguments in (question, [*COMMAND, "layers", "sick-7b", "--json", "--server", service.url]):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stderr is not None
            writer.stdout.close()
            assert writer.stderr.read() == b""


def test_an_interrupt_is_no_traceback(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--port", "0", "--database-url", f"sqlite:///{tmp_path}/x.db"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        while "serves http" not in (line := server.stdout.readline()):
            assert server.poll() is None
        assert httpx2.get(line.rsplit(" ", 1)[1].strip() + "/livez", timeout=30).status_code == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert "Traceback" not in server.stderr.read()


def test_a_terminal_without_the_letters_gets_their_escapes(
    service: Any, process: Callable[..., Any], send_run: Callable[..., None]
) -> None:
    said = process("status", "ü", "--server", service.url, PYTHONIOENCODING="ascii")
    assert said.code == 1
    assert "Traceback" not in said.err


# Not pydantic: typer itself imports it where it is installed.
HEAVY = ("torch", "numba", "triton", "sqlalchemy", "fastapi", "plotly", "pydantic_settings")


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], [*HEAVY, "httpx2", "numpy"]),
        (["status", "--help"], [*HEAVY, "httpx2", "numpy"]),
        (["status", "sick-7b", "--server"], [*HEAVY, "numpy"]),
        (["status", "sick-7b", "--database-url"], ["torch", "numba", "triton", "fp8_safeguard.hooks"]),
    ],
    ids=["help", "status help", "status of a server", "status of a database"],
)
def test_nothing_is_imported_that_is_not_needed(
    service: Any, arguments: list[str], unwanted: list[str]
) -> None:
    place = {"--server": [service.url], "--database-url": [service.database_url]}.get(arguments[-1], [])
    program = (
        "import sys\nfrom fp8_safeguard.cli.main import app\n"
        f"try:\n    app({[*arguments, *place]!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"assert not [name for name in {unwanted!r} if name in sys.modules]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_costs_little() -> None:
    """It takes 0.2 s of a free processor; the bound allows for a busy one. Imports are checked above."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_CPU_SECONDS


def test_every_command_explains_itself_in_80_columns(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = cli("--help").out
    for name in (
        "serve",
        "status",
        "layers",
        "alerts",
        "decisions",
        "token",
        "db",
        "export",
        "alert",
        "decision",
        "baseline",
        "replay",
        "check",
        "compare",
        "report",
        "top",
    ):
        assert re.search(rf"│ {name} ", listed), name
        said = cli(name, "--help")
        assert said.code == 0
        assert max(map(len, said.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["status", "--nope"],
        ["layers", "--limit", "0"],
        ["serve", "--port", "70000"],
        ["alert", "ack", "x"],
    ],
    ids=" ".join,
)
def test_a_mistyped_command_is_a_usage_error(cli: Callable[..., Any], arguments: list[str]) -> None:
    said = cli(*arguments)
    assert (said.code, said.out) == (2, "")
