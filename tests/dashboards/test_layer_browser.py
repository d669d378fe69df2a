"""The layer drawer in a real browser: charts, keys, addresses, actions, accessibility."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]

pytestmark = pytest.mark.browser

SICK = "blocks.1.mlp.down"
HOSTILE = 'a/b "c"\n%<script>alert(1)</script> 🔥'
LAYERS = ["blocks.0.mlp.down", SICK, HOSTILE, "blocks.2.mlp.down"]
STEPS = 24
BINS = [0, 0, 0, 2] + [0] * 8 + [60, 400, 50, 0]
AXE_OPTIONS = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}


@pytest.fixture(scope="module")
def layered(server_url: str, make_trainer: Callable[..., Any]) -> Any:
    """A run with block histograms and a fault in one layer that the policy answers."""
    reporter = make_trainer(server_url, "drawer", LAYERS)
    for step in range(STEPS):
        ill = {SICK: min(0.5, 1e-3 * 2 ** (step - 8))} if step >= 8 else {}
        sample = reporter.sample(step, ill)
        hists = [None if "gemm" in slot else BINS for slot in sample["slots"]]
        reporter.post(step, distortion=ill, columns={**sample["columns"], "tile_sqnr_hist": hists})
    return reporter


def open_drawer(opened: Any, url: str, layer: str = SICK, query: str = "") -> Any:
    opened.page.goto(f"{url}/runs/drawer?layer={quote(layer)}{query}", timeout=90_000)
    drawn(opened)
    return opened.page


def drawn(opened: Any) -> None:
    opened.page.wait_for_selector(".drawer[open]:not([aria-busy]) .drawer-steps[data-drawn]", timeout=40_000)


def query_of(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.evaluate("location.href")).query, keep_blank_values=True)


def title(page: Any) -> str:
    text: str = page.locator("#drawer-title").text_content()
    return text


def svg_texts(page: Any, chart: str) -> list[str]:
    found: list[str] = page.evaluate(
        "(id) => [...document.querySelectorAll(`#${id} svg text`)].map((each) => each.textContent)", chart
    )
    return found


def test_the_drawer_answers_for_one_layer(run_page: Any, server_url: str, layered: Any) -> None:
    """Everything at once, since opening costs more than looking: what is drawn, in words, and axe."""
    page = open_drawer(run_page, server_url, query="&layer_metric=relative_error")
    document = layered.get("/layer", layer=SICK)
    labels = svg_texts(page, "layer-metric")
    slot = next(each for each in document["slots"] if each.get("gemm") == "dgrad")
    for line in slot["thresholds"]["relative_error"]:
        assert any(line["source"] in text and text.startswith(line["severity"]) for text in labels), labels
    lines = page.evaluate("document.querySelectorAll('#layer-metric .shapelayer path').length")
    assert lines >= len(slot["thresholds"]["relative_error"]) + 1
    names = page.evaluate("document.getElementById('layer-amax').data.map((trace) => trace.name)")
    assert {"x amax", "w amax", "dy amax", "x rms"} <= set(names)
    assert "E4M3 max 448 at scale 1" in svg_texts(page, "layer-amax")
    assert page.locator("#layer-histogram .bars path").count() == 16
    assert page.locator("#layer-blocks .heatmaplayer image").count() == 1
    assert any("worst 1 %" in text for text in svg_texts(page, "layer-histogram"))
    fallen = [item for item in document["precision_history"] if item["precision"] == "bf16"]
    assert fallen
    bars = svg_texts(page, "layer-precision")
    for item in fallen:
        assert f"BF16 #{item['decision_id'].rpartition('-')[2]}" in bars
    # Numbers and their units are kept on one line there, and what all reasons begin with is left out.
    words = page.locator(".drawer").text_content().replace("\u00a0", " ")
    for part in (
        SICK,
        "worst signal",
        "GEMM error",
        "1 − cosine",
        *(d["reason"].removeprefix(f"{SICK}: ") for d in document["decisions"]),
    ):
        assert part in words
    assert page.locator(".drawer-table tbody tr").count() == len(document["slots"])
    found = Axe().run(page, context=".drawer", options=AXE_OPTIONS).response["violations"]
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_clicks_open_it_back_closes_it_and_the_address_says_so(
    dark_page: Any, server_url: str, layered: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/drawer?metric=relative_error")
    row = page.locator(f"#worst button[data-layer={json.dumps(SICK)}]")
    row.click()
    drawn(dark_page)
    assert title(page) == SICK
    assert query_of(page) | {"layer": [SICK], "metric": ["relative_error"]} == query_of(page)
    assert page.evaluate("document.activeElement.id") == "drawer-title"
    assert page.locator("[data-set=metric]").input_value() == "relative_error"
    page.go_back()
    page.wait_for_selector(".drawer", state="hidden")
    assert "layer" not in query_of(page)
    page.go_forward()
    drawn(dark_page)
    page.keyboard.press("Escape")
    page.wait_for_selector(".drawer", state="hidden")
    assert "layer" not in query_of(page)
    row.focus()
    page.keyboard.press("Enter")
    drawn(dark_page)
    page.keyboard.press("Escape")
    page.wait_for_selector(".drawer", state="hidden")
    assert page.evaluate("document.activeElement.dataset.layer") == SICK
    row.click()
    drawn(dark_page)
    page.mouse.click(40, 400)
    page.wait_for_selector(".drawer", state="hidden")


def test_keys_go_from_layer_to_layer_and_focus_stays_inside(
    dark_page: Any, server_url: str, layered: Any
) -> None:
    page = open_drawer(dark_page, server_url, LAYERS[0], "&layer_metric=amax")
    for key, expected in (("j", 1), ("ArrowRight", 2), ("k", 1), ("ArrowLeft", 0), ("k", 0)):
        page.keyboard.press(key)
        dark_page.wait(
            f"document.getElementById('drawer-title').textContent === {json.dumps(LAYERS[expected])}"
        )
        assert query_of(page)["layer"] == [LAYERS[expected]]
    drawn(dark_page)
    assert query_of(page)["layer_metric"] == ["amax"]
    for _ in range(60):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.querySelector('.drawer').contains(document.activeElement)"
        )
    page.locator("[data-set=metric]").focus()
    page.keyboard.press("ArrowRight")
    assert title(page) == LAYERS[0]


def test_a_hostile_name_is_text_and_its_address_works(dark_page: Any, server_url: str, layered: Any) -> None:
    page = open_drawer(dark_page, server_url, HOSTILE)
    assert title(page) == HOSTILE
    assert page.locator(".drawer script").count() == 0
    page.reload()
    drawn(dark_page)
    assert title(page) == HOSTILE
    page.locator("[data-filter]").click()
    page.wait_for_selector(".drawer", state="hidden")
    dark_page.wait(f"document.getElementById('filter').value.startsWith({json.dumps(HOSTILE[:6])})")


def test_choices_are_in_the_address_and_come_back(dark_page: Any, server_url: str, layered: Any) -> None:
    page = open_drawer(dark_page, server_url, query="&layer_metric=relative_error")
    page.locator("[data-toggle='dy row']").click()
    dark_page.wait("document.getElementById('layer-metric').data.some((trace) => trace.name === 'dy row')")
    page.locator(".drawer input[value=linear]").check(force=True)
    dark_page.wait("document.getElementById('layer-metric').layout.yaxis.type === 'linear'")
    page.locator("[data-set=blocks]").select_option("w tile")
    drawn(dark_page)
    query = query_of(page)
    assert set(query["layer_slots"][0].split(",")) == {"dy row", "fprop", "dgrad"}
    assert (query["layer_scale"], query["layer_blocks"]) == (["linear"], ["w tile"])
    page.reload()
    drawn(dark_page)
    assert page.evaluate("document.getElementById('layer-metric').layout.yaxis.type") == "linear"
    assert page.locator("[data-toggle='dy row']").get_attribute("aria-pressed") == "true"
    assert page.locator("[data-set=blocks]").input_value() == "w tile"


def test_a_zoom_moves_every_chart_and_the_page(dark_page: Any, server_url: str, layered: Any) -> None:
    page = open_drawer(dark_page, server_url)
    box = page.locator("#layer-metric").bounding_box()
    left, width = box["x"] + 62, box["width"] - 62 - 78
    page.mouse.move(left + 0.25 * width, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(left + 0.75 * width, box["y"] + 62, steps=5)
    page.mouse.up()
    dark_page.wait("document.getElementById('layer-precision').layout.xaxis.range[1] < 20")
    drawn(dark_page)
    ranges = page.evaluate(
        "['metric', 'amax', 'blocks', 'precision'].map((id) => document.getElementById(`layer-${id}`).layout.xaxis.range)"
    )
    assert all(each == ranges[0] for each in ranges)
    assert {"from", "to", "layer"} <= query_of(page).keys()


def test_actions_say_what_happened(dark_page: Any, server_url: str, layered: Any) -> None:
    dark_page.expected = ("403",)
    page = open_drawer(dark_page, server_url)
    alert = next(item for item in layered.get("/layer", layer=SICK)["alerts"] if item["state"] != "resolved")
    button = page.locator(f"[data-post='/api/v1/alerts/{alert['id']}:ack']")
    page.route(
        "**/alerts/*:ack",
        lambda route: route.fulfill(
            status=403,
            content_type="application/problem+json",
            body=json.dumps({"detail": "this token lacks the scope 'control'; it has read"}),
        ),
    )
    button.click()
    dark_page.wait(
        "document.querySelector('.drawer-remark').textContent.includes(\"lacks the scope 'control'\")"
    )
    page.unroute("**/alerts/*:ack")
    button.click()
    dark_page.wait("document.querySelector('.drawer-remark').textContent === 'Alert acknowledged.'")
    dark_page.wait("document.getElementById('drawer-alerts').textContent.includes('acknowledged by')")
    assert button.count() == 0
    drawn(dark_page)


def test_an_unknown_layer_is_told_with_what_is_close(dark_page: Any, server_url: str, layered: Any) -> None:
    dark_page.expected = ("404",)
    dark_page.page.goto(f"{server_url}/runs/drawer?layer=blocks.1.mlp.dwon")
    dark_page.wait("document.querySelector('.drawer-remark')?.textContent.includes('did you mean')")


def test_new_samples_arrive_in_the_open_drawer(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    reporter = make_trainer(server_url, "drawer-live", LAYERS[:1])
    reporter.post(0)
    dark_page.page.goto(f"{server_url}/runs/drawer-live?layer={LAYERS[0]}")
    drawn(dark_page)
    dark_page.page.wait_for_selector("#live[data-live=live]", state="attached")
    reporter.post(1)
    dark_page.wait(
        "document.getElementById('layer-amax').data.find((t) => t.name === 'x amax').x.length === 2"
    )
    assert dark_page.page.evaluate("document.activeElement.id") == "drawer-title"


def test_at_600_pixels_it_takes_the_whole_width(
    contexts: Any, dark_page: Any, server_url: str, layered: Any
) -> None:
    dark_page.page.set_viewport_size({"width": 600, "height": 900})
    page = open_drawer(dark_page, server_url)
    assert page.locator(".drawer").bounding_box() == {"x": 0, "y": 0, "width": 600, "height": 900}
    wide = page.evaluate("document.querySelector('.drawer-body').scrollWidth")
    assert wide <= 600
    page.locator("[data-close]").click()
    page.wait_for_selector(".drawer", state="hidden")


def test_going_to_a_part_keeps_the_head_in_sight(dark_page: Any, server_url: str, layered: Any) -> None:
    """Hidden words for screen readers once made the dialog itself scroll, its head with it."""
    page = open_drawer(dark_page, server_url)
    for part in ("slots", "decisions", "metric"):
        page.locator(f"[data-jump={part}]").click()
        dark_page.wait(
            f"(() => {{ const box = document.getElementById('drawer-{part}').getBoundingClientRect();"
            " return box.top >= 0 && box.top < innerHeight; })()"
        )
        head = page.locator(".drawer-head").bounding_box()
        assert (head["y"], page.evaluate("document.querySelector('.drawer').scrollTop")) == (0, 0)
        assert page.evaluate("document.querySelector('.drawer').scrollHeight <= innerHeight")
