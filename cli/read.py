"""The reading commands: status, layers, alerts and decisions of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8_safeguard.cli.api import Api, ApiError

Server = Annotated[str | None, typer.Option(envvar="FP8_SAFEGUARD_SERVER", help="Address of the server.")]
Token = Annotated[str | None, typer.Option(envvar="FP8_SAFEGUARD_TOKEN", help="Bearer token.")]
Run = Annotated[str | None, typer.Argument(help="The run; by default the one that reported last.")]
Json = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]


def ask(
    server: str | None, token: str | None, run: str | None, question: Callable[[Api, str], Any]
) -> tuple[str, Any]:
    """The run asked about, and the answer; a failure is one line on stderr and exit code 1."""
    try:
        with Api(server, token) as api:
            name = run or api.latest_run()
            return name, question(api, name)
    except ApiError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def print_json(value: Any) -> None:
    """JSON on standard output; non-finite numbers are already strings."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def show(
    what: str,
    answer: tuple[str, Sequence[Mapping[str, Any]]],
    as_json: bool,
    columns: Mapping[str, Callable[[Mapping[str, Any]], object]],
) -> None:
    """The items as the server's JSON, or as a table that says which run it is about."""
    run, items = answer
    if as_json:
        print_json({"items": items, "next_page_token": None})
        return
    if not items:
        typer.echo(f"{run}: no {what}.")
        return
    shown = Table(title=f"{run}: {what}", title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for item in items:
        # Text, because a layer's name may look like markup.
        shown.add_row(*(Text(cell(column(item))) for column in columns.values()))
    Console().print(shown)


def cell(value: object) -> str:
    """One value for a table: numbers with four significant digits, nothing for null."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def place(slot: Mapping[str, Any]) -> str:
    """A slot, a target or a worst reading in two words: `dgrad`, `x row`, `layer`."""
    words = [slot.get("gemm") or "", slot.get("operand") or "", slot.get("layout") or ""]
    return " ".join(word for word in words if word) or "layer"


def status(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The verdict on a run: its state, why, and what to do next."""
    _, detail = ask(server, token, run, lambda api, name: api.get(f"/runs/{name}"))
    if as_json:
        print_json(detail)
        return
    verdict = detail["verdict"]
    typer.echo(f"{detail['id']}: {verdict['state'].upper()}")
    typer.echo(f"  why   {verdict['why']}")
    typer.echo(f"  next  {verdict['next']}")
    typer.echo(
        f"  step  {detail['last_step']}, loss {cell(detail['loss']) or 'not sent'}, mode {detail['mode']}"
    )


def layers(
    run: Run = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
    state: Annotated[str | None, typer.Option(help="Only layers in this state.")] = None,
) -> None:
    """The layers of a run, worst first."""
    answer = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/layers", state=state))

    def worst(name: str) -> Callable[[Mapping[str, Any]], object]:
        return lambda item: (item.get("worst") or {}).get(name)

    columns = {
        "layer": lambda item: item["layer"],
        "state": lambda item: item["state"],
        "slot": lambda item: place(item.get("worst") or {}),
        "metric": worst("metric"),
        "value": worst("value"),
        "limit": worst("threshold"),
    }
    show("layers, worst first", answer, as_json, columns)


def alerts(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The alerts of a run."""
    answer = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/alerts"))
    columns = {
        "step": lambda item: item.get("step"),
        "severity": lambda item: item.get("severity"),
        "state": lambda item: item.get("state"),
        "layer": lambda item: item.get("layer"),
        "slot": lambda item: place(item.get("slot") or {}),
        "rule": lambda item: item.get("rule"),
        "value": lambda item: item.get("value"),
        "limit": lambda item: item.get("threshold"),
    }
    show("alerts", answer, as_json, columns)


def decisions(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The decisions on a run; `--json` adds their reasons and evidence."""
    answer = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/decisions"))
    columns = {
        "step": lambda item: item["step"],
        "layer": lambda item: item["layer"],
        "target": lambda item: place(item["target"]),
        "action": lambda item: item["action"],
        "value": lambda item: item.get("value"),
        "state": lambda item: item["state"],
        "effective": lambda item: item.get("effective_step"),
    }
    show("decisions", answer, as_json, columns)
