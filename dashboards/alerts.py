"""The alert list in words: states, groups, counts."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.metrics import format_limit, format_value, metric_view
from fp8_safeguard.dashboards.view import excess_ratio, number, slot_words
from fp8_safeguard.monitor.nonfinite import remark

STATES = ("open", "held", "resolved")
"""The API's states: an alert has one of them."""
CHIPS = ("open", "held", "acknowledged", "silenced", "resolved")
"""The list's filters. Open ones that are silenced count as silenced only; acknowledged is a mark beside the state."""
DEFAULT_CHIPS = ("open", "held")
CONTEXT_STEPS = 40
"""Steps shown before the first bad one when an alert is opened: enough to see what healthy looked like."""
FOLLOWING_STEPS = 80
"""Steps shown after it, so that its course is seen at a width that cells can be told apart at."""


@dataclass(frozen=True, kw_only=True)
class AlertRow:
    """One entry of the list: a rule's alerts of one layer in one state; opening it shows the first bad cell."""

    ids: tuple[int, ...]
    layer: str
    """Empty for an alert of the whole run."""
    severity: str
    state: str
    title: str
    """The signal that is farthest beyond its limit."""
    detail: str
    """Its value and limit."""
    also: tuple[str, ...]
    """The other slots that it speaks of."""
    when: str
    """Steps from the first breach on."""
    opened: str
    """When it was raised: breaches in a row come before that."""
    since: int
    count: int
    """How often it was raised."""
    remarks: tuple[str, ...]
    """Who acknowledged it, until when it is silent, how it ended."""
    acknowledged: bool
    silenced: bool
    waits: bool
    """Whether nothing has shown it since a remedy took effect, and it waits to be measured again."""
    first_step: int
    """Where it opens: the first bad step of the signal that it names."""
    from_step: int
    to_step: int
    metric: str
    slot: str

    @property
    def tone(self) -> str:
        """The colour and icon of its state."""
        if self.state == "resolved":
            return "ended"
        if self.state == "held":
            return "fallback"
        return "unstable" if self.severity == "act" and not self.waits else "watch"

    @property
    def standing(self) -> str:
        """What it is in one word: its severity while it is open and in breach."""
        return self.state if self.state != "open" else "waits" if self.waits else self.severity


@dataclass(frozen=True, kw_only=True)
class AlertChip:
    """One filter of the list with the number of alerts (not entries) that it lets through."""

    name: str
    count: int
    chosen: bool


def state_of(item: Mapping[str, Any], held: Collection[str]) -> str:
    """The API's state; `held` are the layers in BF16, for answers that do not tell held from open."""
    state = str(item["state"])
    if state == "open" and "occurrences" not in item and item.get("layer") in held:
        return "held"
    return state if state in STATES else "open"


def alert_chips(
    items: Sequence[Mapping[str, Any]], chosen: Collection[str], *, held: Collection[str] = ()
) -> list[AlertChip]:
    """The filters with their counts; all but acknowledged add up to all alerts."""
    return [
        AlertChip(name=name, count=sum(name in _chips(item, held) for item in items), chosen=name in chosen)
        for name in CHIPS
    ]


def chips_of(text: str) -> tuple[tuple[str, ...], list[str]]:
    """The filters that an address names ("none" for none at all), and the names that are none."""
    if not text:
        return DEFAULT_CHIPS, []
    asked = [name for name in text.split(",") if name not in ("", "none")]
    unknown = [name for name in asked if name not in CHIPS]
    found = tuple(name for name in CHIPS if name in asked)
    return (found if found or not unknown else DEFAULT_CHIPS), unknown


def alert_rows(
    items: Iterable[Mapping[str, Any]],
    *,
    held: Collection[str] = (),
    chips: Collection[str] = CHIPS,
    last_step: int | None = None,
) -> list[AlertRow]:
    """The list, one entry for a layer, rule and state: what needs somebody first, then what is held, then the past."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in items:
        if _chips(item, held) & set(chips):
            groups.setdefault(_group(item, held), []).append(item)
    rows = [_alert_row(group, state_of(group[0], held), last_step) for group in groups.values()]
    return sorted(rows, key=urgency)


def _chips(item: Mapping[str, Any], held: Collection[str]) -> set[str]:
    """The filters that let an alert through."""
    state = state_of(item, held)
    if state == "open" and item.get("silenced"):
        state = "silenced"
    # Who knew of an alert that is over matters no more.
    return {state} | ({"acknowledged"} if item.get("acknowledged") and state != "resolved" else set())


def _group(item: Mapping[str, Any], held: Collection[str]) -> tuple[Any, ...]:
    marks = bool(item.get("acknowledged")), bool(item.get("silenced"))
    since = item.get("waits_since") or {}
    return (
        item.get("layer"),
        item["rule"],
        item["severity"],
        state_of(item, held),
        marks,
        since.get("decision"),
    )


def urgency(row: AlertRow) -> tuple[Any, ...]:
    """What the list is sorted by: who needs somebody first."""
    return (
        STATES.index(row.state), row.silenced, row.acknowledged, row.waits, row.severity != "act", row.since, row.layer
    )  # fmt: skip


def _alert_row(group: Sequence[Mapping[str, Any]], state: str, last_step: int | None) -> AlertRow:
    # An alert speaks of one or several slots; each has its own first step, value and limit.
    parts = [part for item in group for part in item.get("slots") or [item]]
    # A slot that is clear again speaks for nothing while others are not.
    worst = max([part for part in parts if not part.get("over")] or parts, key=_excess)
    since, end = min(map(_first_step, parts)), max(int(item["last_step"]) for item in group)
    # What opens is what the words and numbers speak of, at its own first bad step.
    start = _first_step(worst)
    to_step = start + FOLLOWING_STEPS
    opened = [int(item["step"]) for item in group if item.get("step") is not None]
    return AlertRow(
        ids=tuple(int(item["id"]) for item in group if item.get("id") is not None),
        layer=str(group[0].get("layer") or ""),
        severity=str(group[0]["severity"]),
        state=state,
        title=_title(str(group[0]["rule"]), worst),
        detail=_detail(worst),
        also=tuple(
            sorted(
                {slot_words(part.get("slot") or {}) for part in parts}
                - {"", slot_words(worst.get("slot") or {})}
            )
        ),
        when=f"steps {since:,} to {end:,}" if state == "resolved" else f"since step {since:,}",
        opened=f"opened at step {min(opened):,}" if opened else "",
        since=since,
        count=sum(int(item.get("occurrences") or 1) for item in group),
        remarks=tuple(_remarks(group[0], state)),
        acknowledged=bool(group[0].get("acknowledged")) and state != "resolved",
        silenced=bool(group[0].get("silenced")) and state != "resolved",
        waits=bool(group[0].get("waits_since")) and state == "open",
        first_step=start,
        from_step=max(0, since - CONTEXT_STEPS),
        to_step=to_step if last_step is None else max(min(to_step, last_step), start),
        metric=_shown_as(str(worst.get("metric") or "")),
        slot=slot_words(worst.get("slot") or {}),
    )


SHOWN_AS = {"sum_sq": "cosine_distortion", "sum_sq_q": "cosine_distortion", "sum_sq_err": "cosine_distortion"}
"""Raw columns that the page has no heatmap of, by the metric that is NaN where they are."""


def _shown_as(metric: str) -> str:
    return SHOWN_AS.get(metric, metric)


def _title(rule: str, worst: Mapping[str, Any]) -> str:
    metric = str(worst.get("metric") or "")
    label = metric_view(metric).label if metric else rule.replace("-", " ")
    return f"{label} {slot_words(worst.get('slot') or {})}".strip()


def _detail(worst: Mapping[str, Any]) -> str:
    view = metric_view(str(worst.get("metric") or ""))
    value, limit = number(worst.get("value")), number(worst.get("threshold"))
    if value is None and limit is None:
        return ""
    shown = format_value(value, view)
    return shown if limit is None else f"{shown} (limit {format_limit(limit, view)})"


def _first_step(item: Mapping[str, Any]) -> int:
    return int(item["first_step"])


def _remarks(item: Mapping[str, Any], state: str) -> Iterable[str]:
    if state == "resolved":
        by = item.get("resolved_by")
        reason = item.get("resolved_reason")
        yield f"resolved by {by}" if by else str(reason) if reason else "over by itself"
        return
    if began := remark(_first_step(item), item.get("clean_step")):
        yield began
    since = item.get("waits_since")
    if since and state == "open":
        took = f"decision {since['decision']} took effect at step {int(since['step']):,}"
        yield f"waits for its next measurement: no breach since {took}"
    if item.get("what_if"):
        yield "what FP8 would do: the layer runs in high precision"
    if item.get("acknowledged"):
        yield f"acknowledged by {item.get('acknowledged_by') or 'somebody'}"
    if item.get("silenced"):
        until = str(item.get("silenced_until") or "")[:16].replace("T", " ")
        yield f"silenced until {until} UTC" if until else "silenced"


def _excess(item: Mapping[str, Any]) -> float:
    value, threshold = number(item.get("value")), number(item.get("threshold"))
    ratio = excess_ratio(value, threshold, metric_view(str(item.get("metric") or "")))
    return math.inf if ratio is None else ratio
