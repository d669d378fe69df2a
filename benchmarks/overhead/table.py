"""Prints the rows of the overhead report as they are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def print_phase(name: str, control: dict[str, float], rows: Sequence[dict[str, Any]]) -> None:
    """The control and the rows of one phase."""
    print(
        f"{name}: control {control['ratio']:.3f} ({control['low']:.3f} to {control['high']:.3f})", flush=True
    )
    for row in rows:
        print_row(row)


def print_row(row: dict[str, Any]) -> None:
    """One row."""
    text = f"  {row['case']:<38} {row['value']:9.2f} {row['unit']}"
    if row["ratio"] is not None:
        text += f"  {row['ratio']:6.3f} x"
    if row["low"] is not None:
        text += f" ({row['low']:.3f} to {row['high']:.3f})"
    if row["goal"] is not None:
        text += f"  goal {row['goal']:g}"
    if row.get("reached") is not None:
        text += "" if row["reached"] else " MISSED"
    if "accounted_ratio" in row:
        text += f"  accounted {row['accounted_ratio']:.4f}, sender {row['sender_ratio']:.4f}"
    if row.get("us_per_tensor") is not None:
        text += f"  {row['us_per_tensor']:.0f} us a tensor ({row['tensors']})"
    if row.get("child_cpu_ms_per_step"):
        text += f"  and {row['child_cpu_ms_per_step']:.1f} ms in child processes"
    print(text, flush=True)
