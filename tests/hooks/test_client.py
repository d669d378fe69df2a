"""The sender: what travels, what is sent again, what is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, backlog, outage
from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.monitor.wire import parse_sample

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Accept = Callable[..., dict[str, Any]]

PROBLEM = "https://example.invalid/problems/"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_BACKOFF_SECONDS", 0.01)


@pytest.fixture
def model() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def one_more_step(guard: Guard, model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()
    guard.step()
    assert guard.flush(10)


@pytest.fixture
def trained(model: nn.Module, endpoint: Any, watch: Watch, train: Train) -> Any:
    """The guard of `model` after so many steps with a server."""

    def run(number: int) -> Any:
        guard = watch(model, server=endpoint.url, run="sent", recompute=0)
        train(model, torch.optim.SGD(model.parameters(), 0.01), number)
        return guard

    return run


def test_a_sample_arrives_as_msgpack_and_equals_the_last_one(trained: Any, endpoint: Any, read: Read) -> None:
    guard = trained(1)
    guard.log(loss=float("nan"))
    assert guard.flush(10)
    assert endpoint.paths == ["/api/v1/runs/sent/samples"]
    assert endpoint.headers[0]["content-type"] == "application/msgpack"
    assert isinstance(endpoint.requests[0]["columns"]["count"]["data"], bytes)
    arrived, last = parse_sample(endpoint.requests[0]), read(guard).sample
    assert arrived.slots == last.slots
    assert all(
        (arrived.columns[name] == last.columns[name])[~last.nulls[name]].all() for name in last.columns
    )
    assert arrived.run["loss"] != arrived.run["loss"]


def test_the_slot_list_travels_once_then_its_digest(trained: Any, endpoint: Any, model: nn.Module) -> None:
    guard = trained(1)
    assert guard.flush(10)
    first = endpoint.requests[0]
    listed = [Slot.from_wire(slot) for slot in first["slots"]]
    guard.step()
    guard.step()  # a step without a forward: nothing measured, nothing sent
    one_more_step(guard, model)
    assert len(endpoint.requests) == 2
    assert "slots" not in endpoint.requests[1]
    assert endpoint.requests[1]["slots_id"] == slots_id(listed)


def test_unknown_slots_are_sent_again_in_full(
    trained: Any, endpoint: Any, accept: Accept, model: nn.Module
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if "slots" not in body and not forgotten:
            forgotten.append(body["step"])
            return 409, {"type": PROBLEM + "slots-unknown", "status": 409}
        return 200, accept(body)

    forgotten = []
    endpoint.answer = answer
    guard = trained(1)
    assert guard.flush(10)
    one_more_step(guard, model)
    assert forgotten == [1]
    assert [("slots" in body, body["step"]) for body in endpoint.requests] == [
        (True, 0),
        (False, 1),
        (True, 1),
    ]


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_busy_server_is_asked_again_with_the_same_batch_id(
    trained: Any, endpoint: Any, accept: Accept, status: int
) -> None:
    endpoint.answer = lambda body: (
        (200, accept(body)) if len(endpoint.requests) > 3 else (status, {"type": "busy"})
    )
    guard = trained(1)
    assert guard.flush(10)
    assert len(endpoint.requests) == 4
    assert len({body["batch_id"] for body in endpoint.requests}) == 1


def test_samples_that_waited_arrive_together_in_order(trained: Any, endpoint: Any, accept: Accept) -> None:
    gate = threading.Event()
    endpoint.answer = lambda body: (gate.wait(10), (200, accept(body)))[1]
    guard = trained(6)
    gate.set()
    assert guard.flush(10)
    assert [sample["step"] for sample in endpoint.samples] == list(range(6))
    assert any("samples" in body for body in endpoint.requests)


def test_a_refused_sample_is_dropped_counted_and_said_once_and_its_neighbours_arrive(
    trained: Any, endpoint: Any, accept: Accept, caplog: pytest.LogCaptureFixture, model: nn.Module
) -> None:
    def one(sample: dict[str, Any]) -> Any:
        bad = sample["step"] in (1, 2)
        return {"type": PROBLEM + "validation", "status": 422, "detail": "no"} if bad else accept(sample)

    def answer(body: dict[str, Any]) -> Any:
        gate.wait(10)
        if "samples" in body:
            return 200, {"results": [one(sample) for sample in body["samples"]]}
        return one(body).get("status", 200), one(body)

    gate = threading.Event()
    endpoint.answer = answer
    guard = trained(4)
    gate.set()
    assert guard.flush(10)
    one_more_step(guard, model)
    assert endpoint.samples[-1]["dropped"] == 2
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "refuses the sample of step 1, attempt 0, of run sent: 422" in lines[0]


def test_a_body_that_is_refused_whole_is_taken_apart(trained: Any, endpoint: Any, accept: Accept) -> None:
    gate = threading.Event()

    def answer(body: dict[str, Any]) -> Any:
        gate.wait(10)
        return (413, {"type": PROBLEM + "too-large"}) if "samples" in body else (200, accept(body))

    endpoint.answer = answer
    guard = trained(5)
    gate.set()
    assert guard.flush(10)
    assert [body["step"] for body in endpoint.requests if "samples" not in body] == list(range(5))


def test_without_a_disk_a_full_queue_drops_the_oldest_and_counts_them(
    model: nn.Module,
    endpoint: Any,
    accept: Accept,
    watch: Watch,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(backlog, "MEMORY_SAMPLES", 3)
    endpoint.answer = lambda body: (503, {})
    guard = watch(model, server=endpoint.url, run="sent", recompute=0, spool_dir="")
    train(model, torch.optim.SGD(model.parameters(), 0.01), 8)
    guard.last_sample()
    end = time.monotonic() + 30
    while guard._session.builder.dropped < 5:
        assert time.monotonic() < end
        time.sleep(0.005)
    taken: list[int] = []

    def take(body: dict[str, Any]) -> Any:
        taken.extend(sample["step"] for sample in body.get("samples", [body]))
        return 200, accept(body)

    endpoint.answer = take
    assert guard.flush(10)
    one_more_step(guard, model)
    # What was on its way when the others were dropped is among the four of nine that are left.
    assert len(taken) == 4
    assert taken[-2:] == [7, 8]
    assert endpoint.samples[-1]["dropped"] == 5
    lines = [r.message for r in caplog.records if "dropped" in r.message]
    assert len(lines) == 1
    assert endpoint.url in lines[0]


def test_training_does_not_wait_for_a_server_that_hangs(trained: Any, endpoint: Any) -> None:
    gate = threading.Event()
    endpoint.answer = lambda body: (gate.wait(10), (503, {}))[1]
    guard = trained(3)  # would take three hanging answers if it waited
    assert guard.last_sample()["step"] == 2
    assert len(endpoint.requests) <= 1
    gate.set()


def test_jitter_does_not_draw_from_the_trainers_generator(
    trained: Any, endpoint: Any, accept: Accept
) -> None:
    import random

    random.seed(5)
    before = random.getstate()
    endpoint.answer = lambda body: (200, accept(body)) if len(endpoint.requests) > 2 else (503, {})
    assert trained(1).flush(10)
    assert random.getstate() == before


def test_each_sample_logs_one_line_with_its_worst_slots(
    watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fp8_safeguard")
    model = nn.Linear(8, 8)
    guard = watch(model, run="logged")
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert guard.flush(10)
    lines = [
        r.message
        for r in caplog.records
        if r.levelno == logging.INFO and " step " in r.message and "worst" in r.message
    ]
    assert len(lines) == 2
    assert lines[1].startswith("logged step 1: worst underflow 0 % (")
    assert "worst cosine 0.99" in lines[1]
