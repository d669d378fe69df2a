"""What is healthy here: learn it, look at it, choose it, drop it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_safeguard.cli.api import ApiError, in_path
from fp8_safeguard.cli.export import destination
from fp8_safeguard.cli.observed import number_of, steps_of, tracked
from fp8_safeguard.cli.options import LARGEST, Json, ReadFrom, Run, Server, Token, Yes
from fp8_safeguard.cli.output import (
    Columns,
    Item,
    cell,
    confirmed,
    fail,
    json_text,
    print_json,
    printable,
    say,
    shortened,
    show,
)
from fp8_safeguard.cli.read import answer, asking
from fp8_safeguard.cli.source import ServerSource, Source, api

if TYPE_CHECKING:
    from fp8_safeguard.monitor.baseline import Baseline

baseline = typer.Typer(
    no_args_is_help=True, help="What is healthy here: learn it, look at it, choose it, drop it."
)

LEARNING_SECONDS = 300.0
MOST_NAMED = 5
OfRun = Annotated[str | None, typer.Option("--run", help="The run; by default the one that reported last.")]
Number = Annotated[
    int, typer.Argument(min=1, max=LARGEST, metavar="ID", help="From `fp8-safeguard baseline list`.")
]


@baseline.command()
def learn(
    run: OfRun = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="The healthy steps, such as 500:2000.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--for", help="The run to judge by it, if that is another one.")
    ] = None,
    yes: Yes = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to this file instead of using it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Learn what is healthy from steps of a run, and judge a run by it.

    First it shows what would have been raised on those very steps, where
    every alert is a false alarm, and on the rest of the run: with the preset
    alone, and with what was learned. Then it asks. Steps that are too few or
    not healthy (NaN, skipped steps, decisions in force) are refused. A
    database is only read: give --output, and the file to replay or check.

    Examples:
        fp8-safeguard baseline learn --run good-7b --steps 500:2000
        fp8-safeguard baseline learn --run good-7b --steps 500:2000 --for new-7b --yes
    """
    if steps is None:
        fail("--steps is missing: give the healthy steps, such as --steps 500:2000.", 2)
    span = steps_of(steps)
    if output is not None and output.exists() and not force:
        fail(f"{output} exists. Choose another name, or replace it with --force.")
    with asking(server, database_url, token, run) as (asked, name):
        learned, found = preview(asked, name, span, target)
        if not as_json:
            show_preview(found)
        if output is not None:
            with destination(output) as out:
                out.write(f"{json_text(learned.to_dict())}\n".encode())
            say(f"Written to {output}.")
        else:
            found["stored"] = accept(asked, token, learned, target or name, yes, as_json)
        if as_json:
            print_json(found)


def preview(
    asked: Source, name: str, span: tuple[int | None, int | None], target: str | None
) -> tuple["Baseline", dict[str, Any]]:
    """What the window teaches, and what both policies raise on it and on the rest of the run. Exits with 1 on a refusal."""
    from fp8_safeguard.monitor.baseline import BaselineError, Learner
    from fp8_safeguard.monitor.inforce import reasons
    from fp8_safeguard.monitor.policy import PolicyConfig
    from fp8_safeguard.monitor.replay import Replay, alarms

    detail = asked.run(name)
    judged = asked.run(target) if target is not None else detail
    first, last = detail["first_step"] or 0, detail["last_step"] or 0
    from_step = first if span[0] is None else span[0]
    to_step = last if span[1] is None else span[1]
    learner = Learner()
    try:
        for seen in tracked(asked.observations(name, from_step, to_step), "learning", from_step, to_step):
            learner.add(seen)
    except BaselineError as error:
        fail(printable(f"{name}: {error}."))
    refused = [*reasons(asked.decisions(name), from_step, to_step), *learner.refusals()]
    if refused:
        fail(
            f"Nothing can be learned from steps {from_step} to {to_step} of {name}:\n  "
            + "\n  ".join(map(printable, refused))
        )
    learned = learner.finish(run=name, attempt=str(detail["attempt"]), preset=detail["thresholds"])
    preset = judged["thresholds"]
    plain, moved = (Replay(PolicyConfig(run=name, preset=preset, baseline=one)) for one in (None, learned))
    for seen in tracked(asked.observations(name), "replaying", first, last):
        plain.add(seen)
        moved.add(seen)

    def inside(step: int) -> bool:
        return from_step <= step <= to_step

    found: dict[str, Any] = {"baseline": learned.summary(), "for": target or name, "preset": preset}
    for part, keep in (("window", inside), ("rest", lambda step: not inside(step))):
        sides = {"preset": plain, "baseline": moved}
        found[part] = {side: alarms(one, keep).to_dict() for side, one in sides.items()}
    found["rest_steps"] = plain.steps - learner.steps
    return learned, found


def show_preview(found: Item) -> None:
    """The table of what would have been raised, and the false alarms by rule and layer."""
    head = found["baseline"]
    title = (
        f"{head['run']}, steps {head['from_step']} to {head['to_step']}: {head['steps']} sampled steps, "
        f"{head['slots']} slots"
    )
    sides = {"preset": f"preset {found['preset']}", "baseline": "with this baseline"}
    rows = [
        {"steps": words, "judged by": sides[side], **found[part][side]}
        for part, words in (("window", "window (false alarms)"), ("rest", f"the other {found['rest_steps']}"))
        for side in sides
    ]
    columns: Columns = {
        "steps": lambda item: item["steps"],
        "judged by": lambda item: item["judged by"],
        "alerts": lambda item: item["alerts"],
        "decisions": lambda item: item["decisions"],
    }
    show(title, rows, columns)
    for side, words in sides.items():
        alarms = found["window"][side]
        for kind in ("by_rule", "by_layer"):
            if alarms[kind]:
                typer.echo(
                    printable(f"false alarms, {words}, {kind.replace('_', ' ')}: {_named(alarms[kind])}")
                )


def _named(counts: Item) -> str:
    listed = [f"{name} {count}" for name, count in list(counts.items())[:MOST_NAMED]]
    more = len(counts) - MOST_NAMED
    return ", ".join([*listed, *([f"and {more} more"] if more > 0 else [])])


def accept(
    asked: Source, token: str | None, learned: "Baseline", target: str, yes: bool, as_json: bool
) -> Item | None:
    """Let the server learn the same, once somebody has agreed; what it stored."""
    if not isinstance(asked, ServerSource):
        fail(
            f"{asked.name} is only read here: give --output FILE, or ask the server that writes it "
            "(`fp8-safeguard serve`)."
        )
    over = asked.run(target)["state"] == "ended"
    question = f"{target} has ended. Store this baseline for it all the same?"
    confirmed(question if over else f"Judge {target} by this baseline from now on?", yes, "Nothing is stored")
    wish = {"run": learned.run, "from_step": learned.from_step, "to_step": learned.to_step}
    with api(asked.name, token) as opened:
        item: Item = opened.post(f"/runs/{in_path(target)}/baselines", wish, timeout_seconds=LEARNING_SECONDS)
    if item["digest"] != learned.digest:
        say("More samples of these steps arrived meanwhile: the server has learned from them, too.")
    if not as_json:
        typer.echo(printable(_judges(item["id"], target, over)))
    return item


def _judges(number: int, run: str, over: bool) -> str:
    """From when on a baseline judges a run; of one that has ended, where else it can be used."""
    if not over:
        return f"Baseline {number} judges {run} from its next sample on."
    return (
        f"Baseline {number} is stored for {run}, which has ended: nothing is judged by it unless the run goes on. To judge another "
        f"run by it, learn it with --for; for replay and check: fp8-safeguard baseline show {number} --run {run} --output FILE."
    )


@baseline.command(name="list")
def listing(
    run: Run = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """The baselines of a run, the newest first; one at most is in use."""
    with asking(server, database_url, token, run) as (asked, name):
        items = asked.baselines(name)
    columns: Columns = {
        "id": lambda item: item["id"],
        "in use": lambda item: "yes" if item["used"] else "",
        "learned from": lambda item: item["run"],
        "steps": lambda item: f"{item['from_step']} to {item['to_step']}",
        "sampled": lambda item: item["steps"],
        "slots": lambda item: item["slots"],
        "preset": lambda item: item["preset"],
        "by": lambda item: item["created_by"],
    }
    answer(f"{name}: baselines", items, columns, as_json)


@baseline.command(name="show")
def showing(
    number: Number,
    run: OfRun = None,
    q: Annotated[
        str | None, typer.Option("--q", help="Only slots whose layer's name holds this text.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to this file, for replay and check.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """The healthy values of every slot: median, 99 % quantile and worst of each metric.

    Example:
        fp8-safeguard baseline show 3 --run my-run --q lm_head
    """
    from fp8_safeguard.monitor.baseline import Baseline, slot_of

    if output is not None and output.exists() and not force:
        fail(f"{output} exists. Choose another name, or replace it with --force.")
    with asking(server, database_url, token, run) as (asked, name):
        item = asked.baseline(name, number)
    if output is not None:
        with destination(output) as out:
            out.write(f"{json_text(item['baseline'])}\n".encode())
        say(f"Written to {output}.")
        return
    if as_json:
        print_json(item)
        return
    learned = Baseline.from_dict(item["baseline"])
    rows = [
        {"slot": slot_of(family, held.fmt), "metric": metric, "values": values}
        for family, held in learned.families.items()
        for metric, values in held.metrics.items()
        if values.extremum and (q or "").lower() in slot_of(family, held.fmt).layer.lower()
    ]
    columns: Columns = {
        "layer": lambda row: row["slot"].layer,
        "slot": lambda row: row["slot"].gemm or f"{row['slot'].operand} {row['slot'].layout}",
        "metric": lambda row: row["metric"],
        "samples": lambda row: row["values"].samples,
        "median": lambda row: row["values"].median,
        "99 %": lambda row: row["values"].high,
        "worst": lambda row: row["values"].extremum,
    }
    show(f"{name}: baseline {number}, {learned.origin}", rows, columns)


@baseline.command()
def use(
    number: Annotated[
        str, typer.Argument(metavar="ID", help="From `baseline list`; none: the preset alone.")
    ],
    run: OfRun = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Judge a run by one of its baselines from its next sample on, or by its preset alone.

    Examples:
        fp8-safeguard baseline use 3 --run my-run
        fp8-safeguard baseline use none --run my-run
    """
    wanted = None if number == "none" else number_of(number) or 0
    if wanted == 0:
        fail(f"ID is {shortened(number)!r}; give the id of a baseline, or none.", 2)
    with asking(server, None, token, run) as (asked, name), api(_address(asked), token) as opened:
        page = opened.put(f"/runs/{in_path(name)}/baselines", {"baseline": wanted})
        over = asked.run(name)["state"] == "ended"
    if as_json:
        print_json(page)
    else:
        said = "its preset alone" if wanted is None else f"baseline {wanted}"
        until = ", should it go on: it has ended" if over else ""
        typer.echo(printable(f"{name} is judged by {said}{until}."))


@baseline.command()
def drop(
    number: Number,
    run: OfRun = None,
    yes: Yes = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Delete a baseline; a run that was judged by it goes back to its preset."""
    with asking(server, None, token, run) as (asked, name), api(_address(asked), token) as opened:
        held = next((item for item in asked.baselines(name) if item["id"] == number), None)
        if held is None:
            raise ApiError(
                f"{name} has no baseline {number}; `fp8-safeguard baseline list` lists them.", status=404
            )
        in_use = ", which is in use," if held["used"] else ""
        confirmed(f"Drop baseline {number}{in_use} of {name}?", yes, "Nothing is dropped")
        opened.delete(f"/runs/{in_path(name)}/baselines/{number}", scope="control")
    typer.echo(printable(f"Baseline {cell(number)} of {name} is dropped."))


def _address(asked: Source) -> str:
    """The server's address. Raises ApiError for a database, which is only read."""
    if not isinstance(asked, ServerSource):
        raise ApiError(
            f"{asked.name} is only read here: name the server that writes it with --server.", status=400
        )
    return asked.name
