"""What is kept between queries answers as the store does."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.server import slotlists, stepvalues
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import Store, open_store

API = "/api/v1/runs/demo"
QUERIES: list[dict[str, Any]] = [
    {},
    {"max_cols": 5},
    {"metric": "underflow_ratio", "operand": "x", "layout": "row"},
    {"metric": "tile_sqnr_p01_db"},
    {"metric": "amax", "from_step": 6, "to_step": 17},
    {"metric": "relative_error", "gemm": "dgrad", "to_step": 9},
]


class Reporter:
    """Posts random samples of a run with groups, late layers, changing experts and rewinds, and remembers the requests."""

    def __init__(self, client: TestClient, documents: Any, seed: int) -> None:
        self.client, self.documents = client, documents
        self.rng = random.Random(seed)
        self.attempt: dict[str, Any] = {"id": "0", "parent": None, "from_step": 0}

    def post(self, step: int, group: str, layers: int) -> None:
        slots = self.documents.slots(layers)
        worst = {**self.rng.choice(slots), "expert": self.rng.randrange(6)}
        slots = [slot for slot in [*slots, worst] if self.rng.random() < 0.8]
        values = [self.values(slot) for slot in slots]
        sample = self.documents.sample(step, slots, values, group=group, groups=2, attempt=self.attempt)
        answer = self.client.post(f"{API}/samples", json=sample)
        assert answer.status_code == 200, answer.text

    def values(self, slot: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {"amax": self.rng.uniform(1, 9), "nan": self.rng.choice([0] * 9 + [2])}
        if "gemm" not in slot:
            bins = [0] * 16
            bins[self.rng.randrange(16)] = 100
            changes |= {"tile_sqnr_hist": bins, "underflow": self.rng.randrange(999)}
        if self.rng.random() < 0.05:
            changes["sum_sq_err"] = "NaN"
        found: dict[str, Any] = self.documents.values(slot, **changes)
        return found

    def rewind(self, name: str, from_step: int) -> None:
        self.attempt = {"id": name, "parent": self.attempt["id"], "from_step": from_step}


def answers(client: TestClient) -> list[Any]:
    heatmaps = [client.get(f"{API}/heatmap", params=query) for query in QUERIES]
    others = [client.get(f"{API}{path}") for path in ("/layers", "/layer?layer=blocks.0.mlp", "/attempts")]
    return [(answer.status_code, answer.json()) for answer in (*heatmaps, *others)]


@pytest.mark.parametrize("bounded", [False, True], ids=["kept", "forgotten"])
def test_an_answer_that_grew_with_the_run_is_the_one_read_afresh(
    make_client: Callable[..., TestClient], documents: Any, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    if bounded:
        monkeypatch.setattr("fp8_safeguard.server.stepvalues.MOST_BYTES", 1)
        monkeypatch.setattr("fp8_safeguard.server.stepvalues.PART_STEPS", 3)
        monkeypatch.setattr(slotlists, "MOST_SLOTS", 1)
        monkeypatch.setattr(slotlists, "MOST_RUNS", 1)
    warm = make_client()
    reporter = Reporter(warm, documents, seed=5)
    plan = [(step, group) for step in range(24) for group in ("0", "1")]
    for place, (step, group) in enumerate(plan):
        # The second group of every fifth step comes late, after newer steps.
        late = step % 5 == 2 and group == "1"
        if not late:
            reporter.post(step, group, layers=2 if step < 12 else 4)
        if step % 5 == 4 and group == "1":
            reporter.post(step - 2, "1", layers=3)
        if (step, group) == (15, "1"):
            reporter.rewind("1", 10)
            for again in range(10, 14):
                reporter.post(again, "0", layers=4)
        if place % 16 == 15:
            assert answers(warm) == answers(make_client()), (step, group)
    assert answers(warm) == answers(make_client())


def test_a_kept_heatmap_is_extended_and_not_read_again(
    client: TestClient, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter(client, documents, seed=1)
    for step in range(20):
        reporter.post(step, "0", layers=2)
    read: list[int] = []
    load = stepvalues.load_rows

    def counting(conn: Any, attempt_id: int, steps: Sequence[int]) -> Any:
        read.extend(steps)
        return load(conn, attempt_id, steps)

    monkeypatch.setattr(stepvalues, "load_rows", counting)
    assert client.get(f"{API}/heatmap").json()["steps"] == list(range(20))
    assert read == list(range(20))
    read.clear()
    reporter.post(20, "0", layers=2)
    reporter.post(7, "1", layers=2)
    assert client.get(f"{API}/heatmap").json()["steps"] == list(range(21))
    assert read == [7, 20]
    read.clear()
    client.get(f"{API}/heatmap", params={"from_step": 3, "to_step": 9})
    assert read == []


def slots_of(*layers: str) -> tuple[Slot, ...]:
    return tuple(Slot(layer, gemm="fprop") for layer in layers)


class FailedError(Exception):
    pass


def add_and_fail(store: Store) -> None:
    with store.write("demo") as conn:
        list_id = slotlists.use(conn, 1, slots_of("gone"), [100])
        # The transaction itself sees what it added.
        lists = slotlists.of_run(conn, 1)
        assert slotlists.layers_of(lists)[-1] == "gone"
        assert lists[list_id].slots == slots_of("gone")
        raise FailedError


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_lists_of_a_transaction_that_failed_are_not_remembered(
    client: TestClient, documents: Any, settings: Settings
) -> None:
    client.post(f"{API}/samples", json=documents.sample(0))
    store = open_store(settings)

    def layers() -> list[str]:
        with store.read() as conn:
            return list(slotlists.layers_of(slotlists.of_run(conn, 1)))

    first = layers()

    with pytest.raises(FailedError):
        add_and_fail(store)
    assert layers() == first
    with store.write("demo") as conn:
        # On SQLite it gets the row id of the one that is gone.
        slotlists.use(conn, 1, slots_of("stays"), [100])
        slotlists.of_run(conn, 1)
    assert layers() == [*first, "stays"]
    with store.read() as conn:
        lists = slotlists.of_run(conn, 1)
        assert [slot.layer for held in lists.values() for slot in held.slots][-1] == "stays"
    store.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_an_older_snapshot_keeps_seeing_its_own_lists(
    client: TestClient, documents: Any, settings: Settings
) -> None:
    client.post(f"{API}/samples", json=documents.sample(0))
    store = open_store(settings)
    with store.read() as old:
        before = list(slotlists.of_run(old, 1))
        with store.write("demo") as conn:
            slotlists.use(conn, 1, slots_of("new"), [0])
        with store.read() as fresh:
            assert len(slotlists.of_run(fresh, 1)) == len(before) + 1
        assert list(slotlists.of_run(old, 1)) == before
        assert "new" not in slotlists.layers_of(slotlists.of_run(old, 1))
    store.close()


def test_the_first_index_counts_for_statistics_and_the_lowest_for_the_order(
    client: TestClient, documents: Any, settings: Settings
) -> None:
    client.post(f"{API}/samples", json=documents.sample(0, documents.slots(1)))
    store = open_store(settings)
    with store.write("demo") as conn:
        slotlists.use(conn, 1, slots_of("late", "b"), [900, 901])
        slotlists.use(conn, 1, slots_of("b", "late", "b2"), [-5, 950, -5])
    with store.read() as conn:
        lists = slotlists.of_run(conn, 1)
        index = slotlists.index_of(lists)
        assert [index[slot.key] for slot in slots_of("late", "b", "b2")] == [900, 901, -5]
        assert list(slotlists.layers_of(lists)) == ["b", "b2", "blocks.0.mlp", "late"]
    store.close()
