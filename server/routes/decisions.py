"""The plan, decisions about it, pins and the kill switch."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server import control, query
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Context, InContext, Reading
from fp8_safeguard.server.paging import DEFAULT_PAGE
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.routes.actors import Actor, actor_of
from fp8_safeguard.server.routes.runs import PageSize

router = APIRouter(tags=["control"])
_READ = [Depends(require("read"))]
_CONTROL = [Depends(require("control"))]
Document = Annotated[dict[str, Any], Body()]


@router.get("/runs/{run}/plan", dependencies=_READ)
def plan(conn: Reading, run: str) -> StrictJSONResponse:
    """The deviations from the configured precision that are in force."""
    return StrictJSONResponse(query.plan(conn, run))


@router.get("/runs/{run}/decisions", dependencies=_READ)
def list_decisions(
    conn: Reading,
    run: str,
    state: str | None = None,
    layer: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Decisions, the newest first."""
    return StrictJSONResponse(
        query.decisions(conn, run, state=state, layer=layer, page_size=page_size, page_token=page_token)
    )


@router.get("/runs/{run}/audit", dependencies=_READ)
def list_audit(
    conn: Reading,
    run: str,
    decision: str | None = None,
    page_size: PageSize = DEFAULT_PAGE,
    page_token: str | None = None,
) -> StrictJSONResponse:
    """Who did what when, the newest first; `decision` names one."""
    return StrictJSONResponse(
        query.audit(conn, run, decision=decision, page_size=page_size, page_token=page_token)
    )


@router.post("/decisions/{decision}:approve", dependencies=_CONTROL)
def approve(
    context: InContext,
    decision: str,
    actor: Actor,
    body: Annotated[dict[str, Any] | None, Body()] = None,
) -> StrictJSONResponse:
    """Put a proposed decision into the plan; `{"all_of_remedy": true}`: with the others of its remedy.

    The answer's `waiting` names those of its remedy that still wait.
    """
    together = (body or {}).get("all_of_remedy", False)
    if not isinstance(together, bool):
        message = f"all_of_remedy is true or false, not {quoted(together)}"
        raise invalid(message, [("/all_of_remedy", message)])
    return _decide(context, partial(control.approve, together=together), decision, actor)


@router.post("/decisions/{decision}:reject", dependencies=_CONTROL)
def reject(context: InContext, decision: str, actor: Actor) -> StrictJSONResponse:
    """Refuse a proposed decision."""
    return _decide(context, control.reject, decision, actor)


@router.post("/decisions/{decision}:revert", dependencies=_CONTROL)
def revert(context: InContext, decision: str, actor: Actor) -> StrictJSONResponse:
    """Take a decision out of the plan again."""
    return _decide(context, control.revert, decision, actor)


@router.get("/runs/{run}/pins", dependencies=_READ)
def list_pins(conn: Reading, run: str) -> StrictJSONResponse:
    """What people have fixed; the policy leaves it alone."""
    return StrictJSONResponse(control.pins_of(conn, run))


@router.put("/runs/{run}/pins", dependencies=_CONTROL)
def put_pin(request: Request, context: InContext, run: str, pin: Document) -> StrictJSONResponse:
    """Fix a layer: `{"layer", "target": {"gemm": "dgrad"}, "action": "bf16_fallback"}`.

    Without an action the layer stays as it is and the policy leaves it alone.
    """
    with context.store.write() as conn:
        answer, events = control.put_pin(conn, run, pin, actor_of(request, pin), context.clock())
    context.events.publish(events)
    return StrictJSONResponse(answer)


@router.delete("/runs/{run}/pins", dependencies=_CONTROL)
def delete_pin(
    request: Request,
    context: InContext,
    run: str,
    pin: Annotated[dict[str, Any] | None, Body()] = None,
    layer: str | None = None,
    gemm: str | None = None,
    operand: str | None = None,
    layout: str | None = None,
) -> StrictJSONResponse:
    """Release a pin, named as it was put: in the body, or as ?layer= with gemm=, or operand= and layout=."""
    named = {"gemm": gemm} if gemm else {"operand": operand, "layout": layout} if operand else None
    place = pin if pin is not None else {"layer": layer, "target": named}
    with context.store.write() as conn:
        events = control.delete_pin(conn, run, place, actor_of(request, pin))
        answer = control.pins_of(conn, run)
    context.events.publish(events)
    return StrictJSONResponse(answer)


@router.post("/runs/{run}:kill-switch", dependencies=_CONTROL)
def kill_switch(context: InContext, run: str, actor: Actor) -> StrictJSONResponse:
    """Empty the plan at once and only observe from here on; `{"by": "name"}` is optional."""
    with context.store.write() as conn:
        events = control.kill_switch(conn, run, actor)
        answer = {"run": query.run_detail(conn, run), "plan": query.plan(conn, run)}
    context.events.publish(events)
    return StrictJSONResponse(answer)


def _decide(
    context: Context, act: Callable[..., control.Answer], decision: str, actor: str
) -> StrictJSONResponse:
    with context.store.write() as conn:
        answer, events = act(conn, decision, actor)
    context.events.publish(events)
    return StrictJSONResponse(answer)
