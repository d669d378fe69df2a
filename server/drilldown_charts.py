"""The drawer's charts: what was asked for, read once, drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import plotly.graph_objects as go
from sqlalchemy import Connection

from fp8_safeguard.dashboards import layer_view
from fp8_safeguard.dashboards.layer_amax import amax_figure, amax_height
from fp8_safeguard.dashboards.layer_figures import fits_log, metric_figure, step_line
from fp8_safeguard.dashboards.layer_precision import precision_figure, precision_height
from fp8_safeguard.dashboards.layer_tiles import histogram_figure, tiles_figure
from fp8_safeguard.dashboards.metrics import default_scale, metric_view
from fp8_safeguard.monitor.slots import OPERANDS
from fp8_safeguard.server.drilldown import layer_document
from fp8_safeguard.server.drilldown_series import LayerSeries, block_history, load_series
from fp8_safeguard.server.heatmap import metric_name
from fp8_safeguard.server.runlookup import find_run

KINDS = ("metric", "amax", "blocks", "histogram", "precision")
EDGE_STEPS = 20
"""Steps read beyond the ends of the range, so that curves run out of the picture."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a drawer shows. Empty choices are made from the layer's document."""

    layer: str
    page_metric: str = ""
    """The heatmap's metric, which the drawer takes up."""
    metric: str = ""
    slots: tuple[str, ...] = ()
    scale: str = ""
    blocks: str = ""
    at: int | None = None
    from_step: int | None = None
    to_step: int | None = None
    theme: str = "light"

    def metric_of(self, document: Mapping[str, Any]) -> str:
        """The metric to draw. Raises Problem 422 for an unknown one."""
        if self.metric:
            metric_name(self.metric)
            return self.metric
        return layer_view.default_metric(document, self.page_metric)

    def slots_of(self, document: Mapping[str, Any]) -> list[str]:
        """The slots to draw."""
        return list(self.slots) or layer_view.default_slots(document, self.metric_of(document))

    def scale_of(self, metric: str) -> str:
        """log or linear."""
        wanted = self.scale or default_scale(metric)
        return wanted if can_log(metric) else "linear"

    def blocks_of(self, document: Mapping[str, Any]) -> str:
        """The slot whose blocks are shown; the worst where none is chosen."""
        known = layer_view.block_slots(document)
        return self.blocks if self.blocks in known else next(iter(known), "")


def can_log(metric: str) -> bool:
    """Whether a log scale can show the metric."""
    return fits_log(metric_view(metric), ())


class Charts:
    """The figures of one layer; the run's samples are read once for all of them."""

    def __init__(self, conn: Connection, run: str, wish: Asked) -> None:
        self._conn = conn
        self._wish = wish
        self._row = find_run(conn, run)
        self._document = layer_document(conn, run, wish.layer)

    def figure(self, kind: str) -> dict[str, Any]:
        """One of KINDS as Plotly's JSON; `layout.meta` names the run's first and last step."""
        made: go.Figure = getattr(self, f"_{kind}")()
        plain: dict[str, Any] = made.to_plotly_json()
        layout = plain["layout"]
        layout["meta"] = {name: self._document[name] for name in ("first_step", "last_step")}
        if self._wish.at is not None and kind != "histogram":
            layout["shapes"] = [*(layout.get("shapes") or ()), step_line(self._wish.at, self._wish.theme)]
        return plain

    @property
    def _steps(self) -> tuple[int, int] | None:
        """First and last step in the picture."""
        first, last = self._document["first_step"], self._document["last_step"]
        if first is None:
            return None
        wish = self._wish
        low = first if wish.from_step is None else wish.from_step
        high = last if wish.to_step is None else wish.to_step
        return (low, high) if low < high else (low, low + 1)

    @property
    def _read(self) -> tuple[int | None, int | None]:
        first, last = self._wish.from_step, self._wish.to_step
        return (
            None if first is None else max(0, first - EDGE_STEPS),
            None if last is None else last + EDGE_STEPS,
        )

    @cached_property
    def _series(self) -> LayerSeries:
        first, last = self._read
        return load_series(self._conn, self._row, self._wish.layer, from_step=first, to_step=last)

    @cached_property
    def _blocks_by_slot(self) -> dict[str, dict[str, Any]]:
        wish = self._wish
        first, last = self._read
        return block_history(self._conn, self._row, wish.layer, from_step=first, to_step=last, at=wish.at)

    def _metric(self) -> go.Figure:
        metric = self._wish.metric_of(self._document)
        chosen = self._wish.slots_of(self._document)
        return metric_figure(
            [line for line in self._series.metric(metric) if line["slot"] in chosen],
            metric=metric,
            scale=self._wish.scale_of(metric),
            steps=self._steps,
            decisions=self._document["decisions"],
            alerts=self._document["alerts"],
            theme=self._wish.theme,
        )

    def _amax(self) -> go.Figure:
        spreads = [spread for operand in OPERANDS if (spread := self._series.spread(operand)) is not None]
        multipliers = [
            {**span, "operand": span["target"].get("operand")}
            for span in self._document["adjustments"]
            if span["action"] == "scale_multiplier"
        ]
        figure = amax_figure(spreads, steps=self._steps, multipliers=multipliers, theme=self._wish.theme)
        figure.layout.height = amax_height(len(spreads))
        return figure

    def _blocks(self) -> go.Figure:
        slot = self._wish.blocks_of(self._document)
        return tiles_figure(
            self._blocks_by_slot.get(slot),
            steps=self._steps,
            limits=self._block_limits(slot),
            theme=self._wish.theme,
        )

    def _block_limits(self, slot: str) -> list[dict[str, Any]]:
        for held in self._document["slots"]:
            if layer_view.slot_name(held) == slot and held.get("expert") is None:
                limits: list[dict[str, Any]] = held["thresholds"].get("tile_sqnr_p01_db", [])
                return limits
        return []

    def _histogram(self) -> go.Figure:
        history = self._blocks_by_slot.get(self._wish.blocks_of(self._document))
        if history is None:
            return histogram_figure(None, None, theme=self._wish.theme)
        steps, at = history["steps"], self._wish.at
        now = (
            len(steps) - 1 if at is None else min(range(len(steps)), key=lambda place: abs(steps[place] - at))
        )
        before = _before_trouble(steps, [int(alert["first_step"]) for alert in self._document["alerts"]])
        shown = (_at(history, now), _at(history, before))
        return histogram_figure(*shown, theme=self._wish.theme)

    def _precision(self) -> go.Figure:
        history, adjustments = self._document["precision_history"], self._document["adjustments"]
        figure = precision_figure(
            history,
            adjustments=adjustments,
            decisions=self._document["decisions"],
            steps=self._steps,
            theme=self._wish.theme,
        )
        figure.layout.height = precision_height(history, adjustments)
        return figure


def _before_trouble(steps: Sequence[int], troubles: Sequence[int]) -> int:
    """Place of the last step before the first alert; the first of all where there is none."""
    first = min(troubles, default=None)
    healthy = [place for place, step in enumerate(steps) if first is not None and step < first]
    return healthy[-1] if healthy else 0


def _at(history: Mapping[str, Any], place: int) -> dict[str, Any]:
    return {
        "step": history["steps"][place],
        "bins": history["bins"][place],
        "p01_db": history["p01_db"][place],
    }
