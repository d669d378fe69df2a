"""The layer x step matrix of one metric."""

from typing import Any

import numpy as np
from sqlalchemy import Connection

from fp8_safeguard.monitor.metrics import METRICS, worst
from fp8_safeguard.server.answers import encode_array
from fp8_safeguard.server.grid import COSINE_DISTORTION, GRADIENT_DISTORTION, Grid, Selection, load_grid
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.runlookup import check_selection, find_run
from fp8_safeguard.server.slotlists import layers_of, of_run
from fp8_safeguard.server.worst import Measured, reduce_columns, reduce_rows

DEFAULT_COLUMNS = 400
MOST_COLUMNS = 2000


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
        operand=operand, layout=layout, gemm=gemm, gradients=_over_gradients(metric, operand, layout, gemm)
    )
    if operand or layout or gemm:
        check_selection(conn, row, selection)
    grid = load_grid(conn, row.id, selection, from_step=from_step, to_step=to_step)
    layers = layers_of(of_run(conn, row.id))
    table, steps, width = reduce_columns(name, by_layer(name, grid, layers), grid.steps, max_cols)
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


def by_layer(name: str, grid: Grid, layers: list[str]) -> Measured:
    """[layers, T]: the worst of each layer's selected tensors."""
    values, bad = grid.metric(name)
    nan, inf = grid.nonfinite()
    number = {layer: place for place, layer in enumerate(layers)}
    row_of = np.array([number[tensor.layer] for tensor in grid.tensors], dtype=np.intp)
    return reduce_rows(name, Measured(values, bad, nan, inf), row_of, len(layers))
