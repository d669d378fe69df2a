"""The overhead benchmark: what it refuses, how it takes turns, what its rows say."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def refusal(main: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said on the way out with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["hook_overhead", "outage_overhead"])
def test_a_result_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, script: Callable[[str], ModuleType], capsys: Any
) -> None:
    said = refusal(script(name).main, ["--json", str(tmp_path)], capsys)
    assert f"--json {tmp_path} cannot be written" in said


def test_a_number_of_threads_that_is_none_is_refused(
    script: Callable[[str], ModuleType], capsys: Any
) -> None:
    said = refusal(script("hook_overhead").main, ["--threads", "0"], capsys)
    assert "--threads is 0; it takes 1 or more, say" in said


def test_peers_that_are_not_installed_are_named_with_the_command_that_installs_them(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    peers = script("overhead.peers")
    here = {peer.package for peer in peers.PEERS} - {"wandb", "msprobe"}
    found = SimpleNamespace(find_spec=lambda name: object() if name in here else None)
    monkeypatch.setattr(peers.importlib, "util", found)
    said = refusal(script("hook_overhead").main, ["--peers", "--quick"], capsys)
    assert "--peers needs wandb, msprobe, not installed here: run `make peers`, then" in said
    assert ".venv-peers/bin/python benchmarks/hook_overhead.py --peers" in said


def test_every_case_of_the_contract_is_measured_in_both_types(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    benchmark = script("hook_overhead")
    full = benchmark.phases(SimpleNamespace(peers=True, quick=False), tmp_path)
    names = [arm.name for phase in full for arm in phase.arms]
    ours = [f"{kind}_{dtype}" for kind in ("default", "off", "every_step") for dtype in ("fp32", "bf16")]
    assert set(ours) <= set(names)
    assert len(names) == len(set(names)) == 6 + 2 * len(script("overhead.peers").PEERS)
    for phase in full:
        assert phase.rounds >= 20  # whole sampling cycles
        for arm in phase.arms:
            assert arm.steps == phase.steps
            assert arm.steps % min(getattr(arm, "every", 1), 10) == 0


class Counted:
    """An arm that writes down when it runs."""

    def __init__(self, name: str, log: list[str], turns: int = 1) -> None:
        self.name, self.steps, self.turns, self._log = name, 2, turns, log

    def begin(self) -> None:
        self._log.append(f"begin {self.name}")

    def turn(self, index: int) -> None:
        self._log.append(f"{self.name}{index}" if self.turns > 1 else self.name)


def test_in_each_round_everyone_runs_once_and_in_all_rounds_in_every_place(
    script: Callable[[str], ModuleType],
) -> None:
    rounds, log, warm = script("overhead.rounds"), list[str](), list[int]()
    names = ["a", "b", "c"]
    turns = rounds.run([Counted(name, log) for name in names], 6, lambda: warm.append(len(log)))
    assert log[: warm[0]] == [step for name in names for step in (f"begin {name}", name)]
    ran = [log[warm[0] + 3 * i : warm[0] + 3 * i + 3] for i in range(6)]
    assert all(sorted(order) == names for order in ran)
    for place in range(3):
        assert Counter(order[place] for order in ran) == Counter(dict.fromkeys(names, 2))
    assert {name: len(turns[name]) for name in names} == dict.fromkeys(names, 6)


def test_the_steps_of_a_cycle_alternate_and_are_added_up(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, log = script("overhead.rounds"), list[str]()
    clock = iter(float(number) for number in range(1000))
    monkeypatch.setattr(
        rounds, "time", SimpleNamespace(perf_counter=lambda: 0.0, process_time=lambda: next(clock))
    )
    turns = rounds.run([Counted("a", log, 3), Counted("b", log, 1)], 1)
    assert log[-4:] == ["a0", "b", "a1", "a2"]
    # Each turn takes a second by this clock, of which a cycle has two steps.
    assert [spent.cpu_seconds for spent in (*turns["a"], *turns["b"])] == [1.5, 0.5]


def test_the_ratio_is_of_totals_and_its_interval_is_of_resampled_rounds(
    script: Callable[[str], ModuleType],
) -> None:
    ratio_of_totals = script("overhead.rounds").ratio_of_totals
    # Nine cheap rounds and a dear one, which a median of rounds would not see.
    found = ratio_of_totals([1.0] * 9 + [11.0], [1.0] * 10)
    assert found.ratio == pytest.approx(2.0)
    assert found.milliseconds == pytest.approx(2000.0)
    assert found.low == pytest.approx(1.0)
    assert 3.0 <= found.high <= 5.0  # at most four draws in ten of the dear one have 2.5 % of the chance
    same = ratio_of_totals([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (same.ratio, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_peer_is_charged_for_each_tensor_that_its_own_function_takes(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers, workload = script("overhead.peers"), script("overhead.workload")
    tool = ModuleType("some_tool")
    looked = []
    tool.look = lambda kind, tensors: looked.append((kind, sorted(tensors)))
    original = tool.look
    monkeypatch.setitem(sys.modules, "some_tool", tool)

    class Tool(peers.Peer):
        entry = ("some_tool", "look", 1)

        def step(self) -> None:
            tool.look("two", {"a": torch.zeros(3, 5), "b": torch.zeros(7)})

    arm = Tool("tool", "fp32", size=workload.SMALL, folder=tmp_path)
    arm.begin()
    arm.turn(0)
    tally = arm.count()
    assert (tally.tensors, tally.elements) == (2, 22)
    assert looked == [("two", ["a", "b"])] * 2
    assert tool.look is original


def operands_of(model: nn.Module, step: Callable[[], object]) -> tuple[int, int]:
    """Number and elements of x, w and dy of the linear layers, from their shapes."""
    sizes: list[int] = []

    def forward(module: nn.Linear, arguments: tuple[torch.Tensor], output: torch.Tensor) -> None:
        sizes.extend([arguments[0].numel(), module.weight.numel(), output.numel()])

    handles = [m.register_forward_hook(forward) for m in model.modules() if isinstance(m, nn.Linear)]
    step()
    for handle in handles:
        handle.remove()
    return len(sizes), sum(sizes)


def test_ours_counts_each_operand_once_and_says_when_it_measured_nothing(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    arms, workload = script("overhead.arms"), script("overhead.workload")
    arm = arms.Observed("ours", "fp32", 1, size=workload.SMALL, every=1, spool=str(tmp_path))
    arm.begin()
    with pytest.raises(RuntimeError, match="ours: no sample was taken"):
        arm.count()
    before = arm.counters()
    arm.turn(0)
    spent = arm.counters().since(before)
    assert spent.spent > 0
    assert spent.sender > 0
    tally = arm.count()
    plain = workload.Trainer("fp32", workload.SMALL)
    assert (tally.tensors, tally.elements) == operands_of(plain.model, plain.step)
    arm.end()


@pytest.fixture
def timed(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """overhead.rows with arms that take given CPU seconds a step, and one second more of wall time."""
    rows, rounds, arms = script("overhead.rows"), script("overhead.rounds"), script("overhead.arms")
    for kind in (arms.Plain, arms.Observed, script("overhead.peers").Peer):
        monkeypatch.setattr(kind, "end", lambda self: None)

    def with_costs(costs: dict[str, float]) -> ModuleType:
        def run(everyone: Any, number: int, started: Callable[[], None]) -> Any:
            started()
            return {
                arm.name: [rounds.Spent(costs[arm.name], costs[arm.name] + 1)] * number for arm in everyone
            }

        monkeypatch.setattr(rows, "run", run)
        return rows

    return with_costs


def test_rows_say_what_a_step_costs_more_what_of_it_is_accounted_for_and_what_a_tensor_costs(
    script: Callable[[str], ModuleType], timed: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"plain_fp32": 1.9, "plain_again_fp32": 2.1, "default_fp32": 2.05, "off_fp32": 2.0}
    rows, arms = timed(costs), script("overhead.arms")
    counted = {"default_fp32": iter([arms.Counters(), arms.Counters(spent=1.22, sender=0.41)])}
    counted["off_fp32"] = iter([arms.Counters(), arms.Counters()])
    monkeypatch.setattr(arms.Observed, "counters", lambda self: next(counted[self.name]))
    monkeypatch.setattr(arms.Observed, "count", lambda self: arms.Tally(tensors=25, elements=1000))
    observed = [arms.Observed("default_fp32", "fp32", 10, every=10)]
    observed.append(arms.Observed("off_fp32", "fp32", 10, every=10**9))
    phase = rows.Phase("default_fp32", "fp32", observed, 4, 10)
    row, quiet = phase.run()
    assert phase.control["ratio"] == pytest.approx(2.1 / 1.9)
    # The baseline is the mean of both: 2 seconds.
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((1.025,) * 3)
    assert (row["value"], row["baseline_ms"], row["extra_ms_per_step"]) == pytest.approx((2050, 2000, 50))
    assert row["wall_ratio"] == pytest.approx(3.05 / 3)
    assert row["accounted_ratio"] == pytest.approx(1.22 / (4 * 10 * 3.05))
    assert row["sender_ratio"] == pytest.approx(0.41 / (4 * 10 * 2.05))
    # One step in ten is sampled: its tensors have cost what ten steps cost more.
    assert row["us_per_tensor"] == pytest.approx(10 * 50_000 / 25)
    assert row["ns_per_element"] == pytest.approx(10 * 50_000_000 / 1000)
    assert (row["goal"], row["reached"], row["steps"], row["cycles"]) == (1.05, True, 40, 4)
    assert quiet["us_per_tensor"] is None
    assert (quiet["goal"], quiet["reached"]) == (None, True)


def test_ours_is_held_against_the_cheapest_peer_that_sees_activations(
    script: Callable[[str], ModuleType], timed: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"plain_fp32": 2.0, "plain_again_fp32": 2.0, "every_step_fp32": 2.4}
    rows, arms = timed(costs | {"blind": 2.001, "cheap": 2.5, "dear": 3.0}), script("overhead.arms")
    peer = script("overhead.peers").Peer
    monkeypatch.setattr(arms.Observed, "counters", lambda self: arms.Counters())
    monkeypatch.setattr(arms.Observed, "count", lambda self: arms.Tally(10, 100))
    monkeypatch.setattr(peer, "count", lambda self: arms.Tally(20 if self.name == "dear" else 5, 100))
    kinds = {
        name: type(name, (peer,), {"activations": name != "blind"}) for name in ("blind", "cheap", "dear")
    }
    everyone = [arms.Observed("every_step_fp32", "fp32", 2, every=1)]
    everyone += [kind(name, "fp32", 2) for name, kind in kinds.items()]
    *found, cost = rows.Phase("every_step_fp32", "fp32", everyone, 4, 2).run()
    assert [row["reached"] for row in found] == [False, None, None, None]  # 1.2 is above 1.15
    assert cost["case"] == "cost_per_tensor_fp32"
    assert cost["value"] == pytest.approx(40_000)
    # 500 ms for 5 tensors, and 1 s for 20; 'blind' would be cheaper than both.
    assert cost["baseline"] == "dear"
    assert cost["ratio"] == pytest.approx(40 / 50)
    assert cost["against"] == pytest.approx({"cheap": 40 / 100, "dear": 40 / 50})
    assert (cost["goal"], cost["reached"]) == (0.2, False)


def test_a_peer_whose_cost_is_lost_in_the_noise_gives_no_ratio(script: Callable[[str], ModuleType]) -> None:
    peer = {"child_cpu_ms_per_step": 0.0, "activations": True}
    rows = [
        {"case": "every_step_fp32", "us_per_tensor": 8.0},
        {"case": "dear", "us_per_tensor": 4.0, **peer},
        {"case": "lost", "us_per_tensor": -1.0, **peer},
    ]
    (cost,) = script("overhead.rows")._cost_of_a_tensor("fp32", rows)
    assert (cost["baseline"], cost["ratio"], cost["reached"]) == ("lost", None, False)
    assert cost["against"] == {"dear": 2.0, "lost": None}


def test_the_time_of_child_processes_is_found(script: Callable[[str], ModuleType]) -> None:
    children_seconds = script("overhead.peers").children_seconds
    before = children_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert children_seconds() - before >= 0.2
    child.communicate(b"\n")


def test_importing_is_measured_in_processes_of_its_own(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("overhead.import_cost")
    times = iter([9.0, 300.0, 100.0, 200.0, 9.0, 600.0, 400.0, 500.0])
    flags: list[tuple[str, ...]] = []

    def measured(*given: str) -> tuple[float, float, float]:
        flags.append(given)
        cpu = next(times)
        return cpu, 2 * cpu, cpu / 4

    monkeypatch.setattr(module, "_milliseconds", measured)
    row = module.row(3)
    assert (row["case"], row["value"], row["unit"], row["ratio"]) == ("import_ms", 200.0, "ms", None)
    assert (row["wall_ms"], row["garbage_collection_ms"]) == (400.0, 50.0)
    assert row["without_bytecode_ms"] == 500.0
    assert (row["goal"], row["reached"]) == (150.0, False)
    assert ["-B" in given for given in flags] == [False] * 4 + [True] * 4


def test_what_an_import_takes_is_read_from_a_process_of_its_own(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("overhead.import_cost")
    code = module.IMPORT.replace("import gc, json, time, torch", "import gc, json, time")
    work = "gc.collect()\nwhile time.process_time() - cpu < 0.2: pass"
    monkeypatch.setattr(module, "IMPORT", code.replace("import fp8_safeguard.hooks", work))
    cpu, wall, collecting = module._milliseconds()
    assert cpu >= 200
    assert wall >= 0.9 * cpu
    assert 0 < collecting < cpu
