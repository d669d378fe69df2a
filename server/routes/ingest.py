"""POST samples, one or many at a time, and the end of a run."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from fp8_safeguard.monitor.document import Reader
from fp8_safeguard.server import ending
from fp8_safeguard.server.answers import StrictJSONResponse
from fp8_safeguard.server.apischemas import ref
from fp8_safeguard.server.auth import require
from fp8_safeguard.server.context import Context, InContext
from fp8_safeguard.server.gate import Gate
from fp8_safeguard.server.ingest import ingest
from fp8_safeguard.server.payload import content_length, decode_body, read_limited
from fp8_safeguard.server.problems import Problem, invalid

router = APIRouter(tags=["ingest"])

_SAMPLES = {"anyOf": [ref("Samples"), ref("Sample")]}
_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": _SAMPLES},
        "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
    },
}
_ANSWER = {
    "description": "Stored: a reply, or for several samples one for each.",
    "content": {"application/json": {"schema": {"anyOf": [ref("Reply"), ref("Replies")]}}},
}


@router.post(
    "/runs/{run}/samples",
    dependencies=[Depends(require("ingest"))],
    openapi_extra={"requestBody": _BODY, "responses": {"200": _ANSWER}},
)
async def post_samples(request: Request, run: str, context: InContext) -> StrictJSONResponse:
    """Store one sample, or `{"samples": [...]}`; acknowledged means on disk. Content-Encoding zstd or gzip.

    A single refused sample is the answer's problem; in a list each sample has its own reply or problem.
    """
    gate: Gate = request.app.state.gate
    with gate.room() as take:
        limit = context.settings.max_body_bytes
        body = await read_limited(request.stream(), limit, told=content_length(request.headers), take=take)
        # Decoding and SQLite would hold up the event loop, and with it every live stream.
        answer = await gate.run(_answer, context, run, body, dict(request.headers))
    assert isinstance(answer, StrictJSONResponse)
    return answer


@router.post("/runs/{run}:end", dependencies=[Depends(require("ingest"))])
def end_group(context: InContext, run: str, body: Annotated[dict[str, Any], Body()]) -> StrictJSONResponse:
    """Say that a group of an attempt has finished; the run ends with the last group of its newest attempt."""
    reader = Reader(body)
    attempt, group = reader.text("attempt", required=True), reader.text("group", required=True)
    if attempt is None or group is None:
        raise invalid("; ".join(message for _, message in reader.faults), reader.faults)
    with context.store.write(run) as conn:
        ended, events = ending.end_group(conn, run, attempt, group, context.clock())
    context.events.publish(events)
    return StrictJSONResponse({"ended": ended})


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
        message = f"{len(bodies)} samples in one request; at most {most} {'is' if most == 1 else 'are'} read"
        raise invalid(message, [("/samples", message)])
    return bodies
