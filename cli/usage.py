"""Says in our words what an option's value is refused for."""

from typing import Any

from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands; a value that typer has pydantic refuse is quoted beside what is allowed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises what it raises, a usage error with a message of ours."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            faults = getattr(error.__cause__, "errors", None)
            if callable(faults) and isinstance(getattr(error, "message", None), str):
                error.message = refused(faults())  # type: ignore[attr-defined]
            raise


def refused(faults: list[Any]) -> str:
    """One option's faults: `it must be at most 3600, not '5000'`."""
    from fp8_safeguard.server.faults import sentence

    return "; ".join(sentence(fault, "it must be") for fault in faults)
