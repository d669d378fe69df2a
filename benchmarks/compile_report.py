"""What every shipped Triton kernel becomes on each architecture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
from harness import commit, machine, require_writable

try:
    from fp8_safeguard.kernels.triton_compile import ARCHITECTURES, SHARED_LIMIT, MachineCode, compile_shipped
    from fp8_safeguard.kernels.triton_config import PRODUCTS_PER_CLOCK, gemm_config, predict
    from fp8_safeguard.kernels.triton_shipped import Shipped, shipped
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} cannot be imported: install fp8-safeguard[train], which brings Triton")

QUICK = ("quantize_row_col_bf16", "gemm_nt_tma_128x128")
PROCESSORS = {90: 132, 100: 148}
"""Multiprocessors of an H100 or H200, and of a B200."""
DENSE_M = (4096, 8192)
DENSE_NK = (
    (24576, 1536),
    (7168, 16384),
    (7168, 2048),
    (4096, 7168),
    (2112, 7168),
    (18432, 7168),
    (8192, 8192),
    (18432, 8192),
)
LANES = 128
"""Instructions of a thread that a multiprocessor issues in a clock."""
TILE_COLUMNS = 128
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
    "programs",
    "spills",
    "instructions",
    "an element",
    "bytes a thread",
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
    require_writable(parser, options.json)
    cases = [
        (architecture, name)
        for architecture in ARCHITECTURES
        for name in shipped(architecture)
        if not options.quick or name in QUICK
    ]
    compiled = compile_shipped(cases, options.processes)
    for architecture in ARCHITECTURES:
        print_table(architecture, {name: code for (of, name), code in compiled.items() if of == architecture})
        print_predictions(architecture)
    if options.json is not None:
        options.json.write_text(json.dumps(report(compiled), indent=2) + "\n")


def row_of(name: str, code: MachineCode, promise: Shipped) -> list[str]:
    """A kernel's line of the table."""
    counts = dict.fromkeys(SHOWN.values(), 0)
    for prefix, column in SHOWN.items():
        counts[column] += code.count(prefix)
    numbers = (
        code.warps,
        code.registers,
        code.shared,
        code.resident,
        code.spills,
        sum(code.opcodes.values()),
    )
    each = per_element(code, promise)
    quantiser = [f"{each:.1f}", str(code.bytes_loaded)] if each else ["", ""]
    return [name, *map(str, numbers), *quantiser, *map(str, counts.values())]


def per_element(code: MachineCode, promise: Shipped) -> float | None:
    """A quantiser's instructions of a thread for an element of its tile, if it runs through all of them once.

    It is bound by them, not by memory, where they exceed LANES over the elements that memory delivers in a clock: at
    4.8 TB/s and 1.98 GHz (H200) 18.4 bytes a multiprocessor, thus 28 for 4 bytes an element (bf16 to codes in two
    layouts). What is not executed counts too, so this is an upper bound.
    """
    rows = promise.launch.arguments.get("TILE")
    if not promise.saturating or rows is None or "CHUNK" in promise.launch.arguments:
        return None
    return float(sum(code.opcodes.values()) * 32 * code.warps / (rows * TILE_COLUMNS))


def print_predictions(architecture: int) -> None:
    """What the configuration table makes of the dense shapes, before any measurement: an upper bound of the peak."""
    processors = PROCESSORS[architecture]
    print(f"  predicted for fprop on {processors} multiprocessors (the GPU check measures)")
    for m in DENSE_M:
        for n, k in DENSE_NK:
            config = gemm_config(architecture, m, n, scales="tile", tma=True, processors=processors)
            found = predict(architecture, config, m, n, processors)
            clocks = found.clocks * k / TILE_COLUMNS
            print(
                f"    M {m:5} N {n:5} K {k:5}  {config.block_m}x{config.block_n:<3}  {found.blocks:5} blocks  "
                f"{found.waves:6.2f} waves  {100 * found.busy:3.0f} % busy  {found.bound:11}  "
                f"at most {100 * found.peak:3.0f} % of peak  {clocks / 1e6:6.3f} M clocks"
            )
    print(f"    peak: {PRODUCTS_PER_CLOCK[architecture]} multiply-adds a clock and multiprocessor")


def print_table(architecture: int, compiled: dict[str, MachineCode]) -> None:
    """The kernels of one architecture."""
    known = shipped(architecture)
    rows = [list(COLUMNS), *(row_of(name, code, known[name]) for name, code in compiled.items())]
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
