"""The OpenAPI document: what every operation takes, answers and refuses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from fp8_safeguard.monitor.coverage import STATUSES as COVERAGE_STATUSES
from fp8_safeguard.monitor.plan import DECISION_STATES
from fp8_safeguard.monitor.slots import GEMMS, LAYOUTS, OPERANDS
from fp8_safeguard.server.alertlog import STATES
from fp8_safeguard.server.apischemas import NAME, RUN_ID, SCHEMAS, Schema, maybe, one_of, ref
from fp8_safeguard.server.layerview import LAYER_STATES, ORDERS
from fp8_safeguard.server.reportschemas import REPORT_SCHEMAS

API_PREFIX = "/api/v1"
OPEN_PATHS = ("/livez", "/readyz")
JSON, TEXT_TYPE = "application/json", "text/plain"

TAGS = {
    "ingest": "What the training side sends.",
    "runs": "Runs and their attempts.",
    "queries": "What was measured.",
    "alerts": "What people should know, and what they did about it.",
    "control": "The plan, decisions about it, pins and the kill switch.",
    "live": "What happens, as it happens.",
    "health": "For probes and Prometheus.",
}


@dataclass(frozen=True)
class Operation:
    """What the code of a route does not say of it."""

    summary: str
    answer: str | None = None
    """Name of the answer's schema; None leaves what the route itself declares."""
    body: str | None = None
    """Name of the body's schema."""
    needs_body: bool = True
    conflicts: bool = False
    """Whether it may answer 409."""
    kind: str = JSON
    """Media type of the answer."""


OPERATIONS: dict[str, Operation] = {
    "GET /livez": Operation("Is the process alive?", "Status"),
    "GET /readyz": Operation("Can it take samples?", "Status"),
    "GET /metrics": Operation("Scrape Prometheus metrics", kind=TEXT_TYPE),
    "POST /runs/{run}/samples": Operation("Store samples", conflicts=True),
    "POST /runs/{run}:end": Operation("End a group of an attempt", "Ended", "Group"),
    "GET /runs": Operation("List runs", "RunPage"),
    "GET /runs/{run}": Operation("Show a run", "Run"),
    "PATCH /runs/{run}": Operation("Change a run's mode, thresholds or end", "Run", "RunChange"),
    "DELETE /runs/{run}": Operation("Delete a run"),
    "GET /runs/{run}/attempts": Operation("List a run's attempts", "AttemptPage"),
    "GET /runs/{run}/layers": Operation("List a run's layers", "LayerPage"),
    "GET /runs/{run}/layer": Operation("Show one layer"),
    "GET /runs/{run}/coverage": Operation("List what of a model is observed", "Coverage"),
    "GET /runs/{run}/series": Operation("Read a metric over steps", "Series"),
    "GET /runs/{run}/heatmap": Operation("Read a metric of all layers over steps", "Heatmap"),
    "GET /runs/{run}/readiness": Operation("Is a run ready for FP8?", "Readiness"),
    "GET /runs/{run}/samples": Operation("Read samples in step order", kind="application/x-ndjson"),
    "GET /runs/{run}/baselines": Operation("List a run's baselines", "BaselinePage"),
    "GET /runs/{run}/baselines/{baseline}": Operation("Show a baseline", "BaselineDetail"),
    "POST /runs/{run}/baselines": Operation("Learn a baseline", "Baseline", "Window", conflicts=True),
    "PUT /runs/{run}/baselines": Operation("Choose a run's baseline", "BaselinePage", "BaselineChoice"),
    "DELETE /runs/{run}/baselines/{baseline}": Operation("Drop a baseline"),
    "GET /runs/{run}/export": Operation("Export a run", "Bundle"),
    "GET /compare": Operation("Compare the losses of two runs", "Comparison"),
    "GET /runs/{run}/plan": Operation("Show a run's plan", "Plan"),
    "GET /runs/{run}/decisions": Operation("List a run's decisions", "DecisionPage"),
    "POST /decisions/{decision}:approve": Operation(
        "Approve a decision", "Decision", "Approval", needs_body=False, conflicts=True
    ),
    "POST /decisions/{decision}:reject": Operation(
        "Reject a decision", "Decision", "By", needs_body=False, conflicts=True
    ),
    "POST /decisions/{decision}:revert": Operation(
        "Revert a decision", "Decision", "By", needs_body=False, conflicts=True
    ),
    "GET /runs/{run}/pins": Operation("List a run's pins", "PinPage"),
    "PUT /runs/{run}/pins": Operation("Pin a layer", "Pin", "PinWish", conflicts=True),
    "DELETE /runs/{run}/pins": Operation("Release a pin", "PinPage", "PinPlace", needs_body=False),
    "POST /runs/{run}:kill-switch": Operation(
        "Empty the plan and only observe", "Killed", "By", needs_body=False
    ),
    "GET /runs/{run}/audit": Operation("List who did what in a run", "ActPage"),
    "GET /runs/{run}/alerts": Operation("List a run's alerts", "AlertPage"),
    "POST /alerts/{alert}:ack": Operation("Acknowledge an alert", "Alert", "By", needs_body=False),
    "POST /alerts/{alert}:silence": Operation("Silence an alert", "Alert", "Silence", needs_body=False),
    "POST /alerts/{alert}:resolve": Operation(
        "Resolve an alert", "Alert", "By", needs_body=False, conflicts=True
    ),
    "GET /runs/{run}/events": Operation("Follow a run live", kind="text/event-stream"),
}

_SCHEMAS = {**SCHEMAS, **REPORT_SCHEMAS}
_CHOICES: dict[str, Schema] = {
    "operand": one_of(OPERANDS),
    "layout": one_of(LAYOUTS),
    "gemm": one_of(GEMMS),
    "order_by": one_of(ORDERS),
}
_STATES = {
    "/runs/{run}/layers": LAYER_STATES,
    "/runs/{run}/decisions": DECISION_STATES,
    "/runs/{run}/alerts": STATES,
}
_STATUSES = {"/runs/{run}/coverage": COVERAGE_STATUSES}
_PROBLEMS = {
    400: "The body cannot be read.",
    401: "No known token was sent.",
    403: "The token lacks the scope.",
    404: "There is no such thing.",
    409: "It contradicts what is stored.",
    413: "The body is too large.",
    415: "The body is of a type that is not read here.",
    422: "A field or parameter is not allowed; errors has its pointer.",
    429: "Too much is being read already; Retry-After says when to come back.",
    503: "The store is busy; Retry-After says when to come back.",
}


def install(app: FastAPI) -> None:
    """Let the application describe itself by `document`, made when it is first asked for."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def document(app: FastAPI) -> dict[str, Any]:
    """The framework's document, completed from OPERATIONS."""
    made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    made["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    for method, path, operation in _operations(made):
        short = path.removeprefix(API_PREFIX)
        known = OPERATIONS.get(f"{method} {short}")
        if known is not None:
            _complete(operation, known)
        for parameter in operation.get("parameters", []):
            _complete_parameter(short, parameter)
        _add_problems(method, path, operation, known is not None and known.conflicts)
        if path not in OPEN_PATHS:
            operation["security"] = [{"token": []}]
    components = made.setdefault("components", {})
    held = components.setdefault("schemas", {})
    for framework_own in ("HTTPValidationError", "ValidationError"):
        held.pop(framework_own, None)
    held.update(_SCHEMAS)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return made


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _complete(operation: dict[str, Any], known: Operation) -> None:
    operation["summary"] = known.summary
    if known.kind != JSON:
        operation["responses"]["200"] = {
            "description": "The text.",
            "content": {known.kind: {"schema": {"type": "string"}}},
        }
    elif known.answer is not None:
        description = _SCHEMAS[known.answer]["description"]
        content = {JSON: {"schema": ref(known.answer)}}
        if known.answer == "Bundle":
            content["application/x-ndjson"] = {"schema": {"type": "string"}}
        operation["responses"]["200"] = {"description": description, "content": content}
    if known.body is not None:
        schema = ref(known.body) if known.needs_body else maybe(ref(known.body))
        operation["requestBody"] = {"required": known.needs_body, "content": {JSON: {"schema": schema}}}


def _complete_parameter(path: str, parameter: dict[str, Any]) -> None:
    name = parameter["name"]
    schema = parameter["schema"]
    choices = [choice for choice in schema.get("anyOf", []) if choice.get("type") != "null"]
    if len(choices) == 1:
        # A query has no null: a parameter is there or it is not.
        default = {"default": schema["default"]} if schema.get("default") is not None else {}
        schema = {**choices[0], **default}
    schema.pop("title", None)
    if name == "run":
        schema = {"type": "string", "pattern": RUN_ID}
    elif name in _CHOICES:
        schema = {**_CHOICES[name], **({"default": schema["default"]} if "default" in schema else {})}
    elif name == "state" and path in _STATES:
        schema = one_of(_STATES[path])
    elif name == "status" and path in _STATUSES:
        schema = one_of(_STATUSES[path])
    elif schema.get("type") == "string" and parameter["in"] != "header":
        schema = {**NAME, **schema}
    parameter["schema"] = schema


def _add_problems(method: str, path: str, operation: dict[str, Any], conflicts: bool) -> None:
    statuses = {503}
    if path not in OPEN_PATHS:
        statuses |= {401, 403}
    if "{" in path or path.endswith("/compare"):
        statuses.add(404)
    if operation.get("parameters") or "requestBody" in operation:
        statuses.add(422)
    if "requestBody" in operation:
        statuses.add(400)
    if conflicts:
        statuses.add(409)
    if path.endswith("/samples") and method == "POST":
        statuses |= {413, 415, 429}
    if path == "/livez":
        statuses.clear()
    responses = operation["responses"]
    responses.pop("422", None)
    for status in sorted(statuses):
        content = {"application/problem+json": {"schema": ref("Problem")}}
        responses[str(status)] = {"description": _PROBLEMS[status], "content": content}
