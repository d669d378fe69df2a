"""What the hooks cost a training step, in CPU time over whole sampling cycles, and what other tools cost."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
import torch
from overhead import import_cost, peers, table
from overhead.arms import Observed, Plain
from overhead.rows import Phase

EVERY = 10
"""The hooks' default: a sampling cycle is so many steps."""
NEVER = 10**9
"""`every` of hooks that are attached and sample nothing after step 0."""


def phases(options: argparse.Namespace, folder: Path) -> list[Phase]:
    """Hooks with their default and switched off, before a peer is imported; then all that look at every step."""
    found = []
    long, short, steps = (3, 5, 1) if options.quick else (20, 20, 2)
    for dtype in ("fp32", "bf16"):
        arms: list[Plain] = [
            Observed(f"default_{dtype}", dtype, EVERY, every=EVERY, spool=str(folder)),
            Observed(f"off_{dtype}", dtype, EVERY, every=NEVER, spool=str(folder)),
        ]
        found.append(Phase(f"default_{dtype}", dtype, arms, rounds=long, steps=EVERY))
    for dtype in ("fp32", "bf16"):
        arms = [Observed(f"every_step_{dtype}", dtype, steps, every=1, spool=str(folder))]
        if options.peers:
            names = {peer: f"{peer.case}_{dtype}" for peer in peers.PEERS}
            arms += [peer(name, dtype, steps, folder=folder / name) for peer, name in names.items()]
        found.append(Phase(f"every_step_{dtype}", dtype, arms, rounds=short, steps=steps))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report as its JSON's dict."""
    rows: list[dict[str, Any]] = []
    controls: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for phase in phases(options, Path(folder)):
            found = phase.run()
            controls[phase.name] = phase.control
            rows += found
            table.print_phase(phase.name, phase.control, found)
    rows.append(import_cost.row(3 if options.quick else 9))
    table.print_row(rows[-1])
    return {
        "benchmark": "hook_overhead",
        "commit": harness.commit(),
        "machine": harness.machine(),
        "threads": options.threads,
        "control": controls["default_fp32"],
        "controls": controls,
        "rows": rows,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked before anything is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: four minutes at most")
    parser.add_argument("--peers", action="store_true", help="other tools too (about twenty minutes)")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads that torch uses: one is quietest (default: 1)",
    )
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(
            f"--threads is {options.threads}; it takes 1 or more, say {torch.get_num_threads()} as torch would"
        )
    harness.require_writable(parser, options.json)
    lacking = peers.missing() if options.peers else []
    if lacking:
        parser.error(
            f"--peers needs {', '.join(lacking)}, not installed here: run `{peers.INSTALL}`, then "
            f"`{peers.PYTHON} benchmarks/hook_overhead.py --peers`; or leave --peers out"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case, print the table, write it as JSON if asked to. Values are CPU milliseconds a step."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    logging.getLogger("fp8_safeguard").setLevel(logging.ERROR)
    report = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
