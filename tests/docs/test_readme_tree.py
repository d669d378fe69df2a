"""The README's module tree says what the modules say of themselves."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^ {4}(?P<path>\S+\.py)  +(?P<text>.+)$")


def packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [
        name.removeprefix("fp8_safeguard.").replace(".", "/")
        for name in project["tool"]["setuptools"]["packages"]
    ]


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0]


def modules() -> dict[str, str]:
    """Path and opening sentence of every module of the project."""
    return {
        path.relative_to(ROOT).as_posix(): first_sentence(path)
        for package in packages()
        for path in sorted((ROOT / package).glob("*.py"))
        if path.name != "__init__.py" or package.count("/") == 0
    }


def test_readme_tree_equals_the_module_docstrings() -> None:
    rows = (ROW.match(line) for line in (ROOT / "README.md").read_text().splitlines())
    written = {row["path"]: row["text"] for row in rows if row}
    assert written == modules()


def test_every_module_opens_with_one_short_sentence() -> None:
    long = {
        path: text for path, text in modules().items() if not text.endswith(".") or len(text.split()) > 16
    }
    assert not long
