"""Strict JSON answers: non-finite numbers as strings, times as RFC 3339."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

Number = float | int | str | None


def encode_float(value: float | None) -> Number:
    """One measured number; NaN and the infinities become strings, None stays null."""
    if value is None or np.isfinite(value):
        return value
    if np.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def encode_array(values: NDArray[np.float64], nan: NDArray[np.bool_]) -> list[Any]:
    """Nested lists of a 1-d or 2-d array: null where NaN, "NaN" where `nan` says it was measured."""
    plain: NDArray[np.object_] = values.astype(object)
    if not np.isfinite(values).all():
        plain[np.isnan(values)] = None
        plain[values == np.inf] = "Infinity"
        plain[values == -np.inf] = "-Infinity"
    plain[nan] = "NaN"
    listed: list[Any] = plain.tolist()
    return listed


def rfc3339(seconds: float | None) -> str | None:
    """A time for people and programs, in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def strict_dumps(value: Any) -> str:
    """Compact JSON; a non-finite float that slipped through is an error here, not at the reader."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


class StrictJSONResponse(Response):
    """A JSON answer that cannot carry NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        # Only an error that quotes its request can hold a lone surrogate, which UTF-8 cannot carry.
        return strict_dumps(content).encode("utf-8", errors="replace")


class ProblemResponse(StrictJSONResponse):
    """An RFC 9457 answer."""

    media_type = "application/problem+json"
