"""What the trainer's own log says of the server's alerts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fp8_safeguard.hooks.notices import tell_alerts
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.settings import Options, resolve

ALERT = {
    "id": 3,
    "severity": "watch",
    "rule": "underflow",
    "layer": "0",
    "slot": {"layer": "0", "operand": "x", "layout": "row"},
    "first_step": 7,
}


@pytest.fixture
def options() -> Options:
    return resolve(
        server="http://127.0.0.1:1", token=None, run="r", attempt="0", group="0", groups=1, every=1, recompute=1,
        overhead_budget=None, mode="observe", thresholds="floor", spool_dir="", shadow=False,
    )  # fmt: skip


def test_an_alert_is_told_once_and_again_when_it_becomes_severe(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    once = OnceLog()
    caplog.set_level(logging.INFO, "fp8_safeguard")
    for alert in (ALERT, ALERT, {**ALERT, "severity": "act"}, {**ALERT, "severity": "act"}):
        tell_alerts([alert], options, once)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "layer '0' (x row) since step 7; see http://127.0.0.1:1/runs/r" in caplog.records[0].getMessage()


@pytest.mark.parametrize("alerts", [None, {}, "x", [None], [[]], [{}], [{"layer": 3, "slot": "x"}]])
def test_whatever_a_reply_holds_nothing_is_raised(alerts: Any, options: Options) -> None:
    tell_alerts(alerts, options, OnceLog())


def test_an_alert_of_the_whole_run_says_so(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    tell_alerts([{**ALERT, "layer": None, "severity": "act"}], options, OnceLog())
    assert "in the run since step 7" in caplog.records[0].getMessage()
