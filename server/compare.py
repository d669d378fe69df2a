"""Two runs side by side: the loss gap, aligned by step."""

from typing import Any

import numpy as np
from sqlalchemy import Connection

from fp8_safeguard.server.answers import encode_array, encode_float
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.series import read_scalars


def compare(conn: Connection, a: str, b: str) -> dict[str, Any]:
    """Loss of two runs at the steps that both have, and the gap (b - a) / |a|.

    Raises Problem 404 for an unknown run.
    """
    losses = [read_scalars(conn, find_run(conn, run).id, None, "loss") for run in (a, b)]
    steps = sorted(losses[0].keys() & losses[1].keys())
    loss_a, loss_b = (np.array([held[step] for step in steps], dtype=np.float64) for held in losses)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = (loss_b - loss_a) / np.abs(loss_a)
    finite = gap[np.isfinite(gap)]
    last = float(gap[-1]) if len(gap) else None
    return {
        "a": a,
        "b": b,
        "metric": "loss",
        "steps": steps,
        "values_a": encode_array(loss_a, np.isnan(loss_a)),
        "values_b": encode_array(loss_b, np.isnan(loss_b)),
        "gap_ratio": encode_array(gap, np.isnan(gap)),
        "mean_gap_ratio": float(finite.mean()) if len(finite) else None,
        "max_abs_gap_ratio": float(np.abs(finite).max()) if len(finite) else None,
        "last_gap_ratio": encode_float(last),
    }
