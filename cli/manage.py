"""What people do about a whole run: its mode, its end, its deletion."""

from typing import Annotated, Any

import typer

from fp8_safeguard.cli.api import in_path
from fp8_safeguard.cli.options import Json, Server, Token
from fp8_safeguard.cli.output import Item, fail, print_json, printable
from fp8_safeguard.cli.source import api

MODES = ("observe", "advise", "enforce")
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run, from `fp8-safeguard runs`.")]

run = typer.Typer(no_args_is_help=True, help="Act on one run: set its mode, end it, delete it.")


@run.command()
def mode(
    run: RunName,
    mode: Annotated[str, typer.Argument(help=f"One of {', '.join(MODES)}.")],
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Say who acts: nobody (observe), a person (advise), the server (enforce).

    The trainer's own mode decides whether it obeys: one in observe never does.

    Example:
        fp8-safeguard run mode my-run advise
    """
    if mode not in MODES:
        fail(f"MODE is {mode!r}; choose one of {', '.join(MODES)}.", 2)
    _print(_change(server, token, run, {"mode": mode}), as_json)


@run.command()
def end(run: RunName, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """Say that a run is over whose trainer could not say so; a later sample opens it again."""
    _print(_change(server, token, run, {"ended": True}), as_json)


@run.command()
def delete(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Delete a run and everything that was stored for it."""
    if not yes:
        typer.confirm(f"Delete run {printable(run)} and everything stored for it?", abort=True)
    with api(server, token) as asked:
        asked.delete(f"/runs/{in_path(run)}")
    typer.echo(printable(f"Run {run} is deleted."))


def _change(server: str | None, token: str | None, run: str, changes: dict[str, Any]) -> Item:
    with api(server, token) as asked:
        detail: Item = asked.patch(f"/runs/{in_path(run)}", changes)
    return detail


def _print(detail: Item, as_json: bool) -> None:
    if as_json:
        print_json(detail)
    else:
        typer.echo(printable(f"Run {detail['id']}: {detail['state']}, mode {detail['mode']}"))
