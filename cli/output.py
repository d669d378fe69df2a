"""What commands print: JSON, tables that fit the terminal, failures in one line."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
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
NOTHING = "-"
"""An empty cell of a plain table."""
FRAME = 3
"""What the terminal's table puts around each column."""


def json_text(value: Any) -> str:
    """Indented JSON; non-finite numbers are already strings."""
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(json_text(value))


def confirmed(question: str, yes: bool, otherwise: str) -> None:
    """Go on only where somebody agrees, by --yes or at a terminal; `otherwise` says what is not done then.

    Exits with 1 on a no, and with 2 where nobody can be asked: nothing is taken from a pipe for an answer.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{otherwise} without --yes where nobody can be asked.", 2)
    if not typer.confirm(printable(question), err=True):
        fail(f"{otherwise}.")


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
        from rich.console import Console

        console = Console()
        console.print(terminal_table(title, items, columns, console.width))
        return
    for line in table_lines(title, items, columns):
        typer.echo(line)


def table_lines(title: str, items: Sequence[Item], columns: Columns) -> list[str]:
    """The items as aligned lines under a title and the columns' names, for people and for programs.

    Every column is there whatever the items hold, two spaces or more stand between two of them, and NOTHING in an empty
    cell: cutting a line at its double spaces gives as many cells as there are columns.
    """
    from rich.cells import cell_len

    lines = [list(columns)]
    lines += [[_one_cell(cell(column(item))) for column in columns.values()] for item in items]
    # In places on a terminal: a letter may take none or two.
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(text + " " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    return [title, *(line.rstrip() for line in padded)]


def _one_cell(text: str) -> str:
    """A cell of a plain table, in which no name parts two cells: of spaces at its ends and in rows the escapes stand."""
    return re.sub(r"(?<= ) |^ | $", r"\\x20", text) or NOTHING


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


def terminal_table(title: str, items: Sequence[Item], columns: Columns, width: int) -> "RenderableType":
    """The items as a coloured table of at most that many columns of letters, or stacked where they do not fit."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    names, rows = _texts(items, columns)
    # Text, because a title may name a layer, and that may look like markup.
    head = Text(title, style="italic")
    others = [place for place, name in enumerate(names) if name != FOLDED]
    widths = {place: max(map(cell_len, [names[place], *(row[place] for row in rows)])) for place in others}
    if FOLDED in names and width - sum(widths.values()) - FRAME * len(names) < LEAST_FOLDED_WIDTH:
        return _stacked(head, names, rows, width)
    table = Table(title=head, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name != FOLDED)
    for row in rows:
        table.add_row(*map(coloured, row))
    return table


def _stacked(head: "Text", names: list[str], rows: list[list[str]], width: int) -> "RenderableType":
    """The folded column on top, the others named below it: for terminals of 80 columns and less."""
    from rich.console import Group
    from rich.text import Text

    lines = [head]
    folded = names.index(FOLDED)
    for row in rows:
        lines.append(Text(row[folded], style="bold", overflow="fold"))
        line = Text()
        for place, (name, text) in enumerate(zip(names, row, strict=True)):
            if place == folded or not text:
                continue
            pair = Text("  ").append(f"{name} ", style="dim").append(coloured(text))
            if line.cell_len + pair.cell_len > width:
                lines.append(line)
                line = Text()
            line.append(pair)
        lines.append(line)
    return Group(*lines)
