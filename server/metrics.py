"""Prometheus exposition: process counters, and gauges read at scrape time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.monitor.plan import DECISION_ACTIONS
from fp8_safeguard.server.alertlog import is_silenced, unresolved
from fp8_safeguard.server.grid import GRADIENT_DISTORTION, is_gradient
from fp8_safeguard.server.latest import Latest, load_latest
from fp8_safeguard.server.runview import RUN_STATES, detail_of, run_state
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.slotlists import in_order, of_run
from fp8_safeguard.server.store import Store, freshness_of
from fp8_safeguard.server.tables import decisions, nonfinite_totals, runs

PREFIX = "fp8_safeguard_"
_STALE_SHOWN_SECONDS = 300.0
"""How long, at least, a run that fell silent is still listed as stale before it goes away."""

_Labels = tuple[str, ...]


class IngestMeters(Collector):
    """What this process counts itself, without the library's `_created` series (a time stamp a metric)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.samples = Counter(
            f"{PREFIX}ingest_samples", "Samples accepted by this process.", registry=self._registry
        )
        self.duration = Histogram(
            f"{PREFIX}ingest_duration_seconds",
            "Time from a read body to its answer.",
            registry=self._registry,
        )

    def collect(self) -> Iterator[Metric]:
        """The two families."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


@dataclass
class _Family:
    """One metric and its samples."""

    name: str
    help: str
    labels: _Labels
    counter: bool = False
    rows: list[tuple[_Labels, float]] = field(default_factory=list)

    def add(self, labels: _Labels, value: object) -> None:
        number = decode_number(value)
        if number is not None:
            self.rows.append((labels, number))

    def collected(self) -> Metric:
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = kind(PREFIX + self.name, self.help, labels=self.labels)
        for labels, value in self.rows:
            family.add_metric(labels, value)
        return family


def _families() -> dict[str, _Family]:
    slot = ("run", "layer", "operand", "layout")
    listed = [
        _Family(
            "layer_gradient_distortion_ratio",
            "1 - cosine of the worst gradient slot of a layer.",
            ("run", "layer"),
        ),
        _Family("layer_gemm_error_ratio", "Relative error of a recomputed GEMM.", ("run", "layer", "gemm")),
        _Family("layer_underflow_ratio", "Non-zero elements that became zero.", slot),
        _Family("layer_saturation_ratio", "Elements beyond the format's maximum.", slot),
        _Family(
            "nonfinite_values", "NaN and infinite elements seen.", ("run", "layer", "operand"), counter=True
        ),
        _Family("run_step", "Newest optimizer step.", ("run",)),
        _Family("run_loss", "Newest training loss.", ("run",)),
        _Family("run_gradient_norm", "Newest gradient norm.", ("run",)),
        _Family("run_last_report_timestamp_seconds", "Unix time of the newest sample.", ("run",)),
        _Family(
            "run_fallback_budget_used_ratio",
            "Part of the BF16 fallback budget in use, 1 when it is full.",
            ("run",),
        ),
        _Family(
            "run_nonfinite_steps",
            "Sampled steps with a loss, gradient norm or tensor that is not finite.",
            ("run",),
            counter=True,
        ),
        _Family("run_health_state", "1 for the state that a run is in.", ("run", "state")),
        _Family("decisions", "Decisions taken.", ("run", "action", "mode"), counter=True),
        _Family(
            "alerts_active",
            "Open alerts that are not silenced; those held by BF16 are not open.",
            ("run", "rule", "severity"),
        ),
        _Family("series_truncated", "Layer series left out by the cap on a run's series.", ("run",)),
        _Family("build_info", "Version of the service.", ("version",)),
    ]
    return {family.name: family for family in listed}


class RunCollector(Collector):
    """The contract's families, computed from the store at each scrape: nothing outlives its run."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families; one without samples still has its HELP and TYPE."""
        families = _families()
        families["build_info"].add((version("fp8-safeguard"),), 1)
        with self._store.read() as conn:
            for row in conn.execute(select(runs).order_by(runs.c.id)).all():
                _add_run(conn, row, families, self._settings)
        for family in families.values():
            yield family.collected()


def _add_run(conn: Connection, row: Row[Any], families: dict[str, _Family], settings: Settings) -> None:
    now, stale_seconds = freshness_of(conn)
    state = run_state(conn, row)
    since = row.ended_at if row.ended_at is not None else row.last_report_at
    silent = state in ("stale", "ended")
    if silent and now - since > stale_seconds + max(stale_seconds, _STALE_SHOWN_SECONDS):
        return
    for name in RUN_STATES:
        families["run_health_state"].add((row.name, name), float(name == state))
    if silent:
        return
    detail = detail_of(conn, row)
    families["run_step"].add((row.name,), detail["last_step"])
    families["run_loss"].add((row.name,), detail["loss"])
    families["run_gradient_norm"].add((row.name,), detail["gradient_norm"])
    families["run_last_report_timestamp_seconds"].add((row.name,), row.last_report_at)
    families["run_fallback_budget_used_ratio"].add((row.name,), row.fallback_budget_used_ratio or 0.0)
    families["run_nonfinite_steps"].add((row.name,), row.nonfinite_steps)
    _add_audit(conn, row, families)
    _add_layers(conn, row, families, settings.metrics_max_series)


def _add_audit(conn: Connection, row: Row[Any], families: dict[str, _Family]) -> None:
    counted = {(action, row.mode): 0 for action in DECISION_ACTIONS}
    by = (decisions.c.action, decisions.c.mode)
    query = select(*by, func.count().label("count")).where(decisions.c.run_id == row.id).group_by(*by)
    counted.update({(found.action, found.mode): found.count for found in conn.execute(query)})
    for labels, count in counted.items():
        families["decisions"].add((row.name, *labels), count)
    active: dict[tuple[str, str], int] = {}
    now = freshness_of(conn)[0]
    for alert in unresolved(conn, row.id):
        # A rule whose alerts are all held or silenced is there with 0, so that nobody thinks it was forgotten.
        labels = (str(alert.rule), str(alert.severity))
        active[labels] = active.get(labels, 0) + (
            alert.state == "open" and not is_silenced(alert.silenced_until, now)
        )
    for labels, count in active.items():
        families["alerts_active"].add((row.name, *labels), count)


def _add_layers(conn: Connection, row: Row[Any], families: dict[str, _Family], most: int) -> None:
    """Series of the worst layers, up to the cap; the rest is counted."""
    latest = load_latest(conn, row)
    series = _layer_series(conn, row, latest)
    worst = latest.worst_by_layer()
    ranked = sorted(series, key=lambda layer: -worst[layer].excess if layer in worst else 1.0)
    used = dropped = 0
    for layer in ranked:
        if used + len(series[layer]) > most:
            dropped += len(series[layer])
            continue
        used += len(series[layer])
        for name, labels, value in series[layer]:
            families[name].add((row.name, *labels), value)
    families["series_truncated"].add((row.name,), dropped)


def _layer_series(
    conn: Connection, row: Row[Any], latest: Latest
) -> dict[str, list[tuple[str, _Labels, float]]]:
    """(family, labels after run, value) of each layer."""
    found: dict[str, list[tuple[str, _Labels, float]]] = {}
    worst_gradient: dict[str, float] = {}
    for name, metric in (
        ("layer_gradient_distortion_ratio", GRADIENT_DISTORTION),
        ("layer_gemm_error_ratio", "relative_error"),
        ("layer_underflow_ratio", "underflow_ratio"),
        ("layer_saturation_ratio", "saturation_ratio"),
    ):
        values, steps = latest.values(metric)
        for tensor, value, step in zip(latest.grid.tensors, values.tolist(), steps.tolist(), strict=True):
            if step < 0:
                continue
            if metric == GRADIENT_DISTORTION:
                if is_gradient(tensor):
                    before = worst_gradient.get(tensor.layer, -1.0)
                    worst_gradient[tensor.layer] = value if value != value else max(before, value)
            elif metric == "relative_error" and tensor.gemm is not None:
                found.setdefault(tensor.layer, []).append((name, (tensor.layer, tensor.gemm), value))
            elif metric != "relative_error" and tensor.operand and tensor.layout:
                labels = (tensor.layer, tensor.operand, tensor.layout)
                found.setdefault(tensor.layer, []).append((name, labels, value))
    for layer, value in worst_gradient.items():
        found.setdefault(layer, []).append(("layer_gradient_distortion_ratio", (layer,), value))
    for (layer, operand), total in _nonfinite(conn, row).items():
        found.setdefault(layer, []).append(("nonfinite_values", (layer, operand), float(total)))
    return found


def _nonfinite(conn: Connection, row: Row[Any]) -> dict[tuple[str, str], int]:
    """Totals by layer and operand, 0 for those that never had one."""
    totals = {
        (slot.layer, slot.operand): 0
        for slot in in_order(of_run(conn, row.id))
        if slot.operand is not None and slot.variant is None
    }
    query = select(nonfinite_totals).where(nonfinite_totals.c.run_id == row.id)
    totals.update({(found.layer, found.operand): found.total for found in conn.execute(query)})
    return totals
