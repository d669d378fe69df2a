"""The live stream of a run as server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from fp8_safeguard.server import query
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import InContext

router = APIRouter(tags=["live"], dependencies=[Depends(require("read"))])
_RECONNECT_MS = 2000


def _present_state(context: InContext, run: str) -> str:
    """The run as it is when the stream opens. The connection is given back before the stream begins."""
    with context.store.read() as conn:
        detail = query.run_detail(conn, run)
    return strict_dumps({"state": detail["state"], "mode": detail["mode"], "last_step": detail["last_step"]})


@router.get("/runs/{run}/events", response_class=EventSourceResponse)
async def stream(
    context: InContext,
    run: str,
    present: Annotated[str, Depends(_present_state)],
    last_event_id: Annotated[str | None, Header()] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Events sample, decision, alert, plan and state as they are committed; opens with a state.

    Last-Event-ID asks for what was missed, as far as it is kept.
    """
    after = int(last_event_id) if last_event_id and last_event_id.isdecimal() else None
    reader = context.events.subscribe(run, after)
    try:
        yield ServerSentEvent(raw_data=present, event="state", retry=_RECONNECT_MS)
        while (event := await reader.queue.get()) is not None:
            yield ServerSentEvent(raw_data=strict_dumps(event.data), event=event.kind, id=str(event.number))
    finally:
        context.events.unsubscribe(reader)
