"""Liveness, readiness, metrics and the offline API page."""

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from sqlalchemy import text
from starlette.responses import HTMLResponse, Response

from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.apidocs import page, script, style
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext
from fp8_safeguard.server.migrate import current_revision, head_revision
from fp8_safeguard.server.problems import Problem

router = APIRouter()


@router.get("/livez", tags=["health"])
async def livez() -> StrictJSONResponse:
    """The process answers."""
    return StrictJSONResponse({"status": "ok"})


@router.get("/readyz", tags=["health"])
def readyz(context: InContext) -> StrictJSONResponse:
    """The store can be written and has the schema that this version needs."""
    with context.store.write() as conn:
        conn.execute(text("SELECT 1"))
        revision = current_revision(conn)
    if revision != head_revision():
        raise Problem(503, "unavailable", f"the store has schema {revision}, needed is {head_revision()}")
    return StrictJSONResponse({"status": "ok", "schema_revision": revision})


@router.get("/metrics", tags=["health"], dependencies=[Depends(require("read"))])
def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    registry: CollectorRegistry = request.app.state.registry
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"Content-Type": content_type})


@router.get("/docs", include_in_schema=False)
def docs() -> HTMLResponse:
    """The API page; nothing on it comes from another host."""
    policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
    return HTMLResponse(page(), headers={"Content-Security-Policy": policy})


@router.get("/docs/docs.js", include_in_schema=False)
def docs_script() -> Response:
    """The API page's script."""
    return Response(script(), media_type="text/javascript")


@router.get("/docs/docs.css", include_in_schema=False)
def docs_style() -> Response:
    """The API page's style."""
    return Response(style(), media_type="text/css")
