"""What an address asks a page to show, checked."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fp8_safeguard.dashboards.alerts import DEFAULT_CHIPS, chips_of
from fp8_safeguard.dashboards.metrics import PAGE_METRICS, default_scale, metric_view

LAST_STEP = 2**53 - 1
"""The largest step that a browser's numbers hold exactly."""
CHOICES = {"order": ("depth", "worst"), "scale": ("log", "linear"), "tab": ("alerts", "decisions")}


@dataclass(frozen=True, kw_only=True)
class PageView:
    """Everything on the run page that an address fixes."""

    metric: str = PAGE_METRICS[0]
    slot: str = ""
    order: str = "depth"
    scale: str = "log"
    q: str = ""
    start: int | None = None
    """First step in view; None for the run's own."""
    end: int | None = None
    row: str = ""
    """Layer of the ringed cell."""
    step: int | None = None
    """Step of the ringed cell; None rings the whole row, and without a row it rings all rows."""
    chips: tuple[str, ...] = DEFAULT_CHIPS
    tab: str = "alerts"
    table: bool = False
    notices: tuple[str, ...] = field(default=(), compare=False)
    """What the address asked for in vain, in words."""


def read_view(
    query: Mapping[str, str],
    *,
    layers: Collection[str],
    offer: Mapping[str, Sequence[str]],
    opening: str = PAGE_METRICS[0],
) -> PageView:
    """The view of an address. What cannot be shown becomes a notice and the default; nothing raises.

    `layers` are the run's, `offer` the slots of each metric, `opening` the metric where the address names none.
    """
    notices: list[str] = []
    metric = _choose(query, "metric", PAGE_METRICS, notices) or opening
    start, end = (_step(query, name, notices) for name in ("from", "to"))
    if start is not None and end is not None and start > end:
        notices.append(f"from={start} lies behind to={end}: showing all steps")
        start = end = None
    row = _layer(query, layers, notices)
    tab = _choose(query, "tab", CHOICES["tab"], notices) or "alerts"
    return PageView(
        metric=metric,
        slot=_slot(query, metric, offer, notices),
        order=_choose(query, "order", CHOICES["order"], notices) or "depth",
        scale=_choose(query, "scale", CHOICES["scale"], notices) or default_scale(metric),
        q=query.get("q", ""),
        start=start,
        end=end,
        row=row,
        step=_step(query, "step", notices) if row or not query.get("row") else None,
        chips=_chips(query, notices),
        tab=tab,
        table=query.get("table") == "1",
        notices=tuple(notices),
    )


def _choose(query: Mapping[str, str], name: str, known: Iterable[str], notices: list[str]) -> str | None:
    value = query.get(name, "")
    if not value or value in known:
        return value or None
    notices.append(f"{name} “{_short(value)}” is unknown; one of {', '.join(known)}")
    return None


def _step(query: Mapping[str, str], name: str, notices: list[str]) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if text.isdecimal() and text.isascii() and len(text) < 17 and int(text) <= LAST_STEP:
        return int(text)
    notices.append(f"{name}={_short(text)} is not a step; steps are whole numbers from 0")
    return None


def _slot(
    query: Mapping[str, str], metric: str, offer: Mapping[str, Sequence[str]], notices: list[str]
) -> str:
    slot = query.get("slot", "")
    offered = offer.get(metric, ())
    if not slot or slot in offered:
        return slot
    label = metric_view(metric).label
    notices.append(
        f"this run has no {label} of “{_short(slot)}”; showing the worst of each layer"
        + (f" (there are {', '.join(offered)})" if offered else "")
    )
    return ""


def _layer(query: Mapping[str, str], layers: Collection[str], notices: list[str]) -> str:
    row = query.get("row", "")
    if row and row not in layers:
        notices.append(f"this run has no layer “{_short(row)}”")
        return ""
    return row


def _chips(query: Mapping[str, str], notices: list[str]) -> tuple[str, ...]:
    chips, unknown = chips_of(query.get("alerts", ""))
    if unknown:
        notices.append(f"alerts are not filtered by “{_short(', '.join(unknown))}”")
    return chips


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
