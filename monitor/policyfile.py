"""A policy as people write it in a file: a run's own, with changes.

Every field of PolicyConfig but `run` may be given, and `thresholds` changes rules of the preset by their name, all of them or
one kind of slot:

    preset = "floor"
    dwell_steps = 20
    [thresholds."gemm-error"]
    act = 0.04
    [thresholds."underflow x row"]
    watch = "off"
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.plan import is_finite_number
from fp8_safeguard.monitor.policyconfig import PolicyConfig, PolicyConfigError
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.thresholds import (
    Preset,
    Remedy,
    Threshold,
    UnknownPresetError,
    get_preset,
)

LEVELS = ("watch", "act", "instant", "watch_over_median", "act_over_median")
COUNTS = ("min_count", "min_underflow")
MOST_COUNT = 10**9
"""Steps, samples or elements: beyond any run, and far from what a database cannot hold."""
OFF = "off"
"""Takes a level away: TOML has no null."""


class PolicyFileError(ValueError):
    """A file that says no policy."""


def policy_from(
    document: Any, base: PolicyConfig, baseline_of: Callable[[Any], Baseline | None] = lambda named: None
) -> PolicyConfig:
    """The policy that a decoded file says, with `base` where it says nothing.

    baseline_of: the baseline that a value of `baseline` names, None for none. Raises PolicyFileError.
    """
    if not isinstance(document, Mapping):
        raise PolicyFileError(f"a policy is a table of settings, not {type(document).__name__}")
    known = [field.name for field in fields(PolicyConfig) if field.name != "run"]
    unknown = [name for name in document if name not in (*known, "thresholds")]
    if unknown:
        raise PolicyFileError(
            f"{quoted(unknown[0])} is no setting of a policy; there are {', '.join((*known, 'thresholds'))}"
        )
    changes: dict[str, Any] = {
        name: _checked(name, value)
        for name, value in document.items()
        if name not in ("thresholds", "baseline", "preset")
    }
    if "baseline" in document:
        changes["baseline"] = baseline_of(document["baseline"])
    try:
        preset = get_preset(document.get("preset", base.preset))
        preset = with_thresholds(preset, document.get("thresholds", {}))
        return replace(base, preset=preset, **changes)
    except (UnknownPresetError, PolicyConfigError) as error:
        raise PolicyFileError(str(error)) from error


def _checked(name: str, value: Any) -> Any:
    """The value, if it is of the kind that the setting has."""
    kind = get_type_hints(PolicyConfig)[name]
    if get_origin(kind) in (frozenset, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise PolicyFileError(f"{name} is a list of names, not {quoted(value)}")
        return frozenset(value) if get_origin(kind) is frozenset else tuple(value)
    kinds = get_args(kind) or (kind,)
    if type(None) in kinds and value in (OFF, None):
        return None
    accepted = {*kinds, int} if float in kinds else {*kinds}
    if type(value) not in accepted or (isinstance(value, float) and not math.isfinite(value)):
        words = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
        said = words.get(kinds[0], "not settable here") + (f' or "{OFF}"' if type(None) in kinds else "")
        raise PolicyFileError(f"{name} is {said}, not {quoted(value)}")
    if kinds[0] is int and value > MOST_COUNT:
        raise PolicyFileError(f"{name} is at most {MOST_COUNT}, not {quoted(value)}")
    return value


def with_thresholds(preset: Preset, changes: Any) -> Preset:
    """The preset with changed rules. Raises PolicyFileError."""
    if not isinstance(changes, Mapping):
        raise PolicyFileError(f"thresholds is a table of rules, not {quoted(changes)}")
    rules = list(preset.rules)
    for named, change in changes.items():
        places = [at for at, rule in enumerate(rules) if named in (rule.rule, rule_name(rule))]
        if not places:
            names = ", ".join(
                dict.fromkeys(name for rule in preset.rules for name in (rule.rule, rule_name(rule)))
            )
            raise PolicyFileError(f"preset {preset.name} has no rule {quoted(named)}; it has {names}")
        checked = _checked_rule(named, change)
        for at in places:
            rules[at] = replace(rules[at], **checked)
    return Preset(preset.name, tuple(rules))


def rule_name(rule: Threshold) -> str:
    """Name of one rule among those of its name: `gemm-error wgrad`, `underflow x row`."""
    words = (rule.rule, rule.operand, rule.layout, rule.gemm)
    return " ".join(word for word in words if word is not None)


def _checked_rule(named: str, change: Any) -> dict[str, Any]:
    if not isinstance(change, Mapping):
        raise PolicyFileError(f"thresholds.{named} is a table of levels, not {quoted(change)}")
    found: dict[str, Any] = {}
    for name, value in change.items():
        if name in LEVELS:
            off = value == OFF
            if not off and not is_finite_number(value):
                raise PolicyFileError(f'{name} of {named} is a number or "{OFF}", not {quoted(value)}')
            found[name] = None if off else float(value)
        elif name in COUNTS:
            if type(value) is not int or not 0 <= value <= MOST_COUNT:
                raise PolicyFileError(
                    f"{name} of {named} is a whole number from 0 to {MOST_COUNT}, not {quoted(value)}"
                )
            found[name] = value
        elif name == "remedy":
            if value not in get_args(Remedy):
                raise PolicyFileError(
                    f"remedy of {named} is one of {', '.join(get_args(Remedy))}, not {quoted(value)}"
                )
            found[name] = value
        else:
            allowed = ", ".join((*LEVELS, *COUNTS, "remedy"))
            raise PolicyFileError(f"{quoted(name)} of {named} cannot be set; {allowed} can")
    return found
