"""JSON schemas of what the API takes and answers."""

from collections.abc import Sequence
from typing import Any

from fp8_safeguard.monitor.coverage import MAX_DIMENSIONS, MAX_ROWS, STATUSES
from fp8_safeguard.monitor.metrics import ALL_COLUMNS
from fp8_safeguard.monitor.plan import ACTIONS, DECISION_ACTIONS, DECISION_STATES
from fp8_safeguard.monitor.slots import GEMMS, INT64_MAX, LAYOUTS, OPERANDS
from fp8_safeguard.monitor.thresholds import PRESETS
from fp8_safeguard.monitor.wire import ACCEPTED_SCHEMAS, MODES, REQUIRED_COLUMNS
from fp8_safeguard.server.layerview import LAYER_STATES
from fp8_safeguard.server.runview import RUN_STATES

Schema = dict[str, Any]

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ANY: Schema = {}
TEXT: Schema = {"type": "string"}
# No database of ours holds a NUL character.
NAME: Schema = {"type": "string", "pattern": r"^[^\u0000]*$"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": INT64_MAX}
TIME: Schema = {"type": "string", "format": "date-time"}
WORDS: Schema = {"enum": ["NaN", "Infinity", "-Infinity"]}
MEASURED: Schema = {
    "description": "A measured number; what JSON cannot write is a string, null is not measured.",
    "anyOf": [{"type": "number"}, WORDS, {"type": "null"}],
}


def ref(name: str) -> Schema:
    """A named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(values: Sequence[Any]) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def listed(items: Schema, **more: Any) -> Schema:
    """A list of such items."""
    return {"type": "array", "items": items, **more}


def maybe(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(description: str, fields: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """An object with these fields; more may come in later versions."""
    properties = {**fields, **(optional or {})}
    required = {"required": list(fields)} if fields else {}
    return {"type": "object", "description": description, "properties": properties, **required, **more}


def page_of(name: str) -> Schema:
    """One page of a list."""
    fields = {"items": listed(ref(name)), "next_page_token": maybe(TEXT)}
    return record("A page; next_page_token asks for the next one, null: this is the last.", fields)


_SLOT = {
    "operand": maybe(one_of(OPERANDS)),
    "layout": maybe(one_of(LAYOUTS)),
    "gemm": maybe(one_of(GEMMS)),
}
_TARGET = {
    "description": "A gemm, an operand with its layout, or the whole layer.",
    "oneOf": [
        record("One gemm.", {"gemm": one_of(GEMMS)}, additionalProperties=False),
        record(
            "One operand.",
            {"operand": one_of(OPERANDS), "layout": one_of(LAYOUTS)},
            additionalProperties=False,
        ),
        record("The layer.", {"layer": {"const": True}}, additionalProperties=False),
    ],
}
_VALUE: Schema = {"anyOf": [{"type": "number"}, TEXT, {"type": "null"}]}
_RUN_VALUES = {"loss": MEASURED, "gradient_norm": MEASURED, "learning_rate": MEASURED}
_BY = {"by": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[ -~]+$"}}
_CHANGES = {"mode": one_of(MODES), "thresholds": one_of(tuple(PRESETS)), "ended": FLAG}
_SAMPLE_COLUMN: Schema = {
    "description": "A list in slot order, or in msgpack {dtype, data} with raw little-endian values.",
    "anyOf": [{"type": "array"}, {"type": "object"}],
}
MATRIX = {
    "name": NAME,
    "shape": listed(COUNT, maxItems=MAX_DIMENSIONS),
    "status": one_of(STATUSES),
    "reason": NAME,
}
SHARE: Schema = {"type": ["number", "null"], "minimum": 0}
_SAMPLING = record(
    "What the overhead budget makes of the sampling.",
    {},
    {
        "budget": SHARE,
        "overhead_ratio": SHARE,
        **dict.fromkeys(("every", "tile_stride"), maybe({**COUNT, "minimum": 1})),
        **dict.fromkeys(("layers_per_sample", "layers", "full_coverage_steps"), maybe(COUNT)),
    },
)
_BAD = listed(listed(COUNT), description="Where NaN and Inf were counted: [row, column, nan, inf].")

SCHEMAS: dict[str, Schema] = {
    "Problem": record(
        "An error as RFC 9457 tells it.",
        {"type": TEXT, "title": TEXT, "status": {"type": "integer"}, "detail": TEXT},
        {
            "instance": TEXT,
            "errors": listed(
                record("A fault and the JSON pointer of its field.", {"pointer": TEXT, "message": TEXT})
            ),
        },
    ),
    "Status": record("Whether the service works.", {"status": TEXT}, {"schema_revision": TEXT}),
    "Sample": record(
        "All slots of one group at one step. docs/concepts.md has every field.",
        {
            "schema": one_of(ACCEPTED_SCHEMAS),
            "attempt": record("The attempt.", {"id": NAME}, {"parent": maybe(NAME), "from_step": COUNT}),
            "group": NAME,
            "step": COUNT,
            "columns": record(
                "One list a column; null where a slot has no such value.",
                dict.fromkeys(REQUIRED_COLUMNS, _SAMPLE_COLUMN),
                {name: _SAMPLE_COLUMN for name in ALL_COLUMNS if name not in REQUIRED_COLUMNS},
            ),
        },
        {
            "batch_id": maybe(NAME),
            "groups": {**COUNT, "minimum": 1},
            "mode": one_of(MODES),
            "thresholds": one_of(tuple(PRESETS)),
            "plan_version": COUNT,
            "effective_step": maybe(COUNT),
            "overhead_ratio": {"type": ["number", "null"]},
            "dropped": COUNT,
            "slots": listed(record("A slot.", {"layer": NAME}, _SLOT)),
            "slots_id": TEXT,
            "run": record("Values of the run itself.", {}, _RUN_VALUES),
            "scalars": listed(
                record("A layer's own number.", {"name": NAME}, {"layer": maybe(NAME), "value": MEASURED})
            ),
            "ranks": listed({"type": "object"}),
            "coverage": maybe(listed(record("A weight matrix.", MATRIX), maxItems=MAX_ROWS)),
            "sampling": maybe(_SAMPLING),
            "local_decisions": maybe(listed({"type": "object"}, maxItems=256)),
        },
    ),
    "Samples": record(
        "Several samples, each a Sample: one that is not gets its own problem, the others are stored.",
        {"samples": listed(ANY, maxItems=256)},
    ),
    "Reply": record(
        "A sample is on disk; what it led to.",
        {
            "accepted": {"const": True},
            "inserted": COUNT,
            "duplicates": COUNT,
            "plan_version": COUNT,
            "plan": maybe(ref("Plan")),
            "decisions": listed(ref("Decision")),
            "alerts": listed(ref("Alert")),
        },
        {
            "local_decisions": listed(
                TEXT, description="Ids of the sample's local decisions: the server has them now."
            )
        },
    ),
    "Replies": record(
        "A reply or a problem for each sample, in their order.",
        {"results": listed({"anyOf": [ref("Reply"), ref("Problem")]})},
    ),
    "Group": record("A group of an attempt.", {"attempt": NAME, "group": NAME}),
    "Ended": record("Whether the run has ended.", {"ended": FLAG}),
    "Run": record(
        "A run as people see it.",
        {
            "id": {"type": "string", "pattern": RUN_ID},
            "state": one_of(RUN_STATES),
            "verdict": record("What is wrong, and what to do.", {"state": TEXT, "why": TEXT, "next": TEXT}),
            "mode": one_of(MODES),
            "attempt": TEXT,
            "groups": COUNT,
            "first_step": maybe(COUNT),
            "last_step": maybe(COUNT),
            **_RUN_VALUES,
            "overhead_ratio": MEASURED,
            "dropped": COUNT,
            "created": TIME,
            "last_report": TIME,
            "fallback_budget_used_ratio": {"type": ["number", "null"]},
            "nonfinite_steps": COUNT,
            "plan_version": COUNT,
            "thresholds": one_of(tuple(PRESETS)),
            "sampling": maybe(_SAMPLING),
            "causes": listed(ref("Cause")),
            "ranks": listed({"type": "object"}, description="The worst ranks of the newest sample."),
        },
    ),
    "RunChange": record(
        "What is to change.",
        {},
        {**_CHANGES, **_BY},
        anyOf=[{"required": [name]} for name in _CHANGES],
        additionalProperties=False,
    ),
    "Attempt": record(
        "An attempt in the run's tree.",
        {
            "id": TEXT,
            "parent": maybe(TEXT),
            "from_step": COUNT,
            "groups": COUNT,
            "first_step": maybe(COUNT),
            "last_step": maybe(COUNT),
            "live": FLAG,
            "created": TIME,
        },
    ),
    "Layer": record(
        "A layer with its worst reading and precision.",
        {
            "layer": TEXT,
            "state": one_of(LAYER_STATES),
            "follows_from": {**maybe(TEXT), "description": "The layer that its non-finite values began in."},
            "worst": maybe(ref("Reading")),
            "precision": record("What each gemm computes in.", dict.fromkeys(GEMMS, TEXT)),
        },
    ),
    "Reading": record(
        "The reading nearest to, or furthest over, its threshold.",
        {"metric": TEXT, **_SLOT, "value": MEASURED, "threshold": MEASURED, "step": COUNT},
    ),
    "Threshold": record(
        "A level, and where it comes from.",
        {"value": {"type": "number"}, "severity": one_of(("watch", "act")), "origin": TEXT},
    ),
    "Series": record(
        "A metric over steps; non-finite lists [point, nan, inf].",
        {
            "steps": listed(COUNT),
            "values": listed(MEASURED),
            "nonfinite": _BAD,
            "thresholds": listed(ref("Threshold")),
        },
    ),
    "Heatmap": record(
        "Layers x columns of steps, each showing its worst step.",
        {
            "metric": TEXT,
            "layers": listed(TEXT),
            "steps": listed(COUNT),
            "step_width": COUNT,
            "values": listed(listed(MEASURED)),
            "nonfinite": _BAD,
            "agg": one_of(("max", "min")),
        },
    ),
    "PlanEntry": record(
        "One deviation from the configured precision.",
        {
            "layer": TEXT,
            "target": _TARGET,
            "action": one_of(ACTIONS),
            "value": _VALUE,
            "decision_id": TEXT,
            "not_before_step": COUNT,
            "expires_step": maybe(COUNT),
        },
    ),
    "Plan": record("The deviations in force.", {"version": COUNT, "entries": listed(ref("PlanEntry"))}),
    "Decision": record(
        "One audited change of the plan.",
        {
            "id": TEXT,
            "run": TEXT,
            "step": COUNT,
            "layer": TEXT,
            "target": _TARGET,
            "action": one_of(DECISION_ACTIONS),
            "value": _VALUE,
            "rule": TEXT,
            "reason": TEXT,
            "evidence": {"type": "object"},
            "mode": one_of(MODES),
            "state": one_of(DECISION_STATES),
            "actor": TEXT,
            "not_before_step": maybe(COUNT),
            "effective_step": maybe(COUNT),
            "created": TIME,
        },
        {"outcome": maybe(TEXT), "history": listed(ref("Act")), "waiting": listed(TEXT)},
    ),
    "Act": record(
        "What somebody did, or what happened to a decision.",
        {"what": TEXT, "actor": TEXT, "at": TIME, "step": maybe(COUNT)},
        {"id": COUNT, "decision": maybe(TEXT), "facts": {"type": "object"}},
    ),
    "Cause": record(
        "Why numbers are as they are, as decisions carry it in their evidence.",
        {"name": TEXT, "kind": TEXT, "summary": TEXT, "first_step": COUNT, "step": COUNT},
        {
            "found_step": COUNT,
            "layer": maybe(TEXT),
            "slot": maybe({"type": "object"}),
            "advice": maybe(TEXT),
            "value": MEASURED,
            "evidence": {"type": "object"},
            "decisions": listed(TEXT),
        },
    ),
    "Alert": record(
        "Something that people should know.",
        {
            "id": COUNT,
            "run": TEXT,
            "rule": TEXT,
            "severity": one_of(("watch", "act")),
            "layer": maybe(TEXT),
            "metric": maybe(TEXT),
            "value": MEASURED,
            "threshold": MEASURED,
            "step": COUNT,
            "state": one_of(("open", "held", "resolved")),
            "created": TIME,
            "acknowledged_by": maybe(TEXT),
            "acknowledged": maybe(TIME),
            "silenced": FLAG,
            "silenced_until": maybe(TIME),
        },
        {
            "clean_step": {
                **maybe(COUNT),
                "description": "Of NaN and Inf: the last sample before it in which nothing was.",
            },
            "waits_since": {
                **maybe(ref("Remedied")),
                "description": "What it waits to be measured again after.",
            },
        },
    ),
    "Remedied": record(
        "A decision after which no breach was seen, and its first step.", {"decision": TEXT, "step": COUNT}
    ),
    "By": record("Who does it.", {}, _BY),
    "Approval": record("Who approves, and how much.", {}, {**_BY, "all_of_remedy": FLAG}),
    "Silence": record(
        "How long to keep quiet.",
        {},
        {**_BY, "seconds": {"type": "number", "minimum": 0, "maximum": 30 * 86400}},
    ),
    "PinPlace": record("Where a pin is.", {"layer": NAME}, {"target": maybe(_TARGET), **_BY}),
    "PinWish": record(
        "What to fix; without an action the layer stays as it is.",
        {"layer": NAME},
        {"target": maybe(_TARGET), "action": maybe(one_of(ACTIONS)), "value": _VALUE, **_BY},
    ),
    "Pin": record(
        "What a person has fixed.",
        {"layer": TEXT, "target": _TARGET, "action": maybe(TEXT), "value": _VALUE, "actor": TEXT},
        {"decision_id": maybe(TEXT)},
    ),
    "Killed": record("The run after the kill switch.", {"run": ref("Run"), "plan": ref("Plan")}),
    "Comparison": record(
        "The loss of two runs at the steps that both have; the gap is (b - a) / |a|.",
        {
            "a": TEXT,
            "b": TEXT,
            "metric": TEXT,
            "steps": listed(COUNT),
            **dict.fromkeys(("values_a", "values_b", "gap_ratio"), listed(MEASURED)),
            **dict.fromkeys(("mean_gap_ratio", "max_abs_gap_ratio", "last_gap_ratio"), MEASURED),
        },
    ),
    "Bundle": record(
        "Everything stored of a run; its samples can be posted again.",
        {
            "run": ref("Run"),
            "plan": ref("Plan"),
            "attempts": listed(ref("Attempt")),
            "decisions": listed(ref("Decision")),
            "alerts": listed(ref("Alert")),
            "samples": listed(ref("Sample")),
        },
    ),
    **{
        f"{name}Page": page_of(name)
        for name in ("Run", "Attempt", "Layer", "Decision", "Act", "Alert", "Pin", "Baseline")
    },
}
