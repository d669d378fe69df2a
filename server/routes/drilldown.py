"""The layer drill-down: its document, drawer and figures."""

import gzip
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from fp8_safeguard.dashboards import layer_range, layer_view, metrics
from fp8_safeguard.server import drilldown_charts
from fp8_safeguard.server.answers import StrictJSONResponse, strict_dumps
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Viewing
from fp8_safeguard.server.drilldown import layer_document
from fp8_safeguard.server.drilldown_charts import Asked

COMPRESS_BYTES = 4096
_READ = [Depends(require("read"))]

router = APIRouter(tags=["queries"], dependencies=_READ)
pages = APIRouter(include_in_schema=False, dependencies=_READ)

Value = float | Literal["NaN", "Infinity", "-Infinity"] | None
Step = Annotated[int | None, Query(ge=0, le=2**63 - 1)]


class LayerLimit(BaseModel):
    """One level that a metric of a slot is judged by."""

    value: float
    severity: Literal["watch", "act"]
    origin: str = Field(description="Where the number comes from, in a sentence.")
    source: str = Field(description="The same in a few words: the preset, or the slot's own median.")


class LayerSlot(BaseModel):
    """One slot of the layer with its newest sample; with `expert`, the expert that lost most."""

    model_config = ConfigDict(extra="allow")
    layer: str
    operand: str | None = None
    layout: str | None = None
    gemm: str | None = None
    expert: int | None = None
    step: int | None = Field(description="Step of the newest sample that has the slot; null: none found.")
    metrics: dict[str, Value]
    thresholds: dict[str, list[LayerLimit]]
    breaches: dict[str, Literal["watch", "act"]]
    tile_sqnr_hist: list[int] | None
    format: str
    format_max: float | None


class LayerPeriod(BaseModel):
    """Steps that a gemm was computed in one precision, both ends included."""

    gemm: str
    from_step: int
    to_step: int | None = Field(description="Null while it lasts.")
    precision: str
    decision_id: str | None = Field(description="The decision that began it; null: as configured.")


class LayerDocument(BaseModel):
    """Everything that is known of one layer."""

    model_config = ConfigDict(extra="allow")
    layer: str
    state: Literal["healthy", "watch", "unstable", "fallback", "unknown", "stale"]
    precision: dict[str, str]
    worst: dict[str, Any] | None
    first_step: int | None
    last_step: int | None
    previous: str | None
    next: str | None
    slots: list[LayerSlot]
    alerts: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    precision_history: list[LayerPeriod]
    adjustments: list[dict[str, Any]] = Field(description="Changes of scale or format, with their steps.")


@router.get("/runs/{run}/layer", responses={200: {"model": LayerDocument}})
def layer(conn: Viewing, run: str, layer: str) -> StrictJSONResponse:
    """One layer: newest values of every slot with its limits, alerts, decisions and precision history."""
    return StrictJSONResponse(layer_document(conn, run, layer))


def asked(
    layer: str,
    metric: str = "",
    layer_metric: str = "",
    layer_slots: str = "",
    layer_scale: Literal["", "log", "linear"] = "",
    layer_blocks: str = "",
    at: Step = None,
    from_step: Step = None,
    to_step: Step = None,
    theme: Literal["light", "dark"] = "light",
) -> Asked:
    """What the drawer shows: its own choices, and the page's where it has none."""
    return Asked(
        layer=layer,
        page_metric=metric,
        metric=layer_metric,
        slots=tuple(name for name in layer_slots.split(",") if name),
        scale=layer_scale,
        blocks=layer_blocks,
        at=at,
        from_step=from_step,
        to_step=to_step,
        theme=theme,
    )


AskedHere = Annotated[Asked, Depends(asked)]
Kind = Literal["all", "metric", "amax", "blocks", "histogram", "precision"]


@pages.get("/runs/{run}/layer")
def drawer(conn: Viewing, run: str, wish: AskedHere) -> HTMLResponse:
    """The drawer's text as a fragment of a page."""
    document = layer_document(conn, run, wish.layer)
    text = _templates().get_template("layer.html").render(**_words(document, wish))
    return HTMLResponse(text, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


def _words(document: dict[str, Any], wish: Asked) -> dict[str, Any]:
    metric = wish.metric_of(document)
    view = metrics.metric_view(metric)
    slots = wish.slots_of(document)
    return {
        "layer": document,
        "worst": layer_view.worst_words(document["worst"]),
        "beyond": document["worst"] is not None and document["worst"]["beyond"],
        "precision": layer_view.precision_chips(document["precision"]),
        "metrics": [(name, metrics.metric_view(name)) for name in layer_view.DRAWER_METRICS],
        "metric": metric,
        "view": view,
        "judged": any(metric in slot["thresholds"] for slot in document["slots"]),
        "choices": layer_view.slot_choices(document, metric, slots, wish.theme),
        "can_log": drilldown_charts.can_log(metric),
        "scale": wish.scale_of(metric),
        "ranges": layer_range.range_lines(document),
        "block_slots": layer_view.block_slots(document),
        "blocks": wish.blocks_of(document),
        "at": wish.at,
        "columns": [(name, text, metrics.metric_view(name)) for name, text in layer_view.TABLE_COLUMNS],
        "rows": layer_view.slot_rows(document),
        "alerts": layer_view.alert_cards(document["alerts"]),
        "decisions": layer_view.decision_cards(
            document["decisions"], document["mode"], ended=document["ended"], plan=document["in_plan"]
        ),
    }


@pages.get("/runs/{run}/figures/layer/{kind}")
def figure(request: Request, conn: Viewing, run: str, kind: Kind, wish: AskedHere) -> Response:
    """One of the drawer's figures, or `all` of them by name, read once."""
    body = strict_dumps(_figures(conn, run, kind, wish)).encode()
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(body) > COMPRESS_BYTES:
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _figures(conn: Connection, run: str, kind: Kind, wish: Asked) -> dict[str, Any]:
    charts = drilldown_charts.Charts(conn, run, wish)
    if kind != "all":
        return charts.figure(kind)
    return {name: charts.figure(name) for name in drilldown_charts.KINDS}


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("fp8_safeguard.dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
