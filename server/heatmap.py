"""The layer x step matrix of one metric."""

from typing import Any

import numpy as np
from sqlalchemy import Connection

from fp8_safeguard.monitor.metrics import HISTOGRAM, METRICS, metric_needs, worst
from fp8_safeguard.server.answers import encode_array
from fp8_safeguard.server.grid import COSINE_DISTORTION, GRADIENT_DISTORTION, Selection, layer_order
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.runlookup import check_selection, find_run
from fp8_safeguard.server.slotlists import of_run
from fp8_safeguard.server.stepvalues import values_by_step
from fp8_safeguard.server.worst import reduce_columns

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
        operand=operand,
        layout=layout,
        gemm=gemm,
        gradients=_over_gradients(metric, operand, layout, gemm),
        operands=HISTOGRAM in metric_needs(name) and gemm is None,
    )
    if operand or layout or gemm:
        check_selection(conn, row, Selection(operand=operand, layout=layout, gemm=gemm))
    layers = layer_order(of_run(conn, row.id))
    whole, sampled = values_by_step(
        conn, row.id, name, selection, layers, from_step=from_step, to_step=to_step
    )
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
