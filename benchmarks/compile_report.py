"""What every shipped Triton kernel becomes on each architecture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
from harness import commit, machine

from fp8_safeguard.kernels.triton_compile import ARCHITECTURES, SHARED_LIMIT, MachineCode, compile_shipped
from fp8_safeguard.kernels.triton_shipped import shipped

QUICK = ("quantize_row_col_bf16", "gemm_nt_tma")
SHOWN = {
    "QGMMA": "tensor core",
    "UTCQMMA": "tensor core",
    "F2FP.SATFINITE": "saturating",
    "UTMALDG": "TMA loads",
}
COLUMNS = (
    "kernel",
    "warps",
    "registers",
    "shared",
    "spills",
    "instructions",
    "tensor core",
    "saturating",
    "TMA loads",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print a table an architecture, and write the common JSON. Needs neither a GPU nor a driver."""
    parser = argparse.ArgumentParser(description="Machine code of every shipped kernel.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--processes", type=int, default=2, help="compilers at a time (default 2)")
    options = parser.parse_args(arguments)
    cases = [
        (architecture, name)
        for architecture in ARCHITECTURES
        for name in shipped(architecture)
        if not options.quick or name in QUICK
    ]
    compiled = compile_shipped(cases, options.processes)
    for architecture in ARCHITECTURES:
        print_table(architecture, {name: code for (of, name), code in compiled.items() if of == architecture})
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report(compiled), indent=2) + "\n")


def row_of(name: str, code: MachineCode) -> list[str]:
    """A kernel's line of the table."""
    counts = dict.fromkeys(SHOWN.values(), 0)
    for prefix, column in SHOWN.items():
        counts[column] += code.count(prefix)
    numbers = (code.warps, code.registers, code.shared, code.spills, sum(code.opcodes.values()))
    return [name, *map(str, numbers), *map(str, counts.values())]


def print_table(architecture: int, compiled: dict[str, MachineCode]) -> None:
    """The kernels of one architecture."""
    rows = [list(COLUMNS), *(row_of(name, code) for name, code in compiled.items())]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    print(
        f"{ARCHITECTURES[architecture]} (at most 255 registers a thread, {SHARED_LIMIT} bytes of shared memory)"
    )
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([first.strip().ljust(widths[0]), *rest]))


def report(compiled: dict[tuple[int, str], MachineCode]) -> dict[str, Any]:
    """The report as its JSON's dict. Compiling is no measurement: its control is exact."""
    rows = []
    for (architecture, name), code in compiled.items():
        case = f"{ARCHITECTURES[architecture]} {name}"
        rows += [
            _row(f"{case} registers", code.registers, "registers a thread", 255),
            _row(f"{case} shared", code.shared, "bytes of shared memory", SHARED_LIMIT),
            _row(f"{case} spills", code.spills, "accesses to local memory", 0),
        ]
    control = {"ratio": 1.0, "low": 1.0, "high": 1.0}
    return {
        "benchmark": "compile_report",
        "commit": commit(),
        "machine": machine(),
        "control": control,
        "rows": rows,
    }


def _row(case: str, value: int, unit: str, goal: int) -> dict[str, Any]:
    return {
        "case": case,
        "value": value,
        "unit": unit,
        "ratio": None,
        "low": None,
        "high": None,
        "goal": goal,
    }


if __name__ == "__main__":
    main()
