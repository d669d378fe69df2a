"""POST samples: one, or up to 256 at a time."""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Context, InContext
from fp8_safeguard.server.ingest import ingest
from fp8_safeguard.server.payload import decode_body, read_limited
from fp8_safeguard.server.problems import Problem, invalid

router = APIRouter(tags=["ingest"])

_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": {"type": "object"}},
        "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
    },
}


@router.post(
    "/runs/{run}/samples",
    dependencies=[Depends(require("ingest"))],
    openapi_extra={"requestBody": _BODY},
    summary="Store samples",
)
async def post_samples(request: Request, run: str, context: InContext) -> StrictJSONResponse:
    """Store one sample, or `{"samples": [...]}`; acknowledged means on disk. Content-Encoding zstd or gzip.

    A single refused sample is the answer's problem; in a list each sample has its own reply or problem.
    """
    body = await read_limited(request.stream(), context.settings.max_body_bytes)
    # Decoding and SQLite would hold up the event loop, and with it every live stream.
    return await run_in_threadpool(_answer, context, run, body, dict(request.headers))


def _answer(context: Context, run: str, body: bytes, headers: Mapping[str, str]) -> StrictJSONResponse:
    started = time.perf_counter()
    document = decode_body(body, headers, context.settings.max_body_bytes)
    many = isinstance(document, Mapping) and "samples" in document
    bodies = _listed(document, context.settings.max_samples_per_request) if many else [document]
    outcome = ingest(context.store, run, bodies, context.clock)
    context.events.publish(outcome.events)
    context.meters.samples.inc(sum(not isinstance(result, Problem) for result in outcome.results))
    context.meters.duration.observe(time.perf_counter() - started)
    if many:
        results = [item.to_dict() if isinstance(item, Problem) else item for item in outcome.results]
        return StrictJSONResponse({"results": results})
    result = outcome.results[0]
    if isinstance(result, Problem):
        raise result
    return StrictJSONResponse(result)


def _listed(document: Mapping[str, Any], most: int) -> list[Any]:
    bodies = document["samples"]
    if not isinstance(bodies, list):
        raise invalid("samples must be a list", [("/samples", "not a list")])
    if len(bodies) > most:
        message = f"{len(bodies)} samples in one request; at most {most} are read"
        raise invalid(message, [("/samples", message)])
    return bodies
