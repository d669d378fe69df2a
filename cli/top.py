"""The worst layers of a run, live on a terminal, once elsewhere."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fp8_safeguard.cli.api import UnreachableError
from fp8_safeguard.cli.options import Json, Limit, ReadFrom, Run, Server, Token
from fp8_safeguard.cli.output import Item, cell, print_json, printable, show, terminal_table
from fp8_safeguard.cli.read import asking, layer_columns
from fp8_safeguard.cli.source import Source

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_LAYERS = 20
"""Layers that a pipe gets unless told otherwise."""
LEAST_LAYERS = 3
AROUND_TABLE = 8
"""Lines of a terminal that are not layers: verdict, title, header, rules and the last line."""


class Seen(NamedTuple):
    """A run and its worst layers as they stood when it was asked about."""

    detail: Item
    items: list[Item]

    @property
    def title(self) -> str:
        """State and progress in one line."""
        detail = self.detail
        loss = cell(detail["loss"]) or "not sent"
        state, step = str(detail["state"]).upper(), detail["last_step"]
        listed = "layers, worst first" if self.items else "no layers"
        return printable(f"{detail['id']}: {state}, step {step}, loss {loss}; {listed}")


def top(
    run: Run = None,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600.0, metavar="SECONDS", help="Look again after so long.")
    ] = 2.0,
    limit: Limit = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Watch the worst layers of a run, live; Ctrl-C or the run's end stops it.

    Elsewhere than on a terminal, and with --json, it looks once.

    Examples:
        fp8-safeguard top my-run
        fp8-safeguard top my-run --every 10 --limit 5
        fp8-safeguard top my-run | head
    """
    with asking(server, database_url, token, run) as (asked, name):
        if as_json:
            detail, items = look(asked, name, limit)
            print_json({"run": detail, "items": items})
        elif sys.stdout.isatty():
            watch(asked, name, limit, every)
        else:
            seen = look(asked, name, limit or PLAIN_LAYERS)
            if seen.items:
                show(seen.title, seen.items, layer_columns())
            else:
                typer.echo(seen.title)


def look(asked: Source, name: str, limit: int | None) -> Seen:
    """The run and its worst layers now. Raises ApiError."""
    return Seen(asked.run(name), asked.layers(name, limit=limit))


def watch(asked: Source, name: str, limit: int | None, every: float) -> None:
    """Show the worst layers until the run ends or somebody interrupts. Raises ApiError at the first look only."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    room = limit or max(LEAST_LAYERS, console.height - AROUND_TABLE)
    begun = look(asked, name, room)
    try:
        with Live(picture(console, begun, ""), console=console, auto_refresh=False) as live:
            for seen, trouble in again(asked, name, room, begun, every):
                live.update(picture(console, seen, trouble), refresh=True)
    except KeyboardInterrupt:
        pass


def again(asked: Source, name: str, limit: int, seen: Seen, every: float) -> Iterator[tuple[Seen, str]]:
    """What each further look shows, and why one failed: a server that restarts does not end the watching."""
    while seen.detail["state"] != "ended":
        time.sleep(every)
        trouble = ""
        try:
            seen = look(asked, name, limit)
        except UnreachableError as error:
            trouble = f"{error} This is what was seen last."
        yield seen, trouble


def picture(console: "Console", seen: Seen, trouble: str) -> "RenderableType":
    """The verdict, the table and what is wrong with the connection, if anything is."""
    from rich.console import Group
    from rich.text import Text

    verdict = seen.detail["verdict"]
    title, columns = seen.title, layer_columns()
    table = terminal_table(title, seen.items, columns, console.width) if seen.items else Text(title)
    parts = [table, Text(printable(f"why  {verdict['why']}")), Text(printable(f"next {verdict['next']}"))]
    return Group(*parts, *([Text(printable(trouble), style="bold red")] if trouble else []))
