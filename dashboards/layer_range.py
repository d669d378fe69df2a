"""What an operand's newest amax means for its format, in words."""

import math
from collections.abc import Mapping
from typing import Any

from fp8_safeguard.dashboards.layer_amax import headroom
from fp8_safeguard.dashboards.metrics import short_number
from fp8_safeguard.monitor.formats import get_format
from fp8_safeguard.monitor.numbers import decode_number


def range_lines(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """For each operand the newest amax and what it means for its format, in words."""
    lines: dict[str, dict[str, str]] = {}
    for slot in document["slots"]:
        operand = slot.get("operand")
        if operand is None or slot.get("expert") is not None or operand in lines:
            continue
        text = _range_words(slot)
        if text:
            lines[operand] = {"operand": operand, "text": text}
    return list(lines.values())


def _range_words(slot: Mapping[str, Any]) -> str:
    amax, total, count = (decode_number(slot["metrics"][name]) for name in ("amax", "sum_sq", "count"))
    if not amax or not total or not count or not math.isfinite(amax) or not math.isfinite(total):
        return ""
    rms = math.sqrt(total / (count - sum(slot["metrics"][name] or 0 for name in ("nan", "inf"))))
    room = headroom(amax, rms, get_format(slot["format"]))
    name = slot["format"].upper()
    side = "under" if room["to_max"] >= 0 else "over"
    above = room["above_normal"]
    normal = f"{abs(above):.1f} binades {'above' if above >= 0 else 'below'} the smallest normal"
    flushed = decode_number(slot["metrics"]["underflow_ratio"])
    return (
        f"amax {short_number(amax)}, {abs(room['to_max']):.1f} binades {side} {name}’s {slot['format_max']:g}; "
        f"rms {short_number(rms)}, {room['peak']:.1f} binades under amax and {normal} of its block"
        + ("" if flushed is None else f"; {short_number(flushed * 100)} % went to zero")
    )
