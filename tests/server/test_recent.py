"""What is kept in memory: bounded, the last used first, and never instead of the store."""

from typing import Any

from starlette.testclient import TestClient

from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.server.recent import Recent

API = "/api/v1/runs"


def test_what_was_not_used_for_longest_makes_room() -> None:
    kept: Recent[str, int] = Recent(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]
    kept.put("a", 4)
    kept.put("d", 5)
    assert [kept.get(key) for key in "acd"] == [4, None, 5]


def test_a_slot_list_that_was_accepted_can_be_named_after_its_run_has_gone(
    client: TestClient, documents: Any
) -> None:
    """The list goes with the last run that used it; a client that goes on does not notice."""
    first = documents.sample(0)
    named = {key: value for key, value in documents.sample(1).items() if key != "slots"}
    named["slots_id"] = slots_id(Slot.from_wire(slot) for slot in first["slots"])
    assert client.post(f"{API}/demo/samples", json=named).json()["type"] == "slots-unknown"
    client.post(f"{API}/demo/samples", json=first)
    for _ in range(2):
        assert client.post(f"{API}/demo/samples", json=named).json()["accepted"]
        (stored,) = [item for item in client.get(f"{API}/demo/export").json()["samples"] if item["step"] == 1]
        assert stored["slots"] == first["slots"]
        assert client.delete(f"{API}/demo").status_code == 204
