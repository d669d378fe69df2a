"""The order of layers by severity: what its heading promises, worst first."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
WAITS, WATCHED, WHAT_IF, FALLEN, NEAR, BROKEN = (f"blocks.{n}.mlp" for n in range(6))
ACTS = "blocks.7.mlp"


def off(error: float) -> dict[str, Any]:
    return {"sum_sq_err": 65536.0 * error**2}


@pytest.fixture
def send(client: TestClient, documents: Any) -> Any:
    """Posts a step of eight layers: one acts, one is watched, one is so in FP8 only, and one is nearly watched."""

    def send(step: int, *, wgrad: float | None = None, broken: bool = False, **header: Any) -> None:
        slots = documents.slots(8)
        if wgrad is None:
            slots = [slot for slot in slots if (slot["layer"], slot.get("gemm")) != (WAITS, "wgrad")]
            slots = [{**slot, "index": at} for at, slot in enumerate(slots)]
        slots = [
            {**slot, "emulated": True} if slot["layer"] == WHAT_IF and "gemm" in slot else slot
            for slot in slots
        ]
        ill = {
            (WAITS, "wgrad"): off(wgrad or 0.0),
            (WATCHED, "x row"): {"underflow": 400, "zeros": 400},
            (WHAT_IF, "dgrad"): off(0.5),
            (NEAR, "x row"): {"underflow": 325, "zeros": 325},
            (ACTS, "dgrad"): off(0.06),
        }
        if broken:
            ill[BROKEN, "x row"] = {"nan": 1}
        names = [(slot["layer"], slot.get("gemm") or f"{slot['operand']} {slot['layout']}") for slot in slots]
        values = [
            documents.values(slot, **ill.get(name, {})) for slot, name in zip(slots, names, strict=True)
        ]
        body = documents.sample(step, slots, values, mode="advise", **header)
        answer = client.post(f"{API}/samples", json=body)
        assert answer.status_code == 200, answer.text

    return send


def pin(client: TestClient, layer: str, **wish: Any) -> None:
    assert client.put(f"{API}/pins", json={"layer": layer, **wish}).status_code == 200


def order(client: TestClient, **params: Any) -> list[tuple[str, str]]:
    listed = client.get(f"{API}/layers", params=params).json()["items"]
    return [(item["layer"], item["state"]) for item in listed]


def test_what_waits_or_is_held_comes_after_what_is_in_breach_and_before_what_is_healthy(
    client: TestClient, send: Any
) -> None:
    send(0, wgrad=0.5)
    pin(client, WAITS, target={"operand": "x", "layout": "row"}, action="format", value="e5m2")
    pin(client, FALLEN, action="bf16_fallback")
    for step in (1, 2):
        send(step, plan_version=2, effective_step=1)
    ranked = order(client)
    assert ranked[:5] == [
        (ACTS, "unstable"),
        (WATCHED, "watch"),
        (WAITS, "watch"),
        (WHAT_IF, "watch"),
        (FALLEN, "fallback"),
    ]
    assert ranked[5] == (NEAR, "healthy")
    assert {state for _, state in ranked[5:]} == {"healthy"}
    assert order(client, order_by="-severity") == ranked
    # A breach since then makes it act again.
    send(3, wgrad=0.5, plan_version=2, effective_step=1)
    assert order(client)[0] == (WAITS, "unstable")


def test_one_value_that_is_no_number_comes_first_of_what_is_watched(client: TestClient, send: Any) -> None:
    send(0, wgrad=0.02)
    send(1, broken=True)
    assert order(client)[:3] == [(ACTS, "unstable"), (BROKEN, "watch"), (WATCHED, "watch")]
    send(2, broken=True)
    assert order(client)[:2] == [(BROKEN, "unstable"), (ACTS, "unstable")]
