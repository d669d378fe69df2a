"""Alerts and decisions on the run page in a real browser."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

pytestmark = pytest.mark.browser

HEATMAP = "document.getElementById('heatmap')"
RING = """() => {
    const box = (id) => document.getElementById(id).getBoundingClientRect();
    const { layout, data } = document.getElementById("heatmap");
    const [plot, ring] = [box("heatmap"), box("ring")];
    const { l, r, t, b } = layout.margin;
    const [from, to] = layout.xaxis.range;
    const step = from + ((ring.x + ring.width / 2 - plot.x - l) / (plot.width - l - r)) * (to - from);
    const row = (ring.y + ring.height / 2 - plot.y - t) / (plot.height - t - b);
    return [layout.meta.rows[Math.floor(row * layout.meta.rows.length)], Math.round(step), from, to];
}"""


def query_of(page: Any) -> dict[str, str]:
    # As the page has it: `page.url` follows what the page itself wrote into its history a moment later.
    return {
        name: values[0] for name, values in parse_qs(urlsplit(page.evaluate("location.href")).query).items()
    }


def first_alert(reporter: Any, page: Any) -> Any:
    """The alert that the list puts first: that of the cause, where one stands for what follows from it."""
    shown = page.locator("#alerts li.alert").first.get_attribute("data-ids").split(",")
    items = reporter.get("/alerts", page_size=200)["items"]
    return min(
        (item for item in items if str(item["id"]) in shown),
        key=lambda item: (item["severity"] != "act", item["first_step"]),
    )


def test_an_alert_jumps_to_its_first_bad_cell_and_the_address_is_that_view(
    dark_page: Any, server_url: str, faulty: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty?alerts=open,held,resolved&q=mlp")
    alert = first_alert(faulty, page)
    part = min(alert.get("slots") or [alert], key=lambda each: each["first_step"])
    page.locator(".alert-jump").first.click()
    dark_page.wait(f"{HEATMAP}.layout.meta.label === 'GEMM error' && !document.getElementById('ring').hidden")
    layer, step, start, end = page.evaluate(RING)
    assert (layer, step) == (alert["layer"], part["first_step"])
    assert start <= step <= end
    asked = query_of(page)
    assert (asked["metric"], asked["slot"]) == (part["metric"], part["slot"]["gemm"])
    assert (asked["row"], asked["step"]) == (alert["layer"], str(part["first_step"]))
    # The value of the ringed cell is the API's.
    api = faulty.get("/heatmap", metric=part["metric"], gemm=part["slot"]["gemm"])
    value = api["values"][api["layers"].index(layer)][api["steps"].index(step)]
    assert f"{value * 100:.4g} %" in page.locator("#cell").text_content()
    # Opened afresh, it is the same view.
    dark_page.open(page.evaluate("location.href"))
    dark_page.wait("!document.getElementById('ring').hidden")
    assert page.evaluate(RING) == [layer, step, start, end]
    assert page.locator(".alert.is-shown").count() == 1


def test_back_and_forward_walk_through_jumps(dark_page: Any, server_url: str, faulty: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty?alerts=open,held,resolved")
    before = page.evaluate(f"{HEATMAP}.layout.xaxis.range")
    page.locator(".alert-jump").first.click()
    dark_page.wait(f"{HEATMAP}.layout.meta.label === 'GEMM error'")
    jumped = page.evaluate("location.href")
    page.go_back()
    dark_page.wait(f"{HEATMAP}.layout.meta.label === 'gradient distortion'")
    dark_page.wait("document.getElementById('ring').hidden")
    assert page.evaluate(f"{HEATMAP}.layout.xaxis.range") == before
    assert page.locator("#metric").input_value() == "gradient_distortion"
    page.go_forward()
    dark_page.wait(f"{HEATMAP}.layout.meta.label === 'GEMM error' && !document.getElementById('ring').hidden")
    assert page.evaluate("location.href") == jumped


def test_a_fault_that_the_picture_does_not_show_is_one_click_away(
    dark_page: Any, server_url: str, make_trainer: Any
) -> None:
    reporter = make_trainer(server_url, "unseen", ["layers.0", "layers.1"], mode="observe")
    for step in range(3):
        sick = reporter.sample(step, {})
        _, second = (at for at, slot in enumerate(sick["slots"]) if slot.get("gemm") == "fprop")
        sick["columns"]["sum_sq_err"][second] = 16384.0
        reporter.post(step, columns=sick["columns"])
    page = dark_page.open(f"{server_url}/runs/unseen?metric=gradient_distortion")
    assert page.evaluate(f"{HEATMAP}.layout.yaxis.ticktext") == ["layers.0", "layers.1 ▲"]
    page.locator("#definition .unseen").click()
    dark_page.wait(f"{HEATMAP}.layout.meta.label === 'GEMM error' && !document.getElementById('ring').hidden")
    dark_page.wait("!document.querySelector('#definition .unseen')")
    assert page.locator("#slot").input_value() == "fprop"


def test_the_jump_works_by_keyboard_alone(dark_page: Any, server_url: str, faulty: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty?alerts=open,held,resolved")
    page.locator(".alert-jump").first.focus()
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.dataset")
    page.keyboard.press("Enter")
    dark_page.wait("!document.getElementById('ring').hidden && document.activeElement.id === 'map'")
    dark_page.wait("document.getElementById('cell').textContent !== ''")
    assert query_of(page)["row"] == second["row"]
    page.keyboard.press("ArrowRight")
    assert query_of(page)["step"] == str(int(second["step"]) + 1)
    page.keyboard.press("Escape")
    assert "row" not in query_of(page)


def test_filters_count_as_the_api_does_and_live_in_the_address(
    dark_page: Any, server_url: str, faulty: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty")
    items = faulty.get("/alerts", page_size=200)["items"]
    for state in ("open", "held", "resolved"):
        shown = page.locator(f"[data-chip={state}] b").text_content()
        assert int(shown) == sum(item["state"] == state for item in items)
    for chip in ("open", "held"):
        page.locator(f"[data-chip={chip}]").click()
    dark_page.wait("document.querySelectorAll('.alert-jump').length === 0")
    assert query_of(page)["alerts"] == "none"
    page.locator("[data-chip=resolved]").click()
    ids = "[...document.querySelectorAll('#alerts li.alert')].flatMap((item) => item.dataset.ids.split(','))"
    resolved = sum(item["state"] == "resolved" for item in items)
    dark_page.wait(f"{ids}.length === {resolved}" if resolved else "true")
    page.go_back()
    dark_page.wait("document.querySelector('[data-chip=resolved]').getAttribute('aria-pressed') === 'false'")


@pytest.fixture
def alarmed(server_url: str, make_trainer: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """A run of its own in advise mode, so that alerts stay open and decisions wait for somebody."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[-60:].strip("-")
    reporter = make_trainer(server_url, name, [f"blocks.{block}" for block in range(8)], mode="advise")
    for step in range(8):
        reporter.post(step, distortion={"blocks.1": 0.2} if step >= 3 else None)
    return reporter


def states(reporter: Any) -> dict[int, Any]:
    return {item["id"]: item for item in reporter.get("/alerts", page_size=200)["items"]}


def test_acknowledging_and_silencing_reach_the_server_and_the_page(
    dark_page: Any, server_url: str, alarmed: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}?alerts=open,acknowledged,silenced")
    first = page.locator("#alerts li.alert").first
    ids = [int(number) for number in first.get_attribute("data-ids").split(",")]
    key = first.get_attribute("data-ids")
    first.locator("[data-act=ack]").click()
    page.wait_for_selector(f"#alerts li[data-ids='{key}'] .alert-remarks:text('acknowledged by')")
    assert all(states(alarmed)[number]["acknowledged"] for number in ids)
    row = page.locator(f"#alerts li[data-ids='{key}']")
    row.locator("summary").click()
    row.locator("[data-seconds='28800']").click()
    page.wait_for_selector(f"#alerts li[data-ids='{key}'] .alert-remarks:text('silenced')")
    assert all(states(alarmed)[number]["silenced"] for number in ids)
    assert page.locator("#act-notice").is_hidden()


def test_what_others_do_to_alerts_shows_up_live(dark_page: Any, server_url: str, alarmed: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}")
    page.wait_for_selector("#live[data-live=live]")
    number = page.locator("#alerts li.alert").first.get_attribute("data-ids").split(",")[0]
    answer = page.request.post(f"{server_url}/api/v1/alerts/{number}:ack", data={"by": "ana"})
    assert answer.ok
    page.wait_for_selector(".alert-remarks:text('acknowledged by ana')", timeout=20_000)


REFUSALS = [
    (403, "this token lacks the scope 'control'; it has read", "scope 'control'"),
    (401, "send a known token", "scope “control”"),
    (409, "somebody was faster", "somebody was faster"),
    (None, "", "cannot be reached"),
]


def test_a_refused_action_says_why_and_changes_nothing(dark_page: Any, server_url: str, alarmed: Any) -> None:
    dark_page.expected = ("Failed to load resource",)
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}")
    refusals = iter(REFUSALS)

    def refuse(route: Any) -> None:
        status, detail, _ = next(refusals)
        if status is None:
            route.abort("connectionrefused")
        else:
            body = json.dumps({"detail": detail})
            route.fulfill(status=status, body=body, content_type="application/problem+json")

    page.route("**/api/v1/alerts/*", refuse)
    for status, _, words in REFUSALS:
        page.locator("[data-act=ack]").first.click()
        page.wait_for_selector(f"#act-notice:has-text({json.dumps(words, ensure_ascii=False)})")
        page.wait_for_selector(".is-pending", state="detached")
        assert page.locator("#act-notice a").count() == (status == 401)
    assert not any(item["acknowledged"] for item in states(alarmed).values())


def test_a_pending_action_is_shown_and_cannot_be_sent_twice(
    dark_page: Any, server_url: str, alarmed: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}")
    held: list[Any] = []
    page.route("**/api/v1/alerts/*", lambda route: held.append(route))
    page.locator("[data-act=ack]").first.click()
    page.wait_for_selector(".is-pending .doing:text('acknowledging')")
    assert page.locator(".is-pending [data-act=resolve]").is_disabled()
    # A sample that arrives meanwhile redraws the list; what is under way stays so.
    alarmed.post(8, distortion={"blocks.1": 0.2})
    dark_page.wait("document.querySelector('[data-stat=step]').textContent === '8'")
    assert page.locator(".is-pending").count() == 1
    for route in held:
        route.continue_()
    page.wait_for_selector(".is-pending", state="detached")
    assert len(held) == 1


def test_who_may_only_read_sees_no_buttons(
    tmp_path: Path, browser: Any, make_trainer: Callable[..., Any]
) -> None:
    tokens: Any = {"w": ["ingest"], "r": ["read"], "c": ["read", "control"]}
    with running_server(Settings(database_url=f"sqlite:///{tmp_path / 'store.db'}", tokens=tokens)) as url:
        body = make_trainer(url, "guarded", ["a"]).sample(0, {})
        context = browser.new_context()
        bearer = {"Authorization": "Bearer w"}
        assert context.request.post(f"{url}/api/v1/runs/guarded/samples", data=body, headers=bearer).ok
        page = context.new_page()
        for token, buttons in (("r", 0), ("c", 1)):
            page.goto(f"{url}/runs/guarded?tab=decisions")
            page.locator("#token").fill(token)
            page.locator("form[action='/login'] button").click()
            page.wait_for_selector("#decisions")
            assert page.locator("#kill").count() == buttons
            page.locator("form[action='/logout'] button").click()
            page.wait_for_selector("#token")
        context.close()


def test_proposals_are_approved_and_rejected_and_the_plan_follows(
    dark_page: Any, server_url: str, alarmed: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}?tab=decisions")
    assert alarmed.get("/plan")["entries"] == []
    first = page.locator("#decisions li:has([data-act=approve])").first
    chosen = first.get_attribute("data-decision")
    assert "blocks.1" in first.text_content()
    first.locator("summary").click()
    assert "limit ≤" in first.locator(".evidence").text_content()
    first.locator("[data-act=approve]").click()
    page.wait_for_selector(f"[data-decision='{chosen}'] [data-act=revert]")
    assert [entry["decision_id"] for entry in alarmed.get("/plan")["entries"]] == [chosen]
    page.locator(f"[data-decision='{chosen}'] [data-act=revert]").click()
    page.wait_for_selector(f"[data-decision='{chosen}'] .alert-state:text('reverted')")
    assert alarmed.get("/plan")["entries"] == []


def test_the_kill_switch_asks_first(dark_page: Any, server_url: str, alarmed: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}?tab=decisions")
    page.locator("#kill").click()
    page.wait_for_selector("#confirm[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#confirm", state="hidden")
    assert alarmed.get("")["mode"] == "advise"
    page.locator("#kill").click()
    page.locator("#confirm [value=kill]").click()
    dark_page.wait("document.getElementById('mode').value === 'observe'")
    assert alarmed.get("")["mode"] == "observe"


def test_the_mode_can_be_chosen(dark_page: Any, server_url: str, alarmed: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/{alarmed.run}?tab=decisions")
    page.locator("#mode").select_option("enforce")
    dark_page.wait("document.querySelector('[data-stat=mode]').textContent === 'enforce'")
    assert alarmed.get("")["mode"] == "enforce"


CELL = """([row, column]) => {
    const plot = document.getElementById("heatmap");
    const box = plot.getBoundingClientRect();
    const { l, r, t, b } = plot.layout.margin;
    const [from, to] = plot.layout.xaxis.range;
    const x = l + ((plot.data[0].x[column] - from) / (to - from)) * (box.width - l - r);
    const y = t + ((row + 0.5) / plot.data[0].y.length) * (box.height - t - b);
    return [box.left + x, box.top + y, box.left + l - 20];
}"""


def test_a_layer_opens_from_everything_that_names_it(dark_page: Any, server_url: str, faulty: Any) -> None:
    page = dark_page.open(f"{server_url}/runs/faulty?alerts=open,held,resolved")
    x, y, label_x = page.evaluate(CELL, [3, 30])

    def by_keyboard() -> None:
        page.locator("#map").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")

    openers = {
        faulty.layers[3]: lambda: page.mouse.click(x, y),
        faulty.layers[4]: lambda: page.mouse.click(label_x, page.evaluate(CELL, [4, 0])[1]),
        page.locator("#alerts button[data-layer]").first.get_attribute("data-layer"): lambda: page.locator(
            "#alerts button[data-layer]"
        ).first.click(),
        faulty.layers[0]: by_keyboard,
    }
    for layer, open_it in openers.items():
        open_it()
        page.wait_for_selector("#drawer-title")
        dark_page.wait(f"document.getElementById('drawer-title').textContent === {json.dumps(layer)}")
        assert query_of(page)["layer"] == layer
        page.keyboard.press("Escape")
        page.wait_for_selector("#drawer-title", state="hidden")
        assert "layer" not in query_of(page)


def test_an_alert_of_the_whole_run_rings_its_step_in_all_rows(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    reporter = make_trainer(server_url, "nan-loss", ["a", "b"])
    for step in range(8):
        reporter.post(step, run={"loss": "NaN" if step >= 5 else 2.0, "gradient_norm": 0.8})
    page = dark_page.open(f"{server_url}/runs/nan-loss")
    entry = page.locator("li.alert", has_text="whole run")
    assert "loss NaN" in entry.locator(".alert-jump").text_content()
    entry.locator(".alert-jump").click()
    dark_page.wait("!document.getElementById('ring').hidden && document.getElementById('ring-row').hidden")
    dark_page.wait("document.getElementById('cell').textContent === 'step 5, all layers'")
    for _ in range(2):
        ring, left, width = page.evaluate(
            f"""() => {{
                const {{ l, r, t, b }} = {HEATMAP}.layout.margin;
                const box = document.getElementById("map").getBoundingClientRect();
                const ring = document.getElementById("ring").getBoundingClientRect();
                const high = box.height - t - b;
                return [ring.height / high, (ring.left - box.left - l) / (box.width - l - r), ring.width / (box.width - l - r)];
            }}"""
        )
        assert ring == pytest.approx(1, abs=0.02)
        # Eight whole cells are in view; the sixth of them is ringed.
        assert (left, width) == (pytest.approx(5 / 8, abs=0.01), pytest.approx(1 / 8, abs=0.01))
        # The address alone shows the same.
        dark_page.open(page.evaluate("location.href"))
        dark_page.wait("!document.getElementById('ring').hidden")
