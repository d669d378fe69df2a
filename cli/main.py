"""The `fp8-safeguard` command and its options."""

from errno import EADDRINUSE
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fp8_safeguard.cli import read
from fp8_safeguard.cli.api import ApiError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Watch the numerics of FP8 training, and act on what is seen.",
)
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
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
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


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; anything but loopback needs a token.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Server processes; SQLite takes one.")] = 1,
    database_url: Annotated[str | None, typer.Option(help="SQLAlchemy URL of the store.")] = None,
) -> None:
    """Start the server: ingest, dashboard, REST and Prometheus metrics."""
    from fp8_safeguard.server.serve import run
    from fp8_safeguard.server.settings import Settings

    if workers > 1:
        fail(f"--workers is {workers}; this release serves from one process. Leave it at 1.")
    chosen: dict[str, Any] = {"host": host, "port": port, "database_url": database_url}
    try:
        settings = Settings(**{name: value for name, value in chosen.items() if value is not None})
        run(settings)
    except OSError as error:
        if error.errno == EADDRINUSE:
            fail(f"Port {settings.port} is taken. Choose another with --port, or --port 0 for any free one.")
        fail(str(error))
    except ValueError as error:
        fail(str(error))


@app.command()
def demo(
    headless: Annotated[bool, typer.Option("--headless", help="Open no browser, wait for nobody.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each run; the fault comes 50 before the end.")] = 250,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes a free one.")
    ] = 8787,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the database and the checkpoint go.")] = Path(
        "demo-data"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order and fault.")] = 0,
) -> None:
    """Train on real text, break a layer, watch it being saved (about four minutes)."""
    from fp8_safeguard.cli.demo import DemoError, DemoOptions, run_demo
    from fp8_safeguard.cli.server_process import ServerStartError

    options = DemoOptions(
        steps=steps, port=port, headless=headless, folder=folder, json_file=json_file, seed=seed
    )
    try:
        run_demo(options)
    except (DemoError, ServerStartError, ApiError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Stopped.")


@app.command()
def train(
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to have completed at the end, a resumed run's included.")
    ],
    preset: Annotated[str | None, typer.Option(help="Named configuration: demo, ling, seed or tiny.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the fields of TrainConfig.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Checkpoint to continue from.")] = None,
    server: read.Server = None,
    token: read.Token = None,
    run: Annotated[str | None, typer.Option(help="Name of the run on the server.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and data order.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp8 or bf16.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint here at the end.")] = None,
) -> None:
    """Train the mixture-of-experts language model on real text."""
    from fp8_safeguard.cli.train import run_training
    from fp8_safeguard.trainer import TrainerError

    chosen = {"server": server, "token": token, "run": run, "seed": seed, "precision": precision}
    changes = {name: value for name, value in chosen.items() if value is not None}
    try:
        run_training(steps, preset=preset, config=config, resume=resume, save=save, changes=changes)
    except (TrainerError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Stopped.")


@db.command()
def upgrade(
    database_url: Annotated[str | None, typer.Option(help="SQLAlchemy URL of the store.")] = None,
) -> None:
    """Bring the database to this release's schema."""
    from fp8_safeguard.server.migrate import upgrade as migrate
    from fp8_safeguard.server.settings import Settings
    from fp8_safeguard.server.store import StoreError, open_store

    settings = Settings() if database_url is None else Settings(database_url=database_url)
    try:
        store = open_store(settings)
        revision = migrate(store)
    except StoreError as error:
        fail(str(error))
    store.close()
    typer.echo(f"{settings.database_url} is at revision {revision}.")


def fail(text: str) -> NoReturn:
    """One line on stderr and exit code 1."""
    typer.echo(text, err=True)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
