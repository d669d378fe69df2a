"""Runs, their attempts, mode and deletion."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from starlette.responses import Response

from fp8_safeguard.server import query
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext, Reading
from fp8_safeguard.server.control import change_run, delete_run
from fp8_safeguard.server.paging import DEFAULT_PAGE, MOST_PAGE
from fp8_safeguard.server.routes.actors import actor_of

router = APIRouter(tags=["runs"])
PageSize = Annotated[int, Query(ge=1, le=MOST_PAGE)]


@router.get("/runs", dependencies=[Depends(require("read"))])
def list_runs(
    conn: Reading, page_size: PageSize = DEFAULT_PAGE, page_token: str | None = None
) -> StrictJSONResponse:
    """All runs with their state, the newest first."""
    return StrictJSONResponse(query.list_runs(conn, page_size=page_size, page_token=page_token))


@router.get("/runs/{run}", dependencies=[Depends(require("read"))])
def get_run(conn: Reading, run: str) -> StrictJSONResponse:
    """One run: state, verdict, last values."""
    return StrictJSONResponse(query.run_detail(conn, run))


@router.patch("/runs/{run}", dependencies=[Depends(require("control"))])
def patch_run(
    request: Request, context: InContext, run: str, changes: Annotated[dict[str, Any], Body()]
) -> StrictJSONResponse:
    """Change the mode: `{"mode": "observe" | "advise" | "enforce"}`; `{"ended": true}` closes the run."""
    actor = actor_of(request, changes)
    with context.store.write() as conn:
        events = change_run(conn, run, changes, context.clock(), actor)
        detail = query.run_detail(conn, run)
    context.events.publish(events)
    return StrictJSONResponse(detail)


@router.delete("/runs/{run}", dependencies=[Depends(require("admin"))], status_code=204)
def remove_run(context: InContext, run: str) -> Response:
    """Delete a run and everything that was stored for it."""
    with context.store.write() as conn:
        delete_run(conn, run)
    return Response(status_code=204)


@router.get("/runs/{run}/attempts", dependencies=[Depends(require("read"))])
def list_attempts(conn: Reading, run: str) -> StrictJSONResponse:
    """The tree of attempts."""
    return StrictJSONResponse(query.attempts_of(conn, run))
