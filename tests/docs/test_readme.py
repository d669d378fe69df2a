"""The README's generated parts are current: module tree and figures."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^ {4}(?P<path>\S+\.py)  +(?P<text>.+)$")


def sentences() -> dict[str, str]:
    """Path and opening sentence of every installed module, read here independently of the generator."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = [name.split(".", 1)[1].replace(".", "/") for name in project["tool"]["setuptools"]["packages"]]
    found = {}
    for folder in folders:
        for path in (ROOT / folder).glob("*.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring, f"{path} has no docstring"
            found[path.relative_to(ROOT).as_posix()] = docstring.splitlines()[0]
    return found


def test_the_module_tree_says_what_the_modules_say() -> None:
    rows = (ROW.match(line) for line in (ROOT / "README.md").read_text().splitlines())
    assert {row["path"]: row["text"] for row in rows if row} == sentences()


def test_every_module_opens_with_one_short_sentence() -> None:
    long = {
        path: text for path, text in sentences().items() if not text.endswith(".") or len(text.split()) > 16
    }
    assert not long


def test_generated_parts_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "readme.py"), "--check"])
    assert done.returncode == 0, "README.md is not current: run `make readme`"
