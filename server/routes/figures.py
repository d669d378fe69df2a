"""The run page's Plotly figures as JSON."""

import gzip
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from sqlalchemy import Connection

from fp8_safeguard.dashboards import metrics
from fp8_safeguard.dashboards.figures import (
    HeatmapInputError,
    heatmap_json,
    loss_figure,
    timeline_figure,
)
from fp8_safeguard.dashboards.slices import (
    HeatmapSlice,
    UnknownSlotError,
    cut_heatmap,
    slot_filter,
    strictest,
)
from fp8_safeguard.server import query
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Reading
from fp8_safeguard.server.problems import Problem, invalid
from fp8_safeguard.server.routes.assets import COMPRESS_BYTES, accepts_gzip
from fp8_safeguard.server.runlookup import find_run

LANE_ENTRIES = 1000
LOSS_POINTS = 2000

router = APIRouter(include_in_schema=False, dependencies=[Depends(require("read"))])
ThemeName = Literal["light", "dark"]


@router.get("/runs/{run}/figures/heatmap")
def heatmap(
    request: Request,
    conn: Reading,
    run: str,
    metric: str = metrics.PAGE_METRICS[0],
    slot: str = "",
    order: Literal["depth", "worst"] = "depth",
    scale: Literal["", "linear", "log"] = "",
    q: str = "",
    from_step: Annotated[int | None, Query(ge=0)] = None,
    to_step: Annotated[int | None, Query(ge=0)] = None,
    max_cols: Annotated[int, Query(ge=1, le=2000)] = 1000,
    theme: ThemeName = "light",
) -> Response:
    """The heatmap figure; `q` keeps the layers whose name contains it.

    `layout.meta` has what a page needs beside the picture: the run's first and last step, how many layers it has, the rows'
    full names, the metric's label and unit, and which extreme is the bad one.
    """
    detail = query.run_detail(conn, run)
    try:
        place = slot_filter(slot)
        answer = query.heatmap(
            conn, run, metric=metric, from_step=from_step, to_step=to_step, max_cols=max_cols, **place
        )
        part = cut_heatmap(answer, contains=q, worst_first=order == "worst")
        figure = heatmap_json(
            part.values,
            part.layers,
            part.steps,
            metric=metric,
            nonfinite=part.nonfinite,
            scale=scale or metrics.default_scale(metric),
            thresholds=_thresholds(conn, run, answer, place),
            step_width=answer["step_width"],
            decisions=query.decisions(conn, run, page_size=LANE_ENTRIES)["items"],
            alerts=query.alerted_layers(conn, find_run(conn, run)),
            theme=theme,
            empty=_empty(answer, part, q, slot),
        )
    except (HeatmapInputError, UnknownSlotError) as error:
        raise invalid(str(error)) from error
    shown = metrics.metric_view(metric)
    figure["layout"]["meta"] = {
        "label": shown.label,
        "unit": "%" if shown.percent else "dB" if shown.unit == "dB" else "",
        "first_step": detail["first_step"],
        "last_step": detail["last_step"],
        "layers": len(answer["layers"]),
        "rows": part.layers,
        "step_width": answer["step_width"],
        "agg": answer["agg"],
    }
    return _answer(request, figure)


def _empty(answer: Mapping[str, Any], part: HeatmapSlice, q: str, slot: str) -> str | None:
    """Why nothing is drawn; None leaves the words to the figure."""
    if q and answer["layers"] and not part.layers:
        return f"no layer’s name contains “{q}”"
    if slot and part.layers and answer["steps"]:
        label = metrics.metric_view(answer["metric"]).label
        return f"{label} of {slot}: not sampled in this range"
    return None


def _thresholds(
    conn: Connection, run: str, answer: dict[str, Any], place: dict[str, Any]
) -> list[Mapping[str, Any]]:
    """What the first layer is judged by; a metric that nobody judges has none."""
    if not answer["layers"] or not answer["steps"]:
        return []
    last = answer["steps"][-1]
    try:
        found = query.series(
            conn,
            run,
            layer=answer["layers"][0],
            metric=answer["metric"],
            from_step=last,
            to_step=last,
            **place,
        )
    except Problem:
        # The first layer lacks the slot that others have; the colour bar does without marks.
        return []
    return strictest(found["thresholds"], lower_is_worse=answer["agg"] == "min")


@router.get("/runs/{run}/figures/loss")
def loss(request: Request, conn: Reading, run: str, theme: ThemeName = "light") -> Response:
    """The loss and gradient-norm figure."""
    curves = {name: _run_series(conn, run, name) for name in ("loss", "gradient_norm")}
    norms = dict(zip(*curves["gradient_norm"], strict=True))
    steps, losses = curves["loss"]
    figure = loss_figure(steps, losses, gradient_norms=[norms.get(step) for step in steps], theme=theme)
    return _answer(request, figure.to_plotly_json())


@router.get("/runs/{run}/figures/timeline")
def timeline(request: Request, conn: Reading, run: str, theme: ThemeName = "light") -> Response:
    """The lane of alerts and decisions."""
    detail = query.run_detail(conn, run)
    figure = timeline_figure(
        query.decisions(conn, run, page_size=LANE_ENTRIES)["items"],
        alerts=query.alerts(conn, run, page_size=LANE_ENTRIES)["items"],
        last_step=detail["last_step"],
        ended=detail["state"] == "ended",
        theme=theme,
    )
    return _answer(request, figure.to_plotly_json())


def _run_series(conn: Connection, run: str, metric: str) -> tuple[list[int], list[Any]]:
    data = query.series(conn, run, metric=metric, max_points=LOSS_POINTS)
    return data["steps"], data["values"]


def _answer(request: Request, figure: dict[str, Any]) -> Response:
    body = strict_dumps(figure).encode()
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if accepts_gzip(request) and len(body) > COMPRESS_BYTES:
        # Level 1: the figure is read once, and the time is taken from a training step's machine.
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, media_type="application/json", headers=headers)
