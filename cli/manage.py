"""What people do about a whole run: mode, pins, kill switch, end, deletion."""

from typing import Annotated, Any

import typer

from fp8_safeguard.cli.act import By, login_name
from fp8_safeguard.cli.api import in_path
from fp8_safeguard.cli.options import Json, Server, Token, Yes
from fp8_safeguard.cli.output import Columns, Item, confirmed, fail, print_json, printable
from fp8_safeguard.cli.read import answer, place
from fp8_safeguard.cli.source import api

MODES = ("observe", "advise", "enforce")
LayerName = Annotated[str, typer.Argument(help="The layer, by its whole name.")]
Where = Annotated[
    str, typer.Option("--on", help="layer, a gemm (dgrad), or an operand with its layout (x row).")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run, from `fp8-safeguard runs`.")]

run = typer.Typer(no_args_is_help=True, help="Act on one run: mode, pins, kill switch, end.")


@run.command()
def mode(
    run: RunName,
    mode: Annotated[str, typer.Argument(help=f"One of {', '.join(MODES)}.")],
    by: By = None,
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
    _print(_change(server, token, run, {"mode": mode}, by), as_json)


@run.command()
def end(
    run: RunName, by: By = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Say that a run is over whose trainer could not say so; a later sample opens it again."""
    _print(_change(server, token, run, {"ended": True}, by), as_json)


@run.command("kill-switch")
def kill_switch(
    run: RunName,
    yes: Yes = False,
    by: By = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Back to the configured precision at once: empty the plan, only observe from here on.

    Proposals and pins are dropped with it; `fp8-safeguard audit` keeps what they were.
    """
    confirmed(f"Empty the plan of run {run} and only observe it?", yes, "The plan stays as it is")
    with api(server, token) as asked:
        answered: Item = asked.post(f"/runs/{in_path(run)}:kill-switch", _named(by))
    if as_json:
        print_json(answered)
    else:
        version = answered["plan"]["version"]
        typer.echo(printable(f"Run {answered['run']['id']}: plan emptied (version {version}), mode observe"))


@run.command()
def pins(run: RunName, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """List what people have fixed; the policy leaves it alone."""
    with api(server, token) as asked:
        items = asked.items(f"/runs/{in_path(run)}/pins")
    columns: Columns = {
        "layer": lambda item: item["layer"],
        "target": lambda item: place(item["target"]),
        "action": lambda item: item.get("action") or "left alone",
        "value": lambda item: item.get("value"),
        "by": lambda item: item.get("actor"),
    }
    answer(f"{run}: pins", items, columns, as_json)


@run.command()
def pin(
    run: RunName,
    layer: LayerName,
    target: Where = "layer",
    action: Annotated[
        str | None,
        typer.Option(help="Put this into the plan, too: bf16_fallback, scale_multiplier, format, ..."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="The action's argument: a number, or a name such as e5m2.")
    ] = None,
    by: By = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Fix a layer: the policy leaves it as it is, or as the action makes it.

    Examples:
        fp8-safeguard run pin my-run blocks.3.qkv
        fp8-safeguard run pin my-run blocks.3.qkv --on dgrad --action bf16_fallback
        fp8-safeguard run pin my-run blocks.3.qkv --on "x row" --action scale_multiplier --value 0.5
    """
    wish: dict[str, Any] = {"layer": layer, "target": target_of(target)}
    if action is not None:
        wish["action"] = action
    if value is not None:
        wish["value"] = number_or_name(value)
    with api(server, token) as asked:
        item: Item = asked.put(f"/runs/{in_path(run)}/pins", {**wish, **_named(by)})
    if as_json:
        print_json(item)
    else:
        fixed = "" if item.get("action") is None else f": {item['action']} {item.get('value') or ''}".rstrip()
        typer.echo(printable(f"Pinned {item['layer']} {place(item['target'])}{fixed}"))


@run.command()
def unpin(
    run: RunName,
    layer: LayerName,
    target: Where = "layer",
    server: Server = None,
    token: Token = None,
) -> None:
    """Release a pin, and take its action out of the plan again."""
    with api(server, token) as asked:
        asked.delete(f"/runs/{in_path(run)}/pins", scope="control", layer=layer, **query_of(target))
    typer.echo(printable(f"Released {layer} {target}"))


@run.command()
def delete(
    run: RunName,
    yes: Yes = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Delete a run and everything that was stored for it."""
    confirmed(f"Delete run {run} and everything stored for it?", yes, "Nothing is deleted")
    with api(server, token) as asked:
        asked.delete(f"/runs/{in_path(run)}")
    typer.echo(printable(f"Run {run} is deleted."))


def target_of(text: str) -> dict[str, Any]:
    """The API's target of `layer`, `dgrad` or `x row`; what is none of these is a usage error."""
    from fp8_safeguard.monitor.slots import GEMMS, LAYOUTS, OPERANDS

    one, _, layout = " ".join(text.split()).partition(" ")
    if one in OPERANDS and layout in LAYOUTS:
        return {"operand": one, "layout": layout}
    if layout or one not in ("layer", *GEMMS):
        pairs = f"{' or '.join(OPERANDS)} with {' or '.join(LAYOUTS)}"
        fail(f'--on is {text!r}; give layer, {", ".join(GEMMS)}, or {pairs}, such as "x row".', 2)
    return {"layer": True} if one == "layer" else {"gemm": one}


def query_of(target: str) -> dict[str, Any]:
    """A target as the parameters of a query."""
    return {name: value for name, value in target_of(target).items() if name != "layer"}


def number_or_name(text: str) -> float | str:
    """A number where the text is one, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def _named(by: str | None) -> dict[str, str]:
    """Who does it, as the API takes it."""
    named = by if by is not None else login_name()
    return {} if named is None else {"by": named}


def _change(server: str | None, token: str | None, run: str, changes: dict[str, Any], by: str | None) -> Item:
    with api(server, token) as asked:
        detail: Item = asked.patch(f"/runs/{in_path(run)}", {**changes, **_named(by)})
    return detail


def _print(detail: Item, as_json: bool) -> None:
    if as_json:
        print_json(detail)
    else:
        typer.echo(printable(f"Run {detail['id']}: {detail['state']}, mode {detail['mode']}"))
