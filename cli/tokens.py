"""Makes, lists and revokes the server's access tokens, directly in its database."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_safeguard.cli.options import Database, Json
from fp8_safeguard.cli.output import Columns, fail, print_json, say, show
from fp8_safeguard.cli.read import age

if TYPE_CHECKING:
    from fp8_safeguard.server.store import Store
    from fp8_safeguard.server.tokens import TokenInfo

token = typer.Typer(no_args_is_help=True, help="Access tokens, kept in the server's database.")

SCOPES = "ingest (send samples), read, control (decide, act on alerts), admin (everything)"
Name = Annotated[
    str, typer.Argument(help="A name for the token, such as the trainer or person that uses it.")
]


@token.command()
def create(
    name: Name,
    scope: Annotated[list[str] | None, typer.Option(help=f"What it allows, once for each: {SCOPES}.")] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0, help="Days until it stops working; by default it does not.")
    ] = None,
    database_url: Database = None,
    as_json: Json = False,
) -> None:
    """Make a token and print its secret, once.

    The secret is alone on standard output, to be piped; it is stored nowhere.

    Examples:
        TOKEN=$(fp8-safeguard token create trainer --scope ingest)
        fp8-safeguard token create grafana --scope read --expires-in-days 90
    """
    from fp8_safeguard.server.tokens import create_token, list_tokens

    if not scope:
        fail(f"Name at least one --scope: {SCOPES}.", 2)
    expires_at = None if expires_in_days is None else time.time() + expires_in_days * 86400
    with token_store(database_url) as store:
        first = not list_tokens(store)
        info, secret = create_token(store, name=name, scopes=scope, expires_at=expires_at)
    if first:
        say("The first token of this database: from now on its server asks for one, here too.")
    if as_json:
        print_json({**as_document(info), "token": secret})
        return
    typer.echo(secret)
    until = f"until {moment(info.expires_at)}" if info.expires_at else "until it is revoked"
    say(f"Token {info.name!r} allows {', '.join(sorted(info.scopes))} {until}. It is not shown again.")


@token.command("list")
def list_(database_url: Database = None, as_json: Json = False) -> None:
    """List the tokens with what they allow; secrets cannot be shown."""
    from fp8_safeguard.server.tokens import list_tokens

    with token_store(database_url) as store:
        items = [as_document(info) for info in list_tokens(store)]
    if as_json:
        print_json({"items": items, "next_page_token": None})
        return
    if not items:
        typer.echo("No tokens. Make one with `fp8-safeguard token create NAME --scope ingest`.")
        return
    columns: Columns = {
        "name": lambda item: item["name"],
        "state": lambda item: item["state"],
        "scopes": lambda item: " ".join(item["scopes"]),
        "created": lambda item: item["created"],
        "expires": lambda item: item["expires"] or "never",
        "last used": lambda item: age(item["last_used"]),
    }
    show("tokens", items, columns)


@token.command()
def revoke(name: Name, database_url: Database = None, as_json: Json = False) -> None:
    """Make a token worthless at once."""
    from fp8_safeguard.server.tokens import revoke_token

    with token_store(database_url) as store:
        info = revoke_token(store, name)
    if as_json:
        print_json(as_document(info))
    else:
        typer.echo(f"Token {info.name!r} is revoked.")


@contextmanager
def token_store(database_url: str | None) -> Iterator["Store"]:
    """The existing, current database, to be written; a mistake is one line on stderr."""
    from fp8_safeguard.cli.database import existing_store
    from fp8_safeguard.server.tokens import TokenNameError, UnknownTokenError

    with existing_store(database_url) as store:
        try:
            yield store
        except UnknownTokenError as error:
            fail(str(error))
        except (TokenNameError, ValueError) as error:
            fail(str(error), 2)


def as_document(info: "TokenInfo") -> dict[str, Any]:
    """A token for people and programs, without anything secret."""
    return {
        "name": info.name,
        "state": state_of(info, time.time()),
        "scopes": sorted(info.scopes),
        "created": moment(info.created_at),
        "expires": moment(info.expires_at),
        "revoked": moment(info.revoked_at),
        "last_used": moment(info.last_used_at),
    }


def state_of(info: "TokenInfo", now: float) -> str:
    """`active`, `revoked` or `expired`."""
    if info.revoked_at is not None:
        return "revoked"
    return "expired" if info.expires_at is not None and info.expires_at <= now else "active"


def moment(seconds: float | None) -> str | None:
    """A time in UTC, to the second."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
