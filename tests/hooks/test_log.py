"""What a trainer may log: numbers of every kind, and nothing that only looks like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


@pytest.fixture
def logged(watch: Watch, read: Read, train: Train) -> Any:
    """A guard, and the value of a field as the server would read it."""
    model = nn.Linear(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def value(given: Any) -> tuple[Any, Any]:
        train(model, optimizer)
        guard.log(gradient_norm=given)
        guard.log_scalar("", "mine", given)
        sample = read(guard).sample
        return sample.run["gradient_norm"], sample.scalars[0]["value"]

    return guard, value


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (np.int64(3), 3.0),
        (np.uint8(200), 200.0),
        (np.float16(np.inf), math.inf),
        (np.float64("nan"), math.nan),
        (np.array(2.5), 2.5),
        (torch.tensor(1.25), 1.25),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.tensor(3, dtype=torch.int64), 3.0),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (Decimal("0.1"), 0.1),
        (Decimal("-Infinity"), -math.inf),
        (Fraction(1, 4), 0.25),
        (2**60, float(2**60)),
        (-0.0, 0.0),
    ],
)
def test_b76_a_number_of_any_kind_arrives_as_a_float(logged: Any, given: Any, wanted: float) -> None:
    _, value = logged
    for got in value(given):
        assert type(got) is float
        assert got == wanted or (math.isnan(got) and math.isnan(wanted))


@pytest.mark.parametrize(
    "given",
    [
        True, np.bool_(True), torch.tensor(True), "1.5", "a", b"1", [1.0], {}, object(), 1j,
        torch.tensor(1j), torch.ones(2), torch.empty(0), np.ones(2), np.array("1"), np.complex64(1),
        10**400, Decimal("sNaN"),
    ],
)  # fmt: skip
def test_b76_what_is_no_number_is_refused_with_the_ways_out(logged: Any, given: Any) -> None:
    guard, _ = logged
    for call in (lambda: guard.log(loss=given), lambda: guard.log_scalar("layer", "loss", given)):
        with pytest.raises(OptionError, match=r"loss is .*give a number .* or a tensor of one element"):
            call()


def test_a_tensor_that_changes_later_was_copied(logged: Any) -> None:
    _, value = logged
    given = torch.tensor(7.0)
    got = value(given)
    given.zero_()
    assert got == (7.0, 7.0)


@pytest.mark.parametrize(("layer", "name"), [(5, "x"), ("layer", ""), ("layer", None), (None, "x")])
def test_a_scalar_without_a_name_is_refused(logged: Any, layer: Any, name: Any) -> None:
    with pytest.raises(OptionError, match="give a text"):
        logged[0].log_scalar(layer, name, 1.0)


def test_a_learning_rate_that_is_not_finite_is_left_out_and_said_once(
    watch: Watch, read: Read, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """The wire has no place for it: the server would refuse the whole sample."""
    model = nn.Linear(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given in (math.nan, torch.tensor(math.inf), 0.1):
        train(model, optimizer)
        guard.log(learning_rate=given, tokens=4096)
        run = read(guard).sample.run
        assert run["tokens"] == 4096
        assert run.get("learning_rate") == (given if given == 0.1 else None)
    assert sum("learning_rate is nan" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4)])
def test_b76_a_step_number_may_be_numpys(watch: Watch, read: Read, step: Any) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model)
    model(torch.randn(2, 8)).sum().backward()
    guard.step(step)
    assert read(guard).sample.step == 4


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, np.float32(1), np.bool_(True), torch.tensor(1)])
def test_b76_a_step_number_of_another_kind_is_refused(watch: Watch, step: Any) -> None:
    with pytest.raises(OptionError, match="give the whole number, 0 or above"):
        watch(nn.Linear(8, 8)).step(step)


@pytest.mark.parametrize("later", [2.5, torch.tensor(2.5), torch.tensor([2.5], dtype=torch.float64)], ids=str)
@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (1.0, None),
        (math.inf, math.inf),
        (torch.tensor(1), None),
        (torch.tensor([1.0], dtype=torch.bfloat16), None),
        (torch.tensor(-math.inf), -math.inf),
        (torch.tensor(math.nan, dtype=torch.float16), math.nan),
    ],
    ids=str,
)
def test_of_several_values_in_a_step_the_last_counts_unless_one_is_not_finite(
    watch: Watch, before: Any, kept: float | None, later: Any
) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model)
    model(torch.randn(4, 8)).sum().backward()
    for value in (before, later):
        guard.log(loss=value, learning_rate=0.1, gradient_norm=value)
    guard.log(learning_rate=0.2)
    guard.step(0)
    sample: Any = guard.last_sample()
    wanted = 2.5 if kept is None else kept
    assert [float(sample["run"][name]) for name in ("loss", "gradient_norm")] == pytest.approx(
        [wanted] * 2, nan_ok=True
    )
    assert sample["run"]["learning_rate"] == 0.2
