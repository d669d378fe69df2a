"""The page of commands is what the commands say, and every command has its section."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fp8_safeguard.cli.main import app

ROOT = Path(__file__).parents[2]


def leaves(name: str, command: Any) -> list[str]:
    """The whole names of all commands below one."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [name]
    return [leaf for sub, below in inner.items() for leaf in leaves(f"{name} {sub}", below)]


def test_the_page_is_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "commands.py"), "--check"])
    assert done.returncode == 0, "docs/cli.md is not current: run `python docs/commands.py`"


@pytest.mark.parametrize("name", leaves("fp8-safeguard", typer.main.get_command(app)))
def test_every_command_has_a_section(name: str) -> None:
    assert f"\n## {name}\n" in (ROOT / "docs" / "cli.md").read_text()
