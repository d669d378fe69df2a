"""What every request works with: settings, store, events, counters, clock."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request
from sqlalchemy import Connection

from fp8_safeguard.server.branch import viewed
from fp8_safeguard.server.events import Broadcast
from fp8_safeguard.server.metrics import IngestMeters
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import Store


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of one running service."""

    settings: Settings
    store: Store
    events: Broadcast
    meters: IngestMeters
    clock: Callable[[], float]


def context_of(request: Request) -> Context:
    """The context that `create_app` put into the application."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def read_connection(request: Request) -> Iterator[Connection]:
    """A read connection for the length of one request. Not for streams: they would pin it."""
    with context_of(request).store.read() as conn:
        yield conn


def viewing_connection(
    request: Request, run: str, attempt: Annotated[str | None, Query()] = None
) -> Iterator[Connection]:
    """As read_connection; `attempt` shows the run as that attempt and its ancestors saw it, not as it went on."""
    with context_of(request).store.read() as conn:
        yield conn if attempt is None else viewed(conn, run, attempt)


InContext = Annotated[Context, Depends(context_of)]
Reading = Annotated[Connection, Depends(read_connection)]
Viewing = Annotated[Connection, Depends(viewing_connection)]
