"""The API describes itself: every route, in words, with schemas that hold."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from fp8_safeguard.server.openapi import OPERATIONS, TAGS

API = "/api/v1"


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path.removeprefix(API)}", operation


def test_every_route_is_described_and_nothing_else(document: dict[str, Any]) -> None:
    assert {name for name, _ in operations(document)} == set(OPERATIONS)


def test_every_operation_has_words_a_tag_and_the_problems_it_may_answer(document: dict[str, Any]) -> None:
    summaries = [operation["summary"] for _, operation in operations(document)]
    assert len(set(summaries)) == len(summaries)
    for name, operation in operations(document):
        assert operation["summary"].lower() not in name.replace("_", " ").lower(), name
        assert operation["description"], name
        assert len(operation["tags"]) == 1, name
        assert operation["tags"][0] in TAGS, name
        for status, response in operation["responses"].items():
            kinds = list(response.get("content", {}))
            if status >= "400":
                assert kinds == ["application/problem+json"], (name, status)
            elif status == "200":
                assert kinds, name
                assert all(content["schema"] for content in response["content"].values()), name
        if " /livez" not in name and " /readyz" not in name:
            assert {"401", "403"} <= set(operation["responses"]), name


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_what_a_run_is_answered_fits_its_schemas(
    client: TestClient, documents: Any, document: dict[str, Any]
) -> None:
    """The answers that matter most, with decisions, alerts and non-finite values in them."""
    slots = documents.slots(8)
    values = [documents.values(slot) for slot in slots]
    values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
    values[16].update(amax="NaN", nan=3, sum_sq="Infinity")
    for step in range(3):
        run = {"loss": "NaN" if step else 2.0}
        reply = client.post(
            f"{API}/runs/demo/samples", json=documents.sample(step, slots, values, mode="enforce", run=run)
        ).json()
        check(document, "Reply", reply)
    answers = {
        "Run": "/runs/demo",
        "RunPage": "/runs",
        "LayerPage": "/runs/demo/layers",
        "Heatmap": "/runs/demo/heatmap",
        "Series": "/runs/demo/series?metric=amax&layer=blocks.2.mlp",
        "DecisionPage": "/runs/demo/decisions",
        "AlertPage": "/runs/demo/alerts",
        "Plan": "/runs/demo/plan",
        "AttemptPage": "/runs/demo/attempts",
        "Bundle": "/runs/demo/export",
        "Comparison": "/compare?a=demo&b=demo",
        "LayerDocument": "/runs/demo/layer?layer=blocks.0.mlp",
    }
    for name, url in answers.items():
        check(document, name, client.get(API + url).json())


def check(document: dict[str, Any], name: str, answer: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    faults = [
        f"{fault.json_path}: {fault.message[:200]}"
        for fault in Draft202012Validator(schema).iter_errors(answer)
    ]
    assert faults == [], name
