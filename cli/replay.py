"""Replays a stored run under another policy, and shows what differs."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_safeguard.cli.observed import policy_decisions, read_document, tracked
from fp8_safeguard.cli.options import LARGEST, Json, ReadFrom, Run, Server, Token
from fp8_safeguard.cli.output import Columns, Item, fail, folded, print_json, printable, show
from fp8_safeguard.cli.read import asking, place
from fp8_safeguard.cli.source import Source

if TYPE_CHECKING:
    from fp8_safeguard.monitor.baseline import Baseline
    from fp8_safeguard.monitor.policyconfig import PolicyConfig

MOST_ROWS = 200


def replay(
    run: Run = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON file with the other policy; without it the run's own is replayed."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option("--from", min=0, max=LARGEST, metavar="STEP", help="Show nothing before this step."),
    ] = None,
    to_step: Annotated[
        int | None, typer.Option("--to", min=0, max=LARGEST, metavar="STEP", help="Stop after this step.")
    ] = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """What another policy would have done on a stored run, and when.

    Each decision and alert is the same, earlier or later than it was, only
    here or only stored. A policy file holds what differs from the run's own
    policy: preset, mode, baseline (an id, a file, or "none"), any setting
    such as dwell_steps or budget_ratio, and levels of rules. What was
    measured after the first plan that differs was measured under the plan
    that was, not under this one: a question mark says so.

    Examples:
        fp8-safeguard replay my-run --policy stricter.toml
        fp8-safeguard replay my-run --policy stricter.toml --from 500 --to 900 --json
        printf '[thresholds."gemm-error"]\\nact = 0.04\\n' > stricter.toml
    """
    if from_step is not None and to_step is not None and from_step > to_step:
        fail(f"--from {from_step} lies after --to {to_step}.", 2)
    document = {} if policy is None else load(policy)
    with asking(server, database_url, token, run) as (asked, name):
        found = replayed(asked, name, document, policy, from_step, to_step)
    if as_json:
        print_json(found)
    else:
        show_replay(found)


def load(policy: Path) -> Any:
    """The decoded file. Exits with 2 for what cannot be read."""
    if policy.suffix == ".json":
        return read_document(str(policy), "--policy")
    try:
        return tomllib.loads(policy.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"--policy {str(policy)!r} cannot be read: {error.strerror}", 2)
    except RecursionError:
        fail(f"--policy {str(policy)!r} is nested too deeply to be a policy", 2)
    except ValueError as error:
        fail(f"--policy {str(policy)!r} is not TOML (a JSON file is named .json): {error}", 2)


def replayed(
    asked: Source,
    name: str,
    document: Any,
    policy: Path | None,
    from_step: int | None,
    to_step: int | None,
) -> dict[str, Any]:
    """The whole comparison as JSON. Exits with 2 for a file that says no policy."""
    from fp8_safeguard.monitor.policyfile import PolicyFileError, policy_from
    from fp8_safeguard.monitor.replay import Replay, compare_alerts, compare_decisions, counts

    detail = asked.run(name)
    stored, notes = policy_decisions(asked.decisions(name), asked.attempts(name))
    try:
        config = policy_from(
            document,
            own_policy(asked, detail, stored, notes),
            lambda named: named_baseline(asked, name, named, policy),
        )
    except PolicyFileError as error:
        fail(f"--policy {str(policy)!r}: {error}", 2)
    running = Replay(config)
    first, last = detail["first_step"] or 0, detail["last_step"] or 0
    # The state at --from depends on every step before it, so all are replayed.
    for seen in tracked(asked.observations(name, None, to_step), "replaying", first, to_step or last):
        running.add(seen)

    def shown(step: int) -> bool:
        return (from_step is None or step >= from_step) and (to_step is None or step <= to_step)

    decisions, known = compare_decisions(
        [item for item in stored if to_step is None or item["step"] <= to_step], running.decisions
    )
    alerts = compare_alerts(
        [item for item in asked.alerts(name) if to_step is None or item["step"] <= to_step],
        running.alerts,
        known,
    )
    sides = {
        what: [
            each
            for each in listed
            if any(step is not None and shown(step) for step in (each.step, each.stored_step))
        ]
        for what, listed in (("decisions", decisions), ("alerts", alerts))
    }
    return {
        "run": name,
        "policy": {"preset": config.thresholds.name, "mode": config.mode, "baseline": config.baseline and config.baseline.origin},
        "steps": running.steps,
        "first_different_step": known,
        **{what: {"counts": counts(listed), "items": [each.to_dict() for each in listed]} for what, listed in sides.items()},
        "notes": notes,
    }  # fmt: skip


def own_policy(asked: Source, detail: Item, stored: list[Item], notes: list[str]) -> "PolicyConfig":
    """The policy that the run has now, in the mode in which its decisions were made."""
    from fp8_safeguard.monitor.baseline import Baseline
    from fp8_safeguard.monitor.policyconfig import PolicyConfig

    modes = sorted({item["mode"] for item in stored})
    mode = modes[0] if len(modes) == 1 else detail["mode"]
    if len(modes) > 1:
        notes.append(f"the mode changed ({', '.join(modes)}); all steps are replayed in {mode}")
    name = str(detail["id"])
    used = next((item["id"] for item in asked.baselines(name) if item["used"]), None)
    learned = None if used is None else Baseline.from_dict(asked.baseline(name, used)["baseline"])
    if learned is not None:
        notes.append(f"baseline {used} is taken to have judged all steps; when it was chosen is not replayed")
    pins = frozenset(str(pin["layer"]) for pin in asked.pins(name))
    if pins:
        notes.append(f"pins on {len(pins)} layers are taken to have held for all steps")
    return PolicyConfig(run=name, preset=detail["thresholds"], mode=mode, pins=pins, baseline=learned)


def named_baseline(asked: Source, run: str, named: Any, policy: Path | None) -> "Baseline | None":
    """The baseline that a policy file names: an id of the run's, a file beside it, or none. Exits with 2."""
    from fp8_safeguard.monitor.baseline import Baseline, BaselineError
    from fp8_safeguard.monitor.quoting import quoted

    if named is False or named in ("none", "off"):
        return None
    if type(named) is int and 0 < named <= LARGEST:
        return Baseline.from_dict(asked.baseline(run, named)["baseline"])
    if not isinstance(named, str):
        fail(f'baseline is the id of one, a file, or "none", not {quoted(named)}.', 2)
    file = Path(named) if policy is None else policy.parent / named
    try:
        return Baseline.from_dict(read_document(str(file), "the baseline"))
    except BaselineError as error:
        fail(f"{file}: {error}", 2)


WORDS = {
    "same": "same",
    "earlier": "earlier",
    "later": "later",
    "only_here": "only here",
    "only_stored": "only stored",
}


def show_replay(found: Item) -> None:
    """What differs, item by item, and how many of each."""
    policy = found["policy"]
    by = f", {policy['baseline']}" if policy["baseline"] else ""
    typer.echo(
        printable(
            f"{found['run']}: {found['steps']} steps under preset {policy['preset']}, mode {policy['mode']}{by}"
        )
    )
    columns: Columns = {
        "compared": lambda item: WORDS[item["status"]] + ("" if item["certain"] else " ?"),
        "step": lambda item: item["step"],
        "stored": lambda item: item["stored_step"],
        "shift": lambda item: f"{item['shift_steps']:+d}" if item["shift_steps"] else None,
        "layer": lambda item: item["layer"] or "the run",
        "target": lambda item: place(item["target"]) if "target" in item else None,
        "action": lambda item: item.get("action"),
        "value": lambda item: item.get("value"),
        "severity": lambda item: item.get("severity"),
        "rule": lambda item: item["rule"],
    }
    for what in ("decisions", "alerts"):
        items, count = found[what]["items"], found[what]["counts"]
        said = ", ".join(f"{count[status]} {words}" for status, words in WORDS.items() if count[status])
        if items:
            show(f"{what}: {said}", items[:MOST_ROWS], columns)
        else:
            typer.echo(f"{what}: none, here or stored")
        if len(items) > MOST_ROWS:
            typer.echo(f"and {len(items) - MOST_ROWS} more; --json has all")
    if found["first_different_step"] is not None:
        typer.echo(
            folded(
                f"The plans differ from step {found['first_different_step']}: later samples were taken under the stored "
                "plan, so what has a ? is a guess."
            )
        )
    for note in found["notes"]:
        typer.echo(folded(printable(f"note: {note}")))
