"""The web pages; their figures and static files are joined in here."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from sqlalchemy import Connection

from fp8_safeguard.dashboards import (
    alerts,
    causes,
    coverage,
    decisions,
    incidents,
    metrics,
    sight,
    slices,
    view,
)
from fp8_safeguard.dashboards.address import read_view
from fp8_safeguard.monitor.coverage import STATUSES
from fp8_safeguard.monitor.wire import MODES
from fp8_safeguard.server import query, slotlists
from fp8_safeguard.server.auth import SESSION_COOKIE, require, scopes_of
from fp8_safeguard.server.context import Reading
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.routes import assets, figures
from fp8_safeguard.server.runlookup import find_run

TABLE_LAYERS = 40
LIST_RUNS = 500
LIST_ALERTS = 1000
LIST_DECISIONS = 200
SHOWN_ALERTS = 100
SHOWN_MATRICES = 200

# Plotly draws heatmap cells into data: images and sets inline styles. Nothing is evaluated, no other host is reached.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

router = APIRouter(include_in_schema=False)
router.include_router(figures.router)
router.include_router(assets.router)
guarded = [Depends(require("read"))]


@router.get("/", dependencies=guarded)
def run_list(request: Request, conn: Reading) -> Response:
    """All runs, the newest first."""
    answer = query.list_runs(conn, page_size=LIST_RUNS)
    rows = [
        {
            "id": item["id"],
            "state": view.state_of(item),
            "ending": view.ending_of(item),
            "why": str((item.get("verdict") or {}).get("why", "")),
            "alerts": view.alert_words(item["alerts"]),
            "stats": {stat.label: stat for stat in view.run_stats(item)},
            "last_report": item.get("last_report"),
            "over": item.get("state") in ("stale", "ended"),
            "raw": item,
        }
        for item in answer["items"]
    ]
    return render(
        "runs.html",
        runs=rows,
        states=Counter(row["state"] for row in rows),
        cut=answer["next_page_token"] is not None,
        origin=str(request.base_url).rstrip("/"),
        signed_in=SESSION_COOKIE in request.cookies,
    )


@router.get("/runs/{run}", dependencies=guarded)
def run_page(request: Request, conn: Reading, run: str) -> Response:
    """One run: verdict, charts, alerts, decisions, worst layers. Whatever the address asks for, this is a page."""
    try:
        detail = query.run_detail(conn, run)
    except Problem as problem:
        return render("missing.html", status=problem.status, run=run)
    slots = slotlists.in_order(slotlists.of_run(conn, find_run(conn, run).id))
    layers = list(dict.fromkeys(slot.layer for slot in slots))
    present = {view.slot_words(vars(slot)) for slot in slots if slot.variant is None}
    offer = slices.offered_slots(present, metrics.PAGE_METRICS)
    listed = _listed_alerts(conn, run, detail)
    urgent = listed.rows(listed.items)
    opening = sight.opening_metric(urgent)
    shown = read_view(request.query_params, layers=layers, offer=offer, opening=opening)
    return render(
        "run.html",
        run=run,
        detail=detail,
        state=view.state_of(detail),
        stats=view.run_stats(detail),
        view=shown,
        offer=offer,
        metrics=[(name, metrics.metric_view(name)) for name in metrics.PAGE_METRICS],
        default_scale=metrics.default_scale,
        modes=MODES,
        total=len(layers),
        known_layers=frozenset(layers),
        signed_in=SESSION_COOKIE in request.cookies,
        may_control=bool({"control", "admin"} & scopes_of(request)),
        coverage=_coverage(conn, run, detail),
        ranks=view.rank_rows(detail["ranks"]),
        **_worst(conn, run, shown.q),
        unseen=sight.out_of_sight(urgent, shown.metric, shown.slot),
        **_alerts(listed, detail["causes"], shown.chips, layers),
        decisions=_decisions(conn, run, detail),
    )


def _decisions(conn: Connection, run: str, detail: dict[str, Any]) -> list[decisions.DecisionRow]:
    return decisions.decision_rows(
        query.decisions(conn, run, page_size=LIST_DECISIONS)["items"],
        mode=str(detail.get("mode")),
        ended=detail["state"] == "ended",
        plan={entry["decision_id"] for entry in query.plan(conn, run)["entries"]},
    )


def _worst(conn: Connection, run: str, q: str) -> dict[str, Any]:
    """The worst layers of those whose name contains `q`, by the rule that the heatmap filters with."""
    # The list is sorted as a whole whatever its page size.
    items = query.layers(conn, run, order_by="severity", page_size=10**6)["items"]
    kept = [item for item in items if slices.layer_matches(item["layer"], q)]
    return {"layers": view.layer_rows(kept[:TABLE_LAYERS]), "matching": len(kept)}


def _coverage(conn: Connection, run: str, detail: dict[str, Any]) -> coverage.CoverageView | None:
    """What is observed, what is not first; None for a run whose client has not said."""
    shown: list[dict[str, Any]] = []
    for status in reversed(STATUSES):
        if len(shown) < SHOWN_MATRICES:
            page = query.coverage(conn, run, status=status, page_size=SHOWN_MATRICES - len(shown))
            shown += page["items"]
    if page["step"] is None:
        return None
    return coverage.coverage_view(page["counts"], shown, detail["sampling"])


@router.get("/causes", dependencies=guarded)
def cause_page(request: Request) -> Response:
    """What each cause is, how it shows and what helps."""
    known = [
        (name, text, causes.cause_view({"name": name, "kind": text.kind}))
        for name, text in causes.CAUSES.items()
    ]
    return render("causes.html", causes=known, signed_in=SESSION_COOKIE in request.cookies)


@dataclass(frozen=True)
class _Listed:
    """The newest alerts of a run."""

    items: list[dict[str, Any]]
    cut: bool
    """Whether there are older ones."""
    held: frozenset[str]
    """Layers in BF16 by the plan."""
    rows: Callable[..., list[alerts.AlertRow]]
    """The entries of the page's list for some of them."""


def _listed_alerts(conn: Connection, run: str, detail: dict[str, Any]) -> _Listed:
    answer, entries = query.alerts(conn, run, page_size=LIST_ALERTS), query.plan(conn, run)["entries"]
    held = frozenset(entry["layer"] for entry in entries if entry["action"] == "bf16_fallback")
    rows = partial(alerts.alert_rows, held=held, last_step=detail.get("last_step"))
    return _Listed(answer["items"], answer["next_page_token"] is not None, held, rows)


def _alerts(
    listed: _Listed, standing: list[dict[str, Any]], chips: tuple[str, ...], layers: list[str]
) -> dict[str, Any]:
    items, rows = listed.items, partial(listed.rows, chips=chips)
    folded = incidents.fold(standing, items, layers)
    elsewhere = {item["id"] for group in folded for item in group}
    others = rows([item for item in items if item["id"] not in elsewhere])
    return {
        "incidents": [
            incidents.incident(cause, rows(group)) for cause, group in zip(standing, folded, strict=True)
        ],
        "alerts": others[:SHOWN_ALERTS],
        "more_alerts": max(0, len(others) - SHOWN_ALERTS),
        "chips": alerts.alert_chips(items, chips, held=listed.held),
        "alerts_cut": listed.cut,
    }


def render(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page from its template, with the headers that keep it to this server."""
    text = (
        _templates()
        .get_template(template)
        .render(assets=assets.asset_version(), plotly_url=assets.plotly_url(), **values)
    )
    return HTMLResponse(text, status_code=status, headers=PAGE_HEADERS)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("fp8_safeguard.dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
