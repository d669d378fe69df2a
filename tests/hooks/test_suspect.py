"""A server that fails on one sample gets the others; one that fails on all of them loses nobody's."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, outage

Answer = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_BACKOFF_SECONDS", 0.002)


@pytest.fixture
def trained(endpoint: Any, watch: Any, train: Any) -> Callable[..., Guard]:
    model = nn.Linear(8, 8)

    def run(steps: int, **options: Any) -> Guard:
        guard: Guard = watch(model, **{"server": endpoint.url, "run": "r", "recompute": 0, **options})
        train(model, torch.optim.SGD(model.parameters(), 0.1), steps)
        guard.last_sample()
        return guard

    return run


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def steps_of(body: dict[str, Any]) -> list[int]:
    return [sample["step"] for sample in body.get("samples", [body])]


def failing_on(step: int, accept: Callable[..., dict[str, Any]], failed: list[int]) -> Answer:
    """A service that answers 500 to every request with that sample in it."""

    def answer(body: dict[str, Any]) -> Any:
        if step in steps_of(body):
            failed.append(len(steps_of(body)))
            return 500, {"type": "internal-error", "status": 500, "title": "no luck"}
        return 200, accept(body)

    return answer


def refused_in(spool_dir: Path) -> list[tuple[int, str]]:
    (path,) = (spool_dir / "r").glob("*.sqlite*refused")
    with sqlite3.connect(path) as connection:
        found = list(connection.execute("SELECT step, reason FROM refused"))
    connection.close()
    return found


@pytest.mark.parametrize("poison", [0, 4, 19])
def test_a_sample_that_the_server_fails_on_is_set_aside_counted_and_named(
    trained: Any, endpoint: Any, accept: Any, spool_dir: Path, caplog: Any, poison: int
) -> None:
    failed: list[int] = []
    endpoint.answer = lambda body: (503, {})
    guard = trained(20)
    eventually(lambda: guard._session.client._backlog.count == 20)
    endpoint.answer = failing_on(poison, accept, failed)
    if poison == 19:  # nothing behind it tells whose fault it is: it waits, until there is something
        assert not guard.flush(1)
        assert guard._session.client.waiting == 1
        guard._session.model()(torch.randn(2, 8)).sum().backward()
        guard.step()
    assert guard.flush(20)
    taken = [s for body in endpoint.requests if poison not in steps_of(body) for s in steps_of(body)]
    assert sorted(set(taken)) == [n for n in range(20 + (poison == 19)) if n != poison]
    assert failed[-6:] == [1] * 6
    assert guard._session.builder.dropped == 1
    assert [r.getMessage() for r in caplog.records if f"the sample of step {poison}, attempt 0" in r.message]
    guard.detach()
    ((step, reason),) = refused_in(spool_dir)
    assert (step, reason) == (poison, "500 internal-error no luck")


def test_a_sample_of_a_dead_attempt_that_fails_holds_nobody_up(
    trained: Any, endpoint: Any, accept: Any, spool_dir: Path
) -> None:
    endpoint.answer = lambda body: (503, {})
    trained(1).detach(timeout=0.1)
    failed: list[int] = []
    endpoint.answer = failing_on(0, accept, failed)
    guard = trained(0, attempt="1")
    guard.load_state_dict({"step": 1, "plan": {"version": 0, "entries": []}, "attempt": "0"})
    guard._session.model()(torch.randn(2, 8)).sum().backward()
    guard.step()
    assert guard.flush(20)
    assert [body["attempt"]["id"] for body in endpoint.requests[-7:]] == ["0"] * 5 + ["1", "0"]
    assert refused_in(spool_dir)[0][0] == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, {"type": "internal-error"}), (500, "<html>oops</html>"), (413, "<html>too large</html>")],
    ids=["the service", "a gateway", "a proxy with a small limit"],
)
def test_a_server_that_fails_on_everything_makes_nobody_lose_anything(
    trained: Any,
    endpoint: Any,
    accept: Any,
    caplog: Any,
    status: int,
    body: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "LONGEST_BACKOFF_SECONDS", 0.5)
    endpoint.answer = lambda _: (status, body)
    guard = trained(20)
    eventually(lambda: len(endpoint.requests) > 14)
    assert guard._session.client.waiting == 20
    (line,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert f"{endpoint.url} answers samples with an error ({status}" in line
    endpoint.requests.clear()
    endpoint.answer = lambda asked: (200, accept(asked))
    assert guard.flush(20)
    assert [step for asked in endpoint.requests for step in steps_of(asked)] == list(range(20))
    assert guard._session.builder.dropped == 0
