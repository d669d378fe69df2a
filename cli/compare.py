"""Two runs side by side: configuration, loss, numerics and decisions."""

import math
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any

import typer

from fp8_safeguard.cli.api import ApiError
from fp8_safeguard.cli.options import Json, ReadFrom, Server, Token
from fp8_safeguard.cli.output import Columns, Item, folded, print_json, printable, show
from fp8_safeguard.cli.read import place, plan_line
from fp8_safeguard.cli.source import Source, about, source

FACTS = (
    "state",
    "mode",
    "thresholds",
    "attempt",
    "groups",
    "first_step",
    "last_step",
    "loss",
    "gradient_norm",
)
"""What of a run's detail stands beside the other's."""
NUMERICS = {"error": "relative_error", "distortion": "gradient_distortion", "underflow": "underflow_ratio"}
"""Metrics that are compared, by their short names: the judge first."""
LEAST = {"error": 1e-6, "distortion": 1e-4, "underflow": 1e-3}
"""Values below which a layer is not told from one that has none."""
MOST_ROWS = 20


def compare(
    a: Annotated[str, typer.Argument(help="The one run.")],
    b: Annotated[str, typer.Argument(help="The other run.")],
    server: Server = None,
    database_url: ReadFrom = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Put two runs side by side: configuration, loss, numerics, decisions.

    The loss gap is (B - A) / |A| at the steps that both have, where the
    numerics are compared too, by the worst value of each layer. It judges
    nothing: `fp8-safeguard check` does.

    Examples:
        fp8-safeguard compare good-7b new-recipe
        fp8-safeguard compare good-7b new-recipe --json
    """
    with source(server, database_url, token) as asked:
        details = [named(asked, run) for run in (a, b)]
        found = side_by_side(asked, *details)
    if as_json:
        print_json(found)
    else:
        show_comparison(found)


def named(asked: Source, run: str) -> Item:
    """The run's detail. Raises ApiError, with close matches where there is no such run."""
    try:
        return asked.run(run)
    except ApiError as error:
        raise about(asked, run, error) from error


def side_by_side(asked: Source, a: Item, b: Item) -> dict[str, Any]:
    """The whole comparison as JSON. Raises ApiError."""
    runs = [str(each["id"]) for each in (a, b)]
    span = shared(a, b)
    loss = asked.compare(*runs)
    notes = []
    if span is None:
        notes.append("the two share no step: numerics are those of all steps of each")
    if not loss["steps"]:
        notes.append("no loss at the same step of both")
    return {
        "a": a,
        "b": b,
        "from_step": span[0] if span else None,
        "to_step": span[1] if span else None,
        "plans": [asked.plan(run) for run in runs],
        "precisions": [precisions(asked.layers(run)) for run in runs],
        "loss": loss,
        "numerics": numerics([worst(asked, run, span) for run in runs]),
        "decisions": decisions([asked.decisions(run) for run in runs]),
        "notes": notes,
    }


def precisions(layers: list[Item]) -> dict[str, int]:
    """How many GEMMs run in which precision."""
    count: Counter[str] = Counter()
    for layer in layers:
        count.update(str(kind or "unknown") for kind in layer["precision"].values())
    return dict(count)


def shared(a: Item, b: Item) -> tuple[int, int] | None:
    """The first and last step that both have; None where there is none."""
    firsts, lasts = [each["first_step"] for each in (a, b)], [each["last_step"] for each in (a, b)]
    if None in firsts or None in lasts or max(firsts) > min(lasts):
        return None
    return max(firsts), min(lasts)


def worst(asked: Source, run: str, span: tuple[int, int] | None) -> dict[str, dict[str, Any]]:
    """The worst value of each metric over the steps, by layer; NaN and Inf are worse than any number."""
    first, last = span or (None, None)
    found: dict[str, dict[str, Any]] = {}
    for short, metric in NUMERICS.items():
        # One column holds the worst step of all.
        map_ = asked.heatmap(run, metric=metric, from_step=first, to_step=last, max_cols=1)
        broken = {row for row, *_ in map_["nonfinite"]}
        for at, (layer, values) in enumerate(zip(map_["layers"], map_["values"], strict=True)):
            value = values[0] if values else None
            found.setdefault(layer, {})[short] = "non-finite" if at in broken else value
    return found


def numerics(sides: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One item a layer, the one that differs most in any of the metrics first."""
    items = []
    for layer in {**sides[0], **sides[1]}:
        item: dict[str, Any] = {"layer": layer}
        for short in NUMERICS:
            item[short] = [side.get(layer, {}).get(short) for side in sides]
        item["error_ratio"] = ratio(*item["error"])
        items.append(item)
    return sorted(items, key=lambda item: -difference(item))


def ratio(one: Any, other: Any) -> float | None:
    """How many times the other is; None where one of them is no positive number."""
    numbers = [value for value in (one, other) if isinstance(value, int | float) and value > 0]
    return numbers[1] / numbers[0] if len(numbers) == 2 else None


def difference(item: Item) -> float:
    """How far apart a layer is in the metric in which it is farthest; what is not finite in one of the two is farthest."""
    if any(sum(value == "non-finite" for value in item[short]) == 1 for short in NUMERICS):
        return math.inf
    ratios = {short: ratio(*(_floored(short, value) for value in item[short])) for short in NUMERICS}
    return max((abs(math.log(found)) for found in ratios.values() if found), default=-1.0)


def _floored(short: str, value: Any) -> Any:
    """A value, or what is as good as zero: ratios of less say nothing."""
    return max(value, LEAST[short]) if isinstance(value, int | float) else value


def decisions(sides: list[list[Item]]) -> list[dict[str, Any]]:
    """One item for each thing decided in either, with its first step in both and how often."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for at, made in enumerate(sides):
        for item in made:
            key = (item["layer"], place(item["target"]), item["action"], item.get("value"))
            names = ("layer", "target", "action", "value")
            entry = found.setdefault(key, {**dict(zip(names, key, strict=True)), "steps": [[], []]})
            entry["steps"][at].append(int(item["step"]))
    items = [{**entry, "steps": [sorted(steps) for steps in entry["steps"]]} for entry in found.values()]
    return sorted(items, key=lambda item: (min(item["steps"][0] + item["steps"][1]), str(item["layer"])))


def show_comparison(found: Item) -> None:
    """Configuration, loss, numerics and decisions, in this order."""
    a, b = found["a"], found["b"]
    rows = [{"what": name.replace("_", " "), "a": a[name], "b": b[name]} for name in FACTS]
    rows += [
        {"what": "GEMMs in", **dict(zip("ab", map(counted, found["precisions"]), strict=True))},
        {"what": "plan", **dict(zip("ab", (plan_line(plan, None) for plan in found["plans"]), strict=True))},
        {"what": "alerts", "a": counted(a["alerts"]), "b": counted(b["alerts"])},
        {"what": "decisions", **{side: made(found, at) for at, side in enumerate("ab")}},
    ]
    columns: Columns = {name: itemgetter(name) for name in ("what", "a", "b")}
    show(printable(f"a: {a['id']}, b: {b['id']}"), rows, columns)
    typer.echo(folded(loss_line(found["loss"])))
    show_numerics(found)
    show_decisions(found["decisions"])
    for note in found["notes"]:
        typer.echo(folded(f"note: {note}"))


def counted(counts: Item) -> str:
    """How many of each there are: `2 open, 0 held`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def made(found: Item, side: int) -> str:
    """How many decisions a run has, by action."""
    count: Counter[str] = Counter()
    for item in found["decisions"]:
        count[str(item["action"])] += len(item["steps"][side])
    return ", ".join(f"{number} {action}" for action, number in count.items() if number) or "none"


def loss_line(loss: Item) -> str:
    """The gap in one line."""
    if not loss["steps"]:
        return "loss: nothing to compare"
    mean, largest, last = (
        percent(loss[name]) for name in ("mean_gap_ratio", "max_abs_gap_ratio", "last_gap_ratio")
    )
    shared_ = loss["steps"]
    steps = f"{len(shared_)} shared steps ({shared_[0]} to {shared_[-1]})"
    if len(shared_) == 1:
        steps = f"the only shared step, {shared_[0]}"
    return f"loss: mean gap {mean} over {steps}, largest {largest.lstrip('+')}, last {last}"


def percent(value: float | str | None) -> str:
    """A signed gap; what is no number stays a word."""
    if value is None:
        return "unknown"
    return f"{100 * value:+.3g} %" if isinstance(value, float | int) else str(value)


def show_numerics(found: Item) -> None:
    """The layers whose GEMM errors differ most."""
    items = found["numerics"]
    columns: Columns = {
        "layer": itemgetter("layer"),
        **{f"{short} {side}": _of_side(short, at) for short in NUMERICS for at, side in enumerate("ab")},
        "error b/a": itemgetter("error_ratio"),
    }
    first, last = found["from_step"], found["to_step"]
    span = "all steps of each" if first is None else f"steps {first} to {last}"
    if not items:
        typer.echo(f"layers: none in either, of {span}")
        return
    show(f"layers, worst values of {span}, the largest difference first", items[:MOST_ROWS], columns)
    _more(items)


def _of_side(short: str, side: int) -> Callable[[Item], object]:
    return lambda item: item[short][side]


def show_decisions(items: list[Item]) -> None:
    """What was decided in either, with the first step in both."""
    if not items:
        typer.echo("decisions: none in either")
        return
    columns: Columns = {
        "layer": lambda item: item["layer"],
        "target": lambda item: item["target"],
        "action": lambda item: item["action"],
        "value": lambda item: item["value"],
        "step a": lambda item: next(iter(item["steps"][0]), None),
        "step b": lambda item: next(iter(item["steps"][1]), None),
    }
    show("decisions, the earliest first", items[:MOST_ROWS], columns)
    _more(items)


def _more(items: list[Item]) -> None:
    if len(items) > MOST_ROWS:
        typer.echo(f"and {len(items) - MOST_ROWS} more; --json has all")
