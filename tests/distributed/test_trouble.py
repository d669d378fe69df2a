"""Whatever happens to one rank, the others train on, keep one plan, and say once what became of the merging."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

Launch = Callable[..., Any]
APART = "do not report together any more"


def told(result: dict[str, Any]) -> list[str]:
    return [line for line in result["warnings"] if APART in line]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_merge_whatever_their_number(launch: Launch, size: int) -> None:
    results = launch("worker", "merged", size).results()
    assert len({result["collectives"] for result in results}) == 1
    first = results[0]["sample"]
    assert all(result["sample"]["columns"] == first["columns"] for result in results[1:])
    x = next(at for at, slot in enumerate(first["slots"]) if slot.get("operand") == "x")
    assert first["columns"]["count"][x] == size * 40 * 64


def test_a_rank_that_says_nothing_holds_nobody_up_for_longer_than_the_time_out(launch: Launch) -> None:
    first, second = launch("trouble", "silent", 2).results()
    assert first["seconds"] < 15
    assert second["seconds"] < 15
    assert len(told(first)) == 1
    assert "no word from all of them within rank_timeout=0.5 s" in told(first)[0]
    # The plan of the reply to step 1 is in force; that of step 4 came when they no longer heard each other.
    assert (first["plan"], second["plan"]) == (1, 1)
    assert [step for group, step in first["sent"] if group == "0"] == list(range(20))


def test_a_rank_that_dies_leaves_the_others_to_report_for_themselves(launch: Launch) -> None:
    results = launch("trouble", "crash", 3).results(dead=(2,))
    assert [len(told(result)) for result in results] == [1, 1]
    assert max(result["seconds"] for result in results) < 15  # of a time-out of 20
    assert not any(result["together"] for result in results)
    sent = [tuple(each) for each in results[0]["sent"]]
    assert len(sent) == len(set(sent))
    by_group = {group: [s for g, s in sent if g == group] for group, _ in sent}
    assert by_group["0"] == list(range(12))
    # What was merged before is rank 0's; from the step that the third rank did not live to see on, each has its own.
    assert by_group["0.rank1"] == list(range(by_group["0.rank1"][0], 12))
    assert set(by_group) == {"0", "0.rank1"}


def test_an_exception_on_one_rank_takes_only_its_own_guard_off(launch: Launch) -> None:
    first, second = launch("trouble", "leaves", 2).results()
    assert [step for group, step in first["sent"] if group == "0"] == list(range(10))
    assert max(first["seconds"], second["seconds"]) < 15
    assert told(second) == []


def test_a_guard_on_rank_0_alone_trains_on(launch: Launch) -> None:
    first, _ = launch("trouble", "only_first", 2).results()
    assert first["seconds"] < 10
    assert first["step"] == 5
    assert len(told(first)) == 1


def test_ranks_with_different_layers_are_told_to_take_groups(launch: Launch) -> None:
    results = launch("trouble", "different", 2).results()
    assert all("give each rank a group= of its own" in told(result)[0] for result in results)
    groups = {group: [s for g, s in results[0]["sent"] if g == group] for group, _ in results[0]["sent"]}
    assert groups == {"0": [0, 1, 2, 3], "0.rank1": [0, 1, 2, 3]}


def test_a_step_that_one_rank_did_not_count_or_measure_is_still_a_round_of_all(launch: Launch) -> None:
    first, second = launch("trouble", "skipped", 2).results()
    assert first["seen"] == second["seen"]
    switched = [step for step, ours, experts in first["seen"] if "bf16" in (ours, experts)]
    assert switched == list(range(6, 12))
    assert first["collectives"] == second["collectives"]
    assert (first["sent"], second["sent"]) == (list(range(12)), [])
    assert first["together"]
    assert second["together"]
    assert told(first) + told(second) == []


def test_all_ranks_look_closely_at_what_one_of_them_has_flagged(launch: Launch) -> None:
    first, second = launch("trouble", "flagged", 2).results()
    assert first["looked"] == second["looked"]
    assert ["ours"] in first["looked"]
    assert first["looked"][:2] == [[], []]
    variants = [slot for slot in first["sample"]["slots"] if slot.get("variant")]
    assert {slot["gemm"] for slot in variants} == {"fprop", "wgrad"}  # no dgrad: it is the first layer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(done: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def served(folder: Path, port: int) -> Iterator[httpx2.Client]:
    """The command, on that port; a client of its run `away`."""
    environment = {**os.environ, "FP8_SAFEGUARD_DATABASE_URL": f"sqlite:///{folder}/real.db"}
    command = [sys.executable, "-m", "fp8_safeguard.cli.main", "serve", "--port", str(port)]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}/api/v1/runs/away") as client:
                wait(lambda: is_ready(port))
                yield client
        finally:
            process.terminate()
            process.wait(timeout=30)


def is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


def test_what_rank_0_decided_without_the_server_is_the_servers_when_it_is_back(
    launch: Launch, tmp_path: Path
) -> None:
    """Two ranks, a real server on SQLite that comes after half of the run, and a product that is not finite."""
    port = free_port()
    ranks = launch("trouble", "real_server", 2, REAL_SERVER=f"http://127.0.0.1:{port}")
    wait((tmp_path / "come").exists)
    with served(tmp_path, port) as client:
        (tmp_path / "here").touch()
        first, second = ranks.results()
        items = client.get("/decisions").json()["items"]
        plan, run = client.get("/plan").json(), httpx2.get(str(client.base_url).rstrip("/")).json()
    assert first["seen"] == second["seen"]
    switched = next(step for step, precision, _ in first["seen"] if precision == "bf16")
    assert switched <= 12
    assert {precision for step, precision, _ in first["seen"] if step >= switched} == {"bf16"}
    assert {version for step, _, version in first["seen"] if step >= switched} == {1, 2}
    made = [item for item in items if item["action"] != "advice"]
    assert [(item["actor"], item["layer"], item["state"]) for item in made] == [("client", "1", "applied")]
    assert made[0]["effective_step"] == switched
    assert [entry["decision_id"] for entry in plan["entries"]] == [made[0]["id"]]
    assert first["plan"] == second["plan"] == plan
    assert first["local"] == []
    assert (run["last_step"], run["dropped"]) == (first["seen"][-1][0], 0)


def test_torchrun_trains_with_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{n * n % 97}" for n in range(6000)))
    settings = tmp_path / "run.toml"
    settings.write_text(f'preset = "tiny"\ncorpus = "{text}"\nsequences_per_step = 4\nlog_every = 1\n')
    command = ["-m", "fp8_safeguard.cli.main", "train", "--steps", "4", "--config", str(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FP8_SAFEGUARD_SPOOL_DIR": str(tmp_path / "spool")}

    def run(*launcher: str, save: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *launcher, *command, "--save", str(tmp_path / save)],
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return re.findall(r"^step=(\d+) loss=([\d.]+)", done.stderr, flags=re.MULTILINE)

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    both = run(*launcher, save="two.pt")
    assert [int(step) for step, _ in both] == [1, 2, 3, 4]  # one rank shows it
    alone = run(save="one.pt")
    for (_, two), (_, one) in zip(both, alone, strict=True):
        assert abs(float(two) - float(one)) < 0.02
    assert (tmp_path / "two.pt").exists()


def test_a_resumed_and_a_rewound_run_repeat_it_on_three_ranks(launch: Launch) -> None:
    results = launch("worker", "resume", 3).results()
    seen = [result["seen"] for result in results]
    assert all(a == b for a, b in itertools.pairwise(seen))
    assert len({str(result["waiting"]) for result in results}) == 1
    assert seen[0][6:] == seen[0][:3]
    assert all(result["together"] for result in results)
