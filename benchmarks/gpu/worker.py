"""Runs cases by name in a process that may die."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import triton

INTERPRETER_FIX = Path(__file__).parents[2] / "tests" / "interpreter" / "interpreter_fix.py"
ERROR_LENGTH = 2000
PARENT_SECONDS = 0.5


def serve(options: dict[str, Any]) -> None:
    """Say hello, then answer every case's name on standard input with its result, as lines of JSON."""
    replies = _own_output()
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    if options["device"] == "cpu":
        _mend_interpreter()
        torch.set_num_threads(1)
    # What the kernels are decorated with was set by whoever started this process.
    from gpu.case import Bench
    from gpu.catalogue import cases

    known = {case.name: case for case in cases(tune=options["tune"])}
    _say(replies, hello(options["device"]))
    for line in sys.stdin:
        # Inputs of a case do not depend on which cases ran before it here.
        bench = Bench(device=options["device"], small=options["small"], quick=options["quick"])
        result = answer(known[json.loads(line)], bench)
        _say(replies, result)
        if not result["alive"]:
            return


def hello(device: str) -> dict[str, Any]:
    """What this process runs on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
    capability = torch.cuda.get_device_capability()[0] * 10 if device == "cuda" else None
    return {"gpu": name, "architecture": capability, "versions": versions | {"cuda": torch.version.cuda}}


def answer(case: Any, bench: Any) -> dict[str, Any]:
    """Rows of a case, or its error; and whether the device still answers."""
    start, rows, error = time.monotonic(), [], ""
    try:
        with np.errstate(all="ignore"):
            rows = list(case.run(bench))
    except Exception as raised:
        error = _told(raised)
    alive = _tidy(bench.device)
    return {
        "case": case.name,
        "rows": rows,
        "error": error,
        "seconds": time.monotonic() - start,
        "alive": alive,
    }


def _told(raised: Exception) -> str:
    """The error and where it came from."""
    place = traceback.extract_tb(raised.__traceback__)[-1]
    text = f"{type(raised).__name__}: {raised}"
    return f"{text[:ERROR_LENGTH]} ({Path(place.filename).name}:{place.lineno})"


def _tidy(device: str) -> bool:
    """Give memory back; false where the device's context is broken."""
    gc.collect()
    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _own_output() -> TextIO:
    """Standard output kept for replies: what libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _die_with_parent(parent: int) -> None:
    """End this process, hung or not, once the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _mend_interpreter() -> None:
    """Make Triton's interpreter round as the GPU does: by itself it gets FP8 and BF16 wrong."""
    specification = importlib.util.spec_from_file_location("interpreter_fix", INTERPRETER_FIX)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.install()


def arguments_of(options: dict[str, Any]) -> Sequence[str]:
    """The command-line arguments of a worker."""
    return ["--worker", json.dumps(options)]
