"""Attaches to any PyTorch trainer: measures, reports and applies the plan."""

from typing import TYPE_CHECKING, Any

from fp8_safeguard.hooks.attach import attach
from fp8_safeguard.hooks.errors import AlreadyAttachedError, HookError, OptionError

if TYPE_CHECKING:
    from fp8_safeguard.hooks.guard import Guard

__all__ = ["AlreadyAttachedError", "Guard", "HookError", "OptionError", "attach"]


if not TYPE_CHECKING:  # otherwise every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        """The Guard on its first use: all that measures comes with it, and attach() loads that."""
        if name != "Guard":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fp8_safeguard.hooks.guard import Guard

        globals()[name] = Guard
        return Guard


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
