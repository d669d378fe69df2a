"""Starts the server and says what it serves, from where, and to whom."""

import time
from collections.abc import Iterator
from errno import EADDRINUSE
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8_safeguard.cli.environment import chosen_settings
from fp8_safeguard.cli.options import Database
from fp8_safeguard.cli.output import fail

if TYPE_CHECKING:
    from fp8_safeguard.server.settings import Settings


def serve(
    host: Annotated[
        str | None,
        typer.Option(
            show_default="127.0.0.1", help="Address to listen on; anything but loopback needs a token."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, show_default="8787", help="Port to listen on; 0 takes a free one."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Server processes; this release runs in one.")] = 1,
    database_url: Database = None,
) -> None:
    """Start the server: ingest, dashboard, REST and Prometheus metrics.

    Options win over the variables FP8_SAFEGUARD_HOST, FP8_SAFEGUARD_PORT and
    FP8_SAFEGUARD_DATABASE_URL; docs/operations.md lists all settings.

    Examples:
        fp8-safeguard serve
        fp8-safeguard serve --port 0 --database-url sqlite:////var/lib/fp8.db
    """
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.server.serve import run

    if workers > 1:
        fail(
            f"--workers is {workers}; this release serves from one process, because live pages and the policy "
            "follow samples that arrive in it. Leave it at 1.",
            2,
        )
    settings = chosen_settings(host=host, port=port, database_url=database_url)
    try:
        run(settings, list(introduction(settings)))
    except ApiError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno == EADDRINUSE:
            fail(f"Port {settings.port} is taken. Choose another with --port, or --port 0 for any free one.")
        fail(f"{settings.host}:{settings.port} cannot be listened on: {error}")
    except ValueError as error:
        fail(str(error))


def introduction(settings: "Settings") -> Iterator[str]:
    """What the server's owner wants to know before the address is shown."""
    from fp8_safeguard.cli.local import parsed_url
    from fp8_safeguard.server.settings import is_loopback

    url = parsed_url(settings.database_url)
    if url.get_backend_name() == "sqlite":
        path = Path(url.database or "").resolve()
        yield f"database   {path}{'' if path.exists() else ' (new)'}"
    else:
        yield f"database   {url.render_as_string()}"
    yield f"access     {access(settings, is_loopback(settings.host))}"
    yield "dashboard  at the address below; API under /docs, metrics under /metrics"


def access(settings: "Settings", loopback: bool) -> str:
    """Who may enter, in one line."""
    made, active = stored_tokens(settings)
    active += len(settings.token_scopes())
    if active:
        return f"{active} token{'s' if active > 1 else ''}; requests without one are refused"
    if made:
        return "nobody: all tokens are revoked or expired; make one with `fp8-safeguard token create`"
    return "anybody on this machine, without a token" if loopback else "nobody yet: there is no token"


def stored_tokens(settings: "Settings") -> tuple[int, int]:
    """Tokens that the database has, and those that work; 0 where it is new or of an older schema."""
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.local import database_source
    from fp8_safeguard.server.tokens import list_tokens

    try:
        with database_source(settings.database_url) as source:
            made = list_tokens(source.store)
    except ApiError:
        return 0, 0
    now = time.time()
    return len(made), sum(info.active_at(now) for info in made)
