"""The `fp8-safeguard` command and its options."""

from pathlib import Path
from typing import Annotated

import typer

from fp8_safeguard.cli import read

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Watch the numerics of FP8 training, and act on what is seen.")
db = typer.Typer(no_args_is_help=True, help="The server's database.")
app.add_typer(db, name="db")

for command in (read.status, read.layers, read.alerts, read.decisions):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from fp8_safeguard.cli.doctor import version

        typer.echo(f"fp8-safeguard {version('fp8-safeguard')}")
        raise typer.Exit


@app.callback()
def top(
    show_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Watch the numerics of FP8 training, and act on what is seen."""


@app.command()
def doctor(as_json: read.Json = False) -> None:
    """Show what this machine has and which kernels will be used."""
    from fp8_safeguard.cli import doctor as checks

    found = checks.report()
    if as_json:
        read.print_json(found)
    else:
        typer.echo("\n".join(checks.lines(found)))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
