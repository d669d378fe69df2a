"""Alerts: list, acknowledge, silence, resolve."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path

from fp8_safeguard.server import alerting, query
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Context, InContext, Reading
from fp8_safeguard.server.paging import DEFAULT_PAGE
from fp8_safeguard.server.routes.actors import Actor
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
    layer: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Alerts, the newest first; `state` is open, held (by BF16) or resolved."""
    return StrictJSONResponse(
        query.alerts(conn, run, state=state, layer=layer, page_size=page_size, page_token=page_token)
    )


@router.post("/alerts/{alert}:ack", dependencies=_CONTROL)
def acknowledge(context: InContext, alert: AlertId, actor: Actor) -> StrictJSONResponse:
    """Say that somebody knows; `{"by": "name"}` is optional."""
    return _change(context, alerting.acknowledge, alert, actor)


@router.post("/alerts/{alert}:silence", dependencies=_CONTROL)
def silence(context: InContext, alert: AlertId, actor: Actor, body: Document = None) -> StrictJSONResponse:
    """Keep quiet about its rule in its layer for `{"seconds": 3600}`, should it open again, too; 0 ends it."""
    return _change(context, partial(alerting.silence, body=body or {}), alert, actor)


@router.post("/alerts/{alert}:resolve", dependencies=_CONTROL)
def resolve(context: InContext, alert: AlertId, actor: Actor) -> StrictJSONResponse:
    """Close it until its breach clears and comes again; `{"by": "name"}` is optional."""
    return _change(context, alerting.resolve, alert, actor)


def _change(
    context: Context, act: Callable[..., alerting.Answer], alert: int, actor: str
) -> StrictJSONResponse:
    with context.store.write() as conn:
        answer, events = act(conn, alert, actor=actor, now=context.clock())
    context.events.publish(events)
    return StrictJSONResponse(answer)
