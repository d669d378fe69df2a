"""The layer x step matrix of one metric."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from fp8_safeguard.monitor.metrics import HISTOGRAM, METRICS, metric_needs, worst
from fp8_safeguard.server.answers import encode_array
from fp8_safeguard.server.branch import last_steps
from fp8_safeguard.server.grid import (
    COSINE_DISTORTION,
    GRADIENT_DISTORTION,
    Grid,
    Selection,
    layer_order,
    load_grid,
)
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.runlookup import check_selection, find_run
from fp8_safeguard.server.slotlists import of_run
from fp8_safeguard.server.worst import Measured, reduce_columns, reduce_rows

DEFAULT_COLUMNS = 400
MOST_COLUMNS = 2000
PART_STEPS = 512
"""Steps whose rows are in memory together: about 50 MB for a hundred layers."""
ALL_STEPS = 2**31


def heatmap(
    conn: Connection,
    run: str,
    *,
    metric: str = GRADIENT_DISTORTION,
    operand: str | None = None,
    layout: str | None = None,
    gemm: str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    max_cols: int = DEFAULT_COLUMNS,
) -> dict[str, Any]:
    """The contract's heatmap: rows are the run's layers in slot order, columns hold their worst step.

    Raises Problem 404 for an unknown run or slot, 422 for an unknown metric.
    """
    row = find_run(conn, run)
    name = metric_name(metric)
    selection = Selection(
        operand=operand,
        layout=layout,
        gemm=gemm,
        gradients=_over_gradients(metric, operand, layout, gemm),
        operands=HISTOGRAM in metric_needs(name) and gemm is None,
    )
    if operand or layout or gemm:
        check_selection(conn, row, Selection(operand=operand, layout=layout, gemm=gemm))
    layers = layer_order(of_run(conn, row.id))
    whole, sampled = _by_layer_in_parts(conn, row.id, name, selection, layers, from_step, to_step)
    table, steps, width = reduce_columns(name, whole, sampled, max_cols)
    places = np.argwhere((table.nan > 0) | (table.inf > 0)).tolist()
    return {
        "metric": metric,
        "layers": layers,
        "steps": steps.tolist(),
        "step_width": width,
        "values": encode_array(table.values, table.bad),
        "nonfinite": [[r, c, int(table.nan[r, c]), int(table.inf[r, c])] for r, c in places],
        "agg": worst(name),
    }


def metric_name(metric: str) -> str:
    """The metric to derive for a name of the contract. Raises Problem 422 for an unknown one."""
    if metric == GRADIENT_DISTORTION:
        return COSINE_DISTORTION
    if metric not in METRICS:
        known = ", ".join((GRADIENT_DISTORTION, *METRICS))
        message = f"metric {metric!r} is not known; choose one of {known}"
        raise invalid(message, [("/query/metric", message)])
    return metric


def _over_gradients(metric: str, *filters: str | None) -> bool:
    """gradient_distortion is the worst of the gradient slots unless a slot is named."""
    return metric == GRADIENT_DISTORTION and not any(filters)


def _by_layer_in_parts(
    conn: Connection,
    run_id: int,
    name: str,
    selection: Selection,
    layers: list[str],
    from_step: int | None,
    to_step: int | None,
) -> tuple[Measured, NDArray[np.int64]]:
    """[layers, T] and its steps. The rows of a long run are read in parts: only one is in memory at a time."""
    steps = [
        step
        for step in last_steps(conn, run_id, ALL_STEPS)
        if (from_step is None or step >= from_step) and (to_step is None or step <= to_step)
    ]
    spans = [steps[at : at + PART_STEPS] for at in range(0, len(steps), PART_STEPS)]
    # Without a step there is one part, and it is empty.
    bounds = [(span[0], span[-1]) for span in spans] or [(0, -1)]
    grids = (load_grid(conn, run_id, selection, from_step=first, to_step=last) for first, last in bounds)
    parts = [(by_layer(name, grid, layers), grid.steps) for grid in grids]
    tables = [table for table, _ in parts]
    columns = (
        np.concatenate([getattr(table, part) for table in tables], axis=1)
        for part in ("values", "bad", "nan", "inf")
    )
    return Measured(*columns), np.concatenate([sampled for _, sampled in parts])


def by_layer(name: str, grid: Grid, layers: list[str]) -> Measured:
    """[layers, T]: the worst of each layer's selected tensors."""
    values, bad = grid.metric(name)
    nan, inf = grid.nonfinite()
    number = {layer: place for place, layer in enumerate(layers)}
    row_of = np.array([number[tensor.layer] for tensor in grid.tensors], dtype=np.intp)
    return reduce_rows(name, Measured(values, bad, nan, inf), row_of, len(layers))
