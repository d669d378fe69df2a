"""Pages of a plain nn.Sequential: unknown precisions, numbers for names, nothing logged, ended."""

import html
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from fp8_safeguard.dashboards.layer_precision import precision_figure
from fp8_safeguard.dashboards.layer_view import precision_chips
from fp8_safeguard.dashboards.theme import get_theme
from fp8_safeguard.dashboards.view import precision_words

HEATMAP = "document.getElementById('heatmap')"
UNKNOWN = {"fprop": "fp8", "dgrad": "fp8", "wgrad": None}
HIGH_ERROR, FP8_ERROR = 1e-6, 4e-4
"""1 - cosine of an fprop that is nearer to high precision than FP8 can be, and of one that is not."""


def plain_sample(reporter: Any, step: int, fprop: float) -> dict[str, Any]:
    """What a foreign nn.Linear sends: its backward GEMMs are always recomputed with an FP8 stand-in."""
    sample: dict[str, Any] = reporter.sample(step, dict.fromkeys(reporter.layers, fprop))
    for slot in sample["slots"]:
        if slot.get("gemm") == "dgrad":
            slot["emulated"] = True
    return {name: sample[name] for name in ("slots", "columns")}


@pytest.fixture
def make_plain(server_url: str, make_trainer: Callable[..., Any]) -> Callable[..., Any]:
    def make(run: str, *, fprop: float = FP8_ERROR) -> Any:
        reporter = make_trainer(server_url, run, ["0", "2", "4"], mode="observe")
        for step in range(2):
            reporter.post(step, **plain_sample(reporter, step, fprop))
        return reporter

    return make


@pytest.mark.parametrize(
    ("run", "fprop", "shown"), [("plain", FP8_ERROR, "unknown"), ("exact", HIGH_ERROR, "high precision")]
)
def test_the_drawer_answers_for_a_layer_whose_precision_samples_do_not_tell(
    server_url: str, make_plain: Callable[..., Any], run: str, fprop: float, shown: str
) -> None:
    reporter = make_plain(run, fprop=fprop)
    expected = None if shown == "unknown" else "high"
    assert reporter.get("/layer", layer="0")["precision"]["dgrad"] == expected
    for path in ("layer", "figures/layer/precision"):
        answer = httpx2.get(f"{server_url}/runs/{run}/{path}", params={"layer": "0"})
        assert (answer.status_code, shown in answer.text) == (200, True), answer.text
    page = httpx2.get(f"{server_url}/runs/{run}")
    assert page.status_code == 200
    assert "None:" not in page.text
    assert ("high precision: fprop" in page.text) == (shown == "high precision")


@pytest.mark.parametrize(
    ("precision", "words", "chips"),
    [
        (UNKNOWN, "", [("fprop", "FP8", "fp8"), ("dgrad", "FP8", "fp8"), ("wgrad", "unknown", "unknown")]),
        (dict.fromkeys(("fprop", "dgrad")), "", [("fprop", "unknown", "unknown"), ("dgrad", "unknown", "unknown")]),
        ({"fprop": "high"}, "high precision: fprop", [("fprop", "high precision", "left")]),
        ({"fprop": "bf16", "dgrad": None}, "BF16: fprop", [("fprop", "BF16", "left"), ("dgrad", "unknown", "unknown")]),
    ],
)  # fmt: skip
def test_every_precision_of_the_contract_has_words(
    precision: dict[str, str | None], words: str, chips: list[tuple[str, str, str]]
) -> None:
    assert precision_words(precision) == words
    assert precision_chips(precision) == chips


@pytest.mark.parametrize(
    ("kind", "text", "colour"),
    [(None, "unknown", "border"), ("unknown", "unknown", "border"), ("high", "high precision", "fallback")],
)
def test_the_history_tells_unknown_from_high_precision(kind: str | None, text: str, colour: str) -> None:
    period = {"gemm": "wgrad", "from_step": 0, "to_step": None, "precision": kind, "decision_id": None}
    (bar,) = precision_figure([period], steps=(0, 9)).data
    assert (bar.text[0], bar.marker.color) == (text, getattr(get_theme("light"), colour))


@pytest.mark.parametrize(("fault", "ending"), [(None, "healthy"), (0.3, "unstable")])
def test_the_run_list_tells_how_a_run_ended(
    server_url: str, make_trainer: Callable[..., Any], fault: float | None, ending: str
) -> None:
    layers = [str(place) for place in range(8)]
    reporter = make_trainer(server_url, f"ended-{ending}", layers, mode="observe")
    for step in range(4):
        reporter.post(step, distortion={"2": fault} if fault else None)
    httpx2.patch(f"{server_url}/api/v1/runs/{reporter.run}", json={"ended": True}).raise_for_status()
    detail = reporter.get("")
    assert (detail["state"], detail["health"]) == ("ended", ending)
    page = httpx2.get(f"{server_url}/").text
    row = page.split(f'data-run="{reporter.run}"')[1].split("</tr>")[0]
    assert f'class="pill tone-{ending}"' in row
    assert f"ended · {ending}</span>" in row
    # State and step have columns of their own; the sentence itself stays in reach.
    assert f"<span>ended {ending}" in row
    assert detail["verdict"]["why"] in html.unescape(row)
    # Nothing follows the mode of a run that is over, and nothing is left to stop.
    tab = httpx2.get(f"{server_url}/runs/{reporter.run}").text
    for control in ('id="mode"', 'id="kill"'):
        assert " disabled" in tab.split(control)[1].split(">")[0]


@pytest.mark.browser
def test_measured_nan_is_no_gap_and_a_layer_called_0_is_no_number(
    dark_page: Any, server_url: str, make_plain: Callable[..., Any]
) -> None:
    reporter = make_plain("broken")
    sample = plain_sample(reporter, 2, FP8_ERROR)
    place = next(at for at, slot in enumerate(sample["slots"]) if slot["layer"] == "2" and slot.get("gemm"))
    for name in ("sum_sq", "sum_sq_q", "sum_sq_err"):
        sample["columns"][name][place] = "NaN"
    sample["columns"]["nan"][place] = 12
    reporter.post(2, **sample)
    page = dark_page.open(f"{server_url}/runs/broken?metric=relative_error&slot=fprop&row=2&step=2&table=1")
    dark_page.wait("document.querySelectorAll('#table tbody tr').length === 3")
    cells = page.locator("#table tbody tr").nth(1).locator("th, td").all_text_contents()
    assert cells[:6] == ["2", "NaN", "2", "NaN", "3 of 3", "1"]
    ground = page.evaluate(
        f"{HEATMAP}.data.filter((each) => each.name.startsWith('measured')).map((each) => [each.y, each.z])"
    )
    assert ground == [[["0", "2", "4"], [[None] * 3, [None, None, 1], [None] * 3]]]
    page.locator("#map").focus()
    page.keyboard.press("Home")
    page.keyboard.press("End")
    dark_page.wait("document.getElementById('cell').textContent.length > 0")
    assert page.locator("#cell").text_content() == "layer “2”, step 2: GEMM error NaN"


@pytest.mark.browser
def test_labels_of_a_narrow_heatmap_are_all_different(
    dark_page: Any, server_url: str, make_trainer: Callable[..., Any]
) -> None:
    layers = [
        f"{block}.attention.{name}_proj.weight" for block in range(2) for name in ("query", "key", "value")
    ]
    make_trainer(server_url, "narrow", layers).post(0)
    dark_page.page.set_viewport_size({"width": 600, "height": 900})
    page = dark_page.open(f"{server_url}/runs/narrow")
    labels = page.evaluate(f"{HEATMAP}.layout.yaxis.ticktext")
    assert len(set(labels)) == len(layers), labels
    assert max(map(len, labels)) <= 13
