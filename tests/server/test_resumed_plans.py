"""A child attempt applies decisions at the very steps at which its parent did, and its policy knows of them."""

from collections.abc import Callable
from pathlib import Path
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


VANISHING = {
    ("blocks.1.mlp", "x row"): {"underflow": 20000, "zeros": 20000},
    ("blocks.1.mlp", "w tile"): {"underflow": 3000, "zeros": 3000},
}
# 0.2 % of a weight: above its watch level, so that the second sample opens an alert.
WATCHED = {("blocks.2.mlp", "w tile"): {"underflow": 131, "zeros": 131}}
DWELL, UNTIL = 16, 40
BOTH = ("fprop", "dgrad")


@pytest.fixture
def short_dwell(make_client: Callable[..., TestClient], tmp_path: Path) -> TestClient:
    """A client of a service whose spots rest for sixteen steps."""
    file = tmp_path / "policy.toml"
    file.write_text(f"dwell_steps = {DWELL}\nrestore_samples = 2\n", encoding="utf-8")
    return make_client(policy_file=str(file))


@pytest.fixture
def train(short_dwell: TestClient, documents: Any) -> Any:
    """Trains with a fault at steps 6 to 9 and from 24 on; at a step it stops and goes on elsewhere as attempt 1."""

    def ill(step: int) -> dict[Any, Any]:
        vanishing = VANISHING if 6 <= step < 10 or step >= 24 else {}
        return {**vanishing, **(WATCHED if step in (3, 4) else {})}

    def train(stop: int | None = None, from_step: int = 0, until: int = UNTIL, mode: str = "enforce") -> Any:
        made, opened = [], []
        version, waiting, attempt = 0, (0, 0), {"id": "0"}
        step = 0
        while step < until:
            if step == stop:
                attempt = {"id": "1", "parent": "0", "from_step": from_step}
                version, waiting, stop, step = 0, (0, 0), None, from_step
            version = waiting[0] if waiting[0] and step >= waiting[1] else version
            header = {"plan_version": version, "effective_step": waiting[1] if version else None}
            sample = documents.sample(
                step, slots := documents.slots(8), [
                    documents.values(slot, **ill(step).get((slot["layer"], place_of(slot)), {})) for slot in slots
                ], attempt=attempt, mode=mode, run={"loss": 2.0}, **header,
            )  # fmt: skip
            reply = short_dwell.post(f"{API}/samples", json=sample).json()
            if reply["plan"] is not None and reply["plan_version"] != waiting[0]:
                starts = [entry["not_before_step"] for entry in reply["plan"]["entries"]]
                waiting = (reply["plan_version"], max([step + 2, *starts]))
            made += [(step, one["target"].get("gemm"), one["action"]) for one in reply["decisions"]]
            opened += [(step, one["rule"], one["layer"]) for one in reply["alerts"]]
            step += 1
        return made, opened

    return train


def place_of(slot: dict[str, Any]) -> str:
    return slot.get("gemm") or f"{slot['operand']} {slot['layout']}"


def changes(*course: tuple[int, str]) -> set[tuple[int, str, str]]:
    return {(step, gemm, action) for step, action in course for gemm in BOTH}


@pytest.mark.parametrize(
    ("stop", "from_step"),
    [(None, 0), (4, 4), (10, 10), (27, 27), (12, 3), (14, 10)],
    ids=["never", "between two breaches", "in the dwell", "at rest", "back before it", "back behind it"],
)
def test_a_resumed_policy_knows_what_was_decided_and_seen(
    train: Any, short_dwell: TestClient, stop: int | None, from_step: int
) -> None:
    """The same decisions at the same steps as without the stop: none again within the dwell, and each taken back in time."""
    made, opened = train(stop, from_step)
    course = (6, "bf16_fallback"), (6 + DWELL, "restore"), (6 + 2 * DWELL, "bf16_fallback")
    assert set(made) == changes(*course)
    assert len(made) == len(set(made))
    # The watch level was in breach at steps 3 and 4: one sample in each attempt, if it stopped there.
    assert {opening for opening in opened if opening[2] == "blocks.2.mlp"} == {
        (4, "underflow", "blocks.2.mlp")
    }
    graded = {item["step"]: item["outcome"] for item in short_dwell.get(f"{API}/decisions").json()["items"]}
    assert graded[6].startswith("signal recovered (underflow 30.5 % -> BF16)")


def test_a_spot_does_not_rest_after_a_restore_that_did_not_happen(train: Any) -> None:
    """Restored at step 22 and back to step 20: where the fault returns at step 24, nothing holds the remedy back."""
    made, _ = train(24, 20, until=26)
    assert set(made) == changes((6, "bf16_fallback"), (22, "restore"), (24, "bf16_fallback"))


@pytest.mark.parametrize("from_step", [8, 4])
def test_what_a_person_took_back_is_not_decided_again_after_a_rewind(
    train: Any, short_dwell: TestClient, from_step: int
) -> None:
    made, _ = train(until=8)
    assert set(made) == changes((6, "bf16_fallback"))
    for item in short_dwell.get(f"{API}/decisions").json()["items"]:
        assert short_dwell.post(f"/api/v1/decisions/{item['id']}:revert").status_code == 200
    made, _ = train(0, from_step, until=10)
    assert made == []
    assert short_dwell.get(f"{API}/plan").json()["entries"] == []


@pytest.mark.parametrize(("stop", "from_step"), [(8, 8), (9, 7), (9, 4)])
def test_what_waits_for_a_person_is_not_proposed_again(
    train: Any, short_dwell: TestClient, stop: int, from_step: int
) -> None:
    made, _ = train(stop, from_step, until=10, mode="advise")
    assert set(made) == changes((6, "bf16_fallback"))
    assert len(made) == 2
    states = [item["state"] for item in short_dwell.get(f"{API}/decisions").json()["items"]]
    assert states == ["proposed"] * 2
