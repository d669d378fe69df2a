"""What a client decided alone is recorded whatever it says, and stops neither the run nor the pages."""

from typing import Any

import pytest
from starlette.testclient import TestClient

RUN = "/api/v1/runs/demo"
ILL, OTHER = "blocks.1.mlp", "blocks.2.mlp"
ID = "demo-local-0-2-1"
PAGES = ("/", "/runs/demo", "/metrics", "/api/v1/runs", RUN, f"{RUN}/decisions", f"{RUN}/audit")
X_ROW = {"operand": "x", "layout": "row"}
CAUSE: dict[str, Any] = {
    "name": "nonfinite-origin",
    "kind": "fp8",
    "layer": ILL,
    "slot": None,
    "summary": "x",
    "evidence": {},
}


def decision(**changes: Any) -> dict[str, Any]:
    fixed = {
        "id": ID, "run": "demo", "step": 2, "layer": ILL, "target": {"gemm": "fprop"}, "action": "bf16_fallback",
        "value": None, "rule": "non-finite", "reason": "the product is not finite", "evidence": {"local_plan_version": 1},
        "mode": "enforce", "state": "sent", "actor": "client", "not_before_step": 3,
    }  # fmt: skip
    return {**fixed, **changes}


@pytest.fixture
def bring(client: TestClient, documents: Any) -> Any:
    """Sends a sample of a run, with decisions, whatever the answer."""

    def bring(step: int, *brought: Any, run: str = "demo", ill: str | None = None, **header: Any) -> Any:
        slots = documents.slots(8)
        values = [
            documents.values(
                slot, **({"nan": 5} if (slot["layer"], slot.get("gemm")) == (ill, "fprop") else {})
            )
            for slot in slots
        ]
        header = {"mode": "enforce", **({"local_decisions": list(brought)} if brought else {}), **header}
        sample = documents.sample(step, slots, values, **header)
        return client.post(f"/api/v1/runs/{run}/samples", json=sample)

    return bring


def decisions(client: TestClient, run: str = "demo") -> dict[str, dict[str, Any]]:
    items = client.get(f"/api/v1/runs/{run}/decisions").json()["items"]
    return {item["id"]: item for item in items if item["action"] != "advice"}


def test_a_name_that_the_policy_will_give_does_not_stop_the_policy(client: TestClient, bring: Any) -> None:
    bring(0)
    assert bring(3, decision(id="demo-1")).json()["local_decisions"] == ["demo-1"]
    answers = [bring(step, ill=OTHER).status_code for step in range(4, 8)]
    assert answers == [200] * 4
    assert {name: item["actor"] for name, item in decisions(client).items()} == {
        "demo-local-demo-1": "client",
        "demo-1": "policy",
    }


def test_a_checkpoint_brings_what_was_decided_in_the_run_that_it_is_from(
    client: TestClient, bring: Any
) -> None:
    for run in ("demo", "fork"):
        bring(0, run=run)
        assert bring(3, decision(), run=run).json()["local_decisions"] == [ID]
    for _ in range(2):
        reply = bring(4, decision(), run="fork").json()
    assert [entry["layer"] for entry in reply["plan"]["entries"]] == [ILL]
    assert {name: item["run"] for name, item in decisions(client, "fork").items()} == {
        f"fork-local-{ID}": "fork"
    }
    assert list(decisions(client)) == [ID]


STRANGE: tuple[dict[str, Any], ...] = (
    {"signals": 7},
    {"signals": [{"slot": {"layer": ILL}}]},
    {"signals": [{"slot": {"layer": ILL, "gemm": "fprop"}, "rule": "a", "metric": "nan", "value": [1]}]},
    {"first_step": "zz"},
    {"cause": {"name": "outlier-channels"}},
    {"cause": {**CAUSE, "layer": [ILL], "advice": None, "value": None}},
    {"cause": {**CAUSE, "advice": None, "value": "a lot"}},
    {"replaces": 5},
    {"remedy": {"id": 5}},
    {"unshown": "a little"},
    {"budget": {"after": "much", "limit": 0.15}},
)


def test_evidence_that_cannot_be_read_is_kept_aside(client: TestClient, bring: Any) -> None:
    bring(0)
    known = {**CAUSE, "advice": None, "value": None}
    brought = {
        f"demo-local-0-2-{number}": decision(
            id=f"demo-local-0-2-{number}",
            layer=f"blocks.{number % 8}.mlp",
            target={"gemm": "fprop" if number < 8 else "dgrad"},
            # Beside a cause, so that the page of causes reads the rest.
            evidence={"cause": known, **evidence},
        )
        for number, evidence in enumerate(STRANGE)
    }
    assert bring(3, *brought.values()).status_code == 200
    assert bring(4).status_code == 200
    assert [client.get(page).status_code for page in PAGES] == [200] * len(PAGES)
    kept = {name: item["evidence"]["unread"] for name, item in decisions(client).items()}
    assert kept == dict(zip(brought, STRANGE, strict=True))
    assert client.post(f"{RUN}:kill-switch").status_code == 200


def test_evidence_that_can_be_read_is_kept_as_it_is(client: TestClient, bring: Any) -> None:
    signal = {"slot": {"layer": ILL, "gemm": "fprop"}, "rule": "non-finite", "metric": "nan", "value": "NaN"}
    cause = {**CAUSE, "advice": "look", "value": 0.5}
    evidence = {"signals": [signal], "cause": cause, "first_step": 1, "budget": {"after": 0.1}, "words": [1]}
    bring(0)
    bring(3, decision(evidence=evidence))
    (item,) = decisions(client).values()
    assert item["evidence"] == evidence


NOT_ALONE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"action": "scale_multiplier", "target": X_ROW, "value": 3.3}, "to BF16"),
    ({"action": "format", "target": X_ROW, "value": "e5m2"}, "to BF16"),
    ({"value": "zzz"}, "to BF16"),
    ({"target": X_ROW}, "to BF16"),
    ({"layer": "no.such.layer"}, "no layer 'no.such.layer'"),
    ({"step": 2**62}, f"step {2**62}"),
)


def test_what_no_client_decides_alone_is_recorded_and_left_out_of_the_plan(
    client: TestClient, bring: Any
) -> None:
    bring(0)
    named = {f"demo-local-0-2-{number}": case for number, case in enumerate(NOT_ALONE)}
    reply = bring(3, *(decision(id=name, **changes) for name, (changes, _) in named.items())).json()
    assert (reply["plan"]["version"], reply["plan"]["entries"]) == (2, [])
    found = decisions(client)
    assert {name: item["state"] for name, item in found.items()} == dict.fromkeys(named, "reverted")
    assert [name for name, (_, why) in named.items() if why not in found[name]["outcome"]] == []
    assert bring(4).status_code == 200


NEVER_KEPT: tuple[dict[str, Any], ...] = (
    {"evidence": {"ttl_steps": "soon"}},
    {"evidence": {"ttl_steps": 2**63 - 1}},
    {"evidence": {"local_plan_version": 2**63 - 1}},
    {"evidence": [1]},
    {"layer": "a\x00b"},
)


def test_what_nobody_could_keep_is_refused_by_name_with_its_sample(client: TestClient, bring: Any) -> None:
    bring(0)
    for changes in NEVER_KEPT:
        answer = bring(3, decision(**changes))
        assert answer.status_code == 422, (changes, answer.text)
        assert "/local_decisions" in answer.json()["errors"][0]["pointer"]
    assert decisions(client) == {}
    assert bring(3).json()["inserted"] > 0


def test_the_audit_log_has_the_step_at_which_the_client_applied_its_own(
    client: TestClient, bring: Any
) -> None:
    bring(0)
    bring(3, decision())
    bring(4, decision(effective_step=4))
    (item,) = decisions(client).values()
    assert [(act["what"], act["actor"], act["step"]) for act in item["history"]] == [
        ("sent", "client", 2),
        ("applied", "client", 4),
    ]


def test_the_audit_log_has_proposals_that_a_new_attempt_ends(client: TestClient, bring: Any) -> None:
    for step in range(4):
        bring(step, ill=ILL, mode="advise")
    (asked,) = decisions(client)
    bring(0, mode="advise", attempt={"id": "1"})
    item = decisions(client)[asked]
    assert item["state"] == "expired"
    assert [act["what"] for act in item["history"]] == ["proposed", "expired"]
