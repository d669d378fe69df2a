"""Training from the command line: what a signal leaves, and what is said about it."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "fp8_safeguard.cli.main", "train"]


def test_sigterm_leaves_a_checkpoint_and_says_how_to_resume(tmp_path: Path) -> None:
    start = [*COMMAND, "--preset", "tiny", "--steps", "100000", "--save", str(tmp_path / "stopped.pt")]
    with subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None
        said = ""
        while "step" not in said:
            said += training.stderr.readline()
            assert training.poll() is None, said
        training.send_signal(signal.SIGTERM)
        said += training.communicate(timeout=120)[1]
    assert training.returncode == 128 + signal.SIGTERM
    assert re.search(r"Stopped by SIGTERM after \d+ of 100000 steps", said)
    assert f"Resume with: fp8-safeguard train --resume {tmp_path}/stopped.pt --steps 100000" in said
    assert (tmp_path / "stopped.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--steps", "1", "--preset", "foo"], "preset is 'foo'; known presets are"),
        (["train", "--steps", "1", "--config", "missing.toml"], "missing.toml"),
        (
            ["train", "--steps", "1", "--fp8-amax-history-len", "70000"],
            "amax_history is 70000; it must be 1 to 65536",
        ),
        (["demo", "--headless", "--steps", "40"], "it must be at least 110"),
    ],
    ids=["preset", "config", "history", "demo"],
)
def test_what_cannot_be_trained_is_a_usage_error(
    cli: Callable[..., Any], arguments: list[str], words: str
) -> None:
    said = cli(*arguments)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
