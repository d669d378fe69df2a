"""Words for what pydantic refuses: the value, and what is allowed in its place."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8_safeguard.monitor.quoting import quoted

_ALLOWED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "text",
    "list_": "a list",
    "dict_": "a JSON object",
}
"""By the beginning of the fault's type."""
_BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "less_than_equal": ("le", "at most {}"),
    "greater_than": ("gt", "above {}"),
    "less_than": ("lt", "below {}"),
}
_WHERE = {"query": "add ?{}= to the address", "path": "put {} into the path", "header": "send the header {}"}


def allowed(fault: Mapping[str, Any]) -> str:
    """What a field takes: `a whole number`, `at most 1000`, `'json' or 'jsonl'`; empty where only the message says so."""
    kind, told = str(fault["type"]), fault.get("ctx") or {}
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = told[name]
        return words.format(f"{bound:g}" if isinstance(bound, float) else bound)
    if "expected" in told:
        return str(told["expected"])
    return next((words for start, words in _ALLOWED.items() if kind.startswith(start)), "")


def sentence(fault: Mapping[str, Any], subject: str) -> str:
    """`subject` with what is wrong with it: `page_size is at most 1000, not 5000`, for a subject `page_size is`."""
    words = allowed(fault)
    if words:
        return f"{subject} {words}, not {quoted(fault.get('input'))}"
    # A check of somebody's own says itself what it wants.
    return str(fault["msg"]).removeprefix("Value error, ").rstrip(".")


def refusal(fault: Mapping[str, Any]) -> str:
    """One fault of a request in one sentence, with the way out where something is missing."""
    location: Sequence[Any] = fault["loc"]
    place, name = str(location[0]), str(location[-1])
    if fault["type"] != "missing":
        return sentence(fault, f"{'the body' if name == 'body' else name} is")
    if name == "body":
        return "the body is missing: send a JSON object"
    return f"{name} is required: {_WHERE.get(place, 'send it in the body').format(name)}"


def refused_setting(fault: Mapping[str, Any]) -> str:
    """One fault of a variable of the environment in one sentence; no token is told, for logs keep what is printed."""
    location: Sequence[Any] = fault["loc"]
    variable = f"FP8_SAFEGUARD_{str(location[0]).upper()}"
    if location[0] != "tokens":
        return f"{variable} is {quoted(fault['input'])}: it must be {allowed(fault) or fault['msg']}"
    if len(location) > 2:
        return f"{variable} grants {quoted(fault['input'])}: a scope is {allowed(fault)}"
    return f'{variable} cannot be read: it must be every token with its list of scopes, {{"secret": ["ingest", "read"]}}'
