"""What the service says at its beginning and its end."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

PROGRAM = (
    "from fp8_safeguard.server.serve import run\n"
    "from fp8_safeguard.server.settings import Settings\n"
    "run(Settings(port=0, database_url={url!r}))\n"
)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_says_that_it_stopped(tmp_path: Path, ending: signal.Signals) -> None:
    program = PROGRAM.format(url=f"sqlite:///{tmp_path}/x.db")
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        said, _, url = server.stdout.readline().strip().rpartition(" ")
        assert said == "fp8-safeguard serves"
        assert httpx2.get(f"{url}/livez", timeout=30).status_code == 200
        server.send_signal(ending)
        assert server.stdout.read() == "fp8-safeguard stopped\n"
        assert server.stderr.read() == ""


def test_inside_another_program_it_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/x.db")):
        pass
    assert capsys.readouterr().out == ""
