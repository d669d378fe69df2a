"""Options that several commands share."""

from typing import Annotated

import typer

LARGEST = 2**63 - 1
"""The largest step or id: what a database holds."""
Run = Annotated[str | None, typer.Argument(help="The run; by default the one that reported last.")]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ask this server, for example http://127.0.0.1:8787 (env var: FP8_SAFEGUARD_SERVER).",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="FP8_SAFEGUARD_TOKEN",
        help="Bearer token. The variable keeps it out of the process list.",
    ),
]
ReadFrom = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="Read this database instead of asking a server, for example sqlite:///demo-data/demo.db "
        "(env var: FP8_SAFEGUARD_DATABASE_URL, where no server is named).",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="SQLAlchemy URL of the database (env var: FP8_SAFEGUARD_DATABASE_URL; "
        "default: sqlite:///fp8-safeguard.db).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as the REST interface answers.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask; needed where nobody can be asked.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many.")]
