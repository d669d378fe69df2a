"""Alerts: list, acknowledge, silence."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path

from fp8_safeguard.server import alerting, query
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext, Reading
from fp8_safeguard.server.paging import DEFAULT_PAGE
from fp8_safeguard.server.routes.decisions import Actor
from fp8_safeguard.server.routes.runs import PageSize

router = APIRouter(tags=["alerts"])
_CONTROL = [Depends(require("control"))]
AlertId = Annotated[int, Path(ge=1, le=2**63 - 1)]
Document = Annotated[dict[str, Any] | None, Body()]


@router.get("/runs/{run}/alerts", dependencies=[Depends(require("read"))])
def list_alerts(
    conn: Reading,
    run: str,
    state: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Alerts, the newest first; `state` is open or resolved."""
    return StrictJSONResponse(
        query.alerts(conn, run, state=state, page_size=page_size, page_token=page_token)
    )


@router.post("/alerts/{alert}:ack", dependencies=_CONTROL)
def acknowledge(context: InContext, alert: AlertId, actor: Actor) -> StrictJSONResponse:
    """Say that somebody knows; `{"by": "name"}` is optional."""
    with context.store.write() as conn:
        answer, events = alerting.acknowledge(conn, alert, actor, context.clock())
    context.events.publish(events)
    return StrictJSONResponse(answer)


@router.post("/alerts/{alert}:silence", dependencies=_CONTROL)
def silence(context: InContext, alert: AlertId, body: Document = None) -> StrictJSONResponse:
    """Keep quiet about it for `{"seconds": 3600}`."""
    with context.store.write() as conn:
        answer, events = alerting.silence(conn, alert, body or {}, context.clock())
    context.events.publish(events)
    return StrictJSONResponse(answer)
