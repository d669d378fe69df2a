"""The reading commands: runs, status, layers, alerts, decisions, plan, audit."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer

from fp8_safeguard.cli.api import ApiError
from fp8_safeguard.cli.options import Json, Limit, ReadFrom, Run, Server, Token
from fp8_safeguard.cli.output import Columns, Item, cell, print_json, show, show_facts
from fp8_safeguard.cli.source import Source, about, chosen_run, source

NEEDS_SOMEBODY = ("unstable", "stale")
"""What a run is, or has ended as, for which `status --exit-code` answers 1."""


@contextmanager
def asking(
    server: str | None, database_url: str | None, token: str | None, run: str | None
) -> Iterator[tuple[Source, str]]:
    """The source and the run that is meant; a failure is one line on stderr and an exit code."""
    with source(server, database_url, token) as asked:
        name = chosen_run(asked, run)
        try:
            yield asked, name
        except ApiError as error:
            raise about(asked, name, error) from error


def runs(
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    limit: Limit = None,
) -> None:
    """List the runs, the newest first."""
    with source(server, database_url, token) as asked:
        items = asked.runs()[:limit]
    columns: Columns = {
        "run": lambda item: item["id"],
        "state": lambda item: item["state"],
        "step": lambda item: item["last_step"],
        "loss": lambda item: item["loss"],
        "mode": lambda item: item["mode"],
        "last report": lambda item: age(item["last_report"]),
    }
    answer("runs", items, columns, as_json)


def status(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit with 1 when the run is unstable, has ended so, or is stale."),
    ] = False,
) -> None:
    """The verdict on a run: its state, why, and what to do next.

    With --exit-code the verdict is the exit code too: 1 for unstable, ended
    unstable and stale; 0 for healthy, watch and fallback, ended so or not.

    Examples:
        fp8-safeguard status
        fp8-safeguard status my-run --json
        fp8-safeguard status --database-url sqlite:///demo-data/demo.db
    """
    with asking(server, database_url, token, run) as (asked, name):
        detail = asked.run(name)
        if as_json:
            print_json(detail)
        else:
            facts = status_lines(detail, asked.plan(name))
            show_facts(detail["id"], detail["verdict"]["state"], facts)
    if exit_code and needs_somebody(detail):
        raise typer.Exit(1)


def needs_somebody(detail: Item) -> bool:
    """Whether a run is in trouble now, or was when it ended: an end heals nothing."""
    state = detail["state"]
    return (detail.get("health") if state == "ended" else state) in NEEDS_SOMEBODY


def layers(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    limit: Limit = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only layers that are healthy, watch, unstable, fallback, unknown or stale."),
    ] = None,
    q: Annotated[str | None, typer.Option("--q", help="Only layers whose name holds this text.")] = None,
    order_by: Annotated[
        str | None, typer.Option(help="severity (worst first, the default), layer (model order) or name.")
    ] = None,
) -> None:
    """The layers of a run, worst first.

    Examples:
        fp8-safeguard layers my-run --limit 10
        fp8-safeguard layers --state unstable --q mlp --json
    """
    with asking(server, database_url, token, run) as (asked, name):
        items = asked.layers(name, limit=limit, state=state, q=q, order_by=order_by)
    titles = {None: "layers, worst first", "severity": "layers, worst first", "layer": "layers, model order"}
    answer(f"{name}: {titles.get(order_by, f'layers, by {order_by}')}", items, layer_columns(), as_json)


def layer_columns() -> Columns:
    """What is shown of each layer."""
    from fp8_safeguard.dashboards.view import follows_words

    return {
        "layer": lambda item: item["layer"],
        "state": lambda item: item["state"],
        "slot": lambda item: place(item.get("worst") or {}),
        "metric": lambda item: (item.get("worst") or {}).get("metric"),
        "value": lambda item: (item.get("worst") or {}).get("value"),
        "limit": lambda item: (item.get("worst") or {}).get("threshold"),
        "note": follows_words,
    }


def alerts(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    limit: Limit = None,
    state: Annotated[str | None, typer.Option(help="Only alerts that are open, held or resolved.")] = None,
) -> None:
    """The alerts of a run, the newest first, each with the cause that it follows from.

    To act on one: fp8-safeguard alert ack|silence|resolve ID.
    """
    with asking(server, database_url, token, run) as (asked, name):
        items = asked.alerts(name, limit=limit, state=state)
        if not as_json:
            items = with_causes(asked, name, items)
    columns: Columns = {
        "id": lambda item: item["id"],
        "since": lambda item: item.get("first_step", item.get("step")),
        "severity": lambda item: item.get("severity"),
        "state": lambda item: item.get("state"),
        "layer": lambda item: item.get("layer") or "the run",
        "slot": lambda item: place(item.get("slot") or {}) if item.get("layer") else "",
        "rule": lambda item: item.get("rule"),
        "value": lambda item: item.get("value"),
        "limit": lambda item: item.get("threshold"),
        "cause": lambda item: item.get("cause"),
        "note": alert_note,
    }
    answer(f"{name}: alerts", items, columns, as_json)


def decisions(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    limit: Limit = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only proposed, approved, rejected, sent, applied, reverted or expired ones."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Only decisions on this layer, by its whole name.")
    ] = None,
) -> None:
    """The decisions on a run, the newest first; --json adds their reasons and evidence.

    To act on one: fp8-safeguard decision approve|reject|revert ID.
    """
    with asking(server, database_url, token, run) as (asked, name):
        items = asked.decisions(name, limit=limit, state=state, layer=layer)
    columns: Columns = {
        "id": lambda item: item["id"],
        "step": lambda item: item["step"],
        "layer": lambda item: item["layer"],
        "target": lambda item: place(item["target"]),
        "action": lambda item: item["action"],
        "value": lambda item: item.get("value"),
        "state": lambda item: item["state"],
        "effective": lambda item: item.get("effective_step"),
        "cause": decided_cause,
        "outcome": lambda item: item.get("outcome"),
    }
    answer(f"{name}: decisions", items, columns, as_json)


def plan(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """The plan in force: every deviation from the configured precision."""
    with asking(server, database_url, token, run) as (asked, name):
        found = asked.plan(name)
        if as_json:
            print_json(found)
            return
        # The plan says what is wanted; since when it holds the trainer has said of each decision.
        since = (
            {made["id"]: made["effective_step"] for made in asked.decisions(name)} if found["entries"] else {}
        )
    columns: Columns = {
        "layer": lambda item: item["layer"],
        "target": lambda item: place(item["target"]),
        "action": lambda item: item["action"],
        "value": lambda item: item.get("value"),
        "decision": lambda item: item["decision_id"],
        "from step": lambda item: _held_from(since.get(item["decision_id"])),
        "until step": lambda item: item.get("expires_step"),
    }
    if found["entries"]:
        show(f"{name}: plan, version {found['version']}", found["entries"], columns)
    else:
        typer.echo(f"{name}: {plan_line(found, None)}.")


def _held_from(step: int | None) -> object:
    """Since when an entry of a plan holds, as the trainer has said; one that was just approved holds nothing yet."""
    return "not yet" if step is None else step


def audit(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
    limit: Limit = None,
    decision: Annotated[
        str | None, typer.Option(help="Only what happened to this decision, by its id.")
    ] = None,
) -> None:
    """Who did what when, the newest first: decisions, modes, pins, kill switch.

    Nothing in it is ever changed; it goes with its run.
    """
    with asking(server, database_url, token, run) as (asked, name):
        items = asked.audit(name, limit=limit, decision=decision)
    columns: Columns = {
        "when": lambda item: str(item["at"])[:19].replace("T", " "),
        "step": lambda item: item.get("step"),
        "who": lambda item: item["actor"],
        "what": lambda item: item["what"],
        "decision": lambda item: item.get("decision"),
        "facts": lambda item: facts_line(item.get("facts") or {}),
    }
    answer(f"{name}: audit log", items, columns, as_json)


def answer(title: str, items: list[Item], columns: Columns, as_json: bool) -> None:
    """The items as the list that the server answers with, all pages in one, or as a table."""
    if as_json:
        print_json({"items": items, "next_page_token": None})
    elif items:
        show(title, items, columns)
    else:
        what = title.split(", ")[0]
        run, _, name = what.rpartition(": ")
        typer.echo(f"{run}: no {name}." if run else f"No {name}.")


def status_lines(detail: Item, plan: Item) -> Iterator[tuple[str, str]]:
    """What `status` says, question by question; what is nothing to speak of is left out."""
    verdict = detail["verdict"]
    yield "why", verdict["why"]
    yield "next", verdict["next"]
    yield from cause_lines(detail)
    loss = cell(detail["loss"]) or "not sent"
    yield "step", f"{detail['last_step']} (attempt {detail['attempt']}), loss {loss}, mode {detail['mode']}"
    yield "plan", plan_line(plan, detail.get("fallback_budget_used_ratio"))
    yield "alerts", ", ".join(f"{count} {state}" for state, count in detail.get("alerts", {}).items())
    yield "reported", age(detail["last_report"])
    if detail.get("dropped"):
        yield "dropped", f"{detail['dropped']} samples that the client could not keep"


def cause_lines(detail: Item) -> Iterator[tuple[str, str]]:
    """The causes that stand, one a line, and the worst ranks."""
    from fp8_safeguard.dashboards.causes import cause_view
    from fp8_safeguard.dashboards.view import rank_rows

    for cause in detail.get("causes") or ():
        view = cause_view(cause)
        parts = [view.summary or view.place, view.value, f"decisions {', '.join(cause['decisions'])}"]
        told = "; ".join(part for part in parts if part)
        yield "cause", f"{view.title} ({view.kind_words}), since step {cause['first_step']}: {told}"
    for row in rank_rows(detail.get("ranks") or ()):
        yield "rank", f"{row.rank} on {row.host}: {row.layer} {row.signal} {row.value}"


def with_causes(asked: Source, run: str, items: list[Item]) -> list[Item]:
    """The alerts with the cause, in words, of the incident that they belong to."""
    from fp8_safeguard.dashboards.causes import cause_words
    from fp8_safeguard.dashboards.incidents import fold

    causes = asked.run(run).get("causes") or []
    if not causes:
        return items
    layers = [str(item["layer"]) for item in asked.layers(run, order_by="layer")]
    named = {
        item["id"]: cause_words(cause)
        for cause, group in zip(causes, fold(causes, items, layers), strict=True)
        for item in group
    }
    return [{**item, "cause": named.get(item["id"])} for item in items]


def decided_cause(item: Item) -> str:
    """The cause that a decision names, and whether it is FP8's: `outlier channels (FP8)`."""
    from fp8_safeguard.dashboards.causes import cause_of, cause_words

    cause = cause_of(item)
    return "" if cause is None else cause_words(cause)


def facts_line(facts: Item) -> str:
    """What belongs to an act, in one line: `observe to enforce`, `blocks.3.qkv dgrad bf16_fallback`."""
    if "from" in facts:
        return f"{facts['from']} to {facts['to']}"
    if "outcome" in facts:
        return str(facts["outcome"])
    if "layer" in facts:
        value = "" if facts.get("value") is None else str(facts["value"])
        words = (facts["layer"], place(facts.get("target") or {}), facts.get("action") or "left alone", value)
        return " ".join(str(word) for word in words if word)
    if "plan" in facts:
        entries, pins = len(facts["plan"]["entries"]), len(facts["pins"])
        return f"{entries} {'entry' if entries == 1 else 'entries'} and {pins} pin{'' if pins == 1 else 's'} dropped"
    return ""


_CHANGES = {"format": "format change", "gradient_smoothing": "smoothed gradient"}
"""Entries of a plan that leave precision and scales alone, in words."""


def plan_line(plan: Item, budget_used: float | None) -> str:
    """The plan in one line."""
    entries = plan["entries"]
    if not entries:
        return f"version {plan['version']}, no deviation from the configured precision"
    fallen = {entry["layer"] for entry in entries if entry["action"] == "bf16_fallback"}
    parts = [f"{len(fallen)} layer{'' if len(fallen) == 1 else 's'} in BF16"] if fallen else []
    actions = [entry["action"] for entry in entries if entry["action"] != "bf16_fallback"]
    others = Counter(_CHANGES.get(action, "scale change") for action in actions)
    parts += [f"{count} {change}{'' if count == 1 else 's'}" for change, count in others.items()]
    used = f", {budget_used:.0%} of the fallback budget" if budget_used else ""
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"version {plan['version']}, {listed}{used}"


def alert_note(item: Item) -> str:
    """What people did about an alert, how often it came, and where NaN and Inf began between two samples."""
    from fp8_safeguard.monitor.nonfinite import remark

    words = [remark(item.get("first_step") or 0, item.get("clean_step"))]
    if item.get("acknowledged"):
        words.append(f"known to {item.get('acknowledged_by')}")
    if item.get("silenced"):
        words.append("silenced")
    if item.get("resolved_by"):
        words.append(f"resolved by {item['resolved_by']}")
    if (item.get("occurrences") or 1) > 1:
        words.append(f"{item['occurrences']} times")
    return ", ".join(filter(None, words))


def age(moment: str | None) -> str:
    """How long ago an RFC 3339 time was, in its largest unit."""
    if moment is None:
        return "never"
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def place(slot: Item) -> str:
    """A slot, a target or a worst reading in two words: `dgrad`, `x row`, `layer`."""
    words = [slot.get("gemm") or "", slot.get("operand") or "", slot.get("layout") or ""]
    return " ".join(word for word in words if word) or "layer"
