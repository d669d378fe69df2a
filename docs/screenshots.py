"""Takes the pictures of the pages in docs/images."""

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

IMAGES = Path(__file__).parent / "images"
CHROMIUM = "/usr/bin/chromium"
SIZE = {"width": 1440, "height": 900}
NEVER_SECONDS = 1e9
"""A stored run is shown as it was: its age is not news."""

RUN = "synthetic-fault"
"""The made-up run says so in its name: its numbers are drawn, the server's judgement and decisions on them are real."""
LAYERS = [
    f"blocks.{block}.{part}"
    for block in range(4)
    for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
]
SICK = ("blocks.2.attention.qkv", "blocks.3.mlp.gate_up")
STEPS, FAULT_STEP = 250, 200
COUNT, BLOCKS = 65536, 512
SLOTS: tuple[dict[str, str], ...] = (
    {"operand": "x", "layout": "row"},
    {"operand": "x", "layout": "col"},
    {"operand": "w", "layout": "tile"},
    {"operand": "dy", "layout": "row"},
    {"operand": "dy", "layout": "col"},
    {"gemm": "fprop"},
    {"gemm": "dgrad"},
    {"gemm": "wgrad"},
)


def main() -> None:
    """Serve a store, photograph its pages, and write docs/images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", type=Path, help="a demo's database (by default a run is made up)")
    parser.add_argument("--run", help="the run to show (by default the newest with a decision in force)")
    arguments = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        with _service(Path(folder) / "empty.db") as url:
            _shoot_empty(browser, url)
        store = Path(folder) / "store.db"
        if arguments.database:
            shutil.copy(arguments.database, store)
        with _service(store) as url:
            if not arguments.database:
                report_run(url)
            _shoot_run(browser, url, arguments.run or _decided_run(url))
        browser.close()


def _service(store: Path) -> Any:
    return running_server(Settings(database_url=f"sqlite:///{store}", run_stale_seconds=NEVER_SECONDS))


def _decided_run(url: str) -> str:
    runs = httpx2.get(f"{url}/api/v1/runs").json()["items"]
    for run in runs:
        made = httpx2.get(f"{url}/api/v1/runs/{run['id']}/decisions").json()["items"]
        if any(decision["state"] == "applied" for decision in made):
            return str(run["id"])
    raise SystemExit(f"none of the {len(runs)} runs has a decision in force; name one with --run")


@contextmanager
def _page(browser: Browser, theme: Any, address: str) -> Iterator[Page]:
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def _drawn(page: Page) -> None:
    page.wait_for_function("() => document.querySelectorAll('#stack .js-plotly-plot').length === 3")
    page.wait_for_selector("#stack:not([data-loading])")
    page.wait_for_selector("#live[data-live=live], #live[data-live=ended]")
    page.mouse.move(0, 0)
    # Fonts and the last picture settle within a frame or two.
    page.wait_for_timeout(400)


def _save(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"{name}.png")


def _shoot_empty(browser: Browser, url: str) -> None:
    with _page(browser, "dark", url) as page:
        _save(page, "empty")


def _shoot_run(browser: Browser, url: str, run: str) -> None:
    with _page(browser, "light", url) as page:
        _save(page, "runs")
    for theme, name in (("dark", "run-page"), ("light", "run-page-light")):
        with _page(browser, theme, f"{url}/runs/{run}") as page:
            _drawn(page)
            _save(page, name)
    with _page(browser, "dark", f"{url}/runs/{run}?alerts=open,held,resolved") as page:
        _drawn(page)
        page.locator(".alert-jump").first.click()
        page.wait_for_selector("#ring:not([hidden])")
        page.wait_for_function("() => document.getElementById('cell').textContent !== ''")
        _drawn(page)
        _save(page, "alert-jump")
        page.locator("#tab-decisions").click()
        page.locator("#worst button[data-layer]").first.click()
        page.wait_for_selector("#drawer-root .js-plotly-plot")
        _drawn(page)
        _save(page, "drawer")


def report_run(url: str) -> None:
    """Report the made-up run over the wire, as a trainer would that obeys the plan two steps later."""
    generator = np.random.default_rng(8)
    known, effective = 0, None
    for step in range(STEPS):
        body = _sample(generator, step) | {"plan_version": known, "effective_step": effective}
        answer = httpx2.post(f"{url}/api/v1/runs/{RUN}/samples", json=body, timeout=30)
        answer.raise_for_status()
        if answer.json()["plan_version"] > known:
            known, effective = answer.json()["plan_version"], step + 2


def _sample(generator: np.random.Generator, step: int) -> dict[str, Any]:
    slots: list[dict[str, Any]] = []
    rows = []
    for depth, layer in enumerate(LAYERS):
        for slot in SLOTS:
            slots.append({"index": len(slots), "layer": layer, **slot})
            rows.append(_columns(generator, step, layer, depth, slot))
    loss = 1.9 + 3.6 * math.exp(-step / 28) + generator.normal(0, 0.06)
    norm = 0.8 + 1.6 * math.exp(-step / 15) + abs(generator.normal(0, 0.1))
    return {
        "schema": 1, "batch_id": f"{RUN}-{step}", "attempt": {"id": "0", "parent": None, "from_step": 0},
        "group": "0", "groups": 1, "step": step, "mode": "enforce", "overhead_ratio": 0.004, "dropped": 0,
        "slots": slots, "columns": {name: [row[name] for row in rows] for name in rows[0]},
        "run": {"loss": loss, "gradient_norm": norm, "learning_rate": 3e-4, "tokens": 4096},
    }  # fmt: skip


def _columns(
    generator: np.random.Generator, step: int, layer: str, depth: int, slot: dict[str, str]
) -> dict[str, Any]:
    """Healthy E4M3 noise; from FAULT_STEP on, outliers push ever more of two layers' activations below the format."""
    gemm = "gemm" in slot
    error = 0.026 * (1 + 0.04 * depth / len(LAYERS)) * math.exp(generator.normal(0, 0.03))
    lost, amax = 1e-5 * math.exp(generator.normal(0, 0.8)), 4.0 * math.exp(generator.normal(0, 0.08))
    sick = layer in SICK and step >= FAULT_STEP and slot.get("operand") != "w" and slot.get("operand") != "dy"
    if sick:
        progress = step - FAULT_STEP + 1
        error = min(0.75, 0.03 * 1.13**progress)
        lost, amax = min(0.85, 2e-4 * 1.32**progress), 4.0 * min(1e5, 2.0**progress)
    error = min(error, 0.99)
    return {
        "count": COUNT,
        "zeros": None if gemm else round(lost * COUNT),
        "underflow": None if gemm else round(lost * COUNT),
        "saturated": None if gemm else 0,
        "nan": 0,
        "inf": 0,
        "rows": None if gemm else 512,
        "rows_flushed": None if gemm else (round(40 * min(1.0, lost)) if sick else 0),
        "amax": amax,
        "sum_sq": float(COUNT),
        "sum_sq_q": COUNT * (1 - error**2),
        "sum_sq_err": COUNT * error**2,
        "sum_4th": None if gemm else 3.2 * COUNT * (1 + 40 * lost if sick else 1),
        "tile_sqnr_hist": None if gemm else _histogram(generator, lost if sick else 0.0),
    }


def _histogram(generator: np.random.Generator, lost: float) -> list[int]:
    """Blocks by SQNR: around 31.5 dB, and a tail of those that underflow emptied."""
    edges = [-math.inf, 0, 4, 8, 12, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 38, math.inf]
    emptied = round(BLOCKS * min(1.0, lost))
    values = np.concatenate(
        [generator.normal(31.5, 0.7, BLOCKS - emptied), generator.uniform(0, 14, emptied)]
    )
    return [int(count) for count in np.histogram(values, edges)[0]]


if __name__ == "__main__":
    main()
