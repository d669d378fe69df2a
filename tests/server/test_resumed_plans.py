"""A child attempt that goes back applies decisions at the very steps at which its parent did."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
DGRAD = {("blocks.0.mlp", "dgrad"): {"sum_sq_err": 65536.0 * 0.25}}
EVIDENCE, EFFECTIVE, LAST = 6, 8, 11


@pytest.fixture
def first_life(client: TestClient, post: Any) -> None:
    """Decided at step 6, and applied by the client from step 8 on."""
    for step in range(EVIDENCE):
        post(step, mode="enforce")
    (decision,) = post(EVIDENCE, DGRAD, mode="enforce")["decisions"]
    assert decision["not_before_step"] == EVIDENCE + 1
    for step in range(EVIDENCE + 1, LAST):
        post(step, mode="enforce", plan_version=1, effective_step=EFFECTIVE)


def begins(post: Any, from_step: int, parent: str | None = "0", name: str = "1") -> int:
    """The step that the plan's entry waits for, as the attempt's first reply tells it."""
    attempt = {"id": name, "parent": parent, "from_step": from_step}
    (entry,) = post(from_step, attempt=attempt, mode="enforce")["plan"]["entries"]
    step: int = entry["not_before_step"]
    return step


@pytest.mark.parametrize(
    ("from_step", "waits_for"),
    [
        (2, EFFECTIVE),
        (EVIDENCE, EFFECTIVE),
        (EVIDENCE + 1, EFFECTIVE),
        (EFFECTIVE, EFFECTIVE),
        (9, 7),
        (LAST, 7),
    ],
)
def test_an_entry_waits_for_the_step_that_it_took_effect_at(
    client: TestClient, post: Any, first_life: None, from_step: int, waits_for: int
) -> None:
    assert begins(post, from_step) == waits_for
    plan = client.get(f"{API}/plan").json()
    assert [entry["not_before_step"] for entry in plan["entries"]] == [waits_for]
    assert plan["version"] == 1
    # The record of the decision stays as it was made.
    (decision,) = client.get(f"{API}/decisions").json()["items"]
    assert (decision["not_before_step"], decision["effective_step"]) == (EVIDENCE + 1, EFFECTIVE)


def test_the_child_of_a_child_repeats_it_too(post: Any, first_life: None) -> None:
    assert begins(post, 3) == EFFECTIVE
    assert begins(post, 4, parent="1", name="2") == EFFECTIVE


def test_the_child_does_not_decide_again_while_it_repeats(post: Any, first_life: None) -> None:
    begins(post, 4)
    attempt = {"id": "1", "parent": "0", "from_step": 4}
    for step in (5, EVIDENCE):
        reply = post(
            step, DGRAD if step == EVIDENCE else None, attempt=attempt, plan_version=1, mode="enforce"
        )
        assert (reply["decisions"], reply["plan_version"]) == ([], 1)


def test_an_attempt_without_a_parent_repeats_nobody(post: Any, first_life: None) -> None:
    assert begins(post, 0, parent=None) == EVIDENCE + 1


def test_what_no_client_said_it_applied_stays_as_it_is(post: Any) -> None:
    post(0, DGRAD, mode="enforce")
    post(1, mode="enforce", plan_version=1)
    assert begins(post, 0) == 1


def test_the_parent_itself_is_told_the_step_after_the_evidence(post: Any, first_life: None) -> None:
    (entry,) = post(LAST, mode="enforce", plan_version=0)["plan"]["entries"]
    assert entry["not_before_step"] == EVIDENCE + 1
