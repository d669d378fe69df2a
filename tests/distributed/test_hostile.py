"""Training never hangs, fails or changes its numbers because of us, and every rank has one plan at every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

Launch = Callable[..., Any]
APART = "do not report together any more"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_in_mid_step_holds_nobody_up(launch: Launch, size: int) -> None:
    results = launch("hostile", "killed", size).results(dead=(size - 1,))
    for result in results:
        assert result["seconds"] < 60  # of a time-out of 120
        assert (result["flushed"], result["together"]) == (True, False)
        assert result["seen"] == results[0]["seen"]
    versions = [version for _, version, _ in results[0]["seen"]]
    assert versions == sorted(versions)
    assert versions[-1] == 1
    assert set(range(14)) <= set(results[0]["steps"])


def test_a_rank_that_is_gone_before_it_connects_costs_one_time_out_and_no_sample(launch: Launch) -> None:
    (first,) = launch("hostile", "gone_meeting", 2).results(dead=(1,))
    assert first["steps"] == list(range(10))
    assert not first["together"]


def test_a_rank_that_stands_still_for_a_while_is_waited_for(launch: Launch) -> None:
    results = launch("hostile", "hung", 3).results()
    assert [result["together"] for result in results] == [True] * 3
    assert [result["warnings"] for result in results] == [[]] * 3
    assert results[0]["seen"] == results[1]["seen"] == results[2]["seen"]
    assert {version for _, version, _ in results[0]["seen"]} == {0, 1, 2}


def test_guards_outlive_the_trainers_process_group(launch: Launch) -> None:
    first, second = launch("hostile", "no_group", 2).results()
    assert first["seen"] == second["seen"]
    assert first["seen"][-1][1] == 1
    assert (first["together"], second["together"]) == (True, True)
    assert first["precision"] == second["precision"] == "fp8"


def test_a_guard_that_one_rank_alone_takes_off_and_on_changes_no_number(launch: Launch) -> None:
    results, bare = launch("hostile", "attached_again", 2).results(), launch("hostile", "bare", 2).results()
    for result in results:
        assert (result["refused"], result["together"]) == (1, True)
        assert result["weights"] == bare[0]["weights"]
        assert sum(APART in line for line in result["warnings"]) == 1


def test_an_emergency_and_a_plan_of_the_server_that_cross_leave_one_plan_on_every_rank(
    launch: Launch,
) -> None:
    first, second = launch("hostile", "crossing", 2).results()
    assert first["seen"] == second["seen"]
    plain, ours, both = (key for key, _ in groupby(first["seen"]))
    assert plain == [0, None, "fp8", "fp8"]
    assert (ours[0], ours[2:]) == (1, ["bf16", "fp8"])
    assert (both[0], both[2:]) == (9, ["bf16", "bf16"])
    # Nothing that was decided alone is lost, and nothing of the server's came before it had heard of it.
    assert first["seen"][44 - 1][0] == 1
    assert len(first["taken"]) == 1
    assert first["waiting"] == []
