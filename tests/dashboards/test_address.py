"""What an address may ask of the run page."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.address import PageView, read_view
from fp8_safeguard.dashboards.slices import offered_slots

LAYERS = ("blocks.0", 'a/b "c"\n%')
OFFER = {"gradient_distortion": ("dgrad", "dy row"), "underflow_ratio": ("x row", "dy row")}


def read(**query: str) -> PageView:
    return read_view({name.rstrip("_"): value for name, value in query.items()}, layers=LAYERS, offer=OFFER)


def test_an_empty_address_is_the_default_without_a_notice() -> None:
    view = read()
    assert view == PageView()
    assert view.notices == ()


def test_everything_on_the_page_can_be_asked_for() -> None:
    view = read(
        metric="underflow_ratio", slot="x row", order="worst", scale="linear", q=" b ", from_="7", to="90",
        row=LAYERS[1], step="12", alerts="resolved", tab="decisions", table="1",
    )  # fmt: skip
    assert view == PageView(
        metric="underflow_ratio", slot="x row", order="worst", scale="linear", q=" b ", start=7, end=90,
        row=LAYERS[1], step=12, chips=("resolved",), tab="decisions", table=True,
    )  # fmt: skip
    assert view.notices == ()


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"metric": "nonsense"}, "nonsense"),
        ({"slot": "x row"}, "dgrad, dy row"),
        ({"order": "up"}, "depth, worst"),
        ({"scale": "cubic"}, "log, linear"),
        ({"tab": "x"}, "alerts, decisions"),
        ({"from_": "abc"}, "from=abc"),
        ({"from_": "-1"}, "from=-1"),
        ({"to": "1e3"}, "to=1e3"),
        ({"to": "٣"}, "to=٣"),
        ({"to": "9" * 400}, "to=999"),
        ({"from_": "9", "to": "3"}, "behind"),
        ({"row": "nope"}, "nope"),
        ({"row": "blocks.0", "step": "x"}, "step=x"),
        ({"alerts": "zzz"}, "zzz"),
    ],
)
def test_what_cannot_be_shown_is_said_and_the_default_shown(query: Any, word: str) -> None:
    view = read(**query)
    (notice,) = view.notices
    assert word in notice
    assert len(notice) < 400
    assert view == PageView(row="blocks.0" if query.get("row") == "blocks.0" else "")


def test_only_slots_that_exist_for_a_metric_are_offered() -> None:
    present = {"x row", "w tile", "dy row", "fprop", "dgrad"}
    metrics = (
        "gradient_distortion",
        "relative_error",
        "underflow_ratio",
        "tile_sqnr_p01_db",
        "kurtosis",
        "amax",
    )
    offer = offered_slots(present, metrics)
    assert offer["gradient_distortion"] == ("dgrad", "dy row")
    assert offer["relative_error"] == offer["amax"] == ("fprop", "dgrad", "x row", "w tile", "dy row")
    # A recomputed GEMM reports none of what these are made of.
    for metric in ("underflow_ratio", "tile_sqnr_p01_db", "kurtosis"):
        assert offer[metric] == ("x row", "w tile", "dy row")


@pytest.mark.parametrize(
    ("query", "step"),
    [({"step": "5"}, 5), ({"step": "5", "row": LAYERS[0]}, 5), ({"step": "5", "row": "no such layer"}, None)],
)
def test_a_step_without_a_layer_is_a_step_of_the_whole_run(query: dict[str, str], step: int | None) -> None:
    assert read_view(query, layers=LAYERS, offer=OFFER).step == step
