"""What the stability and threat pages promise is what the code has."""

import re
from pathlib import Path

import pytest

from fp8_safeguard.hooks.spool import Owner, open_own
from fp8_safeguard.monitor.wire import ACCEPTED_SCHEMAS, SCHEMA

ROOT = Path(__file__).parents[2]
STABLE = (ROOT / "docs" / "api-stability.md").read_text()
THREATS = (ROOT / "docs" / "threat-model.md").read_text()


def test_the_wires_schema_is_the_one_that_the_page_names() -> None:
    (said,) = re.findall(r"Today N is (\d+)\.", STABLE)
    assert int(said) == SCHEMA
    assert set(ACCEPTED_SCHEMAS) == {SCHEMA, SCHEMA - 1} - {0}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`fp8_safeguard\.(\w+)`", STABLE))))
def test_every_stable_package_lists_its_names(name: str) -> None:
    assert "__all__ = [" in (ROOT / name / "__init__.py").read_text()


def test_waiting_samples_are_their_owners_only(tmp_path: Path) -> None:
    spool, _ = open_own(tmp_path / "spool", Owner("run", "0", "0"))
    assert spool.path.parent.stat().st_mode & 0o777 == 0o700
    spool.close()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", THREATS))))
def test_every_test_that_holds_a_defence_exists(path: str) -> None:
    assert (ROOT / path).exists()
