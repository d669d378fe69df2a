"""Several threads and processes on one store."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from fp8_safeguard.server import control
from fp8_safeguard.server.gate import Gate
from fp8_safeguard.server.migrate import head_revision
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import open_store

URL = "/api/v1/runs/demo/samples"
both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run the jobs in threads that start together; their results in order."""
    gate = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(place: int) -> None:
        gate.wait()
        results[place] = jobs[place]()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@both
def test_b57_sixteen_ranks_post_the_first_batch_of_a_new_run_at_once(
    settings: Settings, documents: Any
) -> None:
    with running_server(settings) as url:
        samples = [documents.sample(0, group=str(rank), groups=16) for rank in range(16)]
        answers = at_once([lambda s=sample: httpx2.post(url + URL, json=s, timeout=30) for sample in samples])
        assert [answer.status_code for answer in answers] == [200] * 16
        assert sum(answer.json()["inserted"] for answer in answers) == 16 * 16
        assert len(httpx2.get(f"{url}/api/v1/runs").json()["items"]) == 1
        params = {"metric": "count", "operand": "x", "layout": "row"}
        heatmap = httpx2.get(f"{url}/api/v1/runs/demo/heatmap", params=params).json()
        assert heatmap["values"] == [[16.0 * 65536]] * 2


@both
def test_b47_the_same_batch_from_two_servers_of_one_store_is_stored_once(
    settings: Settings, documents: Any
) -> None:
    slots = [{"index": n, "layer": f"layer.{n}", "operand": "x", "layout": "row"} for n in range(150)]
    sample = documents.sample(7, slots)
    with running_server(settings) as first, running_server(settings) as second:
        jobs = [
            lambda url=url: httpx2.post(url + URL, json=sample, timeout=30) for url in [first, second] * 4
        ]
        answers = at_once(jobs)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert sum(answer.json()["inserted"] for answer in answers) == 150
    assert sum(answer.json()["duplicates"] for answer in answers) == 7 * 150


@both
def test_b47_a_batch_with_one_new_slot_sent_by_all_at_once_adds_it_once(
    settings: Settings, documents: Any
) -> None:
    """149 slots are stored and one is new; whoever comes first adds it, and nobody is refused."""
    slots = [{"index": n, "layer": f"layer.{n}", "operand": "x", "layout": "row"} for n in range(150)]
    with running_server(settings) as first, running_server(settings) as second:
        old = httpx2.post(first + URL, json=documents.sample(7, slots[:149]), timeout=30)
        assert old.json()["inserted"] == 149
        sample = documents.sample(7, slots)
        jobs = [
            lambda url=url: httpx2.post(url + URL, json=sample, timeout=30) for url in [first, second] * 4
        ]
        answers = at_once(jobs)
        params = {"metric": "count"}
        heatmap = httpx2.get(f"{first}/api/v1/runs/demo/heatmap", params=params).json()
    assert [answer.status_code for answer in answers] == [200] * 8
    counted = [(answer.json()["inserted"], answer.json()["duplicates"]) for answer in answers]
    assert sorted(counted) == [(0, 150)] * 7 + [(1, 149)]
    assert heatmap["values"] == [[65536.0]] * 150


@pytest.fixture
def proposed(documents: Any) -> Callable[[str, str], str]:
    """Posts a sample that makes the policy propose something for a run; the proposal's id."""

    def post(url: str, run: str) -> str:
        slots = documents.slots(8)
        ill = [slot["layer"] == "blocks.0.mlp" and slot.get("gemm") == "dgrad" for slot in slots]
        values = [
            documents.values(slot, **({"sum_sq_err": 16384.0} if bad else {}))
            for slot, bad in zip(slots, ill, strict=True)
        ]
        sample = documents.sample(4, slots, values, mode="advise")
        (asked,) = httpx2.post(f"{url}/api/v1/runs/{run}/samples", json=sample).json()["decisions"]
        return str(asked["id"])

    return post


def build_routes(*urls: str) -> None:
    """FastAPI builds a route at its first request, under warning filters that threads of one process share."""
    for url in urls:
        for path in ("/decisions/none:approve", "/runs/none:kill-switch"):
            assert httpx2.post(f"{url}/api/v1{path}").status_code == 404


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes wait for each other once they have read what they go by: only the store's lock keeps them apart."""
    meet, read = threading.Barrier(2), control._memory

    def slow(*given: Any) -> Any:
        found = read(*given)
        # With the lock the second never comes while the first is here.
        with suppress(threading.BrokenBarrierError):
            meet.wait(timeout=0.5)
        return found

    monkeypatch.setattr(control, "_memory", slow)


@both
@pytest.mark.usefixtures("overlapping")
def test_a_proposal_that_several_people_approve_at_once_is_approved_once(
    settings: Settings, proposed: Any
) -> None:
    with running_server(settings) as first, running_server(settings) as second:
        build_routes(first, second)
        asked = proposed(first, "demo")
        jobs = [
            lambda url=url, by=by: httpx2.post(f"{url}/api/v1/decisions/{asked}:approve", json={"by": by})
            for url, by in zip([first, second] * 3, "abcdef", strict=True)
        ]
        answers = at_once(jobs)
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5
        (won,) = (answer.json() for answer in answers if answer.status_code == 200)
        (item,) = httpx2.get(f"{second}/api/v1/runs/demo/decisions").json()["items"]
        approvals = [act["actor"] for act in item["history"] if act["what"] == "approved"]
        assert (item["state"], approvals) == ("approved", [won["actor"]])
        plan = httpx2.get(f"{first}/api/v1/runs/demo/plan").json()
        assert (plan["version"], [entry["decision_id"] for entry in plan["entries"]]) == (1, [asked])


@both
@pytest.mark.usefixtures("overlapping")
def test_nothing_is_in_force_after_a_kill_switch_whatever_is_approved_with_it(
    settings: Settings, proposed: Any
) -> None:
    with running_server(settings) as first, running_server(settings) as second:
        build_routes(first, second)
        for run in ("r0", "r1"):
            asked = proposed(first, run)
            jobs = [
                lambda: httpx2.post(f"{first}/api/v1/decisions/{asked}:approve", json={}),  # noqa: B023
                lambda: httpx2.post(f"{second}/api/v1/runs/{run}:kill-switch"),  # noqa: B023
            ]
            approval, killed = at_once(jobs)
            assert killed.status_code == 200
            assert approval.status_code in (200, 409)
            detail = httpx2.get(f"{first}/api/v1/runs/{run}").json()
            plan = httpx2.get(f"{first}/api/v1/runs/{run}/plan").json()
            (item,) = httpx2.get(f"{first}/api/v1/runs/{run}/decisions").json()["items"]
            assert (detail["mode"], plan["entries"]) == ("observe", [])
            assert item["state"] == ("reverted" if approval.status_code == 200 else "expired")


WRITER = """
import json, sys, time
from fp8_safeguard.server.ingest import ingest
from fp8_safeguard.server.migrate import upgrade
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import open_store

store = open_store(Settings(database_url=sys.argv[1]))
print(upgrade(store))
sys.stdin.readline()
replies = [ingest(store, "demo", [json.loads(line)], time.time).results[0] for line in open(sys.argv[2])]
print(json.dumps([[reply["inserted"], reply["duplicates"]] for reply in replies]))
"""


@both
def test_b47_b59_processes_that_migrate_and_replay_together_store_each_slot_once(
    settings: Settings, documents: Any, tmp_path: Path
) -> None:
    replay = tmp_path / "replay.jsonl"
    replay.write_text("\n".join(json.dumps(documents.sample(step)) for step in range(30)))
    command = [sys.executable, "-c", WRITER, settings.database_url, str(replay)]
    writers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    newest = f"{head_revision()}\n"
    assert all(writer.stdout and writer.stdout.readline() == newest for writer in writers)
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    counted = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    for mine, others in zip(*counted, strict=True):
        assert sorted([mine, others]) == [[0, 16], [16, 0]]


RANK = """
import http.client, json, sys, time

host, path, rank, replay = sys.argv[1:]
bodies = open(replay).read().replace('"group": "0"', f'"group": "{rank}"').splitlines()
server = http.client.HTTPConnection(host, timeout=30)
sys.stdin.readline()
seconds = []
for body in bodies:
    begun = time.monotonic()
    while True:
        server.request("POST", path, body, {"Content-Type": "application/json"})
        answer = server.getresponse()
        reply = json.load(answer)
        if answer.status != 503:
            break
        time.sleep(float(answer.headers["Retry-After"]))
    assert (answer.status, reply.get("inserted")) == (200, 20), reply
    seconds.append(time.monotonic() - begun)
print(json.dumps(seconds))
"""


@pytest.mark.parametrize(("backend", "steps"), [("sqlite", 50), ("postgresql", 10)], indirect=["backend"])
def test_b56_eight_processes_write_while_two_readers_poll(
    settings: Settings, documents: Any, tmp_path: Path, backend: str, steps: int
) -> None:
    slots = documents.slots(20, ({"operand": "x", "layout": "row"},))
    replay = tmp_path / "batches.jsonl"
    replay.write_text("\n".join(json.dumps(documents.sample(step, slots, groups=8)) for step in range(steps)))
    done = threading.Event()
    polled: list[int] = []

    def poll(url: str) -> None:
        with httpx2.Client(base_url=url, timeout=30) as client:
            while not done.is_set():
                for path in ("", "/demo/layers", "/demo/heatmap"):
                    polled.append(client.get(f"/api/v1/runs{path}").status_code)
                done.wait(0.05)

    with running_server(settings) as url:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, url.removeprefix("http://"), URL, str(rank), str(replay)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(8)
        ]
        # The readers may come before the run's first sample.
        httpx2.post(url + URL, json=documents.sample(99, [], groups=8), timeout=30).raise_for_status()
        readers = [threading.Thread(target=poll, args=(url,)) for _ in range(2)]
        for reader in readers:
            reader.start()
        told = [json.loads(rank.communicate("\n", timeout=60)[0]) for rank in start_together(ranks)]
        done.set()
        for reader in readers:
            reader.join()
    assert [rank.returncode for rank in ranks] == [0] * 8
    assert set(polled) == {200}
    store = open_store(settings)
    with store.read() as conn:
        stored = conn.exec_driver_sql(
            "SELECT body FROM slot_lists JOIN samples ON slot_lists.id = slot_list_id"
        )
        assert sum(len(json.loads(row.body)) for row in stored) == 8 * steps * 20
        if backend == "sqlite":
            assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert conn.exec_driver_sql("PRAGMA busy_timeout").scalar() > 0
    store.close()
    waits = sorted(second for seconds in told for second in seconds)
    assert waits[int(0.99 * len(waits))] < 5


def start_together(ranks: list[Any]) -> list[Any]:
    """Let the processes go, once all of them have begun."""
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    return ranks


@both
def test_readers_are_answered_while_a_writer_holds_the_lock(settings: Settings, documents: Any) -> None:
    with running_server(settings) as url:
        httpx2.post(url + URL, json=documents.sample(0))
        store = open_store(settings)
        with store.write():
            assert httpx2.get(f"{url}/api/v1/runs/demo", timeout=5).json()["last_step"] == 0
            assert httpx2.get(f"{url}/metrics", timeout=5).status_code == 200
        store.close()


@both
def test_a_busy_store_is_503_with_a_time_to_retry(settings: Settings, documents: Any) -> None:
    short = settings.model_copy(update={"busy_timeout_seconds": 0.2})
    with running_server(short) as url:
        store = open_store(settings)
        with store.write():
            answer = httpx2.post(url + URL, json=documents.sample(0), timeout=10)
            assert (answer.status_code, answer.json()["type"]) == (503, "unavailable")
            assert answer.headers["retry-after"] == "1"
        store.close()
        assert httpx2.post(url + URL, json=documents.sample(0), timeout=10).status_code == 200


def test_readers_are_answered_while_more_ingest_requests_wait_than_there_are_threads(
    settings: Settings, documents: Any
) -> None:
    unbounded = httpx2.Limits(max_connections=None)
    with running_server(settings) as url, httpx2.Client(base_url=url, timeout=60, limits=unbounded) as client:
        client.post(URL, json=documents.sample(0))
        store = open_store(settings)
        answers: list[int] = []

        def post(step: int) -> None:
            answers.append(client.post(URL, json=documents.sample(step, [])).status_code)

        writers = [threading.Thread(target=post, args=(step,)) for step in range(1, 61)]
        with store.write():
            for writer in writers:
                writer.start()
            for path in ("/api/v1/runs", "/api/v1/runs/demo/layers", "/metrics") * 3:
                assert client.get(path).status_code == 200
            assert answers == []
        store.close()
        for writer in writers:
            writer.join()
        assert answers == [200] * 60


def test_a_request_that_finds_no_ingest_thread_in_time_is_503() -> None:
    async def scenario() -> Problem:
        gate = Gate(max_body_bytes=1000, wait_seconds=0.05)
        leave = threading.Event()
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(gate.run, leave.wait)
            await anyio.sleep(0)
            with pytest.raises(Problem) as refused:
                await gate.run(leave.wait)
            leave.set()
        # Those that were working end in good order, and there is room again.
        assert await gate.run(lambda: "done") == "done"
        return refused.value

    problem = anyio.run(scenario)
    assert (problem.status, problem.headers["Retry-After"]) == (503, "1")


def test_bodies_that_memory_should_not_hold_at_once_are_429(settings: Settings) -> None:
    """Four of the largest may be on their way; the fifth is told to come back."""
    size = 100_000
    small = settings.model_copy(update={"max_body_bytes": size})
    head = (
        f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    with running_server(small) as url, ExitStack() as opened:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(4):
            sender = opened.enter_context(socket.create_connection((host, int(port))))
            sender.sendall(head.encode() + b" " * (size - 1))
        body = b" " * (size // 2)
        answer = httpx2.Response(200)
        deadline = time.monotonic() + 10
        while answer.status_code != 429 and time.monotonic() < deadline:
            answer = httpx2.post(url + URL, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["type"]) == (429, "too-many-requests")
        assert answer.headers["retry-after"] == "1"
        opened.close()
        while answer.status_code == 429 and time.monotonic() < deadline:
            answer = httpx2.post(url + URL, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
