"""The live stream over real HTTP: it tells, it ends, and it holds nothing."""

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from fp8_safeguard.server.events import KEPT_EVENTS, Broadcast, Event
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

API = "/api/v1/runs/demo"


def events(response: httpx2.Response) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(event, data, id) as they arrive; comments are skipped."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id")
            fields = {}
        else:
            fields = {}


def bad_sample(documents: Any, step: int) -> dict[str, Any]:
    slots = documents.slots(8)
    values = [documents.values(slot) for slot in slots]
    values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
    sample: dict[str, Any] = documents.sample(step, slots, values, mode="enforce")
    return sample


def test_a_stream_opens_with_the_state_and_tells_what_was_committed(
    live: httpx2.Client, documents: Any
) -> None:
    live.post(f"{API}/samples", json=documents.sample(0, documents.slots(8), mode="enforce"))
    with live.stream("GET", f"{API}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response)
        assert next(told)[:2] == ("state", {"state": "healthy", "mode": "enforce", "last_step": 0})
        live.post(f"{API}/samples", json=bad_sample(documents, 1))
        kinds: dict[str, Any] = {}
        while "state" not in kinds:
            kind, data, number = next(told)
            assert number is not None
            kinds[kind] = data
    assert list(kinds) == ["sample", "decision", "alert", "plan", "state"]
    assert kinds["sample"]["step"] == 1
    assert kinds["decision"]["layer"] == "blocks.0.mlp"
    assert kinds["plan"]["version"] == 1


def test_a_reader_that_reconnects_is_told_what_it_missed(live: httpx2.Client, documents: Any) -> None:
    live.post(f"{API}/samples", json=documents.sample(0))
    with live.stream("GET", f"{API}/events") as response:
        told = events(response)
        next(told)
        live.post(f"{API}/samples", json=documents.sample(1))
        _, _, number = next(told)
    live.post(f"{API}/samples", json=documents.sample(2))
    live.post(f"{API}/samples", json=documents.sample(3))
    with live.stream("GET", f"{API}/events", headers={"Last-Event-ID": str(number)}) as response:
        told = events(response)
        next(told)
        assert [next(told)[1]["step"] for _ in range(2)] == [2, 3]


def test_a_stream_of_an_unknown_run_is_404(live: httpx2.Client) -> None:
    answer = live.get("/api/v1/runs/none/events")
    assert (answer.status_code, answer.json()["type"]) == (404, "run-not-found")


@pytest.fixture
def held() -> Iterator[Callable[[], int]]:
    """How many database connections of this process are in somebody's hands."""
    out: set[int] = set()
    taken = lambda connection, record, proxy: out.add(id(record))  # noqa: E731
    given = lambda connection, record: out.discard(id(record))  # noqa: E731
    event.listen(Pool, "checkout", taken)
    event.listen(Pool, "checkin", given)
    yield lambda: len(out)
    event.remove(Pool, "checkout", taken)
    event.remove(Pool, "checkin", given)


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[Broadcast]:
    """The broadcasts made in the test."""
    made: list[Broadcast] = []
    begin = Broadcast.__init__

    def remember(self: Broadcast, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Broadcast, "__init__", remember)
    return made


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def abort_stream(host: str, port: int) -> None:
    """Ask for the stream and hang up at once, with a reset."""
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(f"GET {API}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())


def test_b70_streams_pin_no_connection_and_do_not_hold_up_ingest(
    settings: Settings, documents: Any, held: Callable[[], int], broadcasts: list[Broadcast]
) -> None:
    with running_server(settings) as url, httpx2.Client(base_url=url, timeout=30) as client:
        client.post(f"{API}/samples", json=documents.sample(0, []))
        limits = httpx2.Limits(max_connections=None)
        with httpx2.Client(base_url=url, timeout=30, limits=limits) as viewers:
            opened = [viewers.stream("GET", f"{API}/events") for _ in range(30)]
            responses = [stream.__enter__() for stream in opened]
            told = [events(response) for response in responses]
            assert [next(each)[0] for each in told] == ["state"] * 30
            assert wait_until(lambda: held() == 0)
            for step in range(1, 101):
                assert client.post(f"{API}/samples", json=documents.sample(step, [])).status_code == 200
            assert [[next(each)[1]["step"] for _ in range(100)] for each in told] == [
                list(range(1, 101))
            ] * 30
            for stream in opened:
                stream.__exit__(None, None, None)
        host, port = client.base_url.host, client.base_url.port
        for _ in range(200):
            abort_stream(host, port)
        assert wait_until(lambda: held() == 0)
        assert wait_until(lambda: broadcasts[0].readers() == 0)
        with client.stream("GET", f"{API}/events") as response:
            last = events(response)
            assert next(last)[1]["last_step"] == 100
            httpx2.post(f"{url}{API}/samples", json=documents.sample(101, []))
            assert next(last)[1]["step"] == 101


def test_the_server_stops_with_streams_open(settings: Settings, documents: Any) -> None:
    ended = threading.Event()

    def watch(url: str) -> None:
        with httpx2.stream("GET", f"{url}{API}/events", timeout=30) as response:
            for _ in response.iter_lines():
                pass
        ended.set()

    with running_server(settings) as url:
        httpx2.post(f"{url}{API}/samples", json=documents.sample(0))
        viewer = threading.Thread(target=watch, args=(url,))
        viewer.start()
        time.sleep(0.3)
        leaving = time.monotonic()
    assert ended.wait(10)
    viewer.join()
    assert time.monotonic() - leaving < 4
    with pytest.raises(httpx2.TransportError):
        httpx2.get(url)


def test_a_slow_reader_loses_the_oldest_events_and_nobody_waits() -> None:
    async def scenario() -> tuple[list[int], int]:
        broadcast = Broadcast(queue_events=4)
        reader = broadcast.subscribe("demo")
        broadcast.publish(Event(run="demo", kind="sample", data={"step": step}) for step in range(10))
        broadcast.publish([Event(run="other", kind="sample", data={})])
        await asyncio.sleep(0)
        held = [reader.queue.get_nowait() for _ in range(reader.queue.qsize())]
        broadcast.unsubscribe(reader)
        assert broadcast.readers() == 0
        return [event.data["step"] for event in held if event is not None], reader.lost

    assert asyncio.run(scenario()) == ([6, 7, 8, 9], 6)


def test_only_the_newest_events_are_kept_for_those_who_reconnect() -> None:
    async def scenario() -> list[int]:
        broadcast = Broadcast(queue_events=KEPT_EVENTS + 10)
        broadcast.publish(
            Event(run="demo", kind="sample", data={"step": step}) for step in range(KEPT_EVENTS + 5)
        )
        reader = broadcast.subscribe("demo", after=0)
        held = [reader.queue.get_nowait() for _ in range(reader.queue.qsize())]
        return [event.number for event in held if event is not None]

    assert asyncio.run(scenario()) == list(range(6, KEPT_EVENTS + 6))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_b80_the_stream_is_strict_json_whatever_was_measured(
    live: httpx2.Client, documents: Any, word: str
) -> None:
    """Alerts and decisions quote what was measured; a browser must be able to parse each of them."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"bare {name} in the stream")

    slots = documents.slots(2)
    values = [documents.values(slot) for slot in slots]
    values[6]["sum_sq_err"] = "Infinity"  # an error without a bound
    for row in values[8:]:
        row.update(amax=word, sum_sq=word, sum_sq_q=word, sum_sq_err=word, nan=2, inf=1)
    run = {"loss": word, "gradient_norm": word}
    live.post(f"{API}/samples", json=documents.sample(0, mode="enforce"))
    kinds: set[str] = set()
    alerts: dict[str, Any] = {}
    told: dict[str, Any] = {}
    with live.stream("GET", f"{API}/events") as response:
        lines = response.iter_lines()
        for step in (1, 2, 3):
            body = documents.sample(step, slots, values, run=run)
            assert live.post(f"{API}/samples", json=body).status_code == 200
        live.post(f"{API}/samples", json=documents.sample(4))
        while told.get("step") != 4:
            name, _, value = next(lines).partition(":")
            if name == "event":
                kinds.add(value.strip())
            elif name == "data":
                told = json.loads(value, parse_constant=refuse)
                alerts |= {told["rule"]: told["value"]} if "severity" in told else {}
    assert {"sample", "alert", "decision", "state"} <= kinds
    assert alerts["gemm-error"] == "Infinity"
    assert alerts["non-finite"] > 0


def test_b62_b80_an_event_of_any_layer_name_is_one_line_of_json(live: httpx2.Client, documents: Any) -> None:
    """A line break in a name would end the event's data in the middle."""
    names = ["a\nb", "a\r\ndata: {}", "a/b", "a%2Fb", "ü"]
    slots = [{"index": n, "layer": name, "gemm": "dgrad"} for n, name in enumerate(names)]
    values = [documents.values(slot) for slot in slots]
    for row in values:
        row["sum_sq_err"] = row["sum_sq"] * 0.25
    live.post(f"{API}/samples", json=documents.sample(0))
    with live.stream("GET", f"{API}/events") as response:
        told = events(response)
        next(told)
        live.post(f"{API}/samples", json=documents.sample(1, slots, values))
        seen = set()
        for kind, data, _ in told:
            if kind == "alert":
                seen.add(data["layer"])
            if kind == "state":
                break
    assert seen == set(names)
