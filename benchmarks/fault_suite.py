"""Breaks training in twenty ways, and measures what the safeguard does."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
from faults.arms import Place
from faults.catalogue import BRANCH, CASES
from faults.report import print_table, report
from faults.schedule import Size, all_arms, full, quick, run_all

from fp8_safeguard.cli.server_process import ServerProcess

FOLDER = Path(tempfile.gettempdir()) / "fp8-safeguard-fault-suite"


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Run every arm that has no result yet, beside one server, and report on all."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%m%d-%H%M%S")
    arms = all_arms(size)
    with ServerProcess(folder / f"server-{stamp}.db", 0, folder / "server.log") as server:
        place = Place(folder=folder, server=server.url, stamp=stamp)
        _say(f"results in {folder}; server {server.url}")
        _warm_up()
        failed = run_all(arms, place, _say)
    return report(size, place, failed)


def _warm_up() -> None:
    """Compile the CPU kernels once, before two processes would each do it."""
    from fp8_safeguard.kernels import warm_up

    warm_up()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Size:
    """The size that the options ask for. The healthy branch is always there: without it there is no control."""
    size = quick() if options.quick else full()
    if not options.only:
        return size
    unknown = [name for name in options.only if name not in CASES]
    if unknown:
        parser.error(f"--only {unknown[0]}: no case has that name; choose from {', '.join(CASES)}")
    return replace(size, cases=tuple(dict.fromkeys((*options.only, BRANCH.name))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table, write it as JSON if asked to; 1 if an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--quick", action="store_true", help="five faults, with the safeguard and without, at one seed"
    )
    parser.add_argument(
        "--only", action="append", metavar="FAULT", help="this fault only; may be given again"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help=f"checkpoints and finished arms ({FOLDER})",
    )
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True,
        help="keep the arms that have finished before; --no-resume runs them again",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    size = chosen(options, parser)
    harness.require_writable(parser, options.json)
    if not options.resume:
        shutil.rmtree(options.work / "arms", ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the arms and the server as well
    found = measure(size, options.work)
    print_table(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
