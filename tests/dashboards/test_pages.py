"""The pages and figure endpoints over HTTP, against a real service."""

import gzip
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import httpx2
import pytest
from pydantic import SecretStr

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

LAYERS = ["blocks.0.mlp.down", "blocks.1.mlp.down", "blocks.2.mlp.down"]
STRANGE = [
    "model.layers.0/attn",
    "a%2Fb",
    "a?b#c",
    "..",
    "a b",
    "ü",
    "<img src=x onerror=alert(1)>",
    "'\"&amp;",
]


@pytest.fixture
def reporter(request: pytest.FixtureRequest, server_url: str, make_trainer: Callable[..., Any]) -> Any:
    """A trainer with a run of the test's own."""
    return make_trainer(server_url, re.sub(r"[^A-Za-z0-9]+", "-", request.node.name), LAYERS)


class Text(HTMLParser):
    """Tags seen, and text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def strict(response: httpx2.Response) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name} in JSON")

    assert response.status_code == 200, response.text
    decoded: dict[str, Any] = json.loads(response.text, parse_constant=refuse)
    return decoded


def test_no_runs_tells_how_to_get_one(empty_server_url: str) -> None:
    page = httpx2.get(f"{empty_server_url}/")
    assert page.status_code == 200
    assert "No runs yet" in page.text
    assert empty_server_url in page.text


def test_run_list_links_every_run(server_url: str, make_trainer: Callable[..., Any]) -> None:
    for run in ("first", "second.run"):
        make_trainer(server_url, run, LAYERS).post(0)
    page = Text(httpx2.get(f"{server_url}/").text)
    assert {("href", "/runs/first"), ("href", "/runs/second.run")} <= set(page.attributes)
    assert "healthy" in page.text


@pytest.mark.parametrize("run", ["unknown", "..%2Fetc", "<script>alert(1)"])
def test_unknown_run_is_a_page_that_says_so(server_url: str, run: str) -> None:
    page = httpx2.get(f"{server_url}/runs/{run}")
    assert page.status_code == 404
    if "%2F" not in run:
        assert page.headers["content-type"].startswith("text/html")
        assert "No sample of run" in Text(page.text).text
        # A page that reloads under a reader's hands is a barrier: a script looks again instead.
        assert "http-equiv" not in page.text
        assert "/static/missing.js" in page.text
        assert "<script>alert" not in page.text


def test_run_page_shows_verdict_numbers_and_worst_layers(server_url: str, reporter: Any) -> None:
    reporter.post(0)
    reporter.post(1)
    page = Text(httpx2.get(f"{server_url}/runs/{reporter.run}").text)
    verdict = reporter.get("")["verdict"]
    for text in ("HEALTHY", verdict["why"], verdict["next"], *LAYERS, "enforce", "0.4 %"):
        assert text in page.text


def test_pages_allow_nothing_but_this_server(server_url: str) -> None:
    policy = httpx2.get(f"{server_url}/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert "http" not in policy


def test_b62_any_layer_name_is_shown_as_text_and_never_in_a_path(server_url: str, reporter: Any) -> None:
    reporter.layers = STRANGE
    reporter.post(0)
    page = Text(httpx2.get(f"{server_url}/runs/{reporter.run}").text)
    assert all(layer in page.text for layer in STRANGE)
    assert page.tags.count("img") == 1
    paths = [value for name, value in page.attributes if name in ("href", "src")]
    assert not any("%2F" in (path or "") for path in paths)


@pytest.mark.parametrize("layer", STRANGE)
def test_b62_filter_finds_any_layer_name(server_url: str, reporter: Any, layer: str) -> None:
    reporter.layers = STRANGE
    reporter.post(0)
    figure = strict(
        httpx2.get(
            f"{server_url}/runs/{reporter.run}/figures/heatmap", params={"q": layer, "scale": "linear"}
        )
    )
    escaped = layer.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert escaped in figure["data"][0]["y"]
    page = Text(httpx2.get(f"{server_url}/runs/{reporter.run}", params={"q": layer}).text)
    assert ("value", layer) in page.attributes


def test_b62_a_slash_and_its_escape_are_two_layers(server_url: str, reporter: Any) -> None:
    reporter.layers = ["a/b", "a%2Fb", "a%252Fb"]
    reporter.post(0, distortion={"a%2Fb": 0.25})
    values = []
    for layer in reporter.layers:
        address = f"{server_url}/runs/{reporter.run}/figures/heatmap?scale=linear&q={quote(layer, safe='')}"
        trace = strict(httpx2.get(address))["data"][0]
        assert trace["y"] == [layer]
        values.append(trace["z"][0][0])
        page = Text(httpx2.get(f"{server_url}/runs/{reporter.run}?q={quote(layer, safe='')}").text)
        shown = {value for name, value in page.attributes if name == "data-layer"}
        raised = {alert["layer"] for alert in reporter.get("/alerts")["items"]}
        assert shown == {layer} | raised
    assert values == pytest.approx([4e-4, 0.25, 4e-4], rel=1e-6)


def test_b62_alert_links_show_the_first_bad_cell_of_any_layer(server_url: str, reporter: Any) -> None:
    reporter.layers = STRANGE
    for step in range(3):
        reporter.post(step, distortion=dict.fromkeys(STRANGE, 0.25))
    page = Text(httpx2.get(f"{server_url}/runs/{reporter.run}").text)
    links = [
        value or "" for name, value in page.attributes if name == "href" and (value or "").startswith("?")
    ]
    assert {parse_qs(link[1:])["row"][0] for link in links} == set(STRANGE)
    for link in links:
        opened = httpx2.get(f"{server_url}/runs/{reporter.run}{link}")
        assert opened.status_code == 200
        shown = Text(opened.text)
        assert "notices" not in {value for name, value in shown.attributes if name == "id"}
        assert ("data-row", parse_qs(link[1:])["row"][0]) in shown.attributes


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_heatmap_figure_holds_the_api_s_values(server_url: str, reporter: Any, scale: str) -> None:
    for step in range(4):
        reporter.post(step, distortion={LAYERS[2]: 0.02 * (step + 1)})
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params={"scale": scale}))
    api = reporter.get("/heatmap", metric="gradient_distortion")
    trace = figure["data"][0]
    assert trace["customdata" if scale == "log" else "z"] == api["values"]
    assert (trace["x"], trace["y"]) == (api["steps"], api["layers"])
    assert api["values"][2][3] == pytest.approx(0.08, rel=1e-6)
    assert figure["layout"]["meta"] == {
        "first_step": 0, "last_step": 3, "layers": 3, "rows": api["layers"], "step_width": 1, "agg": "max",
        "label": "gradient distortion", "unit": "",
    }  # fmt: skip


def test_a_fault_in_fprop_is_seen_by_whoever_opens_the_page(server_url: str, reporter: Any) -> None:
    """Gradient distortion stays green: another metric is shown, the row is marked, and other pictures say what they miss."""
    for step in range(3):
        sick = reporter.sample(step, {})
        places = [at for at, slot in enumerate(sick["slots"]) if slot.get("gemm") == "fprop"]
        sick["columns"]["sum_sq_err"][places[1]] = 16384.0
        reporter.post(step, columns=sick["columns"], mode="observe")
    address = f"{server_url}/runs/{reporter.run}"
    opened = httpx2.get(address).text
    assert re.search(r'<option value="relative_error"[^>]* selected>', opened)
    assert "Not in this picture" not in opened
    chosen = httpx2.get(f"{address}?metric=gradient_distortion").text
    assert re.search(r'<option value="gradient_distortion"[^>]* selected>', chosen)
    (words,) = re.findall(r"Not in this picture: .*", Text(chosen).text)
    assert words == f"Not in this picture: GEMM error fprop 50 % (limit ≤ 5 %) of “{LAYERS[1]}”. Show it"
    axis = strict(httpx2.get(f"{address}/figures/heatmap"))["layout"]["yaxis"]
    assert axis["ticktext"] == [LAYERS[0], f"{LAYERS[1]} ▲", LAYERS[2]]


def test_b80_non_finite_elements_reach_the_figure_as_strict_json(server_url: str, reporter: Any) -> None:
    sick = reporter.sample(0, {})
    sick["columns"]["nan"][4] = 7
    for name in ("sum_sq", "sum_sq_q", "sum_sq_err"):
        sick["columns"][name][4] = "NaN"
    reporter.post(0, columns=sick["columns"])
    figure = strict(
        httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params={"metric": "relative_error"})
    )
    marked = next(trace for trace in figure["data"] if trace["name"] == "NaN")
    assert (marked["x"], marked["y"]) == ([0], [LAYERS[0]])


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_b80_figures_tell_nan_inf_and_missing_apart_in_strict_json(
    server_url: str, reporter: Any, scale: str
) -> None:
    words = ["NaN", "Infinity", "-Infinity", None, 2.0]
    reporter.layers = [f"l{n}" for n in range(len(words))]
    sick = reporter.sample(0, {})
    for place, slot in enumerate(sick["slots"]):
        sick["columns"]["amax"][place] = words[int(slot["layer"][1:])]
    reporter.post(0, columns=sick["columns"], run={"loss": "-Infinity", "gradient_norm": "NaN"})
    address = f"{server_url}/runs/{reporter.run}/figures"
    answer = httpx2.get(f"{address}/heatmap", params={"metric": "amax", "scale": scale})
    figure = strict(answer)
    # Typed arrays would carry their non-finite numbers past every check, in base64.
    assert "bdata" not in answer.text
    shown = figure["data"][0]["z" if scale == "linear" else "customdata"]
    assert shown == [[None], [None], [None], [None], [2.0]]
    assert [row[0] is None for row in figure["data"][0]["z"]] == [True] * 4 + [False]
    marks = {trace["name"]: trace["y"] for trace in figure["data"][1:]}
    assert (marks["NaN"], marks["Inf"]) == (["l0"], ["l1", "l2"])
    for name in ("loss", "timeline"):
        answer = httpx2.get(f"{address}/{name}")
        strict(answer)
        assert "bdata" not in answer.text


def test_pauses_in_sampling_are_gaps(server_url: str, reporter: Any) -> None:
    for step in (0, 1, 2, 20, 21):
        reporter.post(step)
    trace = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap"))["data"][0]
    assert trace["x"] == [0, 1, 2, 3, 19, 20, 21]
    assert [value is None for value in trace["z"][0]] == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_b79_a_first_row_without_values_and_a_layer_that_came_later(
    server_url: str, reporter: Any, scale: str
) -> None:
    reporter.layers = ["first", "always"]
    blank = reporter.sample(0, {})
    for place, slot in enumerate(blank["slots"]):
        if slot["layer"] == "first":
            blank["columns"]["underflow"][place] = None
    reporter.post(0, columns=blank["columns"])
    reporter.layers = ["first", "always", "later"]
    late = reporter.sample(1, {})
    reporter.post(1, slots=late["slots"], columns={**late["columns"], "underflow": [None] * 6 + [9] * 12})
    query = {"metric": "underflow_ratio", "slot": "x row", "scale": scale}
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params=query))
    trace = figure["data"][0]
    values = trace["customdata" if scale == "log" else "z"]
    assert values == [[None, None], [0.0, 9 / 65536], [None, 9 / 65536]]
    assert math.isfinite(trace["zmin"])
    assert math.isfinite(trace["zmax"])


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("query", [{"slot": "x row"}, {"from_step": "500"}], ids=["all null", "no step"])
def test_b79_a_matrix_without_a_value_is_a_state_and_no_fault(
    server_url: str, reporter: Any, query: dict[str, str], scale: str
) -> None:
    reporter.post(0)
    params = {"metric": "tile_sqnr_p01_db", "scale": scale, **query}
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params=params))
    trace = figure["data"][0]
    notes = " ".join(note["text"] for note in figure["layout"]["annotations"])
    assert {len(row) for row in trace["z"]} <= {0, 1}
    assert all(value is None for row in trace["z"] for value in row)
    assert [trace.get(name) for name in ("zmin", "zmax")] in ([None, None], [0.0, 40.0])
    assert "not sampled" in notes or "no samples" in notes


def test_loss_figure_holds_the_reported_losses(server_url: str, reporter: Any) -> None:
    for step in range(3):
        reporter.post(step, run={"loss": [2.0, "NaN", 1.5][step], "gradient_norm": 0.5})
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/loss"))
    line = next(trace for trace in figure["data"] if trace["name"] == "loss")
    assert (line["x"], line["y"]) == ([0, 1, 2], [2.0, None, 1.5])


def test_timeline_figure_marks_each_decision_at_its_step(server_url: str, reporter: Any) -> None:
    for step in range(8):
        reporter.post(step, distortion={LAYERS[2]: 0.1} if step >= 4 else None)
    decided = [d for d in reporter.get("/decisions")["items"] if d["action"] == "bf16_fallback"]
    assert decided
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/timeline"))
    lane = next(trace for trace in figure["data"] if trace["name"] == "BF16 fallback")
    assert sorted(lane["x"]) == sorted(decision["step"] for decision in decided)
    assert all(decision["layer"] in lane["hovertext"][0] for decision in decided)


def test_a_run_whose_samples_hold_no_loss_is_said(server_url: str, reporter: Any) -> None:
    reporter.post(0, run={})
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/loss"))
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["no loss reported"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"metric": "nonsense"}, 422),
        ({"slot": "nonsense"}, 422),
        ({"max_cols": "0"}, 422),
        ({"slot": "wgrad"}, 404),
    ],
)
def test_figure_mistakes_are_problems(
    server_url: str, reporter: Any, query: dict[str, str], status: int
) -> None:
    reporter.post(0)
    answer = httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params=query)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["heatmap", "loss", "timeline"])
def test_figures_of_an_unknown_run_are_404(server_url: str, name: str) -> None:
    assert httpx2.get(f"{server_url}/runs/unknown/figures/{name}").status_code == 404


def test_gemm_slots_carry_their_thresholds_on_the_colour_bar(server_url: str, reporter: Any) -> None:
    reporter.post(0)
    query = {"metric": "relative_error", "slot": "dgrad"}
    figure = strict(httpx2.get(f"{server_url}/runs/{reporter.run}/figures/heatmap", params=query))
    labels = {note["text"]: note["y"] for note in figure["layout"]["annotations"]}
    # 5 % on a log scale from 1 % to 100 %.
    assert labels["act"] == pytest.approx(math.log10(5) / 2)


def test_a_configured_token_guards_pages_and_figures_but_not_the_style(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'store.db'}", token=SecretStr("secret"))
    with running_server(settings) as url:
        for path in ("/", "/runs/run", "/runs/run/figures/loss"):
            refused = httpx2.get(url + path)
            assert refused.status_code == 401
            # A browser then asks for the token.
            assert "Basic" in refused.headers["www-authenticate"]
        assert httpx2.get(f"{url}/", auth=("", "secret")).status_code == 200
        assert httpx2.get(f"{url}/static/style.css").status_code == 200


def test_plotly_is_served_compressed_with_a_long_life(server_url: str) -> None:
    with httpx2.stream(
        "GET", f"{server_url}/static/plotly.min.js", headers={"Accept-Encoding": "gzip"}
    ) as answer:
        packed = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert "max-age=31536000" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/javascript")
    assert len(packed) < 2_000_000
    assert b"plotly.js v" in gzip.decompress(packed)[:200]
    again = httpx2.get(
        f"{server_url}/static/plotly.min.js", headers={"If-None-Match": answer.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


def test_static_files_without_a_version_are_checked_again(server_url: str) -> None:
    assert httpx2.get(f"{server_url}/static/style.css").headers["cache-control"] == "no-cache"
    assert "immutable" in httpx2.get(f"{server_url}/static/style.css?v=1").headers["cache-control"]


@pytest.mark.parametrize("file", ["..%2Ftheme.py", "..%2F..%2Fpyproject.toml", "%2e%2e", "nothing.js"])
def test_only_the_listed_static_files_are_served(server_url: str, file: str) -> None:
    assert httpx2.get(f"{server_url}/static/{file}").status_code == 404
