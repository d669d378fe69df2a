"""The quick start's blocks run as they stand, against a real server, in their order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8787"
RUN_ELSEWHERE = ("pip install", "fp8-safeguard serve")
"""Commands that this test does in its own way: the package is installed, and the server is on a free port."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = tmp_path_factory.mktemp("quickstart") / "store.db"
    with running_server(Settings(database_url=f"sqlite:///{database}")) as url:
        yield url


@pytest.fixture(scope="module")
def said(server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each block printed."""
    folder = tmp_path_factory.mktemp("reader")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FP8_SAFEGUARD_")}
    environment = {
        **kept,
        "FP8_SAFEGUARD_SERVER": server,
        "XDG_STATE_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    outputs = {}
    for kind, text in BLOCK.findall(PAGE):
        for command in commands(kind, text.replace(ADDRESS, server)):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder
            )
            name = " ".join(command[3:]) if kind == "console" else command[2]
            assert done.returncode == 0, f"{name}\n{done.stderr}"
            outputs[name] = done.stdout
    return outputs


def commands(kind: str, text: str) -> Iterator[list[str]]:
    if kind == "python":
        yield [sys.executable, "-c", text]
        return
    for line in text.splitlines():
        assert line.startswith("$ "), f"{line!r} is no command"
        if not line.removeprefix("$ ").startswith(RUN_ELSEWHERE):
            program, *arguments = line.removeprefix("$ ").split()
            assert program == "fp8-safeguard"
            yield [sys.executable, "-m", "fp8_safeguard.cli.main", *arguments]


def test_the_trainer_is_observed_whole(said: dict[str, str]) -> None:
    (trainer,) = [output for code, output in said.items() if "guard.coverage()" in code]
    assert trainer == "2 weight matrices, run 'quickstart'\n"


def test_the_commands_tell_of_the_run(said: dict[str, str]) -> None:
    assert said["status quickstart"].startswith("quickstart: ENDED\n")
    assert len(said["layers quickstart"].splitlines()) == 2 + 2
    assert said["alerts quickstart"]
    assert said["top quickstart"].startswith("quickstart: ENDED, step 30, loss ")


def test_the_server_has_what_the_page_promises(said: dict[str, str], server: str) -> None:
    first = httpx2.get(f"{server}/api/v1/runs/quickstart").json()
    assert (first["state"], first["first_step"], first["last_step"]) == ("ended", 0, 30)
    assert first["loss"] is not None
    attempts = httpx2.get(f"{server}/api/v1/runs/resumed/attempts").json()["items"]
    assert [(item["id"], item["parent"], item["from_step"], item["last_step"]) for item in attempts] == [
        ("0", None, 0, 10),
        ("1", "0", 20, 30),
    ]
