"""Attempts of a run: numbered beside its checkpoints, never used twice."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8_safeguard.trainer.durable import create_durably
from fp8_safeguard.trainer.errors import CheckpointError, ConfigError

logger = logging.getLogger("fp8_safeguard")

FOLDER = ".attempts"
_NAME = re.compile(r"(?P<run>.+)\.(?P<number>\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try of a run: from its beginning, from a checkpoint (resume), or from before a failure (rewind)."""

    id: str = "0"
    """What the server knows it by."""
    number: int = 0
    """Its place in the order in which the run's attempts began."""
    parent: str | None = None
    """The attempt whose checkpoint it started from; None for one that starts afresh."""
    from_step: int = 0
    """First step that it does itself; the steps below are its parent's."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"id": self.id, "number": self.number, "parent": self.parent, "from_step": self.from_step}


def first(run: str, wanted: str, checkpoint_dir: str | None) -> Attempt:
    """An attempt without a parent, `wanted` if the run's folder has not seen that one yet."""
    if checkpoint_dir is None:
        return Attempt(id=wanted)
    folder = Path(checkpoint_dir).resolve()
    check_owner(folder, run)
    attempt = claim([folder], run, parent=None, from_step=0, wanted=wanted, periodic=folder)
    if attempt.id != wanted:
        logger.warning(
            "%s has seen attempt %s of run %s already: this start from the beginning is attempt %s",
            checkpoint_dir,
            wanted,
            run,
            attempt.id,
        )
    return attempt


def child(
    path: Path, run: str, parent: Attempt, step: int, *, wanted: str | None, checkpoint_dir: str | None
) -> Attempt:
    """The attempt that goes on, with step `step`, from the checkpoint at `path` that `parent` wrote."""
    if wanted == parent.id:
        raise ConfigError(
            f"attempt is {wanted!r}, which wrote {path}: a resumed run needs another id; leave it out and it gets the "
            "next free one"
        )
    folders, kept = [path.resolve().parent], None
    if checkpoint_dir is not None:
        kept = Path(checkpoint_dir).resolve()
        check_owner(kept, run)
        folders.append(kept)
    attempt = claim(folders, run, parent=parent, from_step=step, wanted=wanted, periodic=kept)
    logger.info(
        "run %s goes on from %s as attempt %s, the child of %s, with step %d",
        run,
        path,
        attempt.id,
        parent.id,
        step,
    )
    return attempt


def claim(
    folders: Iterable[Path],
    run: str,
    *,
    parent: Attempt | None,
    from_step: int,
    wanted: str | None,
    periodic: Path | None,
) -> Attempt:
    """A new attempt, noted in every folder before it begins, so that no other process gets the same.

    Its id is `wanted`, if nobody has that, else its number: one more than any known in those folders. `periodic` is
    the folder that gets its periodic checkpoints; CheckpointError if it cannot be written to. Another folder that
    cannot makes the id random instead.
    """
    folders = list(dict.fromkeys(folders))
    places, suffix = list(folders), ""
    while True:
        known = {a.number: a for folder in folders for a in recorded(folder, run).values()}
        attempt = _next(known, parent, from_step, wanted)
        attempt = replace(attempt, id=attempt.id + suffix)
        try:
            for place in places:
                _note(place, run, attempt, periodic=place == periodic)
        except FileExistsError:
            continue  # another process was quicker
        except OSError as error:
            if place == periodic:
                raise CheckpointError(
                    f"checkpoint_dir {str(place)!r} takes no file: {error.strerror}"
                ) from error
            logger.warning("%s takes no file (%s): the attempt's id gets a random end", place, error.strerror)
            places.remove(place)
            suffix = f"-{secrets.token_hex(3)}"
            continue
        return attempt


def _next(
    known: Mapping[int, Attempt], parent: Attempt | None, from_step: int, wanted: str | None
) -> Attempt:
    ancestors = () if parent is None else (parent,)
    used = {attempt.id for attempt in (*known.values(), *ancestors)}
    number = 1 + max((*known, *(attempt.number for attempt in ancestors)), default=-1)
    if wanted is None or wanted in used:
        while str(number) in used:
            number += 1
        wanted = str(number)
    return Attempt(
        id=wanted, number=number, parent=None if parent is None else parent.id, from_step=from_step
    )


def _note(folder: Path, run: str, attempt: Attempt, *, periodic: bool) -> None:
    content = {"run": run, **attempt.to_mapping(), "periodic": periodic}
    create_durably(folder / FOLDER / f"{run}.{attempt.number}.json", json.dumps(content).encode())


def recorded(folder: Path, run: str) -> dict[int, Attempt]:
    """The run's attempts that the folder knows, by number."""
    found = {}
    for path in (folder / FOLDER).glob("*.json"):
        name = _NAME.fullmatch(path.name)
        if name is not None and name["run"] == run:
            number, content = int(name["number"]), _content(path)
            found[number] = Attempt(
                id=content.get("id", str(number)),
                number=number,
                parent=content.get("parent"),
                from_step=content.get("from_step", 0),
            )
    return found


def owner(folder: Path) -> str | None:
    """The run whose periodic checkpoints the folder keeps; None if it keeps none."""
    for path in sorted((folder / FOLDER).glob("*.json")):
        content = _content(path)
        if content.get("periodic"):
            return str(content["run"])
    return None


def check_owner(folder: Path, run: str) -> None:
    """Raises CheckpointError where the folder keeps another run's checkpoints: theirs would replace each other."""
    other = owner(folder)
    if other not in (None, run):
        raise CheckpointError(
            f"checkpoint_dir {str(folder)!r} keeps the checkpoints of run {other!r}: give run {run!r} a folder of its "
            "own, or resume that run"
        )


def branch(known: Mapping[int, Attempt], number: int) -> list[tuple[int, int | None]]:
    """(attempt's number, last completed step that counts) of an attempt and its ancestors; None for no limit."""
    by_id = {attempt.id: attempt for attempt in known.values()}
    found: list[tuple[int, int | None]] = []
    current, upto = known.get(number), None
    while current is not None:
        found.append((current.number, upto))
        upto = current.from_step if upto is None else min(upto, current.from_step)
        parent = by_id.get(current.parent or "")
        # An attempt descends from an earlier one only, so a cycle of ids cannot loop here.
        current = parent if parent is not None and parent.number < current.number else None
    return found


def _content(path: Path) -> dict[str, Any]:
    """What a note says; nothing where its process died while writing it: then that attempt never began."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
