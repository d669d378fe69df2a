"""The web pages, their static files and their Plotly figures."""

import gzip
import hashlib
import mimetypes
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata, resources
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy import Connection

from fp8_safeguard.dashboards import metrics, view
from fp8_safeguard.dashboards.figures import (
    HeatmapInputError,
    heatmap_figure,
    loss_figure,
    timeline_figure,
)
from fp8_safeguard.dashboards.slices import SLOTS, UnknownSlotError, cut_heatmap, slot_filter, strictest
from fp8_safeguard.server import query
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Reading
from fp8_safeguard.server.problems import Problem, invalid

PLOTLY = "plotly.min.js"
TABLE_LAYERS = 40
LIST_RUNS = 200
LIST_ALERTS = 100
LANE_ENTRIES = 1000
LOSS_POINTS = 2000
COMPRESS_BYTES = 4096

# Plotly draws heatmap cells into data: images and sets inline styles. Nothing is evaluated, no other host is reached.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

router = APIRouter(include_in_schema=False)
guarded = [Depends(require("read"))]
ThemeName = Literal["light", "dark"]


@router.get("/", dependencies=guarded)
def run_list(request: Request, conn: Reading) -> Response:
    """All runs, the newest first."""
    items = query.list_runs(conn, page_size=LIST_RUNS)["items"]
    rows = [
        {
            "id": item["id"],
            "state": view.state_of(item),
            "why": (item.get("verdict") or {}).get("why", ""),
            "stats": {stat.label: stat for stat in view.run_stats(item)},
            "last_report": item.get("last_report"),
        }
        for item in items
    ]
    return _page("runs.html", runs=rows, origin=str(request.base_url).rstrip("/"))


@router.get("/runs/{run}", dependencies=guarded)
def run_page(
    conn: Reading,
    run: str,
    metric: str = metrics.PAGE_METRICS[0],
    slot: str = "",
    order: str = "depth",
    scale: str = "",
    q: str = "",
) -> Response:
    """One run: verdict, charts, alerts, worst layers."""
    try:
        detail = query.run_detail(conn, run)
    except Problem as problem:
        return _page("missing.html", status=problem.status, run=run)
    shown = metric if metric in metrics.PAGE_METRICS else metrics.PAGE_METRICS[0]
    worst = query.layers(conn, run, order_by="severity", q=q or None, page_size=TABLE_LAYERS)
    return _page(
        "run.html",
        run=run,
        state=view.state_of(detail),
        verdict=detail["verdict"],
        stats=view.run_stats(detail),
        last_report=detail.get("last_report"),
        metrics=[(name, metrics.metric_view(name)) for name in metrics.PAGE_METRICS],
        metric=shown,
        definition=metrics.metric_view(shown).definition,
        slots=SLOTS,
        slot=slot,
        order=order,
        scale=scale if scale in ("log", "linear") else metrics.default_scale(shown),
        q=q,
        layers=view.layer_rows(worst["items"]),
        alerts=view.alert_rows(
            query.alerts(conn, run, page_size=LIST_ALERTS)["items"], held=_in_bf16(conn, run)
        ),
    )


def _in_bf16(conn: Connection, run: str) -> set[str]:
    entries = query.plan(conn, run)["entries"]
    return {entry["layer"] for entry in entries if entry["action"] == "bf16_fallback"}


@router.get("/runs/{run}/figures/heatmap", dependencies=guarded)
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
    """The heatmap figure; `q` keeps the layers whose name contains it. `layout.meta` has the run's first and last step."""
    detail = query.run_detail(conn, run)
    try:
        place = slot_filter(slot)
        answer = query.heatmap(
            conn, run, metric=metric, from_step=from_step, to_step=to_step, max_cols=max_cols, **place
        )
        part = cut_heatmap(answer, contains=q, worst_first=order == "worst")
        figure = heatmap_figure(
            part.values,
            part.layers,
            part.steps,
            metric=metric,
            nonfinite=part.nonfinite,
            scale=scale or metrics.default_scale(metric),
            thresholds=_thresholds(conn, run, answer, place),
            step_width=answer["step_width"],
            decisions=query.decisions(conn, run, page_size=LANE_ENTRIES)["items"],
            theme=theme,
        )
    except (HeatmapInputError, UnknownSlotError) as error:
        raise invalid(str(error)) from error
    figure.layout.meta = {"first_step": detail["first_step"], "last_step": detail["last_step"]}
    return _figure(request, figure)


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
    return strictest(found["thresholds"])


@router.get("/runs/{run}/figures/loss", dependencies=guarded)
def loss(request: Request, conn: Reading, run: str, theme: ThemeName = "light") -> Response:
    """The loss and gradient-norm figure."""
    curves = {name: _run_series(conn, run, name) for name in ("loss", "gradient_norm")}
    norms = dict(zip(*curves["gradient_norm"], strict=True))
    steps, losses = curves["loss"]
    figure = loss_figure(steps, losses, gradient_norms=[norms.get(step) for step in steps], theme=theme)
    return _figure(request, figure)


@router.get("/runs/{run}/figures/timeline", dependencies=guarded)
def timeline(request: Request, conn: Reading, run: str, theme: ThemeName = "light") -> Response:
    """The lane of alerts and decisions."""
    figure = timeline_figure(
        query.decisions(conn, run, page_size=LANE_ENTRIES)["items"],
        alerts=query.alerts(conn, run, page_size=LANE_ENTRIES)["items"],
        last_step=query.run_detail(conn, run)["last_step"],
        theme=theme,
    )
    return _figure(request, figure)


@router.get("/static/{file}")
def static(request: Request, file: str) -> Response:
    """A file of the dashboards package, or Plotly from its own package."""
    if file not in _static_names():
        raise Problem(404, "not-found", f"nothing is served at {request.url.path}; see /openapi.json")
    body, etag = _static_body(file)
    lasting = file == PLOTLY or "v" in request.query_params
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if lasting else "no-cache",
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    kind = "text/javascript" if file.endswith(".js") else mimetypes.guess_type(file)[0]
    if _accepts_gzip(request) and len(body) > COMPRESS_BYTES:
        body, headers["Content-Encoding"] = _static_gzip(file), "gzip"
    return Response(body, media_type=kind, headers=headers)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("fp8_safeguard.dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _page(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    plotly_url = f"/static/{PLOTLY}?v={metadata.version('plotly')}"
    text = (
        _templates().get_template(template).render(assets=_asset_version(), plotly_url=plotly_url, **values)
    )
    return HTMLResponse(text, status_code=status, headers=PAGE_HEADERS)


def _figure(request: Request, figure: Any) -> Response:
    body = strict_dumps(figure.to_plotly_json()).encode()
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if _accepts_gzip(request) and len(body) > COMPRESS_BYTES:
        # Level 1: the figure is read once, and the time is taken from a training step's machine.
        body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _run_series(conn: Connection, run: str, metric: str) -> tuple[list[int], list[Any]]:
    data = query.series(
        conn, run, layer=None, metric=metric, operand=None, layout=None, gemm=None, expert=None,
        from_step=None, to_step=None, max_points=LOSS_POINTS,
    )  # fmt: skip
    return data["steps"], data["values"]


def _accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


@lru_cache(maxsize=1)
def _static_names() -> frozenset[str]:
    folder = resources.files("fp8_safeguard.dashboards") / "static"
    return frozenset({PLOTLY, *(entry.name for entry in folder.iterdir() if entry.is_file())})


@lru_cache(maxsize=32)
def _static_body(file: str) -> tuple[bytes, str]:
    """Bytes and ETag, read once a process."""
    if file == PLOTLY:
        body = (resources.files("plotly") / "package_data" / PLOTLY).read_bytes()
    else:
        body = (resources.files("fp8_safeguard.dashboards") / "static" / file).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:20]}"'


@lru_cache(maxsize=32)
def _static_gzip(file: str) -> bytes:
    return gzip.compress(_static_body(file)[0], 6, mtime=0)


@lru_cache(maxsize=1)
def _asset_version() -> str:
    """One token for all our static files: any change gives pages new addresses for them."""
    tags = (_static_body(name)[1] for name in sorted(_static_names() - {PLOTLY}))
    return hashlib.sha256("".join(tags).encode()).hexdigest()[:12]
