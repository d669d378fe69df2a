"""Two ranks report together, take up a plan at the same step, and show which of them is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]


def test_b23_ranks_with_and_without_tokens_do_the_same_and_rank_0_alone_sends(launch: Launch) -> None:
    first, second = launch("worker", "empty_shard", 2).results()
    assert (first["sent"], second["sent"]) == ([0, 3, 6, 9], [])
    assert first["collectives"] == second["collectives"] > 0
    assert first["together"]
    assert second["together"]
    assert (first["delivered"], second["delivered"]) == (4, 0)
    assert max(first["seconds"], second["seconds"]) < 30
    counts = dict(zip(map(str, first["sample"]["slots"]), first["sample"]["columns"]["count"], strict=True))
    assert counts[str(first["sample"]["slots"][0])] == 40 * 64
    assert [first["warnings"], second["warnings"]] == [[], []]


def test_plans_take_effect_at_the_same_step_on_every_rank(launch: Launch) -> None:
    first, second = launch("worker", "switch", 2).results()
    assert first["seen"] == second["seen"]
    # The reply to step 2 was there when step 3 ended, whose round announced it: two steps later it holds.
    assert [ours for ours, _ in first["seen"]] == ["fp8"] * 5 + ["bf16"] * 3 + ["fp8"] * 4
    assert [experts for _, experts in first["seen"]] == ["fp8"] * 8 + ["bf16"] * 4
    versions = [(version, since) for _, version, since in first["reported"]]
    assert versions == [(0, None)] * 5 + [(1, 5)] * 3 + [(2, 8)] * 4
    assert first["state"] == second["state"]


def test_one_bad_rank_shows_before_all_others(launch: Launch) -> None:
    for each in launch("worker", "bad_rank", 2).results():
        healthy_input, again, broken_input = each["ranks"]
        for worst in (healthy_input, again):
            assert (worst[0]["rank"], worst[0]["layer"], worst[0]["gemm"]) == (1, "ours", "fprop")
            assert worst[0]["metric"] == "relative_error"
            assert worst[0]["value"] > 0.2 > 0.1 > max(other["value"] for other in worst[1:])
        assert [len(worst) for worst in each["ranks"]] == [4, 4, 4]
        assert {(one["rank"], one["metric"]) for one in broken_input} == {(1, "nonfinite_count")}
        assert (broken_input[0]["operand"], broken_input[0]["value"]) == ("x", 1.0)


def test_a_waiting_plan_survives_a_resume_and_a_rewind_on_every_rank(launch: Launch) -> None:
    first, second = launch("worker", "resume", 2).results()
    assert first["waiting"] == second["waiting"]
    assert first["waiting"]["effective_step"] == 4
    assert first["seen"] == second["seen"]
    resumed, rewound = first["seen"][:6], first["seen"][6:]
    assert [ours for _, ours, _ in resumed] == ["fp8"] + ["bf16"] * 5
    assert rewound == resumed[:3]
    assert (first["together"], second["together"]) == (True, True)
