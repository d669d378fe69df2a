"""The coverage section of the run page in a real browser."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

HOSTILE = '<img src=x onerror="boom()">.weight'
SECTION = "#coverage details"
SAMPLING = {
    "budget": 0.01,
    "every": 40,
    "overhead_ratio": 0.0093,
    "layers_per_sample": 8,
    "layers": 32,
    "full_coverage_steps": 160,
}


def row(name: str, status: str, reason: str = "") -> dict[str, Any]:
    return {"name": name, "shape": [4096, 11008], "status": status, "reason": reason}


PARTIAL = [
    row("blocks.0.mlp.down_projection_with_a_long_name", "observed"),
    row("blocks.1.mlp", "adapted", "functional GEMM: measured by a mode scoped to its module"),
    row(HOSTILE, "not observed", "embedding: a look-up, no GEMM"),
]


def overflowing(page: Any) -> list[str]:
    """What of the section sticks out of the window or of its own box."""
    script = """() => [...document.querySelectorAll("#coverage, #coverage *")]
        .filter((each) => each.checkVisibility() && !each.closest(".elided") && each.tagName !== "use"
            && (each.getBoundingClientRect().right > innerWidth + 0.5 || each.getBoundingClientRect().left < -0.5))
        .map((each) => each.outerHTML.slice(0, 80))"""
    found: list[str] = page.evaluate(script)
    return found


def test_the_section_appears_and_is_opened_and_closed_by_key_at_any_width(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    """Everything at once, since opening a page costs more than looking."""
    trainer = make_trainer(server_url, "partial", [PARTIAL[0]["name"]])
    trainer.post(0)
    page = dark_page.open(f"{server_url}/runs/partial")
    assert not page.locator("#coverage").is_visible()
    # The first report makes it appear on the open page, open since something is missing.
    trainer.post(1, coverage=PARTIAL, sampling=SAMPLING)
    page.wait_for_selector(SECTION)
    section = page.locator(SECTION)
    assert section.get_attribute("open") is not None
    assert "2 of 3 weight matrices observed, 1 by an adapter" in section.locator("summary").text_content()
    assert "One step in 40 is sampled. 8 of 32 observed layers are measured in full" in section.text_content()
    assert [text.strip() for text in section.locator(".matrix-status").all_text_contents()] == [
        "not observed",
        "adapted",
        "observed",
    ]
    first = section.locator(".matrix").first
    assert "no data: embedding: a look-up, no GEMM" in first.text_content()
    assert first.locator(".matrix-name").text_content().strip() == HOSTILE
    section.locator("summary").focus()
    page.keyboard.press("Enter")
    assert section.get_attribute("open") is None
    # It stays closed, and focused, when the page refreshes with other rows.
    trainer.post(2, coverage=[*PARTIAL, row("a.b." * 60, "not observed", "why " * 80)])
    dark_page.wait("document.querySelector('#coverage summary').textContent.includes('2 of 4')")
    assert section.get_attribute("open") is None
    assert page.evaluate("document.activeElement.dataset.key") == "coverage-summary"
    page.keyboard.press("Enter")
    assert section.locator(".matrix").count() == 4
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    for width in (1440, 820, 360):
        page.set_viewport_size({"width": width, "height": 900})
        # The charts follow the window a moment later.
        dark_page.wait("document.documentElement.scrollWidth <= innerWidth")
        assert section.locator(".matrix").count() == 4
        assert overflowing(page) == [], width
    section.locator("button[data-layer]").click()
    page.wait_for_selector("#drawer-root *")
    assert f"layer={PARTIAL[0]['name']}" in page.evaluate("location.href")
