"""The demo: train, break a layer, watch it being saved, compare with three other runs."""

import json
import queue
import shlex
import sys
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path

from fp8_safeguard.cli.api import Api
from fp8_safeguard.cli.demo_arms import ARMS, ArmMessage, ArmSpec, message_queue, start
from fp8_safeguard.cli.demo_progress import Progress, make_progress
from fp8_safeguard.cli.demo_report import DemoReport, read_report, summary_lines
from fp8_safeguard.cli.server_process import ServerProcess

TAIL_STEPS = 50
"""Steps from the fault to the end: the harm shows after 25 and is largest from 30 to 50, whose mean is compared."""
MINIMUM_HEALTHY_STEPS = 60
"""Steps before the fault: the layers' own baselines need some history, and the loss its first descent."""
PARALLEL_ARMS = 2
SILENCE_SECONDS = 300.0


class DemoError(Exception):
    """The demo could not be run to its end."""


class DemoOptionsError(DemoError):
    """The demo was asked for something that it cannot show."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line asks of the demo."""

    steps: int
    """Steps of each run; the fault comes TAIL_STEPS before the end."""
    port: int
    """Port of the server; 0 takes a free one."""
    headless: bool
    """Open no browser and do not wait for a reader."""
    folder: Path
    """Where the database, the checkpoint and the server's log go."""
    json_file: Path | None = None
    """Where the figures go, as JSON."""
    seed: int = 0
    """Seed of weights, data order and fault."""

    @property
    def fault_step(self) -> int:
        """First step with the fault."""
        return self.steps - TAIL_STEPS


def run_demo(options: DemoOptions) -> DemoReport:
    """Everything from the empty folder to the summary; DemoError says what went wrong."""
    if options.fault_step < MINIMUM_HEALTHY_STEPS:
        raise DemoOptionsError(
            f"--steps is {options.steps}; it must be at least {MINIMUM_HEALTHY_STEPS + TAIL_STEPS}: "
            f"{MINIMUM_HEALTHY_STEPS} healthy ones and {TAIL_STEPS} from the fault on"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    with ServerProcess(options.folder / "demo.db", options.port, options.folder / "server.log") as server:
        runs = {arm: f"demo-{time.strftime('%m%d-%H%M%S')}-{arm.replace('_', '-')}" for arm in ARMS}
        page = f"{server.url}/runs/{runs['protected']}"
        say(f"Live page: {page}")
        say(f"All runs:  {server.url}/")
        if not options.headless and sys.stdout.isatty():
            webbrowser.open(page)
        warm_up_kernels()
        train_arms(options, server.url, runs)
        report = read_report(Api(server.url), runs, steps=options.steps, fault_step=options.fault_step)
        write_report(options, report, server.url)
        if not options.headless and sys.stdin.isatty():
            input(f"{page} stays until you press Enter. ")
    for line in ways_back(runs["protected"], server, program()):
        say(line)
    return report


def ways_back(run: str, server: ServerProcess, command: str) -> Iterator[str]:
    """How to see the run again once the demo and its server are gone."""
    where = f"--database-url {shlex.quote(server.database_url)}"
    yield f"The run's state again: {command} status {run} {where}"
    yield f"Its page again:        {command} serve --port {server.port} {where}"
    yield f"                       and then {server.url}/runs/{run}"


def program() -> str:
    """The command that runs now, as a shell takes it."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m fp8_safeguard.cli.main"
    return shlex.quote(str(called))


def warm_up_kernels() -> None:
    """Compile the CPU kernels once, before four processes would each do it."""
    from fp8_safeguard.kernels import warm_up

    say("Preparing the CPU kernels (the first time on a machine this takes about half a minute) ...")
    warm_up()


def train_arms(options: DemoOptions, server: str, runs: dict[str, str]) -> None:
    """The protected run first; the others from its checkpoint, two processes at a time."""
    messages = message_queue()
    progress = make_progress(options.steps, options.fault_step)

    def launch(arm: str) -> SpawnProcess:
        spec = ArmSpec(
            name=arm,  # type: ignore[arg-type]
            run=runs[arm],
            server=server,
            checkpoint=options.folder / "at-fault.pt",
            fault_step=options.fault_step,
            steps=options.steps,
            seed=options.seed,
        )
        return start(spec, messages)

    waiting = [arm for arm in ARMS if arm != "protected"]
    active = {"protected": launch("protected")}
    forked = False
    try:
        with progress:
            while active:
                message = next_message(messages, active)
                forked = forked or message.kind == "forked"
                if message.kind == "failed":
                    raise DemoError(f"The {message.arm} run failed: {message.text}")
                if message.kind == "done":
                    active.pop(message.arm).join()
                progress.show(message)
                while forked and waiting and len(active) < PARALLEL_ARMS:
                    arm = waiting.pop(0)
                    active[arm] = launch(arm)
    finally:
        for process in active.values():
            process.terminate()
            process.join()


def next_message(messages: "Queue[ArmMessage]", active: dict[str, SpawnProcess]) -> ArmMessage:
    """The next line from any arm; DemoError when one died without a word or all are silent."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            return messages.get(timeout=1.0)
        except queue.Empty:
            dead = [arm for arm, process in active.items() if not process.is_alive()]
            if dead and messages.empty():
                code = active[dead[0]].exitcode
                raise DemoError(
                    f"The {dead[0]} run ended without a word (exit code {code}); is memory short?"
                ) from None
    raise DemoError(f"No run reported a step for {SILENCE_SECONDS:.0f} s.")


def write_report(options: DemoOptions, report: DemoReport, server: str) -> None:
    """The closing summary, and the JSON file where one is asked for."""
    say("\n".join(summary_lines(report, server)))
    if options.json_file is not None:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")
        say(f"Figures written to {options.json_file}")


def say(text: str) -> None:
    """One message on standard output, at once."""
    print(text, flush=True)  # noqa: T201 (this is the command's output)


__all__ = ["DemoError", "DemoOptions", "Progress", "run_demo"]
