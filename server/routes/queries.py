"""Layers, series, heatmaps, comparison and export of a run."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from starlette.responses import StreamingResponse

from fp8_safeguard.server import query
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext, Reading, Viewing
from fp8_safeguard.server.export import export_run
from fp8_safeguard.server.grid import GRADIENT_DISTORTION
from fp8_safeguard.server.heatmap import DEFAULT_COLUMNS, MOST_COLUMNS
from fp8_safeguard.server.paging import DEFAULT_PAGE
from fp8_safeguard.server.routes.runs import PageSize
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.series import DEFAULT_POINTS, MOST_POINTS

router = APIRouter(tags=["queries"], dependencies=[Depends(require("read"))])
Step = Annotated[int | None, Query(ge=0, le=2**63 - 1)]


@router.get("/runs/{run}/layers")
def layers(
    conn: Viewing,
    run: str,
    state: str | None = None,
    order_by: str = "severity",
    q: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Layers with state, worst reading and precision."""
    return StrictJSONResponse(
        query.layers(
            conn, run, state=state, order_by=order_by, q=q, page_size=page_size, page_token=page_token
        )
    )


@router.get("/runs/{run}/coverage")
def coverage(
    conn: Viewing,
    run: str,
    status: str | None = None,
    q: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Weight matrices that are observed, adapted or not observed, with the reason; `counts` are over all of them."""
    return StrictJSONResponse(
        query.coverage(conn, run, status=status, q=q, page_size=page_size, page_token=page_token)
    )


@router.get("/runs/{run}/series")
def series(
    conn: Viewing,
    run: str,
    metric: str,
    layer: str | None = None,
    operand: str | None = None,
    layout: str | None = None,
    gemm: str | None = None,
    expert: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    variant: str | None = None,
    from_step: Step = None,
    to_step: Step = None,
    max_points: Annotated[int, Query(ge=1, le=MOST_POINTS)] = DEFAULT_POINTS,
) -> StrictJSONResponse:
    """One metric of a layer or slot over steps; without a layer, of the run itself."""
    return StrictJSONResponse(
        query.series(
            conn,
            run,
            metric=metric,
            layer=layer,
            operand=operand,
            layout=layout,
            gemm=gemm,
            expert=expert,
            variant=variant,
            from_step=from_step,
            to_step=to_step,
            max_points=max_points,
        )
    )


@router.get("/runs/{run}/heatmap")
def heatmap(
    conn: Viewing,
    run: str,
    metric: str = GRADIENT_DISTORTION,
    operand: str | None = None,
    layout: str | None = None,
    gemm: str | None = None,
    from_step: Step = None,
    to_step: Step = None,
    max_cols: Annotated[int, Query(ge=1, le=MOST_COLUMNS)] = DEFAULT_COLUMNS,
) -> StrictJSONResponse:
    """Layer x step matrix of a metric; each column shows its worst step."""
    return StrictJSONResponse(
        query.heatmap(
            conn,
            run,
            metric=metric,
            operand=operand,
            layout=layout,
            gemm=gemm,
            from_step=from_step,
            to_step=to_step,
            max_cols=max_cols,
        )
    )


@router.get("/runs/{run}/readiness")
def readiness(conn: Viewing, run: str, from_step: Step = None, to_step: Step = None) -> StrictJSONResponse:
    """Whether each GEMM could run in FP8, over a range of steps; of a long one its newest steps, which are counted."""
    return StrictJSONResponse(query.readiness(conn, run, from_step=from_step, to_step=to_step))


@router.get("/compare")
def compare(conn: Reading, a: str, b: str) -> StrictJSONResponse:
    """Loss of two runs aligned by step, and the gap."""
    return StrictJSONResponse(query.compare(conn, a, b))


@router.get("/runs/{run}/export", response_class=StreamingResponse)
def export(context: InContext, run: str, format: Literal["json", "jsonl"] = "json") -> StreamingResponse:
    """Everything stored of a run, as one JSON bundle or as JSON lines."""
    with context.store.read() as conn:
        find_run(conn, run)
    kind = "application/x-ndjson" if format == "jsonl" else "application/json"
    headers = {"Content-Disposition": f'attachment; filename="{run}.{format}"'}
    return StreamingResponse(export_run(context.store, run, format), media_type=kind, headers=headers)
