"""Progress: plain lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from fp8_safeguard.trainer import StepReport, progress
from fp8_safeguard.trainer.progress import line


def report(step: int, *, skipped: bool = False, fallbacks: int = 0) -> StepReport:
    return StepReport(
        step=step,
        loss=2.34567,
        gradient_norm=float("nan") if skipped else 0.91,
        learning_rate=0.002,
        tokens=512 * (step + 1),
        skipped=skipped,
        skipped_steps=int(skipped),
        fallbacks=fallbacks,
        seconds=0.25,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_key_value_pairs_in_a_fixed_order() -> None:
    assert line(report(19)) == (
        "step=20 loss=2.3457 gradient_norm=0.91 learning_rate=0.002 tokens=10240 seconds=0.250 fallbacks=0 "
        "skipped_steps=0"
    )
    assert "gradient_norm=nan" in line(report(3, skipped=True))


def test_a_pipe_gets_plain_lines_at_the_interval_at_skips_and_at_the_end() -> None:
    stream = io.StringIO()
    with progress(27, log_every=10, stream=stream) as on_step:
        for step in range(27):
            on_step(report(step, skipped=step == 4))
    lines = stream.getvalue().splitlines()
    assert [re.match(r"step=(\d+) ", text)[1] for text in lines] == ["5", "10", "20", "27"]  # type: ignore[index]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_newest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with progress(5, stream=stream) as on_step:
        for step in range(5):
            on_step(report(step, fallbacks=6))
    assert "5/5" in stream.getvalue()
    assert "loss 2.346" in stream.getvalue()
    assert "6 fallbacks" in stream.getvalue()
    assert "step=" not in stream.getvalue()
