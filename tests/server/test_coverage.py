"""Coverage and sampling reports: kept, merged, listed, exported and deleted."""

from typing import Any

import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from fp8_safeguard.server.tables import client_reports

URL = "/api/v1/runs/demo"
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
HOSTILE = "</script><b>\u00e9\U0001f600 'x' \"y\"\n%"
SAMPLING = {"budget": 0.01, "every": 40, "overhead_ratio": 0.0093, "layers_per_sample": 8, "tile_stride": 17}


def row(name: str, status: str, reason: str = "") -> dict[str, Any]:
    return {"name": name, "shape": [8, 4], "status": status, "reason": reason}


FIRST = [
    row("blocks.0.mlp", "observed"),
    row("blocks.9.mlp", "observed"),
    row("head", "adapted", "weight stored as [in, out]"),
    row(HOSTILE, "not observed", "embedding: a look-up, no GEMM"),
]


def listed(client: TestClient, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{URL}/coverage", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def names(answer: dict[str, Any]) -> list[str]:
    return [item["name"] for item in answer["items"]]


@BOTH
def test_b13_coverage_lists_every_matrix_and_says_which_was_never_measured(
    client: TestClient, post: Any
) -> None:
    post(0, coverage=FIRST)
    post(1)
    answer = listed(client)
    assert [{name: item[name] for name in FIRST[0]} for item in answer["items"]] == FIRST
    assert [item["measured"] for item in answer["items"]] == [True, False, False, False]
    assert answer["counts"] == {"observed": 2, "adapted": 1, "not observed": 1}
    assert (answer["step"], answer["next_page_token"]) == (0, None)


def test_filters_narrow_the_rows_and_not_the_counts(client: TestClient, post: Any) -> None:
    post(0, coverage=FIRST)
    missing = listed(client, status="not observed")
    assert names(missing) == [HOSTILE]
    assert missing["counts"]["observed"] == 2
    assert names(listed(client, q="MLP")) == ["blocks.0.mlp", "blocks.9.mlp"]
    assert names(listed(client, q="%")) == [HOSTILE]
    assert names(listed(client, q="mlp", status="adapted")) == []
    refused = client.get(f"{URL}/coverage", params={"status": "seen"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/query/status"
    assert client.get("/api/v1/runs/other/coverage").status_code == 404


def test_pages_are_complete_and_a_foreign_token_is_refused(client: TestClient, post: Any) -> None:
    rows = [row(f"w{place}", "observed" if place % 3 else "adapted") for place in range(25)]
    post(0, coverage=rows)
    found: list[str] = []
    token = None
    while True:
        answer = listed(client, page_size=4, status="observed", **({"page_token": token} if token else {}))
        found += names(answer)
        token = answer["next_page_token"]
        if token is None:
            break
    assert found == [item["name"] for item in rows if item["status"] == "observed"]
    assert client.get(f"{URL}/coverage", params={"page_token": "nonsense"}).status_code == 422


@BOTH
def test_the_newest_report_of_a_group_counts_whatever_arrives_late(client: TestClient, post: Any) -> None:
    post(0, coverage=FIRST)
    post(20, coverage=[row("blocks.0.mlp", "not observed", "converted after attach()")])
    post(10, coverage=FIRST)
    answer = listed(client)
    assert [(item["name"], item["reason"]) for item in answer["items"]] == [
        ("blocks.0.mlp", "converted after attach()")
    ]
    assert answer["step"] == 20


def test_what_one_group_observes_is_observed(client: TestClient, post: Any) -> None:
    elsewhere = "on another pipeline stage"
    post(0, group="a", groups=2, coverage=[row("x", "observed"), row("y", "not observed", elsewhere)])
    post(
        0, group="b", groups=2, coverage=[row("y", "adapted", "by functional tier"), row("x", "not observed")]
    )
    answer = listed(client)
    assert [(item["name"], item["status"], item["reason"]) for item in answer["items"]] == [
        ("x", "observed", ""),
        ("y", "adapted", "by functional tier"),
    ]


def test_a_new_attempt_shows_its_parents_coverage_until_it_reports(client: TestClient, post: Any) -> None:
    post(0, coverage=FIRST, sampling=SAMPLING)
    resumed = {"attempt": {"id": "1", "parent": "0", "from_step": 1}}
    post(1, **resumed)
    assert len(names(listed(client))) == 4
    assert client.get(URL).json()["sampling"]["step"] == 0
    post(2, **resumed, coverage=FIRST[:1])
    assert names(listed(client)) == ["blocks.0.mlp"]
    assert len(names(listed(client, attempt="0"))) == 4


def test_the_run_document_has_the_newest_sampling_report(client: TestClient, post: Any) -> None:
    assert post(0)["accepted"]
    assert client.get(URL).json()["sampling"] is None
    post(5, sampling=SAMPLING)
    post(6, sampling={**SAMPLING, "every": 80, "budget": None})
    shown = client.get(URL).json()["sampling"]
    assert shown == {**{k: v for k, v in SAMPLING.items() if k != "budget"}, "every": 80, "step": 6}
    assert client.get("/api/v1/runs").json()["items"][0]["sampling"] == shown


def test_of_several_groups_the_dearest_sampling_is_shown(client: TestClient, post: Any) -> None:
    for group, ratio in (("a", 0.002), ("b", 0.008), ("c", None)):
        post(0, group=group, groups=3, sampling={"every": 10, "overhead_ratio": ratio})
    assert client.get(URL).json()["sampling"]["overhead_ratio"] == 0.008


def test_a_fault_in_coverage_is_told_by_its_place_and_stores_nothing(
    client: TestClient, documents: Any
) -> None:
    sample = documents.sample(0, coverage=[*FIRST, {"name": 3, "shape": [1], "status": "observed"}])
    answer = client.post(f"{URL}/samples", json=sample)
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/coverage/4/name"]
    assert client.get(URL).status_code == 404


def test_an_export_posted_again_brings_coverage_and_sampling_along(client: TestClient, post: Any) -> None:
    post(0, coverage=FIRST[:1])
    post(1, coverage=FIRST, sampling=SAMPLING)
    post(2)
    bundle = client.get(f"{URL}/export").json()
    assert [sorted({"coverage", "sampling"} & set(sample)) for sample in bundle["samples"]] == [
        [],
        ["coverage", "sampling"],
        [],
    ]
    copy = client.post("/api/v1/runs/copy/samples", json={"samples": bundle["samples"]})
    assert all(result["accepted"] for result in copy.json()["results"])
    assert client.get("/api/v1/runs/copy/coverage").json() == listed(client)
    assert client.get("/api/v1/runs/copy").json()["sampling"] == client.get(URL).json()["sampling"]


@BOTH
def test_reports_go_with_their_run(client: TestClient, post: Any) -> None:
    post(0, coverage=FIRST, sampling=SAMPLING)
    assert client.delete(URL).status_code == 204
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        assert conn.execute(select(func.count()).select_from(client_reports)).scalar_one() == 0


def test_a_run_without_a_report_says_so(client: TestClient, post: Any) -> None:
    post(0)
    assert listed(client) == {
        "items": [],
        "next_page_token": None,
        "counts": {"observed": 0, "adapted": 0, "not observed": 0},
        "step": None,
    }
