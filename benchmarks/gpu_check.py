"""Checks and times every kernel on a GPU, within five minutes."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
BUDGET_SECONDS = 280.0
PACKAGES = ("torch", "triton", "numpy")


def find_package() -> str:
    """A folder in which this checkout is `fp8_safeguard`: its .links, or where links were lost one like it."""
    links = HERE.parent / ".links"
    if (links / "fp8_safeguard" / "kernels").is_dir():
        return str(links)
    made = Path(tempfile.mkdtemp(prefix="fp8-safeguard-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    (made / "fp8_safeguard").symlink_to(HERE.parent, target_is_directory=True)
    return str(made)


sys.path[:0] = [str(HERE), find_package()]  # nothing is installed where this runs

from gpu.report import Report  # noqa: E402
from harness import require_writable  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a correctness case failed, 2 if it cannot run: no GPU, no Triton, options that do not fit."""
    made = parser()
    options = made.parse_args(arguments)
    if options.worker:
        from gpu.worker import serve

        serve(json.loads(options.worker))
        return 0
    require_runnable(made, options)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated: before the cases are imported
    from gpu.catalogue import cases

    known = [case for case in cases(tune=options.tune) if case.interpreted or not options.interpret]
    for part in options.only:
        if not any(part in case.name for case in known):
            among = "the interpreter runs no case with" if options.interpret else "no case has"
            made.error(f"--only {part}: {among} that in its name; --dry-run lists the names")
    wanted = [case for case in known if not options.only or any(part in case.name for part in options.only)]
    if options.dry_run:
        from gpu.dry_run import examine

        return int(examine(wanted, compiling=options.compile) > 0)
    if not options.interpret and not has_gpu():
        print(
            "no CUDA device here: --dry-run checks the script, --interpret runs it small on a CPU",
            file=sys.stderr,
        )
        return 2
    return supervise(wanted, options)


def require_runnable(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 where a package is missing, options contradict each other or the result cannot be kept."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        made.error(
            f"{', '.join(missing)} cannot be imported: install {', '.join(PACKAGES)}, nothing else is needed"
        )
    if options.compile and not options.dry_run:
        made.error("--compile compiles what --dry-run plans: add --dry-run")
    if options.dry_run and (options.interpret or options.json):
        made.error("--dry-run runs nothing and has no result: leave --interpret and --json out")
    if options.budget <= 0:
        made.error(f"--budget {options.budget:g}: name the seconds that the run may take")
    require_writable(made, options.json)


def supervise(wanted: Sequence[object], options: argparse.Namespace) -> int:
    """Run the cases and sum up."""
    from gpu.supervisor import run

    signal.signal(signal.SIGTERM, interrupted)
    report = Report(options.json)
    device = "cpu" if options.interpret else "cuda"
    chosen = {"device": device, "small": options.interpret, "quick": options.quick, "tune": options.tune}
    run(wanted, chosen, report, options.budget)  # type: ignore[arg-type]
    summary(report)
    return int(not report.passed())


def interrupted(number: int, frame: FrameType | None) -> None:
    """A request to end goes the way of an exception, so that the workers end too."""
    raise SystemExit(128 + number)


def summary(report: Report) -> None:
    """What failed, what was left out, and the choices, as text."""
    for failure in report.failures:
        print(f"FAILED  {failure['case']}: {failure['error']}")
    for left in report.not_run:
        print(f"NOT RUN {left['case']}: {left['reason']}")
    result = report.as_dict()
    for row in result["rows"]:
        if row.get("kind") in ("timing", "tune") and row["value"] is not None and row["ratio"] is not None:
            goal = "" if row["goal"] is None else f"  goal {row['goal']:.2f}"
            print(
                f"{row['case']:<58}{row['value']:10.3f} {row['unit']:<8}{row['ratio']:7.2f} x {row.get('baseline', '')}{goal}"
            )
    for choice in result["choices"]:
        print(f"choice  {choice}")
    print(f"{len(result['rows'])} rows, {len(report.failures)} failures, {result['seconds']:.0f} s")


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, again after every case"
    )
    made.add_argument("--quick", action="store_true", help="fewer rounds")
    made.add_argument(
        "--only",
        metavar="CASE",
        action="append",
        default=[],
        help="only cases whose name contains this; may be repeated",
    )
    made.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS", help="default %(default)g"
    )
    made.add_argument(
        "--tune",
        action="store_true",
        help="try other GEMM configurations instead of checking; all of them take --budget 600",
    )
    made.add_argument("--dry-run", action="store_true", help="print and check every case; needs no GPU")
    made.add_argument(
        "--compile", action="store_true", help="with --dry-run: compile every launch for sm_90a too"
    )
    made.add_argument(
        "--interpret", action="store_true", help="run small in Triton's interpreter; needs no GPU"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
