"""What the policy remembers of slow signals: run values, scalars and trends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView


@dataclass(frozen=True)
class Trends:
    """Immutable: `added` gives a new one."""

    def added(self, view: StepView) -> Trends:
        """With one more step."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal one."""
        return {}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        return cls()
