"""Numbers on the wire: non-finite values travel as strings, in both directions.

JSON has no NaN, and a browser rejects a document that holds one. So the three non-finite values are the strings "NaN",
"Infinity" and "-Infinity" wherever a measured value may be non-finite, and nowhere else.
"""

import math
from typing import Any

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import INT64_MAX

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class NumberError(ValueError):
    """A value that is not a number, or not one that is legal in its place."""


def encode_number(value: Any) -> int | float | str | None:
    """JSON-ready form of a number (numpy scalars too): None stays, a non-finite value becomes its name."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return int(value) if hasattr(value, "dtype") and value.dtype.kind in "iu" else number


def worse(one: float, other: float) -> float:
    """Of two groups' numbers the one that counts: NaN before all, then an infinity of either sign, then the larger."""
    return max(one, other, key=lambda number: (math.isnan(number), math.isinf(number), number))


def decode_number(value: Any, *, finite: bool = False) -> float | None:
    """A float from its wire form; None stays None. Raises NumberError: a bool is not a number.

    With `finite`, a value that is set rather than measured: NaN and infinities are refused.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _NAMES:
            raise NumberError(f"{quoted(value)} is not a number; the only words are {', '.join(_NAMES)}")
        number = _NAMES[value]
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NumberError(f"{quoted(value)} is not a number")
    else:
        number = _to_float(value)
    if finite and not math.isfinite(number):
        raise NumberError(f"{quoted(value)} is not finite, and this value is set, not measured")
    return number


def decode_count(value: Any) -> int | None:
    """A number of things from its wire form: None, or an integer from 0 to 2^63 - 1 (2.0 counts as 2)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NumberError(f"{quoted(value)} is not a whole number")
    if isinstance(value, float) and not value.is_integer():
        raise NumberError(f"{quoted(value)} is not a whole number")
    if not 0 <= value <= INT64_MAX:
        raise NumberError(f"{quoted(value)} is not between 0 and 2^63 - 1")
    return int(value)


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise NumberError("the integer is beyond the range of a float64") from None
