"""What the policies of all runs have in common, from a file."""

import tomllib
from pathlib import Path

from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.policyfile import PolicyFileError, policy_from

VARIABLE = "FP8_SAFEGUARD_POLICY_FILE"
OF_EACH_RUN = ("preset", "mode", "pins", "baseline", "thresholds")
"""What runs have of their own: set when they start, on their pages, or by `fp8-safeguard`."""


def shared_policy(file: str | None) -> PolicyConfig:
    """The defaults with what a TOML file says; None or an empty text: the defaults. Raises PolicyFileError."""
    if not file:
        return PolicyConfig()
    try:
        document = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyFileError(f"{VARIABLE} is {file!r}, which cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise PolicyFileError(f"{VARIABLE} is {file!r}, which is nested too deeply to be a policy") from error
    except ValueError as error:
        raise PolicyFileError(f"{VARIABLE} is {file!r}, which is not TOML: {error}") from error
    own = [name for name in OF_EACH_RUN if name in document]
    if own:
        raise PolicyFileError(
            f"{VARIABLE} is {file!r}, which sets {own[0]}: each run has its own; a file for all of them sets none of "
            f"{', '.join(OF_EACH_RUN)}"
        )
    try:
        return policy_from(document, PolicyConfig())
    except PolicyFileError as error:
        raise PolicyFileError(f"{VARIABLE} is {file!r}: {error}") from error
