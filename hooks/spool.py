"""Keeps samples in a file when there is no server."""

from __future__ import annotations

from pathlib import Path

from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.monitor.wire import Sample, sample_to_wire


def path_of(options: Options) -> Path:
    """File of one attempt: `<spool_dir>/<run>-<attempt>.msgpack`."""
    assert options.spool_dir is not None
    attempt = "".join(c if c.isalnum() or c in "._-" else "_" for c in options.attempt)
    return options.spool_dir / f"{options.run}-{attempt}.msgpack"


def append(options: Options, sample: Sample) -> None:
    """Add one sample, as one msgpack object, to the attempt's file."""
    import msgpack

    path = path_of(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgpack.packb(sample_to_wire(sample, binary=True)))
