"""The page of how decisions are made: its tables are the code's, and it names all that decides."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from fp8_safeguard.dashboards.causes import CAUSES
from fp8_safeguard.monitor.plan import DECISION_ACTIONS
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.thresholds import PRESETS
from fp8_safeguard.monitor.wire import MODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "control-loop.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w-]+)`", PAGE))
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "monitor").glob("*.py")))


def test_the_tables_are_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "tables.py"), "--check"])
    assert done.returncode == 0, "a page is not current: run `make readme`"


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("rules", {rule.rule for preset in PRESETS.values() for rule in preset.rules}),
        ("rules of no preset", set(re.findall(r'\brule="([a-z-]+)"', SOURCES)) | {"late-nan", "pin"}),
        ("presets", set(PRESETS)),
        ("causes", set(CAUSES)),
        ("actions", set(DECISION_ACTIONS)),
        ("settings", {field.name for field in fields(PolicyConfig)}),
        ("modes", set(MODES)),
    ],
)
def test_it_names_everything(what: str, names: set[str]) -> None:
    assert names, what
    assert names - NAMED == set()


def test_every_cause_that_is_diagnosed_has_words_and_no_other_has() -> None:
    given = set(re.findall(r'\bcause="([a-z-]+)"', SOURCES))
    given |= set(re.findall(r'\b_finding\(\s*"([a-z-]+)"', SOURCES))
    (scales,) = re.findall(r"^SCALE_CAUSES = \((.*?)\)", SOURCES, re.MULTILINE | re.DOTALL)
    given |= set(re.findall(r'"([a-z-]+)"', scales)) | {"fluctuating"}
    assert set(CAUSES) == given


def test_the_thresholds_on_the_page_are_the_presets() -> None:
    """Read back from the page, by a way of its own: a level that changes must change there."""
    rows = re.findall(r"^\| `([a-z-]+)` \| `\w+` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", PAGE, re.MULTILINE)
    told = {
        (rule, place, *(float(found[1]) if (found := re.match(r"[<>] ([\d.e+-]+)(?: x own)?", text)) else None
                        for text in (watch, act)))
        for rule, places, watch, act in rows for place in places.split(", ")
    }  # fmt: skip
    wanted = {
        (
            rule.rule,
            rule.gemm or " ".join(part for part in (rule.operand, rule.layout) if part) or "every slot",
            rule.watch if rule.watch is not None else rule.watch_over_median,
            rule.act,
        )
        for preset in PRESETS.values()
        for rule in preset.rules
    }
    assert told == wanted
