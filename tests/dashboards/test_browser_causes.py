"""Incidents, worst ranks and remedies of several decisions on the run page, in a real browser."""

from dataclasses import replace
from typing import Any

import pytest

from fp8_safeguard.monitor import policy
from fp8_safeguard.server import deciding

pytestmark = pytest.mark.browser

LAYERS = [f"blocks.{block}.mlp" for block in range(6)]
SLOT = {"layer": LAYERS[2], "operand": "x", "layout": "row"}
CAUSE = {
    "name": "outlier-channels", "kind": "fp8", "layer": LAYERS[2], "slot": SLOT,
    "summary": "8 channels are 500 times the median", "evidence": {}, "advice": None, "value": None,
}  # fmt: skip
RANK = {"rank": 3, "host": "n7", "layer": LAYERS[2], "operand": "x", "metric": "amax", "value": 1e9}


@pytest.fixture
def ill(server_url: str, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in advise whose third layer fails, and with it all after it; its two decisions are one remedy."""

    def decide(state: Any, step: Any, config: Any) -> Any:
        after, made = policy.decide(state, step, replace(config, budget_ratio=1.0))
        more = {"cause": CAUSE, "remedy": {"id": "r-1", "name": "bf16-fprop-dgrad", "entries": 2}}
        mine = [one for one in made if one.layer == LAYERS[2] and one.action != "advice"]
        others = (replace(one, evidence={}) for one in made if one not in mine)
        return after, (*(replace(one, evidence={**one.evidence, **more}) for one in mine), *others)

    monkeypatch.setattr(deciding, "decide", decide)
    reporter = make_trainer(server_url, "ill", LAYERS, mode="advise")
    for step in range(3):
        reporter.post(step, ranks=[RANK])
    reporter.post(3, distortion={LAYERS[2]: 0.3}, ranks=[RANK])
    for step in (4, 5):
        reporter.post(step, distortion=dict.fromkeys(LAYERS[2:], 0.3), ranks=[RANK])
    return reporter


def test_one_incident_stands_for_all_that_follows_and_its_remedy_is_one_button(
    dark_page: Any, server_url: str, ill: Any
) -> None:
    page = dark_page.open(f"{server_url}/runs/{ill.run}")
    (incident,) = page.locator("#alerts .incident").all()
    assert "FP8" in incident.inner_text()
    assert "8 channels are 500 times the median" in incident.inner_text()
    assert page.locator("#alerts > ol:not(.incidents) > li.alert").count() == 0
    inner = incident.locator("li.alert")
    assert [one.is_visible() for one in inner.all()] == [True, False, False, False]
    incident.locator("details.evidence > summary").click()
    assert inner.last.is_visible()
    told = {(item["layer"], item["rule"], item["severity"]) for item in ill.get("/alerts")["items"]}
    assert inner.count() == len(told)
    inner.first.locator(".alert-jump").click()
    dark_page.wait("!document.getElementById('ring').hidden")
    assert page.locator(".ranks li").inner_text().startswith(f"rank 3 on n7: {LAYERS[2]} amax x")

    page.locator("#tab-decisions").click()
    both = page.locator("#decisions [data-together]")
    assert (both.count(), both.inner_text()) == (1, "Approve all 2")
    both.click()
    page.wait_for_selector("#decisions [data-act=revert] >> nth=1")
    gemms = {entry["target"]["gemm"] for entry in ill.get("/plan")["entries"] if entry["layer"] == LAYERS[2]}
    assert gemms == {"fprop", "dgrad"}
    assert page.locator("#act-notice").is_hidden()
    history = page.locator("#decisions li:has([data-act=revert])").first.locator(
        "details", has_text="History"
    )
    history.locator("summary").click()
    assert "approved at step 5" in history.inner_text()
    history.locator("xpath=..").locator(".cause-name").click()
    page.wait_for_url("**/causes#outlier-channels")
    assert "How it shows" in page.locator("#outlier-channels").inner_text()
