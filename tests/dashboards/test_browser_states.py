"""Runs and servers that are not at their best, and who can use the pages: real browser."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

pytestmark = pytest.mark.browser

HEATMAP = "document.getElementById('heatmap')"
SERIOUS = ("serious", "critical")
SERVE = "import sys; from fp8_safeguard.server.serve import run; from fp8_safeguard.server.settings import Settings; "


def faults_of(page: Any) -> list[str]:
    """What axe finds on the page that is serious or critical."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:160]}"
        for rule in found
        if rule["impact"] in SERIOUS
        for node in rule["nodes"]
    ]


@pytest.fixture
def open_page(contexts: dict[str, Any]) -> Iterator[Callable[[str], Any]]:
    """A page that axe may be run in: the policy of our pages would refuse its script, so it is bypassed there."""
    opened: list[Any] = []

    def make(theme: str) -> Any:
        context = contexts[theme].browser.new_context(
            viewport={"width": 1440, "height": 900},
            color_scheme=theme,
            bypass_csp=True,
            reduced_motion="reduce",
        )
        opened.append(context)
        return context.new_page()

    yield make
    for context in opened:
        context.close()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_axe_finds_nothing_serious_in_any_state(
    open_page: Callable[[str], Any],
    server_url: str,
    empty_server_url: str,
    faulty: Any,
    make_trainer: Callable[..., Any],
    theme: str,
) -> None:
    ended = make_trainer(server_url, "ended", ["a", "b"])
    missing = {"name": "wte", "shape": [64, 8], "status": "not observed", "reason": "embedding: no GEMM"}
    seen = {**missing, "name": "a", "status": "observed", "reason": ""}
    ended.post(0, coverage=[missing, seen] * 9, sampling={"every": 40, "budget": 0.01})
    httpx2.patch(f"{server_url}/api/v1/runs/ended", json={"ended": True})
    page = open_page(theme)
    found: dict[str, list[str]] = {}
    for path in ("/", "/runs/nothing-here", "/login"):
        page.goto(server_url + path)
        found[path] = faults_of(page)
    page.goto(empty_server_url)
    found["empty"] = faults_of(page)
    drawn = "() => document.querySelectorAll('#stack .js-plotly-plot').length === 3"
    views = ("?alerts=open,held,resolved&metric=nonsense", "?tab=decisions&table=1", "?q=nothing+like+it")
    for run, query in [("faulty", query) for query in views] + [("ended", "?tab=decisions")]:
        page.goto(f"{server_url}/runs/{run}{query}")
        page.wait_for_function(drawn, timeout=40_000)
        found[run + query] = faults_of(page)
    page.goto(f"{server_url}/runs/faulty?tab=decisions")
    page.wait_for_function(drawn, timeout=40_000)
    page.locator("#kill").click()
    found["dialog"] = faults_of(page)
    assert {state: faults for state, faults in found.items() if faults} == {}


def test_no_runs_shows_the_two_lines_that_attach_a_trainer(dark_page: Any, empty_server_url: str) -> None:
    page = dark_page.page
    page.goto(empty_server_url)
    lines = page.locator("#snippet").text_content().splitlines()
    assert len(lines) == 2
    assert f'server="{empty_server_url}"' in lines[1]


def test_a_run_that_stopped_reporting_is_not_called_live(
    dark_page: Any, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'store.db'}", run_stale_seconds=1.0)
    with running_server(settings) as url:
        make_trainer(url, "quiet", ["a"]).post(7)
        dark_page.page.wait_for_timeout(1200)
        page = dark_page.open(f"{url}/runs/quiet")
        page.wait_for_selector("#live[data-live=stale]")
        assert re.match(r"no report for \d+ s", page.locator("#live").text_content())
        assert "STALE" in page.locator("#status").text_content()
        page.goto(url)
        group = page.locator("tbody[data-group=over]")
        assert "quiet" in group.text_content()
        assert page.locator("tbody[data-group=running]").count() == 0
        # The list asks for news: it must not outlive the server.
        page.goto("about:blank")


PAINTED = """async () => {
    const image = new Image();
    image.src = document.querySelector("#heatmap .hm image").href.baseVal;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const brush = canvas.getContext("2d");
    brush.drawImage(image, 0, 0);
    return [...brush.getImageData(image.width >> 1, image.height >> 1, 1, 1).data];
}"""


def test_b83_nothing_lost_and_everything_lost_look_different(
    run_page: Any, server_url: str, make_trainer: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    theme = request.node.callspec.params["run_page"]
    colours = []
    for name, lost in (("none", 0), ("all", 65536)):
        reporter = make_trainer(server_url, f"uniform-{name}-{theme}", ["a", "b"], mode="observe")
        for step in range(3):
            columns = reporter.sample(step, {})["columns"]
            underflow = [None if value is None else lost for value in columns["underflow"]]
            reporter.post(step, columns=columns | {"underflow": underflow})
        page = run_page.open(f"{server_url}/runs/{reporter.run}?metric=underflow_ratio&slot=x+row")
        colours.append(page.evaluate(PAINTED))
    dark, light = min(colours, key=sum), max(colours, key=sum)
    assert sum(light[:3]) - sum(dark[:3]) > 300
    # Bad stands out: bright on the dark page, dark on the light one.
    assert colours[1] == (light if theme == "dark" else dark)


def test_an_ended_run_says_that_no_decision_was_needed(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    make_trainer(server_url, "over", ["a"]).post(0)
    httpx2.patch(f"{server_url}/api/v1/runs/over", json={"ended": True})
    page = dark_page.open(f"{server_url}/runs/over?tab=decisions")
    page.wait_for_selector("#live[data-live=ended]")
    assert "ended without a decision" in page.locator("#decisions").text_content()
    note = "document.getElementById('timeline').layout.annotations[0].text"
    assert page.evaluate(note) == "the run ended without a decision"


def test_what_was_not_measured_is_said_and_not_drawn(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    reporter = make_trainer(server_url, "unmeasured", ["a", "b"])
    for step in range(3):
        reporter.post(step, run={})
    page = dark_page.open(f"{server_url}/runs/unmeasured?metric=tile_sqnr_p01_db&slot=x+row")
    notes = f"{HEATMAP}.layout.annotations.map((note) => note.text).join()"
    assert "SQNR, worst 1 % of blocks of x row: not sampled in this range" in page.evaluate(notes)
    assert page.evaluate(f"{HEATMAP}.data[0].z.flat().every((value) => value === null)")
    page.locator("#filter").fill("zzz ")
    dark_page.wait(f"{notes}.includes('no layer’s name contains “zzz ”')")
    dark_page.wait("document.getElementById('matches').textContent === '0 of 2'")


def test_a_server_that_goes_away_is_said_and_the_page_resumes_by_itself(
    dark_page: Any, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    dark_page.expected = ("Failed to load resource",)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    code = f"{SERVE}run(Settings(database_url='sqlite:///{tmp_path / 'store.db'}', port={port}))"
    server = _start(code, url)
    try:
        reporter = make_trainer(url, "steady", ["a", "b"])
        reporter.post(0)
        page = dark_page.open(f"{url}/runs/steady")
        page.wait_for_selector("#live[data-live=live]")
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)
        page.wait_for_selector("#banner:not([hidden])")
        text = page.locator("#banner").text_content()
        assert "has not answered since" in text
        assert "step 0" in text
        assert page.evaluate(f"{HEATMAP}.data[0].x.length") == 1
        assert page.locator("#live").get_attribute("data-live") == "reconnecting"
        server = _start(code, url)
        reporter.post(1)
        page.wait_for_selector("#banner", state="hidden")
        dark_page.wait(f"{HEATMAP}.data[0].x.length === 2")
    finally:
        server.kill()
        server.wait(timeout=20)


def _start(code: str, url: str) -> "subprocess.Popen[str]":
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout as lines:
        assert url in lines.readline()
    return server


def test_a_run_without_samples_appears_by_itself(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    dark_page.expected = ("Failed to load resource",)
    name = "not-yet"
    dark_page.page.goto(f"{server_url}/runs/{name}")
    assert "No sample of run" in dark_page.page.locator("main").text_content()
    make_trainer(server_url, name, ["a"]).post(0)
    dark_page.drawn()


def test_an_address_that_asks_for_nonsense_is_told_and_mended(
    dark_page: Any, server_url: str, faulty: Any
) -> None:
    page = dark_page.open(
        f"{server_url}/runs/faulty?metric=nonsense&from=abc&order=up&row=nope&alerts=x&q=mlp"
    )
    notices = page.locator("#notices").text_content()
    for word in ("nonsense", "abc", "up", "nope", "“x”"):
        assert word in notices
    asked = parse_qs(urlsplit(page.evaluate("location.href")).query)
    assert asked["metric"] == ["gradient_distortion"]
    assert not {"from", "row", "alerts"} & set(asked)
    assert asked["q"] == ["mlp"]
    page.locator("#dismiss").click()
    assert page.locator("#notices").count() == 0


def test_everything_chosen_survives_a_reload(dark_page: Any, server_url: str, faulty: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty")
    page.locator("#metric").select_option("underflow_ratio")
    dark_page.wait("[...document.getElementById('slot').options].every((option) => option.value !== 'dgrad')")
    page.locator("#slot").select_option("dy row")
    page.locator("#order").select_option("worst")
    page.locator("input[name=scale][value=linear]").check(force=True)
    page.locator("#filter").fill("  ATTN")
    dark_page.wait(f"{HEATMAP}.layout.meta.rows.length === 0")
    page.locator("#filter").fill("ATTN.")
    dark_page.wait(f"{HEATMAP}.layout.meta.rows.length === 8")
    page.locator("#tab-decisions").click()
    shown = f"[{HEATMAP}.data[0].name, {HEATMAP}.layout.meta.rows, {HEATMAP}.data[0].zmax, location.search]"
    before = page.evaluate(shown)
    # Another metric keeps the slot where it has it, and gives it up where it has not.
    page.reload()
    dark_page.drawn()
    assert page.evaluate(shown) == before
    assert page.locator("#filter").input_value() == "ATTN."
    assert page.locator("#panel-decisions").is_visible()
    page.locator("#metric").select_option("relative_error")
    assert page.locator("#slot").input_value() == "dy row"
    page.locator("#slot").select_option("dgrad")
    page.locator("#metric").select_option("underflow_ratio")
    assert page.locator("#slot").input_value() == ""


def test_the_heatmap_is_also_a_table(dark_page: Any, server_url: str, faulty: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty")
    page.keyboard.press("t")
    rows = page.locator("#table tbody tr")
    assert rows.count() == len(faulty.layers)
    api = faulty.get("/heatmap")
    row = api["layers"].index(faulty.layers[-1])
    worst = max(api["values"][row])
    cells = rows.nth(row).locator("th, td").all_text_contents()
    assert cells[0] == faulty.layers[-1]
    assert float(cells[1]) == pytest.approx(worst, rel=1e-3)
    assert cells[2] == str(api["steps"][api["values"][row].index(worst)])
    assert cells[4] == "40 of 40"
    assert "table=1" in page.evaluate("location.href")
    page.go_back()
    page.wait_for_selector("#table", state="hidden")


@pytest.mark.parametrize("width", [600, 1440, 2560])
def test_nothing_sticks_out_at_any_width(dark_page: Any, server_url: str, faulty: Any, width: int) -> None:
    page = dark_page.page
    page.set_viewport_size({"width": width, "height": 900})
    dark_page.open(f"{server_url}/runs/faulty")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lines = "['loss', 'heatmap', 'timeline'].map((id) => document.querySelector(`#${id} .nsewdrag`).getBoundingClientRect())"
    edges = page.evaluate(f"{lines}.map((box) => [Math.round(box.left), Math.round(box.right)])")
    assert edges[0] == edges[1] == edges[2]
    page.goto(server_url)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_five_hundred_runs_are_listed_filtered_and_sorted(
    dark_page: Any, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path / 'store.db'}")) as url:
        reporter = make_trainer(url, "run", ["a"])
        with httpx2.Client() as client:
            for number in range(500):
                body = reporter.sample(number, {}) | {"run": {"loss": 1 + number / 1000}}
                client.post(f"{url}/api/v1/runs/run-{number:03d}/samples", json=body)
        page = dark_page.page
        page.goto(url)
        names = "[...document.querySelectorAll('tr[data-run]:not([hidden])')].map((row) => row.dataset.run)"
        assert len(page.evaluate(names)) == 500
        page.locator("#filter").fill("run-49")
        assert page.locator("#matches").text_content() == "10 of 500 runs"
        page.locator("[data-sort=loss]").click()
        assert page.evaluate(names) == [f"run-49{digit}" for digit in range(10)]
        page.locator("[data-sort=loss]").click()
        assert page.evaluate(names)[0] == "run-499"
        assert parse_qs(urlsplit(page.evaluate("location.href")).query) == {
            "q": ["run-49"],
            "sort": ["-loss"],
        }
        # The list asks for news: it must not outlive the server.
        page.goto("about:blank")
