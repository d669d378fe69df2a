"""The rows of the suite's JSON, and the table on the terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
from faults import measures
from faults.arms import NONE, SAFEGUARD, WATCHED, Place
from faults.catalogue import BRANCH, CASES, SHIFT, WARM_UP, WARM_UP_SEEDS, Case
from faults.measures import Interval
from faults.ranges import LEVELS
from faults.results import Result
from faults.schedule import Size, all_arms
from faults.verdicts import OTHERS, Verdict, finite, healthy_results, interval, verdicts

RATIO_GOAL, LEAD_GOAL, CAUSE_GOAL = 1.005, 15, 0.9
Row = dict[str, Any]


def report(size: Size, place: Place, failed: Sequence[str]) -> dict[str, Any]:
    """Everything that has finished, in the contract's form."""
    found = {
        name: list(verdicts(CASES[name], size, place)) for name in size.cases if CASES[name].kind != "healthy"
    }
    branches = list(verdicts(BRANCH, size, place))
    rows = [row for name, seen in found.items() for row in _case_rows(CASES[name], seen)]
    every = [one for seen in found.values() for one in seen]
    rows += _summary_rows(every, _healthy(size, place))
    return {
        "benchmark": "fault_suite",
        "commit": harness.commit(),
        "machine": harness.machine(),
        "control": _control(branches),
        "control_is": "FP8 with the safeguard over BF16, nothing wrong, the same batches: 20-step mean loss at the end",
        "seeds": list(size.seeds),
        "seeds_of_the_other_presets": list(size.compared_seeds),
        "steps": {"fork": size.fork, "until": size.until},
        "arms": dict(Counter(arm.name for arm in all_arms(size))),
        "twin": "faults of FP8 alone share one BF16 run a seed: they leave it every bit",
        "failed": list(failed),
        "rows": rows,
    }


def _control(branches: Sequence[Verdict]) -> dict[str, float | None]:
    found = interval([one.loss_ratio() for one in branches])
    return _bounds(found)


def _bounds(found: Interval | None) -> dict[str, float | None]:
    if found is None:
        return {"ratio": None, "low": None, "high": None}
    return {"ratio": finite(found.value), "low": finite(found.low), "high": finite(found.high)}


def _row(case: str, value: float | None, unit: str, **more: Any) -> Row:
    return {
        "case": case,
        "value": value,
        "unit": unit,
        "ratio": None,
        "low": None,
        "high": None,
        "goal": None,
    } | more


def _case_rows(case: Case, seen: Sequence[Verdict]) -> list[Row]:
    if not seen:
        return []
    rows = [_detection(case, seen), _cause(case, seen), *_losses(case, seen)]
    if case.kind == "drift":
        rows.append(_lead(case, seen))
    if case.kind in ("control", "isolated"):
        changes = sum(len(one.safeguard.changes(one.onset)) for one in seen)
        rows.append(
            _row(f"{case.name}/precision_changes", changes, "decisions", goal=0, reached=changes == 0)
        )
    return rows


def _detection(case: Case, seen: Sequence[Verdict]) -> Row:
    """The latest of the seeds: what was not detected has no number."""
    steps = [one.detected_after for one in seen]
    latest = None if None in steps else max(step for step in steps if step is not None)
    goal = 0 if case.kind in ("abrupt", "isolated") else None
    reached = None if goal is None else latest == goal
    return _row(
        f"{case.name}/detection", latest, "samples after the onset", goal=goal, reached=reached, letter=case.letter,
        detected=sum(step is not None for step in steps), of=len(seen), each=steps,
        watched=[one.watched_after for one in seen], faults=[dict(one.fault or {}) for one in seen], remark=case.remark,
    )  # fmt: skip


def _lead(case: Case, seen: Sequence[Verdict]) -> Row:
    """The shortest of the seeds that part from their twin at all."""
    parted = [one for one in seen if one.separated is not None]
    leads = [one.lead for one in parted]
    shortest = None if None in leads or not leads else min(step for step in leads if step is not None)
    return _row(
        f"{case.name}/lead", shortest, "steps before separation", goal=LEAD_GOAL,
        reached=None if not parted else shortest is not None and shortest >= LEAD_GOAL, each=[one.lead for one in seen],
        separated=[None if one.separated is None else one.separated - one.onset for one in seen],
    )  # fmt: skip


def _cause(case: Case, seen: Sequence[Verdict]) -> Row:
    right = sum(one.cause_right for one in seen)
    return _row(
        f"{case.name}/cause", right / len(seen), "share right", named=[one.cause for one in seen],
        layers=[one.cause_layer for one in seen],
        right_would_be=list(case.causes), actions=[one.safeguard.actions() for one in seen],
        by_what_if=[one.safeguard.by_what_if() for one in seen],
        outcomes=[_outcomes(one.safeguard) for one in seen],
    )  # fmt: skip


def _changes(seen: Sequence[Verdict], arm: str) -> list[int] | None:
    """How many decisions of each seed changed a precision; None for an arm that nobody decides for."""
    if arm not in WATCHED:
        return None
    results = [one.safeguard if arm == SAFEGUARD else one.others.get(arm) for one in seen]
    return [len(result.changes()) for result in results if result is not None]


def _outcomes(result: Result) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in result.decisions:
        if one.get("outcome"):
            counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
    return counts


def _losses(case: Case, seen: Sequence[Verdict]) -> list[Row]:
    """Training and validation loss over the twin's, of the safeguard and of the others that have run."""
    goal = RATIO_GOAL if case.harms_fp8 else None
    rows = []
    for arm in (SAFEGUARD, *OTHERS):
        for what, of in (("ratio", Verdict.loss_ratio), ("validation", Verdict.validation_ratio)):
            ratios = [of(one, arm) for one in seen]
            found = interval(ratios)
            if found is None:
                continue
            mine = goal if arm == SAFEGUARD else None
            rows.append(
                _row(
                    f"{case.name}/{what}" + ("" if arm == SAFEGUARD else f"/{arm}"), _loss(seen, arm, what), "nats",
                    goal=mine, reached=None if mine is None else found.value <= mine,
                    each=[None if ratio is None else finite(ratio) for ratio in ratios],
                    changes=_changes(seen, arm), **_bounds(found),
                )
            )  # fmt: skip
    return rows


def _loss(seen: Sequence[Verdict], arm: str, what: str) -> float | None:
    results = [one.safeguard if arm == SAFEGUARD else one.others.get(arm) for one in seen]
    there = [result for result in results if result is not None]
    of: Callable[[Result], float] = (
        (lambda result: measures.tail_mean(result.losses)) if what == "ratio" else (lambda r: r.validation)
    )
    return finite(statistics.fmean(map(of, there)))


def _healthy(size: Size, place: Place) -> dict[str, Result]:
    """Every healthy run by name and seed."""
    wanted = ((BRANCH, size.seeds), (SHIFT, size.seeds), (WARM_UP, WARM_UP_SEEDS))
    return {
        f"{case.name} {seed}": result
        for case, seeds in wanted
        if case.name in size.cases
        for seed, result in healthy_results(case, seeds, size, place).items()
    }


def _summary_rows(seen: Sequence[Verdict], healthy: Mapping[str, Result]) -> list[Row]:
    right, controls = (
        sum(one.cause_right for one in seen),
        [one for one in seen if one.case.kind == "control"],
    )
    found = measures.share(right, len(seen))
    rows = []
    if seen:
        row = _row("all/cause", found.value, "share right", low=found.low, high=found.high, goal=CAUSE_GOAL)
        rows.append(row | {"reached": found.value >= CAUSE_GOAL, "of": len(seen)})
    if controls:
        changes = sum(len(one.safeguard.changes(one.onset)) for one in controls)
        row = _row("controls/precision_changes", changes, "decisions", goal=0, reached=changes == 0)
        rows.append(row | {"of": len(controls)})
    if healthy:
        made = {name: len(result.decisions) for name, result in healthy.items()}
        total = sum(made.values())
        row = _row("healthy/decisions", total, "decisions", goal=0, reached=total == 0)
        alerts = {name: len(result.alerts) for name, result in healthy.items()}
        rows.append(row | {"runs": len(made), "each": made, "alerts": alerts})
    return [*rows, *_ranges(healthy)]


def _ranges(healthy: Mapping[str, Result]) -> list[Row]:
    """The farthest that any healthy run went, and the level of the loop that stands against it."""
    rows = []
    for name, (level, unit) in LEVELS.items():
        each = {run: result.ranges[name] for run, result in healthy.items() if name in result.ranges}
        if each:
            worst = max(each.values())
            rows.append(_row(f"healthy/{name}", worst, unit, level=level, each=each))
    return rows


def print_table(found: Mapping[str, Any]) -> None:
    """A line a fault, then what concerns all."""
    control = found["control"]
    print(f"fault_suite: control {_ratio(control)}; steps {found['steps']}, seeds {found['seeds']}")
    print(
        f"  {'fault':<22}{'found':>6}{'after':>7}{'lead':>6}  {'cause':<34}{'loss / BF16 twin':<26}{'none':>7}  action"
    )
    rows = {row["case"]: row for row in found["rows"]}
    for name in dict.fromkeys(case.partition("/")[0] for case in rows if case.endswith("/detection")):
        print(_line(name, rows))
    for name in ("all/cause", "controls/precision_changes", "healthy/decisions"):
        if name in rows:
            row = rows[name]
            print(
                f"  {name:<36}{row['value']:.3g} (goal {row['goal']:g}) {'' if row['reached'] else 'MISSED'}"
            )
    for name in found["failed"]:
        print(f"  FAILED {name}")


def _line(name: str, rows: Mapping[str, Row]) -> str:
    detection, cause, ratio = (rows[f"{name}/{what}"] for what in ("detection", "cause", "ratio"))
    lead, none = rows.get(f"{name}/lead"), rows.get(f"{name}/ratio/{NONE}")
    named = "/".join(str(one) for one in dict.fromkeys(cause["named"]))
    mark = "" if cause["value"] == 1 else " (wrong)"
    missed = " MISSED" if ratio["reached"] is False else ""
    return (
        f"  {name:<22}{detection['detected']:>3}/{detection['of']:<2}{_text(detection['value']):>7}"
        f"{_text(lead['value'] if lead else None):>6}  {(named + mark)[:33]:<34}{_ratio(ratio) + missed:<26}"
        f"{_text(none['ratio'] if none else None, '.3f'):>7}  {'; '.join(dict.fromkeys(cause['actions']))}"
    )


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    if row["high"] is None:
        return f"{row['ratio']:.4f} (one seed)"
    return f"{row['ratio']:.4f} ({row['low']:.3f} to {row['high']:.3f})"


def _text(value: float | None, form: str = "g") -> str:
    return "-" if value is None else format(value, form)
