"""What importing the hooks adds to a process that has torch loaded."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import harness

GOAL_MS = 150.0
IMPORT = """
import gc, json, time, torch
begun, collecting = 0.0, 0.0
def clock(phase, information):
    global begun, collecting
    if phase == "start":
        begun = time.process_time()
    else:
        collecting += time.process_time() - begun
gc.callbacks.append(clock)
wall, cpu = time.perf_counter(), time.process_time()
import fp8_safeguard.hooks
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
print(json.dumps([1e3 * cpu, 1e3 * wall, 1e3 * collecting]))
"""
"""Milliseconds of CPU and wall time, and of garbage collections in it: torch's objects are up for a full one."""


def row(processes: int) -> dict[str, Any]:
    """CPU time, the median of that many new processes; with bytecode, as pip leaves an installed package."""
    with tempfile.TemporaryDirectory() as cache:
        cached = _measured(processes, "-X", f"pycache_prefix={cache}")
    compiled = _measured(processes, "-B", "-X", f"pycache_prefix={cache}")
    cpu, wall, collecting = zip(*cached, strict=True)
    low, high = harness.interval(cpu)
    median = statistics.median(cpu)
    return {
        "case": "import_ms", "value": median, "unit": "ms", "ratio": None, "low": low, "high": high, "goal": GOAL_MS,
        "reached": median <= GOAL_MS, "baseline": "a process with torch loaded", "processes": processes,
        "wall_ms": statistics.median(wall), "garbage_collection_ms": statistics.median(collecting),
        "without_bytecode_ms": statistics.median(cpu for cpu, _, _ in compiled),
    }  # fmt: skip


def _measured(processes: int, *flags: str) -> list[Sequence[float]]:
    """One process more than that: the first one writes the bytecode and reads the files from disk."""
    return [_milliseconds(*flags) for _ in range(processes + 1)][1:]


def _milliseconds(*flags: str) -> Sequence[float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *flags, "-c", IMPORT]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: Sequence[float] = json.loads(ran.stdout.splitlines()[-1])
    return found
