"""Names beside the heatmap's rows: as many as fit, shortened and marked."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

MAX_LABELS = 32
"""Row labels that fit a 380 px high plot at 11 px type."""
LABEL_CHARACTERS = 30
ALERT_MARKS = {"act": " ▲", "watch": " △"}
"""What stands after the name of a layer with such an alert, as in the table of a layer's slots."""


def row_labels(layers: Sequence[str], alerts: Mapping[str, str]) -> dict[str, str]:
    """What stands beside the rows that are named, by layer. alerts: "act" or "watch" by layer."""
    names = _names(layers)
    return {layer: _marked(names[layer], alerts.get(layer, "")) for layer in _labelled(layers, alerts)}


def _labelled(layers: Sequence[str], alerts: Mapping[str, str]) -> list[str]:
    """The rows that are named: every few, but first those with alerts, the worst before the others, as far as they fit."""
    stride = max(1, math.ceil(len(layers) / MAX_LABELS))
    troubled = sorted(
        (at for at, layer in enumerate(layers) if layer in alerts), key=lambda at: alerts[layers[at]] != "act"
    )
    named: list[int] = []
    for at in (*troubled, *range(0, len(layers), stride)):
        if all(abs(at - other) >= stride for other in named):
            named.append(at)
    return [layers[at] for at in sorted(named)]


def _marked(label: str, severity: str) -> str:
    mark = ALERT_MARKS.get(severity, "")
    return _shorten(label, LABEL_CHARACTERS - len(mark)) + mark


def _names(layers: Sequence[str]) -> dict[str, str]:
    """Names that fit the margin: without what all names begin with, then without their middle."""
    if max(map(len, layers), default=0) <= LABEL_CHARACTERS:
        return {layer: layer for layer in layers}
    parts = [layer.split(".") for layer in layers]
    # The last part is always kept, and a single name has nothing in common with others.
    levels = zip(*(names[:-1] for names in parts), strict=False) if len(layers) > 1 else ()
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    start = "…" if shared else ""
    return {
        layer: _shorten(start + ".".join(names[shared:])) for layer, names in zip(layers, parts, strict=True)
    }


def _shorten(name: str, most: int = LABEL_CHARACTERS) -> str:
    if len(name) <= most:
        return name
    head = LABEL_CHARACTERS // 3
    return name[:head] + "…" + name[head + 1 - most :]
