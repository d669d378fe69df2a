"""Several threads and processes on one store."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.store import open_store

URL = "/api/v1/runs/demo/samples"


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


def test_b47_b59_processes_that_migrate_and_replay_together_store_each_slot_once(
    settings: Settings, documents: Any, tmp_path: Path
) -> None:
    replay = tmp_path / "replay.jsonl"
    replay.write_text("\n".join(json.dumps(documents.sample(step)) for step in range(30)))
    command = [sys.executable, "-c", WRITER, settings.database_url, str(replay)]
    writers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert all(writer.stdout and writer.stdout.readline() == "0001\n" for writer in writers)
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    counted = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    for mine, others in zip(*counted, strict=True):
        assert sorted([mine, others]) == [[0, 16], [16, 0]]


def test_readers_are_answered_while_a_writer_holds_the_lock(settings: Settings, documents: Any) -> None:
    with running_server(settings) as url:
        httpx2.post(url + URL, json=documents.sample(0))
        store = open_store(settings)
        with store.write():
            assert httpx2.get(f"{url}/api/v1/runs/demo", timeout=5).json()["last_step"] == 0
            assert httpx2.get(f"{url}/metrics", timeout=5).status_code == 200
        store.close()


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
