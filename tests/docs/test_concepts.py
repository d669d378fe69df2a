"""The concepts page: every metric with the code's own formula, the preset's levels, and examples that run."""

import contextlib
import io
import math
import re
from pathlib import Path

import pytest

from fp8_safeguard.monitor.metrics import DERIVED_METRICS
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.thresholds import FLOOR
from fp8_safeguard.server.runview import RUN_STATES

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
METRICS = SECTIONS["Metrics, their formulas and their traps"]
ROWS = {name: (formula, trap) for name, formula, _, trap in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$", METRICS, re.MULTILINE)}  # fmt: skip
STATS = {
    "count": 1000,
    "zeros": 30,
    "underflow": 20,
    "saturated": 3,
    "nan": 2,
    "inf": 1,
    "rows": 10,
    "rows_flushed": 4,
    "amax": 7.0,
    "sum_sq": 1200.0,
    "sum_sq_q": 1190.0,
    "sum_sq_err": 9.0,
    "sum_4th": 5000.0,
}


def test_every_metric_has_a_formula_and_a_trap() -> None:
    assert {*DERIVED_METRICS, "amax"} == set(ROWS)
    assert all(len(trap) > 10 or trap == "as cosine" for _, trap in ROWS.values())


@pytest.mark.parametrize("name", [name for name in DERIVED_METRICS if name != "tile_sqnr_p01_db"])
def test_the_formula_on_the_page_gives_the_codes_value(name: str) -> None:
    """The formula is read off the page and computed here; 1 - cosine needs the line above it."""
    histogram = [0] * 12 + [8, 0, 0, 0]
    stats = TensorStats.from_vector([*STATS.values(), *histogram])
    expression = re.split(r"[:;,]", ROWS[name][0])[0].replace("^", "**")
    expression = re.sub(r"sqrt\((\w+) (\w+)\)", r"sqrt(\1 * \2)", expression)
    expression = re.sub(r"\b(2|10|n) (?=sqrt|log10|sum)", r"\1 * ", expression)
    names = {**STATS, "n": 997, "sqrt": math.sqrt, "log10": math.log10, "cosine": stats.cosine}
    assert eval(expression, {"__builtins__": {}}, names) == pytest.approx(stats.metric(name), rel=1e-12)


def test_the_examples_print_what_the_page_says() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "docs/concepts.md", "exec"), {})
    assert said.getvalue().splitlines() == re.findall(r"^# prints (.*)$", code, re.MULTILINE)


def test_the_levels_are_the_presets() -> None:
    listed = set()
    table = re.findall(
        r"^\| `([\w-]+)` \| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", SECTIONS["Thresholds"], re.MULTILINE
    )
    for rule, metric, places, watch, act in table:
        for place in ("x", "w", "dy") if places == "operands" else places.split(", "):
            levels = [re.match(r"[\d.]+", text) for text in (watch, act)]
            listed.add((rule, metric, place, *(float(level[0]) if level else None for level in levels)))
    wanted = {
        (
            rule.rule,
            rule.metric,
            rule.gemm or " ".join(part for part in (rule.operand, rule.layout) if part),
            rule.watch,
            rule.act,
        )
        for rule in FLOOR.rules
        if rule.watch is not None
    }
    assert listed == wanted


def test_every_state_of_a_run_is_explained() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", SECTIONS["States"], re.MULTILINE)) == RUN_STATES
