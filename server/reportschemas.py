"""JSON schemas of what reports answer: coverage and readiness."""

from fp8_safeguard.monitor.coverage import STATUSES
from fp8_safeguard.monitor.plan import DECISION_ACTIONS
from fp8_safeguard.monitor.readings import VERDICTS
from fp8_safeguard.monitor.slots import GEMMS
from fp8_safeguard.server.apischemas import (
    ANY,
    COUNT,
    FLAG,
    MATRIX,
    MEASURED,
    NAME,
    SCHEMAS,
    SHARE,
    TEXT,
    TIME,
    Schema,
    listed,
    maybe,
    one_of,
    record,
    ref,
)

_BY = SCHEMAS["By"]["properties"]
_ROW_ID = {**COUNT, "minimum": 1}
_BASELINE = {
    "id": _ROW_ID,
    **dict.fromkeys(("run", "attempt", "preset", "digest", "created_by"), TEXT),
    **dict.fromkeys(("from_step", "to_step", "steps", "slots"), COUNT),
    "used": FLAG,
    "created": TIME,
}
_UNSEEN = listed(record("A weight matrix that was not observed.", {"name": TEXT, "reason": TEXT}))

REPORT_SCHEMAS: dict[str, Schema] = {
    "Coverage": record(
        "A page of weight matrices; counts are over all of them, step is that of the newest report.",
        {
            "items": listed(record("A weight matrix.", {**MATRIX, "measured": FLAG})),
            "next_page_token": maybe(TEXT),
            "counts": record("Matrices by status.", dict.fromkeys(STATUSES, COUNT)),
            "step": maybe(COUNT),
        },
    ),
    "Readiness": record(
        "The verdict on every GEMM over the steps that were used, the newest of the range.",
        {
            "run": TEXT,
            **dict.fromkeys(("from_step", "to_step"), maybe(COUNT)),
            **dict.fromkeys(("steps_used", "steps_in_range"), COUNT),
            "summary": record(
                "What the items say together; the ratios are over all GEMMs and all layers.",
                {
                    "verdict": one_of(("ready", "ready_with_bf16", "not_ready")),
                    "sentence": TEXT,
                    **dict.fromkeys(("gemms", "layers"), COUNT),
                    "counts": record("GEMMs by verdict.", dict.fromkeys(VERDICTS, COUNT)),
                    **dict.fromkeys(("safe_ratio", "keep_bf16_ratio"), SHARE),
                    "keep_bf16_layers": listed(TEXT),
                    "budget_ratio": {"type": "number"},
                    **dict.fromkeys(("samples", "samples_needed", "gemms_short", "samples_short"), COUNT),
                    # What makes the run not ready, and what the verdict does without.
                    **dict.fromkeys(("unobserved", "left_out"), _UNSEEN),
                },
            ),
            "items": listed(ref("ReadinessRow")),
        },
        {
            "decided": listed(
                record(
                    "A decision that was in force at some of these steps, or advice given in them.",
                    {"id": TEXT, "layer": TEXT, "action": one_of(DECISION_ACTIONS), "since_step": COUNT},
                    {
                        "cause": maybe(
                            record("As it names it.", {"name": TEXT, "kind": TEXT, "layer": maybe(TEXT)})
                        )
                    },
                )
            )
        },
    ),
    "ReadinessRow": record(
        "The verdict on one GEMM; best is the what-if to take where plain FP8 is not safe, of as many alternatives.",
        {
            "layer": TEXT,
            "gemm": one_of(GEMMS),
            "verdict": one_of(VERDICTS),
            "reason": TEXT,
            "source": maybe(one_of(("shadow", "emulated", "measured"))),
            "samples": COUNT,
            **dict.fromkeys(("error_median", "error_worst", "error_latest"), MEASURED),
            **dict.fromkeys(("error_worst_step", "error_latest_step", "underflow_step"), maybe(COUNT)),
            "threshold": {"type": "number"},
            **dict.fromkeys(("underflow", "rows_flushed"), MEASURED),
            "underflow_slot": maybe(TEXT),
            **dict.fromkeys(("nonfinite_samples", "alternatives"), COUNT),
            "best": maybe(
                record(
                    "A what-if.",
                    {
                        "variant": TEXT,
                        "verdict": one_of(VERDICTS),
                        **dict.fromkeys(("error_median", "error_worst"), MEASURED),
                        "samples": COUNT,
                        "threshold": {"type": "number"},
                    },
                )
            ),
            "cause": TEXT,
            "remedy": maybe(TEXT),
        },
    ),
    "Baseline": record("What was learned from a healthy window; used: the run is judged by it.", _BASELINE),
    "BaselineDetail": record(
        "A baseline with its values; a metric of a slot is [samples, median, 99 % quantile, worst value].",
        {
            **_BASELINE,
            "baseline": record(
                "As files hold it.",
                {
                    "schema": COUNT,
                    **dict.fromkeys(("run", "attempt", "preset"), TEXT),
                    **dict.fromkeys(("from_step", "to_step", "steps"), COUNT),
                    "families": {"type": "object", "additionalProperties": ANY},
                },
            ),
        },
    ),
    "Window": record(
        "The steps to learn from, both included.",
        {"from_step": COUNT, "to_step": COUNT},
        {"run": maybe(NAME), "use": FLAG, **_BY},
        additionalProperties=False,
    ),
    "BaselineChoice": record(
        "Which baseline judges the run; null: none.",
        {"baseline": maybe(_ROW_ID)},
        _BY,
        additionalProperties=False,
    ),
}
