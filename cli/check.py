"""Holds a run against a reference, for CI of recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_safeguard.cli.api import ApiError
from fp8_safeguard.cli.observed import number_of, policy_decisions, read_document, steps_of, tracked
from fp8_safeguard.cli.options import Json, ReadFrom, Server, Token
from fp8_safeguard.cli.output import Item, fail, folded, print_json, printable
from fp8_safeguard.cli.source import Source, about, source

if TYPE_CHECKING:
    from fp8_safeguard.monitor.baseline import Baseline
    from fp8_safeguard.monitor.runcheck import Report, Side


def check(
    run: Annotated[str, typer.Argument(help="The run to check.")],
    baseline: Annotated[
        str,
        typer.Option(help="The reference: a run, the id of one of RUN's baselines, or a baseline's file."),
    ],
    max_loss_gap: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Largest mean loss gap of 50 steps, as a ratio (0.005), instead of a learned one.",
        ),
    ] = None,
    twins: Annotated[
        list[str] | None,
        typer.Option(
            "--null", metavar="RUN", help="A run that differs from the reference by chaos alone; repeatable."
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Compare these steps only, such as 100:600.")
    ] = None,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Compare a run with a reference: loss, numerics, decisions, alerts, data.

    Exit codes: 0 nothing is worse than the reference; 1 something is, a line
    each; 2 the two cannot be compared (unknown run, no shared steps). The
    loss is judged by means over 50 steps against the spread that such means
    have where nothing is wrong, times 5: of --null runs, or else of the run's
    own steps. Numerics are held against the reference's healthy range.

    Examples:
        fp8-safeguard check new-recipe --baseline good-7b
        fp8-safeguard check new-recipe --baseline good-7b --null good-7b-seed1 --steps 100:600
        fp8-safeguard check new-recipe --baseline 3 --max-loss-gap 0.005 --json
    """
    from fp8_safeguard.monitor.lossgap import CheckError

    span = steps_of(steps)
    with source(server, database_url, token) as asked:
        try:
            report = compared(asked, run, baseline, span, twins or [], max_loss_gap)
        except CheckError as error:
            fail(f"{run} and {baseline} cannot be compared: {error}.", 2)
        except ApiError as error:
            if error.kind in ("run-not-found", "baseline-not-found"):
                fail(str(about(asked, run, error)), 2)
            raise
    if as_json:
        print_json(report.to_dict())
    else:
        show_report(report)
    if not report.ok:
        raise typer.Exit(1)


def compared(
    asked: Source,
    run: str,
    baseline: str,
    span: tuple[int | None, int | None],
    twins: list[str],
    max_gap: float | None,
) -> "Report":
    """The report. Raises CheckError, ApiError."""
    from fp8_safeguard.monitor.lossgap import CheckError
    from fp8_safeguard.monitor.runcheck import Side, report_of

    detail = asked.run(run)
    known = {str(item["id"]): item for item in asked.runs()}
    learned = None if baseline in known else named_baseline(asked, run, baseline)
    reference = baseline if learned is None else learned.run
    # What was learned needs no step in common; the loss is then compared where there are any.
    details = [detail, *([known[baseline]] if learned is None else [])]
    within = _overlap(details, span)
    if within is None:
        raise CheckError(f"they share no step: {', '.join(map(_span, details))}")
    ours = side(asked, run, within)
    theirs = Side()
    if learned is None:
        theirs = side(asked, reference, within)
    elif reference in known:
        theirs = side(asked, reference, (learned.from_step, learned.to_step))
    nulls = [side(asked, twin, within).losses for twin in twins]
    return report_of(
        run=run,
        reference=baseline if learned is None else learned.origin,
        ours=ours,
        theirs=theirs,
        learned=learned,
        raised=_raised(asked, run, within),
        raised_before=_raised(asked, reference, within) if learned is None else ([], []),
        preset=detail["thresholds"],
        twins=nulls,
        max_gap=max_gap,
    )


def named_baseline(asked: Source, run: str, baseline: str) -> "Baseline":
    """The baseline of that id, or in that file. Exits with 2 where there is neither."""
    from fp8_safeguard.monitor.baseline import Baseline, BaselineError

    number = number_of(baseline)
    if number:
        return Baseline.from_dict(asked.baseline(run, number)["baseline"])
    if not _is_file(baseline):
        fail(
            str(about(asked, baseline, ApiError("", status=404, kind="run-not-found")))
            + " It is no baseline's id and no file either.",
            2,
        )
    try:
        return Baseline.from_dict(read_document(baseline, "--baseline"))
    except BaselineError as error:
        fail(f"--baseline {baseline}: {error}", 2)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # such as a name that is longer than any file's
        return False


def side(asked: Source, run: str, within: tuple[int, int]) -> "Side":
    """What a run showed over these steps."""
    from fp8_safeguard.monitor.runcheck import Side

    found = Side()
    for seen in tracked(asked.observations(run, *within), run, *within):
        found.add(seen)
    return found


def _raised(asked: Source, run: str, within: tuple[int, int]) -> tuple[list[Item], list[Item]]:
    """The policy's decisions on a run, and its alerts, over these steps."""

    def inside(item: Item) -> bool:
        return bool(within[0] <= item["step"] <= within[1])

    decisions, _ = policy_decisions(asked.decisions(run), asked.attempts(run))
    return [item for item in decisions if inside(item)], [item for item in asked.alerts(run) if inside(item)]


def _overlap(details: list[Any], span: tuple[int | None, int | None]) -> tuple[int, int] | None:
    """The steps that all have and that are asked for; None where there is none."""
    firsts = [item["first_step"] for item in details]
    lasts = [item["last_step"] for item in details]
    if None in firsts or None in lasts:
        return None
    first = max([*firsts, *([] if span[0] is None else [span[0]])])
    last = min([*lasts, *([] if span[1] is None else [span[1]])])
    return (first, last) if first <= last else None


def _span(item: Item) -> str:
    if item["first_step"] is None:
        return f"{item['id']} has none"
    return f"{item['id']} has {item['first_step']} to {item['last_step']}"


def show_report(report: "Report") -> None:
    """The verdict, what it rests on, and a line for each breach."""
    from fp8_safeguard.monitor.runcheck import percent

    verdict = "passes" if report.ok else f"fails, {len(report.breaches)} breaches"
    typer.echo(printable(f"{report.run} against {report.reference}: {verdict}"))
    loss = report.loss
    if loss is not None:
        worst = loss.worst
        typer.echo(
            folded(
                f"loss: mean gap {percent(loss.mean_gap_ratio)} over {loss.shared_steps} shared steps; worst 50-step window "
                f"{percent(worst.gap_ratio)} (steps {worst.from_step} to {worst.to_step}), limit {percent(worst.limit)}, "
                f"null {loss.null}"
            )
        )
    typer.echo(f"numerics: {report.slots_compared} slots compared")
    for breach in report.breaches:
        typer.echo(printable(f"BREACH {breach.kind}: {breach.said}"))
    for note in report.notes:
        typer.echo(folded(printable(f"note: {note}")))
