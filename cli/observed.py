"""Stored steps as the policy sees them, with progress on a terminal."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fp8_safeguard.cli.api import ApiError
from fp8_safeguard.cli.options import LARGEST
from fp8_safeguard.cli.output import Item, fail, shortened

if TYPE_CHECKING:
    from fp8_safeguard.monitor.observation import StepObservation


def observed(records: Iterable[Mapping[str, Any]]) -> Iterator["StepObservation"]:
    """Wire documents in step order as one observation a step. Raises ApiError for what is no sample."""
    from fp8_safeguard.monitor.observation import observe
    from fp8_safeguard.monitor.wire import WireError, parse_sample

    try:
        for _, documents in groupby(records, key=lambda record: record["step"]):
            yield observe([parse_sample(document) for document in documents])
    except (WireError, KeyError, TypeError) as error:
        raise ApiError(f"the server sent samples that this version cannot read: {error}") from error


def tracked(
    seen: Iterable["StepObservation"], title: str, first: int, last: int
) -> Iterator["StepObservation"]:
    """The same steps, with a bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield from seen
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=max(last - first + 1, 1))
        for each in seen:
            yield each
            bars.update(bar, completed=each.step - first + 1)


def steps_of(text: str | None) -> tuple[int | None, int | None]:
    """First and last step of `500:2000`, `500:`, `:2000`; (None, None) without."""
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    wanted = [part.strip() for part in (first, last)]
    if not colon or not all(part.isascii() and part.isdigit() for part in wanted if part) or not any(wanted):
        fail(f"--steps is {shortened(text)!r}; give first and last step as 500:2000.", 2)
    found = [number_of(part) if part else None for part in wanted]
    if any(number is None for part, number in zip(wanted, found, strict=True) if part):
        fail(f"--steps is {shortened(text)!r}; steps go from 0 to 2^63 - 1.", 2)
    from_step, to_step = found
    if from_step is not None and to_step is not None and from_step > to_step:
        fail(f"--steps {text}: step {from_step} lies after step {to_step}.", 2)
    return from_step, to_step


def number_of(text: str) -> int | None:
    """The whole number that a text is; None for what is none, and for one that no database holds."""
    digits = text.lstrip("0") or text[:1]
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(LARGEST)):
        return None
    number = int(digits)
    return number if number <= LARGEST else None


def policy_decisions(items: Iterable[Item], attempts: Iterable[Item]) -> tuple[list[Item], list[str]]:
    """Stored decisions of the policy that the live branch has, the oldest first; and notes about the others."""
    branches = [item for item in attempts if item["live"] and item["parent"] is not None]
    oldest = sorted(items, key=lambda item: int(item["step"]))
    by_hand = [item for item in oldest if item["rule"] == "pin" or item["actor"] == "client"]
    gone = [
        item
        for item in oldest
        if any(
            item["step"] >= branch["from_step"] and item["created"] < branch["created"] for branch in branches
        )
    ]
    left_out = [*by_hand, *gone]
    notes = []
    if by_hand:
        notes.append(f"{len(by_hand)} decisions that people or the client made are not replayed")
    acted = [item for item in oldest if item["actor"] not in ("policy", "client") and item["rule"] != "pin"]
    if acted:
        notes.append(
            f"{len(acted)} decisions were approved, rejected or reverted by people; that is not replayed"
        )
    if branches:
        steps = ", ".join(str(item["from_step"]) for item in branches)
        notes.append(
            f"the run began again from step {steps}; the replay follows the live branch as if it had gone straight"
        )
    if gone:
        notes.append(f"{len(gone)} decisions on steps that did not happen are left out")
    return [item for item in oldest if not any(item is other for other in left_out)], notes


def read_document(text: str, what: str) -> Any:
    """The JSON of a file. Exits with 2 for what cannot be read."""
    from pathlib import Path

    from fp8_safeguard.monitor.document import distinct

    path = Path(text)
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except OSError as error:
        fail(f"{what} {text!r} cannot be read: {error.strerror}", 2)
    except RecursionError:
        fail(f"{what} {text!r} is nested too deeply to be what is asked for", 2)
    except ValueError as error:
        fail(f"{what} {text!r} is not JSON: {error}", 2)
