"""Collects rows and writes the benchmarks' common JSON each time."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.floors import H200
from harness import commit, machine

Row = dict[str, Any]
UNKNOWN = {"ratio": None, "low": None, "high": None}


@dataclass
class Report:
    """Everything known so far. Safe to call from several threads."""

    file: Path | None
    started: float = field(default_factory=time.monotonic)
    hello: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    source: dict[str, str] = field(default_factory=lambda: {"commit": _commit(), "machine": machine()})

    def add(self, rows: list[Row]) -> None:
        """Rows of a case that ran."""
        with self.lock:
            self.rows += rows
            for row in rows:
                if row.get("passed") is False:
                    self.failures.append({"case": row["case"], "kind": row["kind"], "error": _missed(row)})
                if row.get("ours"):
                    self.failures.append({"case": row["case"], "kind": row["kind"], "error": row["error"]})
            self._write()

    def fail(self, case: str, kind: str, error: str) -> None:
        """A case that raised, hung or took its process with it."""
        with self.lock:
            self.failures.append({"case": case, "kind": kind, "error": error})
            row = {"case": case, "value": None, "unit": "", **UNKNOWN, "goal": None, "kind": kind}
            self.rows.append(row | {"error": error} | ({"passed": False} if kind == "check" else {}))
            self._write()

    def skip(self, case: str, reason: str) -> None:
        """A case that was not run."""
        with self.lock:
            self.not_run.append({"case": case, "reason": reason})
            self._write()

    def greet(self, hello: dict[str, Any]) -> None:
        """What the workers run on."""
        with self.lock:
            self.hello = hello

    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(failure["kind"] == "check" for failure in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """The JSON's content."""
        found = [row for row in self.rows if row.get("kind") == "control"]
        control = {key: found[0][key] for key in UNKNOWN} if found else UNKNOWN
        gpu = self.hello.get("gpu", "no GPU yet")
        return {
            "benchmark": "gpu_check",
            "commit": self.source["commit"],
            "machine": f"{gpu}; {self.source['machine']}",
            "control": control,
            "versions": self.hello.get("versions", {}),
            "architecture": self.hello.get("architecture"),
            "seconds": time.monotonic() - self.started,
            "ceilings": vars(H200),
            "rows": self.rows,
            "failures": self.failures,
            "not_run": self.not_run,
            "choices": choices(self.rows),
        }

    def _write(self) -> None:
        """Whole or not at all: a kill at any moment leaves a file that can be read."""
        if self.file is None:
            return
        part = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        part.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        part.replace(self.file)


def choices(rows: list[Row]) -> list[dict[str, Any]]:
    """FP8 or BF16 for every GEMM and shape timed: FP8 where the whole interval of the ratio is below 1."""
    timed = {row["case"]: row for row in rows if "shape" in row and row["value"] is not None}
    found = []
    for case, row in timed.items():
        if case.endswith(" ours") and row["ratio"] is not None and "tflops" in row:
            name = case.removesuffix(" ours")
            others = {backend: timed.get(f"{name} {backend}") for backend in ("scaled_mm", "deep_gemm")}
            ratios = {"triton": row["ratio"]} | {key: each["ratio"] for key, each in others.items() if each}
            precision = "fp8" if row["high"] < 1 else "bf16"
            chosen = {"precision": precision, "ratio": row["ratio"], "low": row["low"], "high": row["high"]}
            found.append(row["shape"] | chosen | {"fastest": min(ratios, key=lambda key: ratios[key])})
    return found


def _missed(row: Row) -> str:
    return f"{row['value']:g} {row['unit']}, allowed {row['goal']:g}"


def _commit() -> str:
    """The commit; a machine without git has none."""
    try:
        return commit()
    except OSError:
        return "unknown"
