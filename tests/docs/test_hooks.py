"""The page of the hooks names tests that exist, and the what-ifs that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE)


def test_the_matrix_is_there() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_each_scenario_has_the_test_that_it_names(file: str, test: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    *classes, function = test.split("::")
    assert re.search(rf"def {function}\(", text)
    assert all(re.search(rf"^class {name}\b", text, re.MULTILINE) for name in classes)
