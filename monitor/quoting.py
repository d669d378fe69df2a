"""Quotes a wrong value in an error, whatever its size."""

import reprlib
from typing import Any

MOST_CHARACTERS = 200

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 8
# A string is cut before it comes here, so that its beginning stays whole.
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_CHARACTERS


def quoted(value: Any, most: int = MOST_CHARACTERS) -> str:
    """repr() of a value, cut off after about `most` characters, and never much longer on the way there."""
    text = repr(value[: most + 4]) if isinstance(value, str | bytes | bytearray) else _SHORT.repr(value)
    return text if len(text) <= most + len("b''") else f"{text[:most]}..."
