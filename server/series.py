"""One metric of one layer, or of the run itself, over steps."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row

from fp8_safeguard.monitor.metrics import METRICS
from fp8_safeguard.monitor.numbers import decode_number, worse
from fp8_safeguard.monitor.thresholds import get_preset, thresholds_for
from fp8_safeguard.server.answers import encode_array
from fp8_safeguard.server.baselines import chosen
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.grid import GRADIENT_DISTORTION, Selection, load_grid
from fp8_safeguard.server.heatmap import metric_name
from fp8_safeguard.server.problems import invalid, not_found
from fp8_safeguard.server.runlookup import check_selection, find_run
from fp8_safeguard.server.slotlists import in_order, of_run
from fp8_safeguard.server.stepvalues import by_layer
from fp8_safeguard.server.tables import samples
from fp8_safeguard.server.worst import Measured, column_width, reduce_rows

RUN_METRICS = ("loss", "gradient_norm", "learning_rate", "tokens", "loss_scale")
DEFAULT_POINTS = 2000
MOST_POINTS = 100_000


def series(
    conn: Connection,
    run: str,
    *,
    metric: str,
    layer: str | None = None,
    operand: str | None = None,
    layout: str | None = None,
    gemm: str | None = None,
    expert: int | None = None,
    variant: str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    max_points: int = DEFAULT_POINTS,
) -> dict[str, Any]:
    """The contract's series. Without a layer it is one of the run's own values, for example the loss.

    Of several slots the worst counts; of several steps in one point too, so a spike survives.
    """
    row = find_run(conn, run)
    known = metric == GRADIENT_DISTORTION or metric in METRICS
    slot_filters = (operand, layout, gemm, expert, variant)
    if layer is None or (not known and not any(value is not None for value in slot_filters)):
        return _scalar_series(conn, row, layer, metric, from_step, to_step, max_points)
    name = metric_name(metric)
    selection = Selection(
        layer=layer,
        operand=operand,
        layout=layout,
        gemm=gemm,
        expert=expert,
        variant=variant,
        gradients=metric == GRADIENT_DISTORTION and not (operand or layout or gemm),
    )
    check_selection(conn, row, selection)
    grid = load_grid(conn, row.id, selection, from_step=from_step, to_step=to_step)
    table = by_layer(name, grid, [layer])
    answer = _points(name, table, grid.steps, max_points)
    return {**answer, "thresholds": _thresholds(conn, row, selection, name)}


def _thresholds(conn: Connection, run: Row[Any], selection: Selection, name: str) -> list[dict[str, Any]]:
    preset, learned = get_preset(run.preset), chosen(conn, run)
    lines: list[dict[str, Any]] = []
    for slot in in_order(of_run(conn, run.id)):
        if selection.has(slot):
            found = thresholds_for(preset, slot, name, baseline=learned)
            lines.extend(line for line in found if line not in lines)
    return lines


def _points(name: str, table: Measured, steps: NDArray[np.int64], most: int) -> dict[str, Any]:
    """Points of a one-row table; a point of several steps stands at its first and shows the worst."""
    held = ~np.isnan(table.values[0]) | table.bad[0] | (table.nan[0] > 0) | (table.inf[0] > 0)
    shown = steps[held]
    table = Measured(table.values[:, held], table.bad[:, held], table.nan[:, held], table.inf[:, held])
    _, width = column_width(shown, most)
    if len(shown) > most:
        _, first, point_of = np.unique((shown - shown[0]) // width, return_index=True, return_inverse=True)
        table = reduce_rows(name, table.transposed(), point_of.astype(np.intp), len(first)).transposed()
        shown = shown[first]
    places = np.flatnonzero((table.nan[0] > 0) | (table.inf[0] > 0)).tolist()
    return {
        "steps": shown.tolist(),
        "values": encode_array(table.values[0], table.bad[0]),
        "nonfinite": [[place, int(table.nan[0, place]), int(table.inf[0, place])] for place in places],
    }


def _scalar_series(
    conn: Connection,
    run: Row[Any],
    layer: str | None,
    metric: str,
    from_step: int | None,
    to_step: int | None,
    most: int,
) -> dict[str, Any]:
    found = read_scalars(conn, run.id, layer, metric, from_step=from_step, to_step=to_step)
    if not found and (layer is not None or metric not in RUN_METRICS):
        _explain_missing(conn, run, layer, metric)
    steps = np.array(sorted(found), dtype=np.int64)
    values = np.array([found[step] for step in steps.tolist()], dtype=np.float64).reshape(1, -1)
    bad = np.isnan(values)
    table = Measured(values, bad, bad.astype(np.int64), np.isinf(values).astype(np.int64))
    return {**_points("loss_scalar", table, steps, most), "thresholds": []}


def _explain_missing(conn: Connection, run: Row[Any], layer: str | None, metric: str) -> None:
    if layer is None:
        message = f"the run itself has no metric {metric!r}; it has {', '.join(RUN_METRICS)}"
        raise invalid(message, [("/query/metric", message)])
    check_selection(conn, run, Selection(layer=layer))
    metric_name(metric)
    raise not_found("slot-not-found", f"layer {layer!r} of run {run.name!r} has no scalar {metric!r}")


def read_scalars(
    conn: Connection,
    run_id: int,
    layer: str | None,
    name: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> dict[int, float]:
    """A run's own value (layer None) or a layer's named scalar by step of the live branch.

    Where groups disagree the worse number counts: no group's trouble is hidden.
    """
    wanted = samples.c.run_values if layer is None else samples.c.scalars
    found: dict[int, float] = {}
    for row in visible_rows(conn, run_id, [wanted.label("body")], from_step=from_step, to_step=to_step):
        for value in _values_in(row.body, layer, name):
            found[row.step] = worse(found.get(row.step, value), value)
    return found


def _values_in(body: str, layer: str | None, name: str) -> list[float]:
    held = json.loads(body)
    if layer is None:
        found = [decode_number(held.get(name))]
    else:
        mine = (item for item in held if item["layer"] == layer and item["name"] == name)
        found = [decode_number(item["value"]) for item in mine]
    return [value for value in found if value is not None]
