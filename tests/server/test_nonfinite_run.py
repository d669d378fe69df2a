"""A loss or norm that is no number is shown, whichever group has it."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
WORDS = ("NaN", "Infinity", "-Infinity")


@pytest.fixture
def told(post: Any) -> Any:
    """Posts step 3 of two groups, of which one has that loss, after three healthy steps; the reply to the last."""

    def told(word: str, group: str, order: tuple[str, ...] = ("0", "1")) -> dict[str, Any]:
        for step in range(3):
            for each in order:
                post(step, groups=2, group=each, run={"loss": 2.0, "gradient_norm": 1.0})
        for each in order:
            value = word if each == group else 2.5
            reply = post(3, groups=2, group=each, run={"loss": value, "gradient_norm": value})
        answer: dict[str, Any] = reply
        return answer

    return told


@pytest.mark.parametrize("group", ["0", "1"])
@pytest.mark.parametrize("word", WORDS)
def test_b95_no_group_hides_that_the_loss_of_another_is_no_number(
    client: TestClient, told: Any, word: str, group: str
) -> None:
    reply = told(word, group)
    assert [(alert["rule"], alert["step"]) for alert in reply["alerts"]] == [("nonfinite-loss", 3)]
    run = client.get(API).json()
    assert (run["loss"], run["gradient_norm"]) == (word, word)
    series = client.get(f"{API}/series", params={"metric": "loss"}).json()
    assert series["steps"] == [0, 1, 2, 3]
    assert len(series["nonfinite"]) == 1
    exported = {
        sample.name.removeprefix("fp8_safeguard_"): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }
    shown = [str(exported[name]) for name in ("run_loss", "run_gradient_norm")]
    assert shown == [{"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[word]] * 2


def test_b96_steps_that_are_not_finite_are_counted_though_the_loss_is(client: TestClient, post: Any) -> None:
    counted = []
    for step, norm in enumerate((1.0, 1.0, "NaN", 1.0, "Infinity")):
        post(step, run={"loss": 2.0, "gradient_norm": norm})
        counted.append(client.get(API).json()["nonfinite_steps"])
    assert counted == [0, 0, 1, 1, 2]
    assert (
        'fp8_safeguard_run_nonfinite_steps_total{run="demo"} 2.0' in client.get("/metrics").text.splitlines()
    )


def test_b95_the_newest_step_that_has_a_loss_is_the_one_that_is_shown(client: TestClient, post: Any) -> None:
    post(0, groups=2, group="0", run={"loss": "NaN", "gradient_norm": 7.0})
    post(0, groups=2, group="1", run={"loss": 3.0})
    post(1, groups=2, group="1", run={"loss": 2.0})
    post(1, groups=2, group="0", run={"loss": 1.5})
    run = client.get(API).json()
    assert (run["loss"], run["gradient_norm"], run["learning_rate"]) == (2.0, 7.0, None)


def test_the_badge_of_a_cause_follows_a_weight_that_holds_it_by_now(client: TestClient, post: Any) -> None:
    result = {("blocks.1.mlp", "fprop"): {"nan": 3}}
    kinds = []
    for step, ill in enumerate([{}, result, result, {**result, ("blocks.1.mlp", "w tile"): {"nan": 1}}]):
        post(step, ill, mode="enforce")
        kinds.append([cause["kind"] for cause in client.get(API).json()["causes"]])
    assert kinds == [[], [], ["fp8"], ["not-fp8"]]
    assert client.get(API).json()["verdict"]["next"].endswith("go back to a checkpoint before step 1")
