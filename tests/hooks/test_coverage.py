"""Coverage says what was really seen of every weight matrix, and why not where it was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, coverage
from fp8_safeguard.kernels import Fp8Linear
from fp8_safeguard.monitor.coverage import STATUSES

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


def named(guard: Guard) -> dict[str, dict[str, Any]]:
    rows = guard.coverage()
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(
        row["status"] in STATUSES and row.keys() == {"name", "shape", "status", "reason"} for row in rows
    )
    return {row["name"]: row for row in rows}


def once(model: nn.Module, *inputs: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model(*inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Body(nn.Module):
    """A layer of each fate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(5, 8), nn.Conv1d(8, 8, 1)
        self.used, self.ours, self.idle = nn.Linear(8, 8), Fp8Linear(8, 8), nn.Linear(8, 8)
        self.detached, self.excluded = nn.Linear(8, 8), nn.Linear(8, 8)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ours(self.used(x)) + self.detached(x).detach() + self.excluded(x)


def test_every_matrix_has_one_row_and_what_was_seen_of_it(watch: Watch, read: Read) -> None:
    model = Body()
    guard = watch(model, filter=lambda module, name: name != "excluded")
    layers = {"used", "ours", "idle", "detached", "excluded", "normed"}
    assert named(guard).keys() == {*layers, "embed.weight", "conv.weight"}
    assert named(guard)["idle"]["status"] == "observed"
    once(model, torch.randn(4, 8))
    assert read(guard).sample.step == 0
    said = {name: (row["status"], row["reason"]) for name, row in named(guard).items()}
    assert [said[name][0] for name in ("used", "ours", "detached")] == ["observed"] * 3
    assert said["used"][1] == "real output compared; dgrad and wgrad emulated"
    assert said["ours"][1] == ""
    assert "seen without dy" in said["detached"][1]
    reasons = {
        "idle": "registered, never called", "excluded": "excluded by filter", "normed": "parametrized",
        "embed.weight": "embedding", "conv.weight": "convolution",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert said[name][0] == "not observed"
        assert reason in said[name][1]


def test_the_rows_travel_with_the_first_sample_and_when_they_have_changed(
    watch: Watch, endpoint: Any, read: Read
) -> None:
    model = Body()
    guard = watch(model, server=endpoint.url, run="coverage")
    x = torch.randn(4, 8)
    for _ in range(3):
        once(model, x)
    once(nn.Sequential(model.idle, model), x)
    assert [read(guard)[f"idle {part}"].rows for part in ("x row", "dy row")] == [4, 4]
    for _ in range(2):
        once(model, x)
    assert guard.flush(10)
    sent = [sample.get("coverage") for sample in endpoint.samples]
    assert [rows is not None for rows in sent] == [True, False, False, True, False, False]
    seen = [{row["name"]: row["status"] for row in rows}["idle"] for rows in (sent[0], sent[3])]
    assert seen[0] == "not observed" != seen[1]
    assert {row["name"] for row in sent[0]} == set(named(guard))


@pytest.mark.parametrize("steps", [1, 3])
def test_b13_a_model_whose_modules_are_never_called_is_not_called_observed(
    watch: Watch, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """A trainer that calls forward() itself passes every hook by: there is no sample, and that is said."""
    model = nn.Linear(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(steps):
        model.forward(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert guard.last_sample() is None
    row = named(guard)[""]
    assert row["status"] == "not observed"
    assert "registered, never called" in row["reason"]
    assert sum("without a forward of any observed layer" in r.message for r in caplog.records) == 1
    once(model, torch.randn(4, 8))
    assert guard.last_sample() is not None
    assert named(guard)[""]["status"] == "observed"


class TestReplaced:
    def test_a_module_that_user_code_puts_in_the_place_of_another_is_named(
        self, watch: Watch, read: Read, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
        guard = watch(model)
        once(model, torch.randn(4, 8))
        old = model["b"]
        model["b"] = nn.Linear(8, 8)
        for _ in range(3):
            once(model, torch.randn(4, 8))
            read(guard)
        assert [r.message for r in caplog.records if "was replaced" in r.message] == [
            "module b was replaced after attach() and is no longer observed: detach(), then attach again last"
        ]
        rows = named(guard)
        assert rows.keys() == {"a", "b"}
        assert rows["b"]["status"] == "not observed"
        assert rows["b"]["reason"] == "replaced after attach(): attach again last"
        assert rows["a"]["status"] == "observed"
        assert old is not model["b"]

    def test_a_conversion_of_the_whole_model_is_one_line(
        self, watch: Watch, read: Read, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        guard = watch(model)
        once(model, torch.randn(4, 8))
        for i in range(2):
            converted = Fp8Linear(8, 8)
            converted.weight = model[i].weight
            model[i] = converted
        assert named(guard)["1"]["reason"] == "replaced after attach(): attach again last"
        assert {row["status"] for row in guard.coverage()} == {"not observed"}
        assert sum("module 0 and 1 others was replaced" in r.message for r in caplog.records) == 1
        guard.detach()
        again = watch(model)
        once(model, torch.randn(4, 8))
        assert {row["status"] for row in again.coverage()} == {"observed"}

    def test_a_module_that_is_only_wrapped_goes_on(
        self, watch: Watch, read: Read, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As an adapter does, which brings layers of its own."""

        class Adapter(nn.Module):
            def __init__(self, base_layer: nn.Linear) -> None:
                super().__init__()
                self.base_layer, self.lora = base_layer, nn.Linear(8, 8, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base_layer(x) + self.lora(x)

        model = nn.Sequential(nn.Linear(8, 8))
        guard = watch(model)
        once(model, torch.randn(4, 8))
        model[0] = Adapter(model[0])
        once(model, torch.randn(4, 8))
        assert read(guard)["0 x row"].rows == 4
        rows = named(guard)
        assert rows["0"]["status"] == "observed"
        assert rows["0.lora.weight"]["reason"] == "added after attach(): attach again last"
        assert not [r for r in caplog.records if "replaced" in r.message]


def test_a_large_model_is_only_looked_through_where_something_has_changed(
    watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in walks through the model, since no test reads a clock."""
    walk, walks = coverage._raw_parameters, []
    monkeypatch.setattr(coverage, "_raw_parameters", lambda *a: (walks.append(a), walk(*a))[1])
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    guard = watch(model)
    for _ in range(3):
        once(model, torch.randn(1, 1))
        read(guard)
    assert len(walks) == 1
    session = guard._session
    assert coverage.coverage_rows(session) is None
    assert len(walks) == 1
    session.samples = 100
    for layer in session.layers:
        layer.seen_at = 99
    assert coverage.coverage_rows(session) is None
    assert len(walks) == 2


def test_a_fault_in_the_report_costs_the_report_only(
    watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model)

    def broken(samples: int) -> None:
        raise RuntimeError("no report")

    monkeypatch.setattr(guard._session.coverage, "changed", broken)
    once(model, torch.randn(4, 8))
    assert read(guard).sample.coverage is None
    assert sum("no report" in r.message for r in caplog.records) == 1
