"""Which weight matrices a run observes, and its sampling, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.metrics import short_number

NO_DATA = "no data"


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One weight matrix of the list."""

    name: str
    shape: str
    """`512 × 128`; empty for one that has none."""
    status: str
    tone: str
    """The state whose icon and colour it takes."""
    note: str
    """Why it is not observed, or how it is; empty where there is nothing to say."""
    data: str
    """NO_DATA until a sample of the run has held it; then empty."""

    @property
    def measured(self) -> bool:
        """Whether there is anything to open."""
        return not self.data


@dataclass(frozen=True, kw_only=True)
class CoverageView:
    """The section of the run page."""

    headline: str
    """`12 of 14 weight matrices observed`."""
    complete: bool
    """Whether nothing is left out: the section then starts closed."""
    rows: tuple[CoverageRow, ...]
    """What is not observed first."""
    more: int
    """Matrices that are not listed."""
    sampling: str
    """What the overhead budget makes of the sampling; empty where the client does not say."""


_TONES = {"not observed": "watch", "adapted": "healthy", "observed": "healthy"}


def coverage_view(
    counts: Mapping[str, int], items: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any] | None
) -> CoverageView:
    """The section from the API's counts and rows (those shown, what is not observed first) and its sampling report."""
    total = sum(counts.values())
    seen = total - counts["not observed"]
    adapted = f", {counts['adapted']:,} by an adapter" if counts["adapted"] else ""
    matrices = "matrix" if total == 1 else "matrices"
    return CoverageView(
        headline=f"{seen:,} of {total:,} weight {matrices} observed{adapted}",
        complete=seen == total,
        rows=tuple(map(_row, items)),
        more=total - len(items),
        sampling=" ".join(
            filter(None, (sampling_words(sampling or {}), _counts_words(seen, sampling or {})))
        ),
    )


def _counts_words(seen: int, sampling: Mapping[str, Any]) -> str:
    """Why there are fewer or more layers than matrices; empty where the two counts are one."""
    layers = sampling.get("layers")
    if layers is None or layers == seen:
        return ""
    return (
        f"The {seen:,} above counts weight matrices, the {layers:,} here the layers that hold them, of which one may hold several; "
        "the map and the list of layers have those that a sample has held so far."
    )


def _row(item: Mapping[str, Any]) -> CoverageRow:
    return CoverageRow(
        name=str(item["name"]),
        shape=" × ".join(f"{size:,}" for size in item["shape"]),
        status=str(item["status"]),
        tone=_TONES.get(str(item["status"]), "unknown"),
        note=str(item["reason"]),
        data="" if item["measured"] else NO_DATA,
    )


def sampling_words(sampling: Mapping[str, Any]) -> str:
    """How often, how much, how soon everything was seen, and at what cost; what the client leaves out is not said."""
    said = [
        _often(sampling),
        _capital("; ".join(part for part in (_layers(sampling), _tiles(sampling)) if part)),
        _soon(sampling),
        _cost(sampling),
    ]
    return " ".join(f"{sentence}." for sentence in said if sentence)


def _often(sampling: Mapping[str, Any]) -> str:
    every = sampling.get("every")
    if every is None:
        return ""
    return "Every step is sampled" if every == 1 else f"One step in {every:,} is sampled"


def _layers(sampling: Mapping[str, Any]) -> str:
    chosen, layers = sampling.get("layers_per_sample"), sampling.get("layers")
    if chosen is None:
        return ""
    if layers is not None and chosen >= layers:
        all_ = "the observed layer is" if layers == 1 else f"all {layers:,} observed layers are"
        return f"{all_} measured in full in each sample"
    one = chosen == 1
    of_all = f" layer{'' if one else 's'}" if layers is None else f" of {layers:,} observed layers"
    return f"{chosen:,}{of_all} {'is' if one else 'are'} measured in full in each sample, in turn"


def _tiles(sampling: Mapping[str, Any]) -> str:
    stride, chosen = sampling.get("tile_stride"), sampling.get("layers_per_sample")
    others = "" if chosen is None else "of the others "
    return f"{others}one block in {stride:,} is read" if stride is not None and stride > 1 else ""


def _soon(sampling: Mapping[str, Any]) -> str:
    steps = sampling.get("full_coverage_steps")
    if steps is None:
        return ""
    return f"Every observed layer is measured in full within {steps:,} step{'' if steps == 1 else 's'}"


def _cost(sampling: Mapping[str, Any]) -> str:
    spent, budget = sampling.get("overhead_ratio"), sampling.get("budget")
    if spent is None:
        return "" if budget is None else f"It may take {_percent(budget)} of the training time"
    allowed = "" if budget is None else f"; the budget is {_percent(budget)}"
    return f"It takes {_percent(spent)} of the training time{allowed}"


def _percent(ratio: float) -> str:
    return f"{short_number(round(ratio * 100, 2))} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
