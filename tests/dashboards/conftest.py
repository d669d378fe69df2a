"""A real service, samples posted to it over HTTP, and a browser."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HEALTHY_DISTORTION = 4e-4
SLOTS = (
    {"operand": "x", "layout": "row"},
    {"operand": "w", "layout": "tile"},
    {"operand": "dy", "layout": "row"},
    {"operand": "dy", "layout": "col"},
    {"gemm": "fprop"},
    {"gemm": "dgrad"},
)
COUNT = 65536


class Trainer:
    """Posts samples of one run, with a chosen cosine distortion per layer."""

    def __init__(self, url: str, run: str, layers: list[str], *, mode: str = "enforce") -> None:
        self.url = url
        self.run = run
        self.layers = layers
        self.mode = mode
        self.plan_version = 0
        self.effective_step: int | None = None
        self.replies: list[dict[str, Any]] = []

    def post(
        self, step: int, *, distortion: dict[str, float] | None = None, **changes: Any
    ) -> dict[str, Any]:
        """One sample; `distortion` names the recomputed GEMMs' cosine distortion of layers that are not healthy."""
        body = self.sample(step, distortion or {}) | changes
        answer = httpx2.post(f"{self.url}/api/v1/runs/{self.run}/samples", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        if reply["plan_version"] > self.plan_version:
            self.plan_version, self.effective_step = reply["plan_version"], step + 2
        self.replies.append(reply)
        return reply

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """A GET under /api/v1/runs/{run}."""
        answer = httpx2.get(f"{self.url}/api/v1/runs/{self.run}{path}", params=query, timeout=30)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def sample(self, step: int, distortion: dict[str, float]) -> dict[str, Any]:
        """The wire's sample: every slot healthy except the recomputed GEMMs of the named layers."""
        slots: list[dict[str, Any]] = []
        rows = []
        for layer in self.layers:
            for slot in SLOTS:
                ill = distortion.get(layer, HEALTHY_DISTORTION) if "gemm" in slot else HEALTHY_DISTORTION
                slots.append({"index": len(slots), "layer": layer, **slot})
                rows.append(columns_of_distortion(ill, gemm="gemm" in slot))
        return {
            "schema": 1,
            "batch_id": f"{self.run}-{step}",
            "attempt": {"id": "0", "parent": None, "from_step": 0},
            "group": "0",
            "groups": 1,
            "step": step,
            "mode": self.mode,
            "plan_version": self.plan_version,
            "effective_step": self.effective_step,
            "overhead_ratio": 0.004,
            "dropped": 0,
            "slots": slots,
            "columns": {name: [row[name] for row in rows] for name in rows[0]},
            "run": {"loss": 1.7 + 3.0 * math.exp(-step / 40), "gradient_norm": 0.8},
        }


def columns_of_distortion(distortion: float, *, gemm: bool = False) -> dict[str, Any]:
    """Sums whose cosine distortion is exactly `distortion`.

    With the error orthogonal to the quantised tensor, sum_sq_q = sum_sq - sum_sq_err, so
    cosine^2 = sum_sq_q / sum_sq and sum_sq_err / sum_sq = 1 - (1 - distortion)^2.
    """
    error = 1 - (1 - distortion) ** 2
    counts = dict.fromkeys(("zeros", "underflow", "saturated"), None if gemm else 0)
    return {
        "count": COUNT,
        **counts,
        "nan": 0,
        "inf": 0,
        "rows": None if gemm else 512,
        "rows_flushed": None if gemm else 0,
        "amax": 4.0,
        "sum_sq": float(COUNT),
        "sum_sq_q": COUNT * (1 - error),
        "sum_sq_err": COUNT * error,
    }


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running service; the tests of a file share it and name runs of their own."""
    with _service(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.fixture
def empty_server_url(tmp_path: Path) -> Iterator[str]:
    """A running service without a run."""
    with _service(tmp_path) as url:
        yield url


def _service(folder: Path) -> AbstractContextManager[str]:
    return running_server(Settings(database_url=f"sqlite:///{folder / 'store.db'}"))


@pytest.fixture(scope="session")
def make_trainer() -> type[Trainer]:
    """Trainers that report to a service: make_trainer(url, run, layers)."""
    return Trainer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; without it the browser tests are skipped, and fail in CI.

    Playwright keeps an event loop running in this thread: it must be gone before other modules start theirs.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _no_browser("playwright is not installed")
    if not CHROMIUM.exists():
        _no_browser(f"there is no browser at {CHROMIUM}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        yield chromium
        chromium.close()


def _no_browser(reason: str) -> None:
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"CI must run the browser tests, but {reason}")
    pytest.skip(f"browser tests need Chromium and playwright, but {reason}")


class RunPage:
    """A page in one of the themes that must log no error and reach no other host than the one it came from."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.faults: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Parts of messages that a test provokes."""
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.faults.extend(_foreign(request)))

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(message.text)

    def open(self, address: str) -> Any:
        """Go to a run page and wait until its three charts are drawn."""
        self.page.goto(address)
        self.drawn()
        return self.page

    def drawn(self) -> None:
        """Wait until the charts are there."""
        self.page.wait_for_function(
            "() => document.querySelectorAll('#stack .js-plotly-plot').length === 3", timeout=40_000
        )
        self.page.wait_for_selector("#stack:not([data-loading])")

    def wait(self, condition: str, timeout: float = 30_000) -> None:
        """Wait for a JavaScript expression; as a function, since the page's policy forbids evaluating text."""
        self.page.wait_for_function(f"() => {condition}", timeout=timeout)

    def close(self) -> list[str]:
        """Close the page; the faults that no test expected."""
        self.page.close()
        return [fault for fault in self.faults if not any(part in fault for part in self.expected)]


@pytest.fixture(scope="module")
def contexts(browser: Any) -> Iterator[dict[str, Any]]:
    """One context a theme, so that the chart library is fetched and compiled once a module."""
    made = {
        theme: browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=theme)
        for theme in ("dark", "light")
    }
    yield made
    for context in made.values():
        context.close()


@pytest.fixture
def dark_page(contexts: dict[str, Any]) -> Iterator[RunPage]:
    """A dark page that must log no error and reach no other host, with the waiting that tests of the run page share."""
    opened = RunPage(contexts["dark"])
    yield opened
    assert opened.close() == []


@pytest.fixture(params=["dark", "light"])
def run_page(contexts: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[RunPage]:
    """The same in both themes, for what colours change."""
    opened = RunPage(contexts[request.param])
    yield opened
    assert opened.close() == []


@pytest.fixture
def page(dark_page: RunPage) -> Any:
    """The dark page itself, for tests that do their own waiting."""
    return dark_page.page


FAULTY_LAYERS = [
    f"blocks.{block}.{part}" for block in range(4) for part in ("attn.qkv", "attn.out", "mlp.down")
]
FAULT_STEP = 20


def growing_fault(step: int) -> dict[str, float]:
    """A fault in the last three layers that grows from FAULT_STEP on."""
    if step < FAULT_STEP:
        return {}
    return {layer: min(0.5, 5e-4 * 1.3 ** (step - FAULT_STEP)) for layer in FAULTY_LAYERS[-3:]}


@pytest.fixture(scope="module")
def faulty(server_url: str) -> Trainer:
    """A run of 40 steps with a fault that the policy answers."""
    reporter = Trainer(server_url, "faulty", FAULTY_LAYERS)
    for step in range(40):
        reporter.post(step, distortion=growing_fault(step))
    return reporter


def _foreign(request: Any) -> list[str]:
    local = urlsplit(request.url).hostname == "127.0.0.1" or request.url.startswith(("data:", "blob:"))
    return [] if local else [f"request to another host: {request.url}"]
