"""Grades decisions: whether what they were made for recovered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8_safeguard.monitor.state import PolicyState
    from fp8_safeguard.monitor.view import StepView


def grade(state: PolicyState, view: StepView) -> Mapping[str, str]:
    """The grades given at this step, by decision id. Empty while none is due."""
    return {}
