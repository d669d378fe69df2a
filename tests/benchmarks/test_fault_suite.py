"""The fault suite: arithmetic, draws, arms, and going on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8_safeguard.trainer.faults import KINDS, fault_from_mapping

ROOT = Path(__file__).parents[2]
SEEDS = (201, 202, 203)


def test_every_fault_of_the_trainer_is_in_the_suite_and_can_be_drawn(suite: Any) -> None:
    catalogue = suite("faults.catalogue")
    named = {case.name for case in (*catalogue.FP8_FAULTS, *catalogue.CONTROLS, catalogue.SHIFT)}
    assert named == set(KINDS) - {"outlier-drift"}
    drawn = set()
    for name in named:
        case = catalogue.CASES[name]
        for seed in range(100, 130):
            fault = fault_from_mapping(case.fault(seed))
            assert 510 <= fault.start_step < 518
            assert fault == fault_from_mapping(case.fault(seed))
            drawn.add((name, json.dumps(case.fault(seed), sort_keys=True)))
            assert (fault.harms == "both") == (case.kind == "control")
    assert len(drawn) > 20 * len(named)
    assert min(*catalogue.SEEDS, *catalogue.WARM_UP_SEEDS) > 104
    assert catalogue.end_step() - 517 == 120


def test_cases_of_fp8_share_a_twin_and_a_control_has_its_own(suite: Any) -> None:
    schedule, catalogue = suite("faults.schedule"), suite("faults.catalogue")
    size = schedule.full()
    twins = {
        (name, seed): schedule.twin_of(catalogue.CASES[name], seed, size)
        for name in size.cases
        for seed in SEEDS
    }
    assert twins["slow-drift", 201] == twins["expert-nan", 201] != twins["slow-drift", 202]
    assert twins["slow-drift", 201].fault is None
    assert twins["bad-rank", 201].config == {"micro_batches": 2}
    assert twins["norm-gain", 201].fault == catalogue.CASES["norm-gain"].fault(201)
    assert len({twin.key for twin in twins.values()}) == 3 * (2 + 6)


def test_the_full_suite_has_its_arms_once_and_fits_its_time(suite: Any) -> None:
    schedule = suite("faults.schedule")
    arms = schedule.all_arms(schedule.full())
    assert len({arm.key for arm in arms}) == len(arms)
    by_name = {
        name: [arm for arm in arms if arm.name == name]
        for name in ("safeguard", "none", "twin", "seed", "autoswitch")
    }
    assert sum(map(len, by_name.values())) == len(arms)
    healthy = [arm for arm in by_name["safeguard"] if arm.case in ("healthy", "warm-up", "domain-shift")]
    assert len(healthy) == 10
    assert {arm.fork for arm in healthy if arm.case == "warm-up"} == {0}
    # Measured on one core of two: 0.13 s a step without, 0.27 s with a server; 8 s to start and end.
    steps = sum(
        (arm.until - arm.fork) * (0.27 if arm.name in ("safeguard", "seed", "autoswitch") else 0.13)
        for arm in arms
    )
    minutes = (steps + 8 * len(arms) + 3 * 500 * 0.13) / 2 / 60
    assert minutes < 60


def test_quick_is_five_faults_with_the_safeguard_and_without(suite: Any) -> None:
    schedule, catalogue = suite("faults.schedule"), suite("faults.catalogue")
    size = schedule.quick()
    faults = [catalogue.CASES[name] for name in size.cases if name != "healthy"]
    assert len(faults) == 5
    assert {case.kind for case in faults} == {"drift", "abrupt", "control"}
    arms = schedule.all_arms(size)
    assert {arm.name for arm in arms} == {"safeguard", "none", "twin"}
    assert all(arm.seed == 201 and arm.fork == 250 for arm in arms)
    assert all(size.fault(case, 201)["start_step"] + 60 <= size.until for case in faults)


class _Process:
    """A process that has ended, with its file or without."""

    exitcode = 1

    def is_alive(self) -> bool:
        return False

    def join(self) -> None:
        pass


@pytest.fixture
def place(tmp_path: Path, suite: Any) -> Any:
    return suite("faults.arms").Place(folder=tmp_path, server="http://127.0.0.1:9", stamp="now")


def test_what_has_finished_is_not_run_again_and_what_fails_is_named(
    suite: Any, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, arms = suite("faults.schedule"), suite("faults.arms")
    wanted = schedule.all_arms(schedule.quick())
    for start in {place.checkpoint(arm) for arm in wanted}:
        start.write_text("a checkpoint")
    done, broken = wanted[:3], wanted[4]
    for arm in done:
        arms._write(place.result(arm), {})
    started: list[str] = []

    def start(job: Any, at: Any) -> Any:
        started.append(job[0])
        if job[0] != broken.key:
            arms._write(job[3], {})
        return job, _Process()

    monkeypatch.setattr(schedule, "_start", start)
    monkeypatch.setattr(schedule.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert schedule.run_all(wanted, place, said.append) == [broken.key]
    assert started == [arm.key for arm in wanted[3:]]
    assert f"{broken.key} FAILED with exit code 1" in " ".join(said)
    started.clear()
    assert schedule.run_all(wanted, place, said.append) == [broken.key]
    assert started == [broken.key]


def test_without_a_checkpoint_nothing_is_run(suite: Any, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = suite("faults.schedule")
    monkeypatch.setattr(schedule, "_start", lambda job, at: (job, _Process()))
    monkeypatch.setattr(schedule.time, "sleep", lambda seconds: None)
    with pytest.raises(schedule.ArmError, match="no checkpoint to start from: checkpoint 201"):
        schedule.run_all(schedule.all_arms(schedule.quick()), place, lambda text: None)


def test_another_fault_is_another_arm(suite: Any, place: Any) -> None:
    arm = suite("faults.arms").Arm
    common: dict[str, Any] = {"case": "c", "seed": 1, "name": "none", "until": 10, "fork": 5}
    one, other = arm(fault={"start_step": 1}, **common), arm(fault={"start_step": 2}, **common)
    assert place.result(one) != place.result(other)
    assert place.checkpoint(one) == place.checkpoint(other)
    parts = arm(fault=None, config={"micro_batches": 2}, **common)
    assert place.checkpoint(parts) == place.checkpoint(one)
    assert place.checkpoint(arm(fault=None, config={"d_model": 64}, **common)) != place.checkpoint(one)


def write(suite: Any, place: Any, arm: Any, losses: Mapping[int, float], **more: Any) -> None:
    found = {
        "arm": {}, "run": "r", "losses": {str(step): loss for step, loss in losses.items()}, "gradient_norms": {},
        "skipped_steps": 0, "step_seconds": 0.1, "validation": 2.0, "alerts": [], "decisions": [], "seconds": 1.0,
    }  # fmt: skip
    suite("faults.arms")._write(place.result(arm), found | more)


def decision(step: int, action: str, cause: str | None, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "action": action,
        "cause": None if cause is None else {"name": cause},
        "value": None,
    } | more


@pytest.fixture
def finished(suite: Any, place: Any) -> Callable[..., dict[str, Any]]:
    """The report on arms whose files are made up."""

    def make(cases: tuple[str, ...], told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        schedule, catalogue, report = (
            suite("faults.schedule"),
            suite("faults.catalogue"),
            suite("faults.report"),
        )
        size = schedule.Size(cases=(*cases, "healthy"), seeds=SEEDS, compared_seeds=(), healthy=False)
        for arm in schedule.all_arms(size):
            losses = dict.fromkeys(range(arm.fork, arm.until), 2.0)
            more = dict(told.get(f"{arm.case}/{arm.name}", {}))
            onset = 0 if arm.fault is None else arm.fault["start_step"]
            losses |= {
                step: loss
                for step, loss in more.pop("after", {}).items()
                for step in range(onset + step, arm.until)
            }
            for key in ("alerts", "decisions"):
                more[key] = [one | {"step": onset + one["step"]} for one in more.get(key, ())]
            write(suite, place, arm, losses, **more)
        assert catalogue.CASES
        found: dict[str, Any] = report.report(size, place, [])
        json.dumps(found, allow_nan=False)
        return found

    return make


def rows_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in found["rows"]}


def test_a_drift_that_is_caught_reaches_every_goal(finished: Any) -> None:
    caught = {
        "alerts": [{"step": 5, "severity": "watch"}, {"step": 10, "severity": "act"}],
        "decisions": [
            decision(
                10, "format", "outlier-channels", value="e5m2", what_if={"x": 1}, outcome="signal recovered"
            ),
            decision(10, "format", "outlier-channels", value="e5m2"),
        ],
        "after": {60: 2.004},
    }
    found = finished(
        ("fast-drift",), {"fast-drift/safeguard": caught, "fast-drift/none": {"after": {26: 2.4}}}
    )
    rows = rows_of(found)
    assert {"benchmark", "commit", "machine", "control", "rows"} <= found.keys()
    assert all(
        {"case", "value", "unit", "ratio", "low", "high", "goal"} <= row.keys() for row in found["rows"]
    )
    detection, lead, ratio = (rows[f"fast-drift/{name}"] for name in ("detection", "lead", "ratio"))
    assert (detection["value"], detection["each"], detection["watched"]) == (10, [10] * 3, [5] * 3)
    assert (lead["value"], lead["goal"], lead["reached"]) == (16, 15, True)
    assert lead["separated"] == [26] * 3
    assert ratio["ratio"] == pytest.approx(1.002)
    assert ratio["low"] == pytest.approx(ratio["high"])
    assert (ratio["goal"], ratio["reached"]) == (1.005, True)
    assert rows["fast-drift/ratio/none"]["ratio"] == pytest.approx(1.2)
    assert rows["fast-drift/cause"]["value"] == rows["all/cause"]["value"] == 1.0
    assert rows["fast-drift/cause"]["actions"] == ["2 format=e5m2"] * 3
    assert rows["fast-drift/cause"]["by_what_if"] == [1] * 3
    assert found["control"]["ratio"] == 1.0


def test_what_is_missed_late_or_misnamed_says_so(finished: Any, suite: Any, capsys: Any) -> None:
    late = {"decisions": [decision(1, "bf16_fallback", "norm-gain")], "after": {0: 2.1}}
    found = finished(
        ("abrupt-outliers", "isolated-nan", "slow-drift"),
        {"abrupt-outliers/safeguard": late, "slow-drift/none": {"after": {40: 2.4}}},
    )
    rows = rows_of(found)
    assert (rows["abrupt-outliers/detection"]["value"], rows["abrupt-outliers/detection"]["reached"]) == (
        1,
        False,
    )
    assert rows["abrupt-outliers/ratio"]["reached"] is False
    assert rows["abrupt-outliers/cause"]["value"] == 0.0
    assert rows["isolated-nan/detection"]["value"] is None
    assert rows["isolated-nan/detection"]["detected"] == 0
    assert rows["isolated-nan/precision_changes"]["reached"] is True
    assert (rows["slow-drift/lead"]["value"], rows["slow-drift/lead"]["reached"]) == (None, False)
    assert rows["all/cause"]["reached"] is False
    suite("faults.report").print_table(found)
    shown = capsys.readouterr().out
    assert "abrupt-outliers" in shown
    assert "norm-gain (wrong)" in shown
    assert "MISSED" in shown


def test_an_isolated_nan_is_told_by_its_alert_alone(finished: Any) -> None:
    told = {"alerts": [{"step": 0, "severity": "watch", "rule": "non-finite"}]}
    rows = rows_of(finished(("isolated-nan",), {"isolated-nan/safeguard": told}))
    assert (rows["isolated-nan/detection"]["value"], rows["isolated-nan/detection"]["reached"]) == (0, True)
    assert rows["isolated-nan/cause"]["value"] == 1.0
    assert rows["isolated-nan/precision_changes"]["value"] == 0


def test_a_nan_that_lasts_is_detected_by_its_first_alert_and_another_fault_is_not(finished: Any) -> None:
    told = {
        "alerts": [
            {"step": 0, "severity": "watch", "rule": "non-finite"},
            {"step": 1, "severity": "act", "rule": "non-finite"},
        ]
    }
    names = ("expert-nan", "abrupt-outliers")
    rows = rows_of(finished(names, {f"{name}/safeguard": told for name in names}))
    assert rows["expert-nan/detection"]["value"] == 0
    assert rows["abrupt-outliers/detection"]["value"] == 1


def test_advice_on_a_control_is_no_change_and_a_fallback_is(finished: Any) -> None:
    advised = {"decisions": [decision(1, "advice", "norm-gain")]}
    rows = rows_of(finished(("norm-gain",), {"norm-gain/safeguard": advised}))
    assert rows["norm-gain/precision_changes"]["value"] == rows["controls/precision_changes"]["value"] == 0
    assert rows["norm-gain/cause"]["value"] == 1.0
    assert rows["norm-gain/ratio"]["goal"] is None
    fallen = {"decisions": [*advised["decisions"], decision(2, "bf16_fallback", None)]}
    rows = rows_of(finished(("norm-gain",), {"norm-gain/safeguard": fallen}))
    assert rows["controls/precision_changes"]["value"] == 3
    assert rows["controls/precision_changes"]["reached"] is False


def test_a_decision_on_a_healthy_run_is_counted(finished: Any) -> None:
    quiet = rows_of(finished(("norm-gain",), {}))["healthy/decisions"]
    assert (quiet["value"], quiet["reached"], quiet["runs"]) == (0, True, 3)
    loud = rows_of(
        finished(("norm-gain",), {"healthy/safeguard": {"decisions": [decision(3, "advice", None)]}})
    )
    assert (loud["healthy/decisions"]["value"], loud["healthy/decisions"]["reached"]) == (3, False)


def test_a_fault_that_no_case_has_is_refused(suite: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        suite("fault_suite").main(["--only", "fast-drift", "--only", "drift"])
    assert ended.value.code == 2
    assert "--only drift: no case has that name; choose from slow-drift" in capsys.readouterr().err


def test_only_keeps_the_healthy_branch_that_is_the_control(suite: Any) -> None:
    script = suite("fault_suite")
    size = script.chosen(SimpleNamespace(quick=True, only=["qk-gain"]), None)
    assert size.cases == ("qk-gain", "healthy")
