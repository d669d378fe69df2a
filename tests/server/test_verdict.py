"""What a run's state means, in words: ended apart from stale, refused samples, what to do next."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"


@pytest.fixture
def post(client: TestClient, documents: Any) -> Any:
    """Posts a step; `error` is that of the first layer's recomputed dgrad."""

    def post(step: int, error: float = 0.025, **header: Any) -> Any:
        slots = documents.slots(8)
        values = [documents.values(slot) for slot in slots]
        values[6]["sum_sq_err"] = values[6]["sum_sq"] * error**2
        header = {"mode": "enforce", **header}
        return client.post(f"{API}/samples", json=documents.sample(step, slots, values, **header))

    return post


def test_how_a_run_ended_is_kept_apart_from_its_silence(client: TestClient, post: Any, clock: Any) -> None:
    post(0)
    client.patch(API, json={"ended": True})
    ended = client.get(API).json()
    assert (ended["state"], ended["health"], ended["ended"]) == (
        "ended",
        "healthy",
        "2023-11-14T22:13:20.000Z",
    )
    assert ended["verdict"] == {
        "state": "ended",
        "why": "ended healthy; last sample at step 0",
        "next": "compare it, or export it",
    }
    clock.now += 10_000
    assert client.get(API).json()["state"] == "ended"
    post(1, error=0.5)
    assert client.get(API).json()["ended"] is None
    client.patch(API, json={"ended": True})
    detail = client.get(API).json()
    assert (detail["state"], detail["health"]) == ("ended", "fallback")
    assert detail["verdict"]["why"] == (
        "ended with its faults held by the plan: 'blocks.0.mlp' in BF16; last sample at step 1"
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("format", "e5m2")], "in other formats"),
        ([("scale_multiplier", 0.5)], "with other scales"),
        ([("format", "e5m2"), ("scale_multiplier", 0.5)], "in other formats and with other scales"),
    ],
)
def test_a_healthy_end_that_the_plan_holds_says_so(
    client: TestClient, post: Any, entries: list[tuple[str, Any]], words: str
) -> None:
    post(0, mode="advise")
    for operand, (action, value) in zip("wx", entries, strict=False):
        target = {"operand": operand, "layout": "tile" if operand == "w" else "row"}
        pin = {"layer": "blocks.2.mlp", "target": target, "action": action, "value": value}
        assert client.put(f"{API}/pins", json=pin).status_code == 200
    client.patch(API, json={"ended": True})
    assert client.get(API).json()["verdict"]["why"] == (
        f"ended healthy: the plan holds 'blocks.2.mlp' {words}; last sample at step 0"
    )


def test_a_run_that_ended_in_trouble_says_so(client: TestClient, post: Any) -> None:
    post(0, error=0.5, mode="observe")
    client.patch(API, json={"ended": True})
    (item,) = client.get("/api/v1/runs").json()["items"]
    assert (item["state"], item["health"]) == ("ended", "unstable")
    assert item["verdict"]["why"] == (
        "ended unstable: 'blocks.0.mlp' dgrad: GEMM error 50 % (limit 5 %) since step 0, alert 1; last sample at step 0"
    )
    assert item["verdict"]["next"] == "look at its earliest alert before using what it has learnt"


def dying(client: TestClient, documents: Any, mode: str = "observe", sick: str = "x") -> None:
    """One NaN in an operand of the first layer at step 30, in every weight and the loss from step 31 on."""
    slots = documents.slots(2)
    for step in (30, 31, 32):
        bad = [
            slot.get("operand") == "w"
            if step > 30
            else (slot["layer"], slot.get("operand")) == (slots[0]["layer"], sick)
            for slot in slots
        ]
        values = [documents.values(slot, nan=int(ill)) for slot, ill in zip(slots, bad, strict=True)]
        loss = 2.5 if step == 30 else "NaN"
        body = documents.sample(step, slots, values, mode=mode, run={"loss": loss})
        assert client.post(f"{API}/samples", json=body).status_code == 200


BEGAN = "non-finite values begin in the input of layer 'blocks.0.mlp' at step 30"
WAY_OUT = (
    "no precision helps: look at the batch, or at what comes before this layer; its weight holds them by now, too: "
    "go back to a checkpoint before step 30"
)


@pytest.mark.parametrize("mode", ["observe", "advise", "enforce"])
def test_what_no_precision_helps_asks_for_no_other_mode(
    client: TestClient, documents: Any, mode: str
) -> None:
    dying(client, documents, mode)
    verdict = client.get(API).json()["verdict"]
    assert verdict["state"] == "unstable"
    assert verdict["why"].startswith(BEGAN)
    assert verdict["next"] == WAY_OUT


def test_a_run_that_died_does_not_look_fine_after_its_end(client: TestClient, documents: Any) -> None:
    dying(client, documents)
    client.patch(API, json={"ended": True})
    detail = client.get(API).json()
    (item,) = client.get("/api/v1/runs").json()["items"]
    assert detail == item
    assert (detail["state"], detail["health"]) == ("ended", "unstable")
    number = {alert["rule"]: alert["id"] for alert in client.get(f"{API}/alerts").json()["items"]}
    why = detail["verdict"]["why"]
    assert why.startswith(
        f"ended unstable: non-finite loss since step 31, alert {number['nonfinite-loss']}; {BEGAN}"
    )
    assert why.endswith(f", alert {number['non-finite']}; last sample at step 32")
    assert detail["verdict"]["next"] == WAY_OUT


def test_what_began_between_samples_asks_for_a_checkpoint_of_the_last_clean_one(
    client: TestClient, documents: Any
) -> None:
    slots = documents.slots(2)
    for step in (20, 30, 40, 50):
        ill = [step > 30 and slot.get("operand") == "w" for slot in slots]
        values = [documents.values(slot, nan=int(bad)) for slot, bad in zip(slots, ill, strict=True)]
        body = documents.sample(step, slots, values, run={"loss": "NaN" if step > 30 else 2.5})
        assert client.post(f"{API}/samples", json=body).status_code == 200
    verdict = client.get(API).json()["verdict"]
    began = "between step 30 (last clean sample) and step 40"
    assert verdict["why"].startswith(f"non-finite values begin in the weight of layer 'blocks.0.mlp' {began}")
    assert verdict["next"].endswith("go back to a checkpoint of step 30 or earlier")
    client.patch(API, json={"ended": True})
    assert (
        f"ended unstable: non-finite loss, begun {began}, alert " in client.get(API).json()["verdict"]["why"]
    )


def test_a_loss_that_is_no_number_is_a_bad_end_without_any_alert(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/samples", json=documents.sample(7, run={"loss": "Infinity"}))
    (alert,) = client.get(f"{API}/alerts").json()["items"]
    client.post(f"/api/v1/alerts/{alert['id']}:resolve")
    client.patch(API, json={"ended": True})
    detail = client.get(API).json()
    assert (detail["state"], detail["health"]) == ("ended", "unstable")
    assert detail["verdict"]["why"] == "ended unstable: its loss is Infinity; last sample at step 7"


def test_a_run_that_fell_silent_in_trouble_says_what_it_was(
    client: TestClient, documents: Any, clock: Any
) -> None:
    dying(client, documents)
    clock.now += 600
    detail = client.get(API).json()
    assert detail["state"] == "stale"
    assert "before that it was unstable: non-finite loss since step 31" in detail["verdict"]["why"]


def test_a_layer_that_is_not_ours_to_switch_asks_for_no_other_mode(
    client: TestClient, documents: Any
) -> None:
    """Its results are emulated, so it computes in a higher precision already."""
    slots = [{**slot, **({"emulated": True} if "gemm" in slot else {})} for slot in documents.slots(1)]
    values = [documents.values(slot, nan=int(slot.get("gemm") == "fprop")) for slot in slots]
    for step in range(2):
        body = documents.sample(step, slots, values, mode="observe")
        assert client.post(f"{API}/samples", json=body).status_code == 200
    verdict = client.get(API).json()["verdict"]
    assert verdict["state"] == "unstable"
    assert verdict["next"] == "nothing to switch here: the gemm runs in BF16 already, so the cause is not FP8"


def test_a_stale_run_says_what_it_was_and_what_to_do(client: TestClient, post: Any, clock: Any) -> None:
    post(0, error=0.5)
    clock.now += 600
    detail = client.get(API).json()
    assert (detail["state"], detail["health"], detail["ended"]) == ("stale", "fallback", None)
    assert detail["verdict"]["why"] == (
        "no sample for 10.0 min: the trainer stopped, or the network is down; before that it was fallback"
    )
    assert "spool" in detail["verdict"]["next"]
    assert "mark the run as ended" in detail["verdict"]["next"]


def test_a_stale_run_of_which_some_groups_ended_names_the_others(
    client: TestClient, post: Any, clock: Any
) -> None:
    for group in ("0", "1"):
        post(0, group=group, groups=2)
    client.post(f"{API}:end", json={"attempt": "0", "group": "0"})
    clock.now += 600
    assert "1 of 2 groups has ended, 1 stopped without a word" in client.get(API).json()["verdict"]["why"]


def test_a_run_id_that_is_used_twice_is_in_the_verdict(client: TestClient, post: Any) -> None:
    post(0)
    post(1)
    assert client.get(API).json()["conflicts"] == 0
    assert post(1, error=0.03).status_code == 409
    detail = client.get(API).json()
    assert (detail["conflicts"], detail["last_conflict_step"], detail["state"]) == (1, 1, "healthy")
    assert detail["verdict"]["why"].endswith(
        "; 1 sample was refused (the last at step 1): this run id and attempt are used twice"
    )
    assert detail["verdict"]["next"].startswith("give each trainer its own run id")
    assert post(0, error=0.03).status_code == 409
    assert "2 samples were refused (the last at step 0)" in client.get(API).json()["verdict"]["why"]
    (attempt,) = client.get(f"{API}/attempts").json()["items"]
    assert (attempt["conflicts"], attempt["last_conflict_step"]) == (2, 0)
    # A new attempt begins without them.
    post(2, attempt={"id": "1", "parent": "0", "from_step": 2})
    assert client.get(API).json()["conflicts"] == 0


def test_a_verdict_names_how_many_tensors_an_alert_is_about(client: TestClient, documents: Any) -> None:
    slots = documents.slots(1)
    values = [documents.values(slot) for slot in slots]
    for place in (5, 6):
        values[place]["sum_sq_err"] = values[place]["sum_sq"] * 0.25
    client.post(f"{API}/samples", json=documents.sample(0, slots, values))
    why = client.get(API).json()["verdict"]["why"]
    told = "'blocks.0.mlp' dgrad: GEMM error 50 % (limit 5 %) since step 0, and 1 more of its tensors"
    # What is decided on it may name a cause besides.
    assert why.partition("; cause: ")[0] == told


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"ended": 1}, "/ended"),
        ({"ended": "yes"}, "/ended"),
        ({"ended": None}, "/ended"),
        ({"mode": "Observe"}, "/mode"),
        ({"mode": ["observe"]}, "/mode"),
        ({"thresholds": 10**400}, "/thresholds"),
        ({"a/b~": 1}, "/a~1b~0"),
    ],
)
def test_a_change_that_cannot_be_made_names_its_field(
    client: TestClient, post: Any, change: dict[str, Any], pointer: str
) -> None:
    post(0)
    before = client.get(API).json()
    answer = client.patch(API, json=change)
    assert (answer.status_code, [fault["pointer"] for fault in answer.json()["errors"]]) == (422, [pointer])
    assert client.get(API).json() == before


def test_a_warning_from_the_first_sample_on_is_told_apart_from_a_change(
    client: TestClient, documents: Any
) -> None:
    """A small healthy model may lie beyond a level that fits most."""
    slots = documents.slots(2)

    def send(step: int, *, ill: bool) -> str:
        values = [
            documents.values(slot, underflow=1500 if ill and slot.get("operand") == "dy" else 0)
            if "gemm" not in slot and slot["layout"] == "col"
            else documents.values(slot)
            for slot in slots
        ]
        body = documents.sample(step, slots, values)
        assert client.post(f"{API}/samples", json=body).status_code == 200
        detail = client.get(API).json()
        return f"{detail['state']}: {detail['verdict']['next']}"

    for step in range(2):
        told = send(step, ill=True)
    assert told.startswith("watch: nothing is decided on this alone. It was so from the first sample on")
    for step in range(2, 5):
        told = send(step, ill=False)
    assert told == "healthy: nothing to do"
    for step in range(60, 62):
        told = send(step, ill=True)
    assert told == "watch: watch it: nothing is decided on this alone"


def test_of_what_is_only_to_be_watched_the_one_farthest_beyond_its_limit_is_told(
    client: TestClient, documents: Any
) -> None:
    """A little beyond a level since the start, as healthy layers may be, is no news beside what is far beyond it."""
    slots = documents.slots(2)
    first, second = (layer for layer in dict.fromkeys(slot["layer"] for slot in slots))

    def told(step: int, underflow: dict[str, int]) -> str:
        values = [
            documents.values(slot, underflow=underflow.get(slot["layer"], 0))
            if "gemm" not in slot and (slot["operand"], slot["layout"]) == ("dy", "col")
            else documents.values(slot)
            for slot in slots
        ]
        assert client.post(f"{API}/samples", json=documents.sample(step, slots, values)).status_code == 200
        return str(client.get(API).json()["verdict"]["why"])

    for step in range(2):
        mild = told(step, {first: 1500})
    assert repr(first) in mild
    for step in range(2, 5):
        far = told(step, {first: 1500, second: 9000})
    assert repr(second) in far
    assert repr(first) not in far
