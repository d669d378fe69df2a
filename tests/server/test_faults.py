"""What the framework refuses is said in our words: the value, what is allowed, and the way out."""

import re
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from fp8_safeguard.server.faults import refused_setting
from fp8_safeguard.server.settings import Settings

RUN = "/api/v1/runs/demo"
RAW = re.compile(r"Input should|Field required|unable to parse|valid (integer|dictionary)")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{RUN}/layers?page_size=many", "page_size is a whole number, not 'many'"),
        (f"{RUN}/layers?page_size=0", "page_size is 1 or more, not '0'"),
        (f"{RUN}/layers?page_size=5000", "page_size is at most 1000, not '5000'"),
        (f"{RUN}/series", "metric is required: add ?metric= to the address"),
        ("/api/v1/compare?a=demo", "b is required: add ?b= to the address"),
        (f"{RUN}/export?format=xml", "format is 'json' or 'jsonl', not 'xml'"),
        (
            f"{RUN}/series?max_points=x&from_step=-1",
            "metric is required: add ?metric= to the address; from_step is 0 or more, not '-1'; "
            "max_points is a whole number, not 'x'",
        ),
    ],
)
def test_a_parameter_that_is_refused(client: TestClient, path: str, words: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["detail"]) == (422, words)
    assert "; ".join(error["message"] for error in answer.json()["errors"]) == words
    assert all(error["pointer"].startswith("/query/") for error in answer.json()["errors"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[]", "the body is a JSON object, not []"),
        ("7", "the body is a JSON object, not 7"),
        ("null", "the body is a JSON object, not None"),
        ("", "the body is missing: send a JSON object"),
        (f'"{"x" * 5000}"', f"the body is a JSON object, not '{'x' * 199}..."),
    ],
)
def test_a_body_that_is_refused(client: TestClient, body: str, words: str) -> None:
    answer = client.post(f"{RUN}:end", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["detail"]) == (422, words)
    assert answer.json()["errors"] == [{"pointer": "", "message": words}]


def test_no_operation_lets_the_frameworks_words_through(client: TestClient, documents: Any) -> None:
    client.post(f"{RUN}/samples", json=documents.sample(0))
    asked = 0
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        url = re.sub(r"\{(?!run)[^}]+\}", "zz", path).replace("{run}", "demo")
        for method, operation in operations.items():
            named = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
            for params in ({}, *({name: "-7x"} for name in named)):
                answer = client.request(method, url, params=params, content=b"[1]")
                asked += answer.status_code == 422
                assert not RAW.search(answer.text), (method, url, params, answer.text)
    assert asked > 20


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": "eighty"}, "FP8_SAFEGUARD_PORT is 'eighty': it must be a whole number"),
        ({"port": "99999"}, "FP8_SAFEGUARD_PORT is '99999': it must be at most 65535"),
        ({"run_stale_seconds": "-1"}, "FP8_SAFEGUARD_RUN_STALE_SECONDS is '-1': it must be above 0"),
        ({"busy_timeout_seconds": "x"}, "FP8_SAFEGUARD_BUSY_TIMEOUT_SECONDS is 'x': it must be a number"),
        (
            {"tokens": {"s3cret": ["rad"]}},
            "FP8_SAFEGUARD_TOKENS grants 'rad': a scope is 'ingest', 'read', 'control' or 'admin'",
        ),
        (
            {"tokens": {"s3cret": "ingest"}},
            'FP8_SAFEGUARD_TOKENS cannot be read: it must be every token with its list of scopes, {"secret": ["ingest", "read"]}',
        ),
        (
            {"tokens": ["s3cret"]},
            'FP8_SAFEGUARD_TOKENS cannot be read: it must be every token with its list of scopes, {"secret": ["ingest", "read"]}',
        ),
    ],
)
def test_a_variable_that_is_refused_and_no_token_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(**given)
    (fault,) = caught.value.errors()
    assert refused_setting(fault) == words
