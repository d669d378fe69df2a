"""Coverage in words, and its section of the run page as the server writes it."""

from typing import Any

import httpx2
import pytest

from fp8_safeguard.dashboards.coverage import coverage_view, sampling_words

HOSTILE = '<img src=x onerror="boom()">\u00e9\n&amp;'
SAMPLING = {
    "budget": 0.01,
    "every": 40,
    "overhead_ratio": 0.0093,
    "layers_per_sample": 8,
    "layers": 32,
    "tile_stride": 17,
    "full_coverage_steps": 160,
}


def row(name: str, status: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [4096, 128], "status": status, "reason": reason, **more}


@pytest.mark.parametrize(
    ("counts", "headline", "complete"),
    [
        ((12, 0, 2), "12 of 14 weight matrices observed", False),
        ((10, 4, 0), "14 of 14 weight matrices observed, 4 by an adapter", True),
        ((1, 0, 0), "1 of 1 weight matrix observed", True),
        ((0, 0, 44544), "0 of 44,544 weight matrices observed", False),
        ((0, 0, 0), "0 of 0 weight matrices observed", True),
    ],
)
def test_the_headline_counts_what_is_seen(
    counts: tuple[int, int, int], headline: str, complete: bool
) -> None:
    named = dict(zip(("observed", "adapted", "not observed"), counts, strict=True))
    shown = coverage_view(named, [], None)
    assert (shown.headline, shown.complete, shown.more) == (headline, complete, sum(counts))


def test_b13_a_matrix_that_was_never_measured_says_no_data() -> None:
    counts = {"observed": 2, "adapted": 0, "not observed": 1}
    items = [
        row("a", "not observed", "embedding: a look-up, no GEMM", measured=False),
        row("b", "observed", measured=False),
        row("c", "observed", measured=True),
    ]
    shown = coverage_view(counts, items, None).rows
    assert [(each.data, each.measured, each.note) for each in shown] == [
        ("no data", False, "embedding: a look-up, no GEMM"),
        ("no data", False, ""),
        ("", True, ""),
    ]
    assert (shown[0].shape, shown[0].tone) == ("4,096 × 128", "watch")


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            SAMPLING,
            "One step in 40 is sampled. "
            "8 of 32 observed layers are measured in full in each sample, in turn; of the others one block in 17 is read. "
            "Every observed layer is measured in full within 160 steps. "
            "It takes 0.93 % of the training time; the budget is 1 %.",
        ),
        (
            {"every": 1, "layers_per_sample": 32, "layers": 32, "tile_stride": 1, "overhead_ratio": 0.2},
            "Every step is sampled. All 32 observed layers are measured in full in each sample. "
            "It takes 20 % of the training time.",
        ),
        ({"budget": 0.02}, "It may take 2 % of the training time."),
        (
            {"layers_per_sample": 3, "full_coverage_steps": 1},
            "3 layers are measured in full in each sample, in turn. "
            "Every observed layer is measured in full within 1 step.",
        ),
        ({"tile_stride": 17}, "One block in 17 is read."),
        ({"overhead_ratio": 0.0}, "It takes 0 % of the training time."),
        ({"step": 7}, ""),
        ({}, ""),
    ],
)
def test_sampling_in_words(sampling: dict[str, Any], words: str) -> None:
    assert sampling_words(sampling) == words


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            9,
            "All 9 observed layers are measured in full in each sample. The 12 above counts weight matrices, the 9 here",
        ),
        (12, "All 12 observed layers are measured in full in each sample."),
    ],
)
def test_two_counts_that_differ_say_what_each_counts(layers: int, words: str) -> None:
    counts = {"observed": 12, "adapted": 0, "not observed": 2}
    said = coverage_view(counts, [], {"layers_per_sample": layers, "layers": layers}).sampling
    assert said.startswith(words)
    assert ("counts weight matrices" in said) == (layers == 9)


def text_of(url: str, run: str) -> str:
    page = httpx2.get(f"{url}/runs/{run}").text
    return page[page.index('id="coverage"') : page.index("</aside>")]


def test_the_page_lists_what_is_missing_first_with_every_text_escaped(
    server_url: str, make_trainer: Any
) -> None:
    trainer = make_trainer(server_url, "covered", ["blocks.0.mlp"])
    rows = [
        row("blocks.0.mlp", "observed"),
        row("blocks.1.mlp", "adapted", HOSTILE),
        row(HOSTILE, "not observed"),
    ]
    trainer.post(0, coverage=rows, sampling=SAMPLING)
    part = text_of(server_url, "covered")
    assert "2 of 3 weight matrices observed, 1 by an adapter" in part
    assert '<details data-key="coverage" open>' in part
    assert "One step in 40 is sampled" in part
    assert "<img" not in part
    assert part.count("&lt;img src=x onerror=&#34;boom()&#34;&gt;") >= 2
    assert (
        part.index("not observed")
        < part.index("adapted</span>")
        < part.index("observed</span>", part.index("adapted</span>") + 20)
    )
    assert part.count("<b>no data</b>") == 2
    assert 'data-layer="blocks.0.mlp"' in part


def test_the_section_starts_closed_where_nothing_is_missing(server_url: str, make_trainer: Any) -> None:
    make_trainer(server_url, "complete", ["a"]).post(0, coverage=[row("a", "observed")])
    part = text_of(server_url, "complete")
    assert '<details data-key="coverage">' in part
    assert "1 of 1 weight matrix observed" in part


def test_a_run_whose_client_says_nothing_has_no_section(server_url: str, make_trainer: Any) -> None:
    make_trainer(server_url, "silent", ["a"]).post(0)
    part = text_of(server_url, "silent")
    assert "<details" not in part
    assert 'class="panel panel--coverage is-absent"' in httpx2.get(f"{server_url}/runs/silent").text


def test_a_huge_model_is_cut_and_says_so(server_url: str, make_trainer: Any) -> None:
    rows = [row(f"experts.{n}.w", "observed" if n % 2 else "not observed", "raw") for n in range(500)]
    make_trainer(server_url, "huge", ["a"]).post(0, coverage=rows)
    part = text_of(server_url, "huge")
    assert part.count('<li class="matrix') == 200
    assert "tone-healthy" not in part
    assert "and 300 more" in part
