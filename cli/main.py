"""The `fp8-safeguard` command and its options."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fp8_safeguard.cli import act, manage, options, read
from fp8_safeguard.cli.baseline import baseline
from fp8_safeguard.cli.check import check
from fp8_safeguard.cli.compare import compare
from fp8_safeguard.cli.database import db
from fp8_safeguard.cli.export import export
from fp8_safeguard.cli.output import fail, print_json, say
from fp8_safeguard.cli.replay import replay
from fp8_safeguard.cli.report import report
from fp8_safeguard.cli.serving import serve
from fp8_safeguard.cli.tokens import token
from fp8_safeguard.cli.top import top
from fp8_safeguard.cli.usage import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Watch the numerics of FP8 training, and act on what is seen.",
)
WATCHING = "Watch runs, and act"
SERVING = "Serve"
TRAINING = "Train"


class Listing(TyperCommand):
    """A list whose items another command acts on: `alerts ack 3` says that it is `alert ack 3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        group = {"alerts": act.alert, "decisions": act.decision}[str(self.name)]
        verbs = [
            command.name or command.callback.__name__
            for command in group.registered_commands
            if command.callback
        ]
        if len(args) > 1 and args[0] in verbs:
            one = str(self.name).removesuffix("s")
            fail(f"To act on one: fp8-safeguard {one} {' '.join(args)}", 2)
        return super().parse_args(ctx, args)


for reader in (read.status, read.runs, read.layers, read.plan, read.audit):
    app.command(rich_help_panel=WATCHING)(reader)
app.command(rich_help_panel=WATCHING)(top)
for lister in (read.alerts, read.decisions):
    app.command(cls=Listing, rich_help_panel=WATCHING)(lister)
app.command(rich_help_panel=WATCHING)(report)
app.command(rich_help_panel=WATCHING)(compare)
app.command(rich_help_panel=WATCHING)(replay)
app.command(rich_help_panel=WATCHING)(check)
app.command(rich_help_panel=WATCHING)(export)
app.add_typer(baseline, name="baseline", rich_help_panel=WATCHING)
app.add_typer(act.alert, name="alert", rich_help_panel=WATCHING)
app.add_typer(act.decision, name="decision", rich_help_panel=WATCHING)
app.add_typer(manage.run, name="run", rich_help_panel=WATCHING)
app.command(rich_help_panel=SERVING)(serve)


def _version(wanted: bool) -> None:
    if wanted:
        from fp8_safeguard.cli.doctor import version

        typer.echo(f"fp8-safeguard {version('fp8-safeguard')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Watch the numerics of FP8 training, and act on what is seen.

    Exit codes: 0 it worked; 1 it did not, or the answer is bad where asked;
    2 it was asked wrongly. Answers go to standard output, the rest to
    standard error.
    """


@app.command(rich_help_panel=TRAINING)
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
    from fp8_safeguard.cli.api import ApiError
    from fp8_safeguard.cli.demo import DemoError, DemoOptions, DemoOptionsError, run_demo
    from fp8_safeguard.cli.server_process import ServerStartError

    chosen = DemoOptions(
        steps=steps, port=port, headless=headless, folder=folder, json_file=json_file, seed=seed
    )
    try:
        run_demo(chosen)
    except DemoOptionsError as error:
        fail(str(error), 2)
    except (DemoError, ServerStartError, ApiError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Stopped.")


@app.command(rich_help_panel=TRAINING)
def train(
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to have completed at the end, a resumed run's included.")
    ],
    preset: Annotated[str | None, typer.Option(help="Named configuration: demo, ling, seed or tiny.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the fields of TrainConfig.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Checkpoint to continue from, or a folder: its newest healthy one.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(envvar="FP8_SAFEGUARD_SERVER", help="Address of the server.")
    ] = None,
    token: options.Token = None,
    run: Annotated[str | None, typer.Option(help="Name of the run on the server.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and data order.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp8 or bf16.")] = None,
    fp8_amax_history_len: Annotated[
        int | None, typer.Option(min=1, help="Delayed scaling, with the amax of so many steps.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint here at the end.")] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Write periodic checkpoints into this folder.")
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Go back to the newest healthy checkpoint when the run is lost.")
    ] = False,
) -> None:
    """Train the mixture-of-experts language model on real text.

    SIGTERM and Ctrl-C stop it after the step in progress, with a checkpoint,
    and it says how to resume; the exit code is then 143 or 130.

    Examples:
        fp8-safeguard train --steps 200 --preset tiny --save tiny.pt
        fp8-safeguard train --steps 400 --resume tiny.pt
    """
    from fp8_safeguard.cli.train import run_training
    from fp8_safeguard.trainer import ConfigError, TrainerError

    chosen: dict[str, Any] = {
        "server": server,
        "token": token,
        "run": run,
        "seed": seed,
        "precision": precision,
        "scaling": None if fp8_amax_history_len is None else "delayed",
        "amax_history": fp8_amax_history_len,
    }
    chosen |= {
        "checkpoint_dir": None if checkpoint_dir is None else str(checkpoint_dir),
        "recover": recover or None,
    }
    changes = {name: value for name, value in chosen.items() if value is not None}
    try:
        interruption = run_training(
            steps, preset=preset, config=config, resume=resume, save=save, changes=changes
        )
    except ConfigError as error:
        fail(str(error), 2)
    except (TrainerError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Stopped.")
    if interruption is not None:
        fail(interruption.message, interruption.exit_code)


app.add_typer(token, name="token", rich_help_panel=SERVING)
app.add_typer(db, name="db", rich_help_panel=SERVING)


@app.command(rich_help_panel=SERVING)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has and which kernels will be used."""
    from fp8_safeguard.cli import doctor as checks

    found = checks.report()
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(checks.lines(found)))


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter shows its escape; it is no reason to fail.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"The answer cannot be written: {error.strerror}.")
        sys.exit(1)


if __name__ == "__main__":
    main()
