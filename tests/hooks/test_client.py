"""The sender: what travels, what is sent again, what is lost, and how the process ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.hooks import client as client_module
from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.monitor.wire import parse_sample

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Accept = Callable[..., dict[str, Any]]

PROBLEM = "https://example.invalid/problems/"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_SECONDS", 0.01)


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
    assert sum("refuses a sample" in r.message for r in caplog.records) == 1


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


def test_a_full_queue_drops_the_oldest_and_counts_them(
    trained: Any, endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "QUEUE_SAMPLES", 3)
    endpoint.answer = lambda body: (503, {})
    guard = trained(8)
    assert not guard.flush(0.3)
    client = guard._session.client
    assert client.waiting == 3
    assert [queued.sample.step for queued in client._outbox] == [5, 6, 7]
    assert guard._session.builder.dropped == 5


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


def test_without_a_server_samples_go_to_the_spool_file(watch: Watch, train: Train, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model, run="kept", attempt="a/b", spool_dir=tmp_path / "spool")
    train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    assert guard.flush(10)
    with (tmp_path / "spool" / "kept-a_b.msgpack").open("rb") as file:
        samples = [parse_sample(document) for document in msgpack.Unpacker(file)]
    assert [sample.step for sample in samples] == [0, 1, 2]


def test_each_sample_logs_one_line_with_its_worst_slots(
    watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fp8_safeguard")
    model = nn.Linear(8, 8)
    guard = watch(model, run="logged")
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert guard.flush(10)
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO and "step" in r.message]
    assert len(lines) == 2
    assert lines[1].startswith("logged step 1: worst underflow 0 % (")
    assert "worst cosine 0.99" in lines[1]


SCRIPT = """
    import logging, os, sys, time
    import torch
    from torch import nn
    from fp8_safeguard.hooks import attach, farewell
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    model = nn.Linear(8, 8)
    attach(model, server=sys.argv[1], run="exit", every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def steps(number):
        for _ in range(number):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def script(tail: str, url: str, **options: Any) -> subprocess.Popen:
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(tail)
    return subprocess.Popen(
        [sys.executable, "-c", code, url],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


class TestTheEndOfTheProcess:
    def test_b74_everything_arrives_before_a_normal_exit(self, endpoint: Any) -> None:
        process = script("steps(50)", endpoint.url)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert sorted(sample["step"] for sample in endpoint.samples) == list(range(50))

    def test_b74_a_black_hole_holds_the_exit_up_for_a_bounded_time_and_the_loss_is_counted(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as hole:  # accepts, never answers
            url = f"http://127.0.0.1:{hole.getsockname()[1]}"
            process = script("farewell.EXIT_SECONDS = 0.5\nsteps(5)\nprint('done', flush=True)", url)
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            start = time.monotonic()
            _, errors = process.communicate(timeout=30)
            assert time.monotonic() - start < 10
        assert process.returncode == 0
        assert "5 samples were not sent within 0.5 s and are lost" in errors

    def test_b74_sigterm_sends_the_rest_and_keeps_the_exit_code(self, endpoint: Any) -> None:
        tail = "steps(5)\nprint('ready', flush=True)\ntime.sleep(60)"
        process = script(tail, endpoint.url)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGTERM, errors
        assert sorted(sample["step"] for sample in endpoint.samples) == list(range(5))

    def test_b74_an_earlier_sigterm_handler_still_runs(self, endpoint: Any) -> None:
        first = "import signal\nsignal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))\n"
        tail = "steps(2)\nprint('ready', flush=True)\ntime.sleep(60)"
        code = textwrap.dedent(first) + textwrap.dedent(SCRIPT) + tail
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys\n" + code, endpoint.url], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 7
        assert sorted(sample["step"] for sample in endpoint.samples) == [0, 1]

    def test_b74_after_a_handler_that_goes_on_so_does_the_monitor(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        seen: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(len(endpoint.samples)))
        try:
            model = nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            guard = watch(model, server=endpoint.url, run="term")
            train(model, optimizer, 2)
            signal.raise_signal(signal.SIGTERM)
            train(model, optimizer)
            assert guard.flush(10)
            guard.detach()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen == [2]
        assert [sample["step"] for sample in endpoint.samples] == [0, 1, 2]

    def test_b75_forked_workers_with_the_model_finish_and_report_nothing(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, server=endpoint.url, run="fork")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer)
        assert guard.flush(10)

        class Data(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 6

            def __getitem__(self, index: int) -> torch.Tensor:
                with torch.enable_grad():
                    model(torch.ones(2, 8)).sum().backward()
                    optimizer.step()
                return torch.tensor(os.getpid())

        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
        pids = {int(pid) for _ in range(3) for batch in loader for pid in batch}
        assert os.getpid() not in pids
        train(model, optimizer)
        assert guard.flush(10)
        assert [sample["step"] for sample in endpoint.samples] == [0, 1]
