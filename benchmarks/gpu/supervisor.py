"""Gives cases to worker processes and outlives whatever happens to them."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu.case import Case
from gpu.report import Report
from gpu.worker import arguments_of

SCRIPT = Path(__file__).parents[1] / "gpu_check.py"
START_SECONDS = 90.0
"""What a worker may take to import torch and say hello."""
SLACK_SECONDS, SLACK_FACTOR = 45.0, 3.0
"""A case is killed after its estimate times the factor plus the slack: it hangs."""
GRACE_SECONDS = 10.0
"""What a running case may take beyond the budget."""
RESERVED_SHARE = 0.5
"""Of the budget at most is kept for the timings while the checks run."""
WORKERS = 4
"""Processes that check side by side: compiling is what takes the time. Timings run alone."""


class WorkerLost(Exception):
    """A worker died, hung or was out of time; the text says which."""


class NeverStarted(WorkerLost):
    """A worker cannot even say hello: the case has not been tried."""


@dataclass
class Worker:
    """A process that runs cases, started when it is first needed and again after it died."""

    options: dict[str, Any]
    report: Report
    process: subprocess.Popen[str] | None = None

    def run(self, case: Case, seconds: float) -> dict[str, Any]:
        """The worker's reply; WorkerLost if there is none within that time."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(case.name) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost(self._ending()) from None
        reply = self._read(seconds)
        if not reply["alive"]:
            self.stop()
        return reply

    def stop(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            _reap(process)

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            command = [sys.executable, *_flags(), str(SCRIPT), *arguments_of(self.options)]
            environment = os.environ | ({"TRITON_INTERPRET": "1"} if self.options["device"] == "cpu" else {})
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            try:
                self.report.greet(self._read(START_SECONDS))
            except WorkerLost as lost:
                raise NeverStarted(f"no worker starts: {lost}") from None
        return self.process

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        output: IO[str] = self.process.stdout
        if not select.select([output], [], [], seconds)[0]:
            self.stop()
            raise WorkerLost(f"no answer after {seconds:.0f} s: killed")
        line = output.readline()
        if not line:
            raise WorkerLost(self._ending())
        found: dict[str, Any] = json.loads(line)
        return found

    def _ending(self) -> str:
        """How the process ended."""
        process, self.process = self.process, None
        if process is None:
            return "it was stopped"
        status = _reap(process)
        return (
            f"its process ended with status {status}"
            if status >= 0
            else f"its process died of signal {-status}"
        )


def _reap(process: subprocess.Popen[str]) -> int:
    """Exit status of a process that has ended or is about to, its pipes closed."""
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    return status


def _flags() -> Sequence[str]:
    """Interpreter flags of this process that its children need: without site packages stays without."""
    return ["-S"] if sys.flags.no_site else []


@contextmanager
def crew(options: dict[str, Any], report: Report, number: int) -> Iterator[list[Worker]]:
    """Workers that are ended whatever happens."""
    workers = [Worker(options, report) for _ in range(number)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def run(cases: Sequence[Case], options: dict[str, Any], report: Report, budget: float) -> None:
    """Run the checks side by side, then the timings one after the other, as far as the budget goes."""
    deadline = report.started + budget
    checks, timings = (
        [case for case in cases if (case.kind == "check") == wanted] for wanted in (True, False)
    )
    number = WORKERS if options["device"] == "cuda" else 1
    reserved = min(sum(case.seconds for case in timings), RESERVED_SHARE * budget)
    with crew(options, report, number) as workers:
        _share(checks, workers, report, deadline - reserved)
        # Memory that idle workers hold, and their kernels, would disturb the timings.
        for worker in workers[1:]:
            worker.stop()
        _share(timings, workers[:1], report, deadline)


def _share(cases: Sequence[Case], workers: Sequence[Worker], report: Report, deadline: float) -> None:
    """Every worker takes the next case until none is left."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    reasons: list[str] = []

    def work(worker: Worker) -> None:
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _attempt(case, worker, report, deadline)
            except NeverStarted as lost:
                # Other workers may go on: a device may be lent to one process only.
                waiting.put(case)
                reasons.append(str(lost))
                return

    with ThreadPoolExecutor(max(len(workers), 1)) as pool:
        running = [pool.submit(work, worker) for worker in workers]
        try:
            for done in running:
                done.result()
        except BaseException:
            # Interrupted: nothing is started any more, and what runs is ended, or the threads would wait for it.
            while not waiting.empty():
                waiting.get_nowait()
            for worker in workers:
                worker.stop()
            raise
    while not waiting.empty():
        case = waiting.get_nowait()
        report.fail(case.name, case.kind, reasons[-1])


def _attempt(case: Case, worker: Worker, report: Report, deadline: float) -> None:
    """Run one case and put down what became of it."""
    left = deadline - time.monotonic()
    missing = case.missing()
    if missing:
        return report.skip(case.name, missing)
    if case.seconds > left:
        return report.skip(
            case.name, f"needs about {case.seconds:.0f} s, the budget has {max(left, 0):.0f} s left"
        )
    limit = case.seconds * SLACK_FACTOR + SLACK_SECONDS
    try:
        reply = worker.run(case, min(limit, left + GRACE_SECONDS))
    except NeverStarted:
        raise
    except WorkerLost as lost:
        if left + GRACE_SECONDS < limit and "killed" in str(lost):
            return report.skip(case.name, "not finished within the budget")
        return report.fail(case.name, case.kind, str(lost))
    report.add([row | {"seconds": reply["seconds"]} for row in reply["rows"]])
    if reply["error"]:
        report.fail(case.name, case.kind, reply["error"])
    return _tell(case, reply, report)


def _tell(case: Case, reply: dict[str, Any], report: Report) -> None:
    """One line of progress."""
    state = "ERROR" if reply["error"] else "ok"
    if any(row.get("passed") is False for row in reply["rows"]):
        state = "WRONG"
    elapsed = time.monotonic() - report.started
    print(f"{elapsed:6.1f} s  {state:<6}{case.name}  ({reply['seconds']:.1f} s)", flush=True)
