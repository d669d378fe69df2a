"""What people do about alerts and decisions, through the server."""

import getpass
import re
from typing import Annotated, Any

import typer

from fp8_safeguard.cli.api import in_path
from fp8_safeguard.cli.options import Json, Server, Token
from fp8_safeguard.cli.output import Item, fail, print_json, printable, say
from fp8_safeguard.cli.read import place
from fp8_safeguard.cli.source import api

AlertId = Annotated[int, typer.Argument(min=1, help="The alert's id, from `fp8-safeguard alerts`.")]
DecisionId = Annotated[str, typer.Argument(help="The decision's id, from `fp8-safeguard decisions`.")]
By = Annotated[str | None, typer.Option(help="Who does it, for the record; by default your login name.")]

alert = typer.Typer(no_args_is_help=True, help="Act on one alert: acknowledge, silence, resolve.")
decision = typer.Typer(no_args_is_help=True, help="Act on one decision: approve, reject, revert.")

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@alert.command()
def ack(
    alert: AlertId, by: By = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Say that somebody knows of an alert."""
    print_alert(act(server, token, f"/alerts/{alert}:ack", by), as_json)


@alert.command()
def silence(
    alert: AlertId,
    duration: Annotated[
        str, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d; 0 ends a silence.")
    ] = "1h",
    by: By = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Keep quiet about an alert's rule in its layer for a while.

    Example:
        fp8-safeguard alert silence 12 --for 2h
    """
    body = {"seconds": seconds(duration)}
    print_alert(act(server, token, f"/alerts/{alert}:silence", by, **body), as_json)


@alert.command()
def resolve(
    alert: AlertId, by: By = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Close an alert by hand, until its breach clears and comes again."""
    print_alert(act(server, token, f"/alerts/{alert}:resolve", by), as_json)


@decision.command()
def approve(
    decision: DecisionId,
    all_of_remedy: Annotated[
        bool, typer.Option("--all-of-remedy", help="The other proposals of its remedy with it.")
    ] = False,
    by: By = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Put a proposed decision into the plan.

    A remedy may be several decisions, of which one alone helps little: it
    says which of them still wait.
    """
    body = {"all_of_remedy": True} if all_of_remedy else {}
    item = act(server, token, f"/decisions/{in_path(decision)}:approve", by, **body)
    print_decision(item, as_json)
    say_of_advice(item)
    if item.get("waiting"):
        others = ", ".join(item["waiting"])
        say(f"Of the same remedy these wait: {others}. Approve them, too; --all-of-remedy does it at once.")


@decision.command()
def reject(
    decision: DecisionId, by: By = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Refuse a proposed decision."""
    item = act(server, token, f"/decisions/{in_path(decision)}:reject", by)
    print_decision(item, as_json)
    say_of_advice(item)


@decision.command()
def revert(
    decision: DecisionId, by: By = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Take a decision out of the plan again."""
    print_decision(act(server, token, f"/decisions/{in_path(decision)}:revert", by), as_json)


def act(server: str | None, token: str | None, path: str, by: str | None, **body: Any) -> Item:
    """The server's answer to one change, made in somebody's name."""
    named = by if by is not None else login_name()
    with api(server, token) as asked:
        answer: Item = asked.post(path, {**body, **({"by": named} if named is not None else {})})
    return answer


def login_name() -> str | None:
    """Who is logged in; None in a container that knows no users."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def seconds(duration: str) -> float:
    """Seconds of `90`, `90s`, `30m`, `2h` or `1d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", duration.strip())
    if found is None:
        fail(f"--for is {duration!r}; give a number and a unit: 90s, 30m, 2h or 1d.", 2)
    return float(found[1]) * UNITS[found[2] or "s"]


def print_alert(item: Item, as_json: bool) -> None:
    """The alert as it stands now."""
    if as_json:
        print_json(item)
        return
    notes = [str(item["state"])]
    if item.get("acknowledged_by"):
        notes.append(f"known to {item['acknowledged_by']}")
    if item.get("silenced"):
        notes.append(f"silenced until {item['silenced_until']}")
    about = item.get("layer") or "the run"
    typer.echo(printable(f"Alert {item['id']} ({item.get('rule')}, {about}): {', '.join(notes)}"))


def say_of_advice(item: Item) -> None:
    """That an answer to advice is for the record: nobody waits for it, and no plan holds it."""
    if item["action"] == "advice":
        say(
            f"It is advice, for people: your answer is noted, the plan stays as it is. It said: {item['reason']}"
        )


def print_decision(item: Item, as_json: bool) -> None:
    """The decision as it stands now."""
    if as_json:
        print_json(item)
        return
    what = f"{item['action']} of {item['layer']} {place(item['target'])}"
    typer.echo(printable(f"Decision {item['id']} ({what}): {item['state']}"))
