"""Two real ranks report as one process that runs both their batches, and take up a plan at the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError, attach
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear

WORKER = Path(__file__).parents[1] / "distributed" / "worker.py"
SCENARIOS = ("merged", "empty_shard", "switch", "bad_rank", "resume")
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the two ranks saw in each scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder), *SCENARIOS],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
        for name in SCENARIOS
    }


class Model(nn.Module):
    """The worker's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.plain = Fp8Linear(64, 32), nn.Linear(32, 32)
        self.experts = Fp8GroupedLinear(3, 32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(
            torch.relu(self.plain(self.ours(x))), torch.tensor([0, 10, 10, 40], dtype=torch.int32)
        )
        return out


def micro_batches(steps: int) -> dict[str, Any]:
    """The last sample of one process that runs both ranks' batches in each step."""
    torch.manual_seed(0)
    model = Model()
    with attach(model, every=1, recompute=3) as guard:
        for step in range(steps):
            model.zero_grad()
            for rank in range(2):
                generator = torch.Generator().manual_seed(100 * step + rank)
                (model(torch.randn(40, 64, generator=generator)).square().sum() / 100).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
            guard.step(step)
        sample = guard.last_sample()
    assert sample is not None
    return sample


def test_the_merged_sample_is_that_of_one_process_bit_by_bit(ranks: Results) -> None:
    expected = micro_batches(6)
    for merged in ranks["merged"]:
        sample = merged["sample"]
        assert sample["slots"] == expected["slots"]
        assert sample["columns"] == expected["columns"]
    weight = [slot.get("operand") == "w" and slot["layer"] == "ours" for slot in expected["slots"]].index(
        True
    )
    assert expected["columns"]["count"][weight] == 64 * 32  # once, not once a rank


def test_b23_ranks_with_and_without_tokens_do_the_same_and_rank_0_alone_sends(ranks: Results) -> None:
    first, second = ranks["empty_shard"]
    assert (first["sent"], second["sent"]) == ([0, 3, 6, 9], [])
    assert first["collectives"] == second["collectives"] > 0
    assert first["together"]
    assert second["together"]
    assert (first["delivered"], second["delivered"]) == (4, 0)
    assert max(first["seconds"], second["seconds"]) < 30
    counts = dict(zip(map(str, first["sample"]["slots"]), first["sample"]["columns"]["count"], strict=True))
    assert counts[str(first["sample"]["slots"][0])] == 40 * 64
    assert [each["warnings"] for each in ranks["empty_shard"]] == [[], []]


def test_plans_take_effect_at_the_same_step_on_every_rank(ranks: Results) -> None:
    first, second = ranks["switch"]
    assert first["seen"] == second["seen"]
    # The reply to step 2 was there when step 3 ended, whose round announced it: two steps later it holds.
    assert [ours for ours, _ in first["seen"]] == ["fp8"] * 5 + ["bf16"] * 3 + ["fp8"] * 4
    assert [experts for _, experts in first["seen"]] == ["fp8"] * 8 + ["bf16"] * 4
    versions = [(version, since) for _, version, since in first["reported"]]
    assert versions == [(0, None)] * 5 + [(1, 5)] * 3 + [(2, 8)] * 4
    assert first["state"] == second["state"]


def test_one_bad_rank_shows_before_all_others(ranks: Results) -> None:
    for each in ranks["bad_rank"]:
        healthy_input, again, broken_input = each["ranks"]
        for worst in (healthy_input, again):
            assert (worst[0]["rank"], worst[0]["layer"], worst[0]["gemm"]) == (1, "ours", "fprop")
            assert worst[0]["metric"] == "relative_error"
            assert worst[0]["value"] > 0.2 > 0.1 > max(other["value"] for other in worst[1:])
        assert [len(worst) for worst in each["ranks"]] == [4, 4, 4]
        assert {(one["rank"], one["metric"]) for one in broken_input} == {(1, "nonfinite_count")}
        assert (broken_input[0]["operand"], broken_input[0]["value"]) == ("x", 1.0)


def test_a_waiting_plan_survives_a_resume_and_a_rewind_on_every_rank(ranks: Results) -> None:
    first, second = ranks["resume"]
    assert first["waiting"] == second["waiting"]
    assert first["waiting"]["effective_step"] == 4
    assert first["seen"] == second["seen"]
    resumed, rewound = first["seen"][:6], first["seen"][6:]
    assert [ours for _, ours, _ in resumed] == ["fp8"] + ["bf16"] * 5
    assert rewound == resumed[:3]
    assert (first["together"], second["together"]) == (True, True)


@pytest.mark.parametrize("wrong", [0, -1.0, True, "soon", float("inf"), float("nan")])
def test_a_time_out_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="rank_timeout is"):
        attach(nn.Linear(4, 4), rank_timeout=wrong)


def test_one_rank_of_one_has_a_client_and_no_round(watch: Callable[..., Guard]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        guard = watch(nn.Linear(4, 4))
        assert guard._session.controls.ranks is None
    finally:
        torch.distributed.destroy_process_group()
