"""The readiness report: formats, files, ranges, exit codes, and names that are hostile."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli.decided import decided_lines
from fp8_safeguard.cli.report import columns_of

NAMES = ("blocks.0.mlp.up", 'blocks.1/a "b"\n\x1b[31m%')


@pytest.fixture(scope="module")
def ready(service: Any) -> Any:
    """The service with a run that is ready but for one layer of eight: its what-if in E5M2 is safe."""
    counts = {"count": 65536, "nan": 0, "inf": 0, "amax": 4.5, "sum_sq": 65536.0, "sum_sq_q": 65540.0}
    for step in range(6):
        slots = [{"index": n, "layer": f"layers.{n}.a|b", "gemm": "fprop"} for n in range(8)]
        slots.append({**slots[0], "variant": "x_e5m2", "emulated": True})
        errors = [0.4, *[0.03] * 7, 0.06]
        body = {
            "schema": 1,
            "attempt": {"id": "0"},
            "group": "0",
            "step": step,
            "slots": slots,
            "columns": {
                **{name: [value] * 9 for name, value in counts.items()},
                **{name: [None] * 9 for name in ("zeros", "underflow", "saturated")},
                "sum_sq_err": [65536.0 * error**2 for error in errors],
            },
        }
        answer = httpx2.post(f"{service.url}/api/v1/runs/one-sick-layer/samples", json=body)
        assert answer.status_code == 200, answer.text
    return service


def ask(cli: Callable[..., Any], service: Any, run: str, *more: str) -> Any:
    return cli("report", run, "--server", service.url, *more)


def test_the_verdict_comes_first_and_the_worst_gemm_next(ready: Any, cli: Callable[..., Any]) -> None:
    said = ask(cli, ready, "one-sick-layer")
    lines = said.out.splitlines()
    assert (said.code, said.err) == (0, "")
    assert lines[0] == "one-sick-layer: ready with 1 layer kept in BF16"
    assert lines[1].split() == [
        "layer",
        "gemm",
        "verdict",
        "error",
        "worst",
        "at",
        "step",
        "limit",
        "underflow",
        "samples",
        "cause",
        "remedy",
    ]
    assert lines[2].split(None, 3)[:3] == ["layers.0.a|b", "fprop", "keep_bf16"]
    assert "40 %" in lines[2]
    assert "safe with e5m2 for x (6 %, limit 10 %)" in lines[2]
    assert [line.split()[2] for line in lines[3:10]] == ["safe"] * 7
    assert lines[10:] == [
        "8 GEMMs of 8 layers: 7 safe, 1 keep_bf16",
        "keep in BF16 (12.5 % of the layers, budget 15 %): layers.0.a|b",
        "steps 0 to 5, 6 sampled",
        "the verdicts rest on 48 recomputed samples, 6 of each GEMM",
        "layers.0.a|b fprop: error 40 % at step 0: beyond 15 % one sample is enough",
    ]


def test_json_is_the_servers_answer_and_takes_the_range(ready: Any, cli: Callable[..., Any]) -> None:
    served = ready.get("/runs/one-sick-layer/readiness", from_step=2, to_step=4)
    for form in (("--json",), ("--format", "json"), ("--json", "--format", "json")):
        said = ask(cli, ready, "one-sick-layer", "--from-step", "2", "--to-step", "4", *form)
        assert said.json == served
    assert (served["from_step"], served["to_step"], served["items"][0]["samples"]) == (2, 4, 3)
    local = cli(
        *("report", "one-sick-layer", "--json", "--from-step", "2", "--to-step", "4"),
        *("--database-url", ready.database_url),
    )
    assert local.json == served


def test_csv_has_one_line_a_gemm_with_every_number(ready: Any, cli: Callable[..., Any]) -> None:
    said = ask(cli, ready, "one-sick-layer", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    served = ready.get("/runs/one-sick-layer/readiness")["items"]
    assert len(rows) == len(served) == 8
    for row, item in zip(rows, served, strict=True):
        for name, value in item.items():
            if name != "best":
                assert row[name] == ("" if value is None else str(value)), name
    assert (rows[0]["best_variant"], float(rows[0]["best_error_median"])) == ("x_e5m2", pytest.approx(0.06))
    assert rows[1]["best_variant"] == ""


def test_markdown_is_a_table_whatever_a_layer_is_called(ready: Any, cli: Callable[..., Any]) -> None:
    lines = ask(cli, ready, "one-sick-layer", "--format", "markdown").out.splitlines()
    assert lines[0] == "# one-sick-layer: ready with 1 layer kept in BF16"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 10
    cells = {line.replace("\\|", "").count("|") for line in table}
    assert cells == {13}
    assert table[2].startswith("| layers.0.a\\|b | fprop | keep\\_bf16 | 40 % |")
    hostile = ask(cli, ready, "sick-7b", "--format", "markdown").out
    assert "\x1b" not in hostile
    assert hostile.count("\n|") == len([line for line in hostile.splitlines() if line.startswith("|")])


def test_a_hostile_name_does_not_steer_the_terminal(ready: Any, cli: Callable[..., Any]) -> None:
    said = ask(cli, ready, "sick-7b")
    assert "\x1b" not in said.out
    assert 'blocks.1/a "b"\\n\\x1b[31m%' in said.out
    rows = list(csv.DictReader(io.StringIO(ask(cli, ready, "sick-7b", "--format", "csv").out)))
    assert {row["layer"] for row in rows} == set(NAMES)


def test_what_keeps_a_gemm_in_bf16_beside_its_error_stands_in_its_row(
    ready: Any, cli: Callable[..., Any]
) -> None:
    """Where weights and activations vanish together, an error far below its limit explains nothing."""
    bundle = ready.get("/runs/one-sick-layer/export")["samples"]
    counts = {"count": 65536, "zeros": 0, "saturated": 0, "nan": 0, "inf": 0, "amax": 4.5}
    sums = {"sum_sq": 65536.0, "sum_sq_q": 65540.0, "sum_sq_err": 43.3}
    for sample in bundle:
        gemm = {"index": 0, "layer": "lin", "gemm": "fprop"}
        x = {"index": 1, "layer": "lin", "operand": "x", "layout": "row"}
        w = {"index": 2, "layer": "lin", "operand": "w", "layout": "tile"}
        sample["slots"] = [gemm, x, w]
        rows = [{**counts, **sums, "underflow": lost} for lost in (None, 16384, 295)]
        rows[0] |= {"zeros": None, "saturated": None}
        sample["columns"] = {name: [row[name] for row in rows] for name in rows[0]}
    answer = httpx2.post(f"{ready.url}/api/v1/runs/vanishing/samples", json={"samples": bundle})
    assert answer.status_code == 200, answer.text
    row = ask(cli, ready, "vanishing").out.splitlines()[2]
    assert "keep_bf16" in row
    assert "x and w vanish together" in row
    assert (
        "| outlier channels (FP8): x and w vanish together |"
        in ask(cli, ready, "vanishing", "--format", "markdown").out
    )


def test_what_was_not_observed_is_named_with_its_reason_and_fails(
    ready: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    hostile = "raw|\x1b[31m"
    coverage = [
        {"name": "layers.0.a|b", "shape": [8, 8], "status": "observed", "reason": ""},
        {"name": hostile, "shape": [8, 8], "status": "not observed", "reason": "compiled: not seen"},
        {"name": "head", "shape": [8, 8], "status": "not observed", "reason": "excluded by filter"},
        {"name": "tok", "shape": [8, 8], "status": "not observed", "reason": "embedding: a look-up, no GEMM"},
    ]
    bundle = ready.get("/runs/one-sick-layer/export")["samples"]
    healthy = [{**sample, "coverage": coverage} for sample in bundle]
    answer = httpx2.post(f"{ready.url}/api/v1/runs/half-seen/samples", json={"samples": healthy})
    assert answer.status_code == 200, answer.text
    said = ask(cli, ready, "half-seen", "--exit-code")
    assert said.code == 1
    lines = said.out.splitlines()
    assert lines[0] == "half-seen: not ready: 1 weight matrix was not observed: raw|\\x1b[31m"
    assert "raw|\\x1b[31m: unknown, not observed: compiled: not seen" in lines
    assert "head: not judged, not observed: excluded by filter" in lines
    assert "tok" not in said.out
    target = tmp_path / "half.txt"
    assert ask(cli, ready, "half-seen", "-o", str(target)).code == 0
    assert target.read_text() == said.out
    summary = ask(cli, ready, "half-seen", "--json").json["summary"]
    assert summary["unobserved"] == [{"name": hostile, "reason": "compiled: not seen"}]
    assert summary["left_out"] == [{"name": "head", "reason": "excluded by filter"}]
    page = ask(cli, ready, "half-seen", "--format", "markdown").out
    assert "- raw\\|\\\\x1b\\[31m: unknown, not observed: compiled: not seen" in page.splitlines()
    assert "\x1b" not in said.out + page


def test_a_file_is_written_whole_and_never_replaced_unasked(
    ready: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    target = tmp_path / "ready.txt"
    said = ask(cli, ready, "one-sick-layer", "--output", str(target))
    assert (said.code, said.out) == (0, "")
    assert said.err.startswith("one-sick-layer: ready with 1 layer kept in BF16; written to")
    assert target.read_text() == ask(cli, ready, "one-sick-layer").out
    target.write_text("mine")
    assert ask(cli, ready, "one-sick-layer", "-o", str(target)).code == 1
    assert target.read_text() == "mine"
    replaced = ask(cli, ready, "one-sick-layer", "-o", str(target), "--force", "--format", "json")
    assert replaced.code == 0
    assert json.loads(target.read_text())["run"] == "one-sick-layer"


def test_exit_codes(ready: Any, cli: Callable[..., Any]) -> None:
    assert ask(cli, ready, "sick-7b").code == 0
    assert ask(cli, ready, "sick-7b", "--exit-code").code == 1
    assert ask(cli, ready, "one-sick-layer", "--exit-code").code == 0
    missing = ask(cli, ready, "never-seen")
    assert (missing.code, missing.out) == (1, "")
    assert "no run 'never-seen' (404)" in missing.err
    for wrong in (
        ("--from-step", "-1"),
        ("--from-step", "5", "--to-step", "2"),
        ("--json", "--format", "csv"),
    ):
        refused = ask(cli, ready, "one-sick-layer", *wrong)
        assert (refused.code, refused.out) == (2, ""), wrong
        assert refused.err


def test_a_range_without_samples_says_so(ready: Any, cli: Callable[..., Any]) -> None:
    said = ask(cli, ready, "one-sick-layer", "--from-step", "100")
    assert said.out == "one-sick-layer: not ready: no GEMM was measured in these steps\n"
    assert "| " not in ask(cli, ready, "one-sick-layer", "--from-step", "100", "--format", "markdown").out


def test_too_few_samples_say_how_many_more_are_needed(ready: Any, cli: Callable[..., Any]) -> None:
    few = ask(cli, ready, "one-sick-layer", "--from-step", "3").out.splitlines()
    assert "the verdicts rest on 24 recomputed samples, 3 of each GEMM; a verdict needs 4: 7 GEMMs have fewer and need up to 1 more" in few  # fmt: skip
    summary = ask(cli, ready, "one-sick-layer", "--from-step", "3", "--json").json["summary"]
    assert (summary["samples"], summary["gemms_short"], summary["samples_short"]) == (24, 7, 1)


@pytest.mark.parametrize(
    ("variant", "said", "measured"),
    [
        ("bf16", "not measured", 0),
        ("x_e5m2", "none of 1 measured helps", 1),
    ],
)
def test_without_a_measured_what_if_that_helps_nothing_is_advised(
    ready: Any, cli: Callable[..., Any], variant: str, said: str, measured: int
) -> None:
    bundle = ready.get("/runs/one-sick-layer/export")["samples"]
    for sample in bundle:
        sample["slots"][8]["variant"] = variant
        sample["columns"]["sum_sq_err"][8] = 65536.0 * 0.41**2
    answer = httpx2.post(f"{ready.url}/api/v1/runs/untold-{variant}/samples", json={"samples": bundle})
    assert answer.status_code == 200, answer.text
    rows = ask(cli, ready, f"untold-{variant}").out.splitlines()[2:10]
    assert [line.endswith(f"  {said}") for line in rows] == [True] + [False] * 7
    item = ask(cli, ready, f"untold-{variant}", "--json").json["items"][0]
    assert (item["alternatives"], item["best"], item["remedy"]) == (measured, None, None)
    assert f"| {said} |" in ask(cli, ready, f"untold-{variant}", "--format", "markdown").out


@pytest.fixture(scope="module")
def healed(service: Any) -> Any:
    """A run whose fault a person's format holds from step 7 on: the report over all steps has the fault in it."""
    counts = {"count": 65536, "nan": 0, "inf": 0, "amax": 4.5, "sum_sq": 65536.0, "sum_sq_q": 65540.0}
    url = f"{service.url}/api/v1/runs/healed"
    for step in range(14):
        errors = [0.4 if step in (4, 5, 6) else 0.03, *[0.03] * 7]
        applied = {"plan_version": 1, "effective_step": 7} if step >= 7 else {}
        body = {
            "schema": 1,
            "attempt": {"id": "0"},
            "group": "0",
            "step": step,
            "mode": "advise",
            "slots": [{"index": n, "layer": f"layers.{n}", "gemm": "fprop"} for n in range(8)],
            "columns": {
                **{name: [value] * 8 for name, value in counts.items()},
                **{name: [None] * 8 for name in ("zeros", "underflow", "saturated")},
                "sum_sq_err": [65536.0 * error**2 for error in errors],
            },
            **applied,
        }
        answer = httpx2.post(f"{url}/samples", json=body)
        assert answer.status_code == 200, answer.text
        if step == 6:
            wish = {
                "layer": "layers.0",
                "target": {"operand": "x", "layout": "row"},
                "action": "format",
                "value": "e5m2",
            }
            assert httpx2.put(f"{url}/pins", json=wish).status_code == 200
    return service


def test_a_report_of_a_healed_run_says_what_holds_it_and_which_steps_show_that(
    healed: Any, cli: Callable[..., Any]
) -> None:
    said = ask(cli, healed, "healed")
    assert "keep_bf16" in said.out
    (line,) = (line for line in said.out.splitlines() if line.startswith("decided meanwhile"))
    (made,) = healed.get("/runs/healed/plan")["entries"]
    assert line == (
        f"decided meanwhile: 'layers.0' in other formats from step 7 on ({made['decision_id']}); the verdicts count the steps "
        "before that, too, and --from-step 7 leaves those out"
    )
    later = ask(cli, healed, "healed", "--from-step", "7")
    assert later.out.startswith("healed: ready for FP8\n")
    decided = healed.get("/runs/healed/readiness")["decided"]
    assert [(item["layer"], item["action"], item["since_step"], item["cause"]) for item in decided] == [
        ("layers.0", "format", 7, None)
    ]
    assert healed.get("/runs/healed/readiness", to_step=6)["decided"] == []


def test_the_cause_of_a_report_is_the_one_that_status_names() -> None:
    cause = {"name": "outlier-channels", "kind": "fp8", "layer": "a"}
    found = {
        "decided": [
            {"id": f"r-{n}", "layer": "a", "action": action, "since_step": 200 + n, "cause": cause}
            for n, action in enumerate(("format", "format", "scale_multiplier", "bf16_fallback", "advice"))
        ]
    }
    told = columns_of(found)["cause"]
    bad = {"layer": "a", "verdict": "keep_bf16", "cause": "x and w vanish together"}
    assert told(bad) == "outlier channels (FP8): x and w vanish together"
    assert told({**bad, "cause": ""}) == "outlier channels (FP8)"
    assert told({**bad, "verdict": "safe", "cause": ""}) == ""
    assert told({**bad, "layer": "b"}) == "x and w vanish together"
    assert list(decided_lines(found)) == [
        "decided meanwhile, because of outlier channels (FP8): 'a' in BF16 and in other formats and with other scales from step "
        "203 on (r-0, r-1, r-2 and 1 more); the verdicts count the steps before that, too, and --from-step 203 leaves those out"
    ]
    assert list(decided_lines({})) == []
