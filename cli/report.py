"""Prints whether a run is ready for FP8, GEMM by GEMM."""

import csv
import io
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8_safeguard.cli.decided import decided_lines, named_causes
from fp8_safeguard.cli.export import destination
from fp8_safeguard.cli.options import LARGEST, ReadFrom, Run, Server, Token
from fp8_safeguard.cli.output import (
    Columns,
    Item,
    fail,
    folded,
    json_text,
    printable,
    say,
    show,
    table_lines,
)
from fp8_safeguard.cli.read import asking

WORST_FIRST = ("keep_bf16", "watch", "unknown", "safe")
TROUBLE = ("keep_bf16", "watch")
"""Verdicts that ask for a remedy."""
MOST_REASONS = 20


class Form(StrEnum):
    """What the report looks like."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"
    JSON = "json"


def report(
    run: Run = None,
    from_step: Annotated[
        int | None, typer.Option(min=0, max=LARGEST, help="Leave earlier steps out.")
    ] = None,
    to_step: Annotated[int | None, typer.Option(min=0, max=LARGEST, help="Leave later steps out.")] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="table (the default), csv, markdown or json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, whole or not at all.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 when the run is not ready.")
    ] = False,
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
) -> None:
    """Is this model ready for FP8? The verdict on every GEMM, worst first.

    safe, watch, keep_bf16, or unknown where too little was measured. The judge
    is the error of the recomputed GEMM over the range of steps; of a long
    range the newest steps are read. On a BF16 run attach with shadow=True.
    A model of which a weight matrix was not observed is not ready. The remedy
    is what the policy would take of the what-ifs that were measured.

    Examples:
        fp8-safeguard report my-run
        fp8-safeguard report my-run --from-step 1000 --format markdown --output readiness.md
        fp8-safeguard report my-run --format csv | column -s, -t
    """
    chosen = _form(form, as_json)
    if output is not None and output.exists() and not force:
        fail(f"{output} exists. Choose another name, or replace it with --force.")
    if from_step is not None and to_step is not None and from_step > to_step:
        fail(f"--from-step {from_step} lies after --to-step {to_step}.", 2)
    with asking(server, database_url, token, run) as (asked, name):
        found = asked.readiness(name, from_step=from_step, to_step=to_step)
    if output is None and chosen is Form.TABLE:
        _show(found)
    else:
        with destination(output) as out:
            out.write(WRITERS[chosen](found).encode())
    if output is not None:
        say(f"{_heading(found)}; written to {output}")
    if exit_code and found["summary"]["verdict"] == "not_ready":
        raise typer.Exit(1)


def _form(form: Form | None, as_json: bool) -> Form:
    if as_json and form not in (None, Form.JSON):
        fail(f"--json and --format {form} ask for two things; give one.", 2)
    return Form.JSON if as_json else form or Form.TABLE


def worst_first(found: Item) -> list[Item]:
    """The items by verdict, in the model's order among equals."""
    return sorted(found["items"], key=lambda item: WORST_FIRST.index(item["verdict"]))


def columns_of(found: Item) -> Columns:
    """What is shown of each GEMM; its cause is the one that the run's decisions name, and what the report sees of it."""
    named = named_causes(found)

    def cause(item: Item) -> str:
        told = named.get(item["layer"], "") if item["verdict"] in TROUBLE else ""
        return ": ".join(filter(None, (told, item["cause"])))

    return {**_COLUMNS, "cause": cause, "remedy": remedy}


_COLUMNS: Columns = {
    "layer": lambda item: item["layer"],
    "gemm": lambda item: item["gemm"],
    "verdict": lambda item: item["verdict"],
    "error": lambda item: percent(item["error_median"]),
    "worst": lambda item: percent(item["error_worst"]),
    "at step": lambda item: item["error_worst_step"],
    "limit": lambda item: percent(item["threshold"]),
    "underflow": lambda item: underflow(item),
    "samples": lambda item: item["samples"],
}


def percent(ratio: float | str | None) -> str:
    """A share of 1 in percent, three digits; what is no number stays a word."""
    if ratio is None:
        return ""
    return f"{100 * ratio:.3g} %" if isinstance(ratio, float | int) else ratio


def underflow(item: Item) -> str:
    """What the operand that lost most has lost; nothing where nothing is lost."""
    return f"{percent(item['underflow'])} {item['underflow_slot']}" if item["underflow"] else ""


def remedy(item: Item) -> str:
    """What would be safe, or else the best of the alternatives; with its error, and its limit if that is another.

    It is the server's word: what the policy would take of the what-ifs that were measured. Without any there is none.
    """
    best = item["best"]
    if best is None:
        return untold(item) if item["verdict"] in TROUBLE else ""
    error = percent(best["error_median"])
    if best["threshold"] != item["threshold"]:
        error = f"{error}, limit {percent(best['threshold'])}"
    return f"{item['remedy']} ({error})" if item["remedy"] else f"best {best['variant']} ({error})"


def untold(item: Item) -> str:
    """Why there is no alternative to name; a server of an older release does not say."""
    measured = item.get("alternatives")
    if measured is None:
        return ""
    return f"none of {measured} measured helps" if measured else "not measured"


def _heading(found: Item) -> str:
    # The sentence may name a layer, and what a layer is called is anybody's choice.
    return printable(f"{found['run']}: {found['summary']['sentence']}")


def facts(found: Item) -> Iterator[str]:
    """What the report rests on, a line each."""
    summary, counts = found["summary"], found["summary"]["counts"]
    listed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(WORST_FIRST) if counts[verdict])
    if listed:
        yield f"{summary['gemms']} GEMMs of {summary['layers']} layers: {listed}"
    kept = summary["keep_bf16_layers"]
    if kept:
        share = (
            f"{percent(summary['keep_bf16_ratio'])} of the layers, budget {percent(summary['budget_ratio'])}"
        )
        yield f"keep in BF16 ({share}): {', '.join(map(printable, kept))}"
    used, there = found["steps_used"], found["steps_in_range"]
    if used:
        span = f"steps {found['from_step']} to {found['to_step']}, {used} sampled"
        yield span if used == there else f"{span}; the newest of {there} in the range"
    if found["items"]:
        yield rests_on(found)
    yield from decided_lines(found)


def rests_on(found: Item) -> str:
    """How many recomputed samples the verdicts have, and how many more are needed where there are too few."""
    held = [int(item["samples"]) for item in found["items"]]
    span = f"{min(held)}" if min(held) == max(held) else f"{min(held)} to {max(held)}"
    said = f"the verdicts rest on {sum(held)} recomputed samples, {span} of each GEMM"
    short = found["summary"].get("gemms_short")
    if not short:
        return said
    summary = found["summary"]
    missing = summary["samples_short"]
    who = "1 GEMM has fewer and needs" if short == 1 else f"{short} GEMMs have fewer and need up to"
    return f"{said}; a verdict needs {summary['samples_needed']}: {who} {missing} more"


def reasons(found: Item) -> Iterator[str]:
    """Why each GEMM that is not safe is not; of many the worst."""
    listed = [item for item in worst_first(found) if item["reason"]]
    for item in listed[:MOST_REASONS]:
        yield f"{printable(item['layer'])} {item['gemm']}: {item['reason']}"
    if len(listed) > MOST_REASONS:
        yield f"and {len(listed) - MOST_REASONS} more; --format csv has all"


def unseen(found: Item) -> Iterator[str]:
    """Weight matrices that were not observed, and those that the verdict does without; of many the first."""
    for name, words in (("unobserved", "unknown"), ("left_out", "not judged")):
        listed = found["summary"][name]
        for each in listed[:MOST_REASONS]:
            yield f"{printable(each['name'])}: {words}, not observed: {printable(each['reason'])}"
        if len(listed) > MOST_REASONS:
            yield f"and {len(listed) - MOST_REASONS} more that are {words}; --format json has all"


def _show(found: Item) -> None:
    items = worst_first(found)
    if items:
        show(_heading(found), items, columns_of(found))
    else:
        typer.echo(_heading(found))
    for line in (*facts(found), *unseen(found), *reasons(found)):
        typer.echo(folded(line))


def as_table(found: Item) -> str:
    """The plain lines that a pipe gets."""
    items = worst_first(found)
    lines = table_lines(_heading(found), items, columns_of(found)) if items else [_heading(found)]
    return "\n".join([*lines, *facts(found), *unseen(found), *reasons(found)]) + "\n"


def as_csv(found: Item) -> str:
    """One line a GEMM with every number; the best alternative in columns of its own."""
    text = io.StringIO()
    best = ("variant", "verdict", "error_median", "error_worst", "samples", "threshold")
    rows = [_flat(item, best) for item in found["items"]]
    names = [*ITEM_NAMES, *(f"best_{name}" for name in best)]
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(item: Item, best: tuple[str, ...]) -> dict[str, Any]:
    held = item["best"] or {}
    return {**item, **{f"best_{name}": held.get(name) for name in best}}


ITEM_NAMES = (
    *("layer", "gemm", "verdict", "reason", "source", "samples"),
    *("error_median", "error_worst", "error_worst_step", "error_latest", "error_latest_step", "threshold"),
    *(
        "underflow",
        "underflow_slot",
        "underflow_step",
        "rows_flushed",
        "nonfinite_samples",
        "alternatives",
        "cause",
        "remedy",
    ),
)


def as_markdown(found: Item) -> str:
    """A page to be kept beside the model."""
    columns = {**columns_of(found), "why": lambda item: item["reason"]}
    listed = (*facts(found), *unseen(found))
    lines = [f"# {_escaped(_heading(found))}", "", *(f"- {_escaped(fact)}" for fact in listed), ""]
    if found["items"]:
        lines += [_line(columns), _line(["---"] * len(columns))]
    for item in worst_first(found):
        lines.append(_line(_escaped(str(cell)) for cell in _cells(item, columns)))
    return "\n".join(lines).rstrip() + "\n"


def _cells(item: Item, columns: Columns) -> Iterator[object]:
    for column in columns.values():
        value = column(item)
        yield "" if value is None else value


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text as text: a layer's name may hold what Markdown or HTML would take for its own."""
    plain = printable(text).replace("\\", "\\\\")
    for mark in "|*_`[]<>#&":
        plain = plain.replace(mark, f"\\{mark}")
    return plain


def as_json(found: Item) -> str:
    """The answer itself."""
    return f"{json_text(found)}\n"


WRITERS: dict[Form, Callable[[Item], str]] = {
    Form.TABLE: as_table,
    Form.CSV: as_csv,
    Form.MARKDOWN: as_markdown,
    Form.JSON: as_json,
}
