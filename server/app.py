"""The application: parts are made here and passed in, routes are joined."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from fp8_safeguard.server import openapi, problems
from fp8_safeguard.server.addresses import PlainAddresses
from fp8_safeguard.server.context import Context
from fp8_safeguard.server.events import Broadcast
from fp8_safeguard.server.gate import Gate
from fp8_safeguard.server.metrics import IngestMeters, RunCollector
from fp8_safeguard.server.migrate import upgrade
from fp8_safeguard.server.routes import (
    alerts,
    baselines,
    decisions,
    drilldown,
    events,
    health,
    ingest,
    login,
    pages,
    queries,
    runs,
)
from fp8_safeguard.server.settings import Settings, check_bind
from fp8_safeguard.server.sharedpolicy import shared_policy
from fp8_safeguard.server.smallbodies import SmallBodies
from fp8_safeguard.server.store import open_store
from fp8_safeguard.server.tokens import stored_token

API_PREFIX = "/api/v1"


def create_app(
    settings: Settings,
    *,
    clock: Callable[[], float] = time.time,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """The service on the store that the settings name; the schema is brought up to date here.

    Raises InsecureBindError for a public address without a token, StoreError for a store that cannot be used, PolicyFileError
    for a policy file that says no policy.
    """
    policy = shared_policy(settings.policy_file)
    check_bind(settings, lambda: stored_token(settings, clock))
    store = open_store(settings, clock, policy)
    upgrade(store)
    meters = IngestMeters()
    context = Context(
        settings=settings,
        store=store,
        events=Broadcast(settings.sse_queue_events),
        meters=meters,
        clock=clock,
    )
    app = FastAPI(
        title="fp8-safeguard",
        version=version("fp8-safeguard"),
        summary="Watches the numerics of FP8 training while it runs, and acts on what it sees.",
        # The stock pages load their assets from a content delivery network.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.context = context
    app.state.store = store
    app.state.gate = Gate(max_body_bytes=settings.max_body_bytes, wait_seconds=settings.busy_timeout_seconds)
    app.state.registry = registry if registry is not None else CollectorRegistry()
    app.state.registry.register(meters)
    app.state.registry.register(RunCollector(store, settings))
    problems.install(app)
    openapi.install(app)
    app.add_middleware(SmallBodies)
    app.add_middleware(PlainAddresses)
    _include_routes(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.context.events.close()
    app.state.context.store.close()


def _include_routes(app: FastAPI) -> None:
    app.include_router(health.router)
    # `/runs/{run}:kill-switch` goes before `/runs/{run}`, which would match it too.
    for part in (ingest, decisions, alerts, runs, queries, baselines, drilldown, events):
        app.include_router(part.router, prefix=API_PREFIX)
    app.include_router(drilldown.pages)
    app.include_router(login.router)
    app.include_router(pages.router)
