"""Write docs/cli.md from the commands themselves, or check that it is current."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from fp8_safeguard.cli.main import app

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Written by `docs/commands.py` from the commands themselves.

**Exit codes.** 0: it worked. 1: it did not; or the answer is bad, where a command says so (`status --exit-code`, `report --exit-code`, `check`, `db check`).
2: it was asked wrongly, or has to ask (below) and finds nobody. An interrupt ends with 130. Answers go to standard output, everything else to standard error.

**Where answers come from.** `status`, `runs`, `layers`, `top`, `alerts`, `decisions`, `plan`, `audit`, `report`, `compare`, `replay`, `check`, `baseline` and `export` ask the first of these that is given:

1. `--server` or `--database-url` (both at once is an error);
2. `FP8_SAFEGUARD_SERVER`;
3. `FP8_SAFEGUARD_DATABASE_URL`;
4. the server at http://127.0.0.1:8787;
5. where nobody answers there: the database of this folder, `fp8-safeguard.db` or `demo-data/demo.db`. A line on standard error says so.

A database is opened read-only and never migrated; the JSON is the server's own. `alert` and `decision` go to a server only. `token` and `db` go to the
database only: `--database-url`, `FP8_SAFEGUARD_DATABASE_URL`, or `fp8-safeguard.db` of this folder.

**Which run is meant.** The one that is named; without a name the one that reported last, of several the newest. Where there are several, a line on standard
error says which.

**Terminals.** Colour and tables on a terminal, elsewhere plain lines: a title, the names of all columns, then one line an item. Two spaces or more stand between columns, and `-`
in an empty cell: `sed 1,2d | awk -F '  +' '{print $1, $5}'` takes the first and the fifth. `NO_COLOR` turns colour off. `--json` lists all pages in one;
non-finite numbers are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

**Questions.** `run kill-switch`, `run delete`, `baseline learn` and `baseline drop` ask first, on a terminal; a no ends with 1. `--yes` answers beforehand, and is needed where standard input is no
terminal: nothing is taken from a pipe for an answer.
"""


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    return HEAD + "".join(f"\n{part}" for part in _sections("fp8-safeguard", root))


def _sections(name: str, command: Any) -> Iterator[str]:
    for sub, inner in getattr(command, "commands", {}).items():
        whole = f"{name} {sub}"
        if hasattr(inner, "commands"):
            yield from _sections(whole, inner)
        else:
            yield _section(whole, inner)


def _section(name: str, command: Any) -> str:
    words = [
        f"[{param.name.upper()}]" if not param.required else param.name.upper()
        for param in _of(command, "argument")
    ]
    text, _, examples = (command.help or "").partition(
        "\n\nExamples:\n" if "Examples:" in (command.help or "") else "\n\nExample:\n"
    )
    lines = [f"## {name}", f"`{' '.join([name, '[OPTIONS]', *words])}`", "", text, ""]
    if examples:
        lines += [*(f"    {line.strip()}" for line in examples.strip().splitlines()), ""]
    rows = [_row(param) for kind in ("argument", "option") for param in _of(command, kind)]
    if rows:
        lines += ["| option | what it does | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _of(command: Any, kind: str) -> list[Any]:
    return [param for param in command.params if param.param_type_name == kind and param.name != "help"]


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        names = f"`{param.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len, reverse=True))
    text = (param.help or "").replace("|", "\\|")
    variable = f" Variable: `{param.envvar}`." if param.envvar else ""
    return f"| {names} | {text}{variable} | {_default(param)} |"


def _default(param: Any) -> str:
    shown = getattr(param, "show_default", None)
    value = shown if isinstance(shown, str) else param.default
    if value is None or isinstance(value, bool) or param.required:
        return ""
    return f"`{getattr(value, 'value', value)}`"


def main() -> int:
    """Exit code 1 with --check where docs/cli.md is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
