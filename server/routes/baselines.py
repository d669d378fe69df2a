"""Healthy windows that levels are learned from, and a run's samples in order."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response, StreamingResponse

from fp8_safeguard.server import baselines
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext, Reading
from fp8_safeguard.server.learning import choice_of, learn_window, wish_of
from fp8_safeguard.server.observations import sample_lines
from fp8_safeguard.server.routes.actors import actor_of
from fp8_safeguard.server.routes.decisions import Document
from fp8_safeguard.server.routes.queries import Step
from fp8_safeguard.server.runlookup import find_run

router = APIRouter(tags=["queries"])
_READ = [Depends(require("read"))]
_CONTROL = [Depends(require("control"))]
BaselineId = Annotated[int, Path(ge=1, le=2**63 - 1)]


@router.get("/runs/{run}/baselines", dependencies=_READ)
def list_baselines(conn: Reading, run: str) -> StrictJSONResponse:
    """Healthy windows that levels were learned from, the newest first; `used` marks the one that judges the run."""
    return StrictJSONResponse(baselines.baselines_of(conn, run))


@router.get("/runs/{run}/baselines/{baseline}", dependencies=_READ)
def show_baseline(conn: Reading, run: str, baseline: BaselineId) -> StrictJSONResponse:
    """One baseline with the healthy values of every slot."""
    return StrictJSONResponse(baselines.baseline_detail(conn, run, baseline))


@router.post("/runs/{run}/baselines", dependencies=_CONTROL)
def learn_baseline(request: Request, context: InContext, run: str, wish: Document) -> StrictJSONResponse:
    """Learn from the steps of a window: `{"run": "a", "from_step": 500, "to_step": 2000}`.

    `run` is the run to learn from, by default the one that the baseline is for. With `"use": false` it is stored and the
    run goes on as before. A window that is too short or not healthy is refused, with the reasons.
    """
    actor = actor_of(request, wish)
    source, from_step, to_step, use = wish_of(wish)
    with context.store.read() as conn:
        find_run(conn, run)
    learned = learn_window(context.store, source or run, from_step, to_step)
    with context.store.write() as conn:
        item = baselines.add(conn, run, learned, actor, context.clock(), use=use)
    return StrictJSONResponse(item)


@router.put("/runs/{run}/baselines", dependencies=_CONTROL)
def use_baseline(request: Request, context: InContext, run: str, wish: Document) -> StrictJSONResponse:
    """Judge the run by one of its baselines from the next sample on: `{"baseline": 3}`; null: by its preset alone."""
    actor = actor_of(request, wish)
    number = choice_of(wish)
    with context.store.write() as conn:
        events = baselines.use(conn, run, number, actor)
        answer = baselines.baselines_of(conn, run)
    context.events.publish(events)
    return StrictJSONResponse(answer)


@router.delete("/runs/{run}/baselines/{baseline}", dependencies=_CONTROL, status_code=204)
def drop_baseline(request: Request, context: InContext, run: str, baseline: BaselineId) -> Response:
    """Delete a baseline; a run that was judged by it goes back to its preset."""
    with context.store.write() as conn:
        events = baselines.drop(conn, run, baseline, actor_of(request))
    context.events.publish(events)
    return Response(status_code=204)


@router.get("/runs/{run}/samples", response_class=StreamingResponse, dependencies=_READ)
def read_samples(
    context: InContext, run: str, from_step: Step = None, to_step: Step = None
) -> StreamingResponse:
    """The samples of the live branch in step order, as JSON lines; each can be posted again."""
    with context.store.read() as conn:
        find_run(conn, run)
    lines = sample_lines(context.store, run, from_step, to_step)
    return StreamingResponse(lines, media_type="application/x-ndjson")
