"""The reading commands: status, layers, alerts and decisions of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8_safeguard.cli.api import Api, ApiError

Server = Annotated[str | None, typer.Option(envvar="FP8_SAFEGUARD_SERVER", help="Address of the server.")]
Token = Annotated[str | None, typer.Option(envvar="FP8_SAFEGUARD_TOKEN", help="Bearer token.")]
Run = Annotated[str | None, typer.Argument(help="The run; by default the one that reported last.")]
Json = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]


def ask(server: str | None, token: str | None, run: str | None, question: Callable[[Api, str], Any]) -> Any:
    """Put a question about a run; a failure is one line on stderr and exit code 1."""
    try:
        with Api(server, token) as api:
            return question(api, run or api.latest_run())
    except ApiError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def print_json(value: Any) -> None:
    """JSON on standard output; non-finite numbers are already strings."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on a terminal, and the same lines where there is none."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        # Text, because a layer's name may look like markup.
        shown.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    Console().print(shown)


def status(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The verdict on a run: its state, why, and what to do next."""
    detail = ask(server, token, run, lambda api, name: api.get(f"/runs/{name}"))
    if as_json:
        print_json(detail)
        return
    verdict = detail["verdict"]
    typer.echo(f"{detail['id']}: {verdict['state'].upper()}")
    typer.echo(f"  why   {verdict['why']}")
    typer.echo(f"  next  {verdict['next']}")
    typer.echo(f"  step  {detail['last_step']}, loss {detail['loss']}, mode {detail['mode']}")


def layers(
    run: Run = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
    state: Annotated[str | None, typer.Option(help="Only layers in this state.")] = None,
) -> None:
    """The layers of a run, worst first."""
    items = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/layers", state=state))
    if as_json:
        print_json({"items": items, "next_page_token": None})
        return
    table(
        "Layers, worst first",
        ["layer", "state", "metric", "slot", "value", "threshold", "step"],
        list(map(_layer_row, items)),
    )


def _layer_row(item: Mapping[str, Any]) -> list[object]:
    worst = item.get("worst") or {}
    slot = worst.get("gemm") or " ".join(filter(None, [worst.get("operand"), worst.get("layout")]))
    return [
        item["layer"],
        item["state"],
        worst.get("metric"),
        slot,
        worst.get("value"),
        worst.get("threshold"),
        worst.get("step"),
    ]


def alerts(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The alerts of a run."""
    items = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/alerts"))
    if as_json:
        print_json({"items": items, "next_page_token": None})
        return
    names = ["first_step", "severity", "state", "layer", "rule", "metric", "value"]
    table("Alerts", names, [[item.get(name) for name in names] for item in items])


def decisions(run: Run = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """The decisions on a run, with their reasons."""
    items = ask(server, token, run, lambda api, name: api.items(f"/runs/{name}/decisions"))
    if as_json:
        print_json({"items": items, "next_page_token": None})
        return
    names = ["step", "layer", "target", "action", "value", "state", "effective_step", "reason"]
    table("Decisions", names, [[item.get(name) for name in names] for item in items])
