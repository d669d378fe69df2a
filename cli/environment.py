"""The service's settings, or one line that names the variable at fault."""

from typing import TYPE_CHECKING, Any

from fp8_safeguard.cli.output import fail

if TYPE_CHECKING:
    from fp8_safeguard.server.settings import Settings


def chosen_settings(**options: Any) -> "Settings":
    """The settings with the options that were given; a bad variable is named."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from fp8_safeguard.server.faults import refused_setting
    from fp8_safeguard.server.settings import Settings

    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        fail("; ".join(map(refused_setting, error.errors())), 2)
    except SettingsError as error:
        fail(f"A variable cannot be read: {error}. FP8_SAFEGUARD_TOKENS is JSON.", 2)
