"""What commands print: JSON, tables that fit the terminal, failures in one line."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.text import Text

Item = Mapping[str, Any]
Columns = Mapping[str, Callable[[Item], object]]

STYLES = {
    "healthy": "green",
    "watch": "yellow",
    "unstable": "bold red",
    "fallback": "magenta",
    "stale": "dim",
    "ended": "dim",
    "unknown": "dim",
    "safe": "green",
    "keep_bf16": "bold red",
    "act": "bold red",
    "open": "red",
    "held": "magenta",
    "resolved": "dim",
}
"""Colour of a state or severity. The word always stands there too."""
FOLDED = "layer"
"""The one column that may be broken over lines; it goes on a line of its own where the rest leaves no room."""
LEAST_FOLDED_WIDTH = 24
FRAME = 3
"""What the terminal's table puts around each column."""


def json_text(value: Any) -> str:
    """Indented JSON; non-finite numbers are already strings."""
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(json_text(value))


def say(text: str) -> None:
    """A line about the answer on standard error, where it disturbs no pipe."""
    typer.echo(text, err=True)


def fail(text: str, code: int = 1) -> NoReturn:
    """The reason on standard error, and the exit code: 1 it did not work, 2 it was asked wrongly."""
    say(text)
    raise typer.Exit(code)


def printable(text: str) -> str:
    """The text with control characters escaped: a layer's name must not steer the terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shortened(text: str, most: int = 100) -> str:
    """What somebody typed, as an error quotes it."""
    return text if len(text) <= most else f"{text[:most]}..."


def cell(value: object) -> str:
    """One value for a table: numbers with four significant digits, nothing for null."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def show(title: str, items: Sequence[Item], columns: Columns) -> None:
    """The items as a coloured table on a terminal, elsewhere as aligned lines, one an item."""
    if sys.stdout.isatty():
        _show_on_terminal(title, *_texts(items, columns))
        return
    for line in table_lines(title, items, columns):
        typer.echo(line)


def table_lines(title: str, items: Sequence[Item], columns: Columns) -> list[str]:
    """The items as aligned lines under a title and the columns' names."""
    names, rows = _texts(items, columns)
    lines = [names, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )
    return [title, *(line.rstrip() for line in padded)]


def _texts(items: Sequence[Item], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """The columns' names, and the cells of every row."""
    named = {name: [cell(column(item)) for item in items] for name, column in columns.items()}
    # A column in which nothing stands only takes room.
    named = {name: texts for name, texts in named.items() if any(texts)}
    return list(named), [list(row) for row in zip(*named.values(), strict=True)]


def show_facts(subject: str, state: str, facts: Iterable[tuple[str, str]]) -> None:
    """A verdict and what it rests on, one question a line; on a terminal folded under its question."""
    terminal = sys.stdout.isatty()
    width = get_terminal_size().columns if terminal else sys.maxsize
    if terminal:
        from rich.console import Console

        Console().print(coloured(state.upper()), f"[bold]{subject}[/]", sep="  ", highlight=False)
    else:
        typer.echo(f"{subject}: {state.upper()}")
    for question, said in facts:
        start = f"  {question:<9} "
        lines = wrap(printable(said), width, initial_indent=start, subsequent_indent=" " * len(start))
        typer.echo("\n".join(lines or [start.rstrip()]))


def folded(text: str) -> str:
    """A line that goes on indented where a terminal ends; elsewhere it stays one."""
    width = get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    return "\n".join(wrap(text, width, subsequent_indent="  ")) or text


def coloured(text: str) -> "Text":
    """A word in the colour of the state that it names."""
    from rich.text import Text

    # Text, because a layer's name may look like markup.
    return Text(text, style=STYLES.get(text.lower(), ""))


def _show_on_terminal(title: str, names: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    console = Console()
    others = [place for place, name in enumerate(names) if name != FOLDED]
    widths = {place: max(map(cell_len, [names[place], *(row[place] for row in rows)])) for place in others}
    room = console.width - sum(widths.values()) - FRAME * len(names)
    if FOLDED in names and room < LEAST_FOLDED_WIDTH:
        _show_stacked(console, title, names, rows)
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != FOLDED)
    for row in rows:
        table.add_row(*map(coloured, row))
    console.print(table)


def _show_stacked(console: Any, title: str, names: list[str], rows: list[list[str]]) -> None:
    """The folded column on top, the others named below it: for terminals of 80 columns and less."""
    from rich.text import Text

    console.print(Text(title, style="italic"))
    folded = names.index(FOLDED)
    for row in rows:
        console.print(Text(row[folded], style="bold"), overflow="fold")
        line = Text()
        for place, (name, text) in enumerate(zip(names, row, strict=True)):
            if place == folded or not text:
                continue
            pair = Text("  ").append(f"{name} ", style="dim").append(coloured(text))
            if line.cell_len + pair.cell_len > console.width:
                console.print(line)
                line = Text()
            line.append(pair)
        console.print(line)
