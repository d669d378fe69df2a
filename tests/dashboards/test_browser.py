"""The run page in a real browser: values, decisions, live updates, keyboard, themes."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytestmark = pytest.mark.browser

LAYERS = [f"blocks.{block}.{part}" for block in range(4) for part in ("attn.qkv", "attn.out", "mlp.down")]
DRAWN = "() => document.querySelectorAll('#stack .js-plotly-plot').length === 3"
HEATMAP = "document.getElementById('heatmap')"
COLUMNS = f"{HEATMAP}.data[0].x.length"


def wait(page: Any, condition: str, timeout: float = 30_000) -> None:
    """Wait for a JavaScript expression; as a function, since the page's policy forbids evaluating text."""
    page.wait_for_function(f"() => {condition}", timeout=timeout)


def open_run(page: Any, url: str, run: str, query: str = "") -> None:
    page.goto(f"{url}/runs/{run}{query}")
    page.wait_for_function(DRAWN)


def hover_cell(page: Any, row: int, column: int) -> str:
    """Point at a cell of the heatmap and read its hover label."""
    x, y = page.evaluate(
        """([row, column]) => {
            const plot = document.getElementById("heatmap");
            const box = plot.getBoundingClientRect();
            const { l, r, t, b } = plot.layout.margin;
            const [from, to] = plot.layout.xaxis.range;
            const rows = plot.data[0].y.length;
            const step = plot.data[0].x[column];
            return [
                box.left + l + ((step - from) / (to - from)) * (box.width - l - r),
                box.top + t + ((row + 0.5) / rows) * (box.height - t - b),
            ];
        }""",
        [row, column],
    )
    page.mouse.move(x - 1, y)
    page.mouse.move(x, y)
    page.wait_for_selector("#heatmap .hoverlayer .hovertext")
    text: str = page.locator("#heatmap .hoverlayer .hovertext").first.text_content()
    return text


def drag(page: Any, start: float, end: float) -> None:
    """Brush the heatmap from one share of its width to another."""
    left, top, width = page.evaluate(
        f"(() => {{ const box = {HEATMAP}.getBoundingClientRect(); const {{ l, r }} = {HEATMAP}.layout.margin;"
        " return [box.left + l, box.top + 60, box.width - l - r]; })()"
    )
    page.mouse.move(left + start * width, top)
    page.mouse.down()
    page.mouse.move(left + end * width, top + 2, steps=5)
    page.mouse.up()


def test_a_chosen_cell_equals_the_api_s_value(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    api = faulty.get("/heatmap", metric="gradient_distortion")
    shown = page.evaluate(f"{HEATMAP}.data[0].customdata")
    assert shown == api["values"]
    row, column = api["layers"].index(LAYERS[-1]), api["steps"].index(35)
    text = hover_cell(page, row, column)
    assert LAYERS[-1] in text
    assert "step 35" in text
    assert f"{api['values'][row][column]:.4g}" in text


def test_the_fault_is_plain_at_first_sight(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    z, low, high = page.evaluate(f"[{HEATMAP}.data[0].z, {HEATMAP}.data[0].zmin, {HEATMAP}.data[0].zmax]")
    place = [(row[39] - low) / (high - low) for row in z]
    assert max(place[:-3]) < 0.25
    assert min(place[-3:]) > 0.5


def test_decision_markers_stand_at_their_steps_in_line_with_the_heatmap(
    page: Any, server_url: str, faulty: Any
) -> None:
    open_run(page, server_url, "faulty")
    steps = sorted(
        item["step"] for item in faulty.get("/decisions")["items"] if item["action"] == "bf16_fallback"
    )
    lane = "document.getElementById('timeline').data.find((trace) => trace.name === 'BF16 fallback')"
    assert sorted(page.evaluate(f"{lane}.x")) == steps
    ranges = page.evaluate(
        "['loss', 'heatmap', 'timeline'].map((id) => document.getElementById(id).layout.xaxis.range)"
    )
    margins = page.evaluate(
        "['loss', 'heatmap', 'timeline'].map((id) => [document.getElementById(id).layout.margin, "
        "document.getElementById(id).getBoundingClientRect()].map(({l, r, left, right}) => [l ?? left, r ?? right]))"
    )
    assert ranges[0] == ranges[1] == ranges[2]
    assert margins[0] == margins[1] == margins[2]


def test_hovering_a_decision_tells_action_target_and_reason(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    decision = next(d for d in faulty.get("/decisions")["items"] if d["action"] == "bf16_fallback")
    x, y = page.evaluate(
        """() => {
            const trace = [...document.querySelectorAll("#timeline .trace")].find((each) => each.querySelector("text"));
            const box = trace.querySelector("path.point:last-of-type").getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
    )
    page.mouse.move(x - 1, y)
    page.mouse.move(x, y)
    page.wait_for_selector("#card:not([hidden])")
    text = page.locator("#card").text_content()
    for part in (
        "step",
        "bf16_fallback",
        decision["layer"].split(".")[0],
        "off the high-precision result",
        "effective from",
    ):
        assert part in text
    page.mouse.move(20, 20)
    page.wait_for_selector("#card", state="hidden")


def test_b86_live_update_without_reload_keeps_the_zoom(
    page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    reporter = make_trainer(server_url, "live", LAYERS)
    for step in range(10):
        reporter.post(step)
    open_run(page, server_url, "live")
    page.wait_for_selector("#live[data-live=live]")
    page.evaluate("window.notReloaded = true")
    assert page.evaluate(COLUMNS) == 10
    reporter.post(10)
    reporter.post(11)
    wait(page, f"{COLUMNS} === 12", timeout=15_000)
    wait(page, "document.querySelector('[data-stat=step]').textContent === '11'")
    drag(page, 0.25, 0.5)
    wait(page, "document.getElementById('timeline').layout.xaxis.range[1] < 8")
    zoomed, revision = page.evaluate(f"[{HEATMAP}.layout.xaxis.range, {HEATMAP}.layout.datarevision]")
    assert zoomed == pytest.approx([2.5, 5.5], abs=0.2)
    reporter.post(12)
    wait(page, "document.querySelector('[data-stat=step]').textContent === '12'")
    wait(page, "document.getElementById('loss').data.find((trace) => trace.name === 'loss').x.length === 13")
    assert page.evaluate(f"{HEATMAP}.layout.datarevision") > revision
    for chart in ("loss", "heatmap", "timeline"):
        assert page.evaluate(f"document.getElementById('{chart}').layout.xaxis.range") == zoomed
    page.locator("#reset").click()
    wait(page, f"{COLUMNS} === 13 && {HEATMAP}.layout.xaxis.range[1] === 12.5")
    assert page.evaluate("window.notReloaded")


def test_b87_fewer_rows_while_hovering_throws_nothing(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    hover_cell(page, len(LAYERS) - 1, 35)
    page.locator("#filter").fill("blocks.0.attn")
    wait(page, f"{HEATMAP}.data[0].y.length === 2")
    hover_cell(page, 1, 35)
    assert page.evaluate(f"{HEATMAP}.data[0].y") == ["blocks.0.attn.qkv", "blocks.0.attn.out"]


def test_slash_focuses_the_filter_and_escape_clears_it(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    page.keyboard.press("/")
    page.keyboard.type("nothing like it")
    wait(page, "document.getElementById('worst').textContent.includes('No layer')")
    assert "q=nothing" in page.evaluate("location.href")
    page.keyboard.press("Escape")
    wait(page, f"{HEATMAP}.data[0].y.length === {len(LAYERS)}")
    assert "q=" not in page.evaluate("location.href")


def test_the_theme_follows_the_system_and_the_toggle(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    wait(page, f"{HEATMAP}.data[0].colorscale[0][1] === '#edf2f8'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    # The context remembers it for every later page.
    page.evaluate("localStorage.clear()")


def test_everything_essential_fits_the_screen(page: Any, server_url: str, faulty: Any) -> None:
    open_run(page, server_url, "faulty")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    for part in ("#status", "#heatmap", "#timeline", "#loss", "#alerts", "#worst"):
        box = page.locator(part).bounding_box()
        assert box["width"] > 200
        assert box["y"] < 900


def test_pause_holds_the_page_still(page: Any, server_url: str, make_trainer: Callable[..., Any]) -> None:
    reporter = make_trainer(server_url, "paused", LAYERS)
    reporter.post(0)
    open_run(page, server_url, "paused")
    page.wait_for_selector("#live[data-live=live]")
    page.locator("#pause").click()
    reporter.post(1)
    page.wait_for_timeout(1500)
    assert page.evaluate(COLUMNS) == 1
    page.locator("#pause").click()
    wait(page, f"{COLUMNS} === 2")


def test_strange_layer_names_are_text_everywhere(
    page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    name = "<img src=x onerror=alert(1)>"
    make_trainer(server_url, "odd", [name, "a/b#c?d"]).post(0)
    open_run(page, server_url, "odd")
    assert name in hover_cell(page, 0, 0)
    assert page.locator("#worst img").count() == 0
    page.locator("#filter").fill(name)
    wait(page, f"{HEATMAP}.data[0].y.length === 1")


def test_an_empty_list_of_runs_fills_by_itself(
    page: Any, empty_server_url: str, make_trainer: Callable[..., Any]
) -> None:
    page.goto(empty_server_url)
    assert "No runs yet" in page.locator("#runs").text_content()
    make_trainer(empty_server_url, "fresh", LAYERS).post(0)
    page.wait_for_selector("a.run-link", timeout=20_000)
    assert page.locator("a.run-link").get_attribute("href") == "/runs/fresh"


STRANGE = ["model.layers.0/attn", "a%2Fb", "a/b", "a?b#c", "..", "a+b&q=ü"]


def test_b62_the_filter_of_any_layer_name_survives_its_address(
    page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    make_trainer(server_url, "strange", STRANGE).post(0)
    open_run(page, server_url, "strange")
    for name in STRANGE:
        quoted = json.dumps(name)
        page.locator("#filter").fill(name)
        rows = sum(name.casefold() in other.casefold() for other in STRANGE)
        wait(page, f"{HEATMAP}.data[0].y.length === {rows}")
        assert parse_qs(urlsplit(page.evaluate("location.href")).query, keep_blank_values=True)["q"] == [name]
        if name == "a%2Fb":
            page.reload()
            page.wait_for_function(DRAWN)
        wait(page, f"{HEATMAP}.data[0].y.length === {rows}")
        assert page.evaluate("document.getElementById('filter').value") == name
        wait(page, f"document.getElementById('worst').textContent.includes({quoted})")
        page.locator("#filter").fill("")
        wait(page, f"{HEATMAP}.data[0].y.length === {len(STRANGE)}")
        wait(page, f"document.querySelectorAll('#worst button[data-layer]').length === {len(STRANGE)}")


def test_b80_a_run_full_of_nan_and_inf_is_drawn(
    page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    """The page fixture fails on any error in the console; JSON.parse would raise one."""
    reporter = make_trainer(server_url, "nonfinite", ["a", "b", "c"])
    for step, word in enumerate(("NaN", "Infinity", "-Infinity")):
        sick = reporter.sample(step, {})
        for place, slot in enumerate(sick["slots"]):
            if slot["layer"] != "c":
                for name in ("amax", "sum_sq", "sum_sq_q", "sum_sq_err"):
                    sick["columns"][name][place] = word
                sick["columns"]["nan"][place] = 1
        reporter.post(step, columns=sick["columns"], run={"loss": word, "gradient_norm": word})
    open_run(page, server_url, "nonfinite", "?metric=amax")
    assert page.evaluate(f"{HEATMAP}.data[0].z.slice(0, 2)") == [[None] * 3] * 2
    assert all(value is not None for value in page.evaluate(f"{HEATMAP}.data[0].z[2]"))
    marked = f"{HEATMAP}.data.find((trace) => trace.name === 'NaN').x.length"
    assert page.evaluate(marked) == 6
    page.wait_for_selector("#live[data-live=live]")
    reporter.post(3)
    wait(page, f"{COLUMNS} === 4")
