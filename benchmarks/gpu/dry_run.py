"""Checks every case without a GPU and prints what it will cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpu.case import Bench, Case
from gpu.floors import H200

from fp8_safeguard.kernels.triton_launch import Launch

HOPPER = 90


def examine(cases: Sequence[Case], *, compiling: bool) -> int:
    """Print every case's estimate and floor; import, plan and (if asked) compile what it needs. Number of problems."""
    problems, seen = 0, set[str]()
    print(f"{'case':<52}{'kind':<8}{'about s':>8}{'MB':>10}{'GFLOP':>10}{'floor us':>10}  launches")
    for case in cases:
        found, note = _planned(case)
        wrong = [problem for launch in found for problem in _unfit(launch)]
        if compiling:
            wrong += [problem for launch in found for problem in _uncompiled(launch, seen)]
        problems += len(wrong) + note.startswith("ERROR")
        print(f"{_line(case)}  {note or len(found)}")
        for problem in wrong:
            print(f"    ERROR {problem}")
    seconds = sum(case.seconds for case in cases)
    checks = sum(case.seconds for case in cases if case.kind == "check")
    print(
        f"{len(cases)} cases, about {checks:.0f} s of checks (several at a time) and {seconds - checks:.0f} s of timings"
    )
    return problems


def _line(case: Case) -> str:
    start = f"{case.name:<52}{case.kind:<8}{case.seconds:>8.1f}"
    if case.work is None:
        return f"{start}{'':>10}{'':>10}{'':>10}"
    work = case.work
    flops = (work.tensor or work.vector) / 1e9
    return f"{start}{work.bytes / 1e6:>10.0f}{flops:>10.0f}{1e6 * work.seconds(H200):>10.0f}"


def _planned(case: Case) -> tuple[Sequence[Launch], str]:
    """What a timing would launch, at its real size, with tensors that have no memory; or why there is nothing."""
    missing = case.missing()
    if missing:
        return [], f"not run: {missing}"
    if case.kind == "check":
        return [], "compares numbers: see --interpret"
    launches: list[Launch] = []
    with recorded(launches):
        try:
            rows = case.run(Bench(device="meta", small=False))
        except Exception as error:
            return [], f"ERROR {type(error).__name__}: {error}"
    ours = [row["error"] for row in rows if row.get("ours") or (case.kind == "tune" and "error" in row)]
    if not (launches or ours or case.name == "control"):
        ours = ["launches no kernel of ours"]
    return launches, f"ERROR {ours[0]}" if ours else ""


@contextmanager
def recorded(launches: list[Launch]) -> Iterator[None]:
    """Launches are kept instead of run."""
    run = Launch.run

    def keep(self: Launch) -> None:
        launches.append(self)

    Launch.run = keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.run = run  # type: ignore[method-assign]


def _unfit(launch: Launch) -> list[str]:
    """Arguments that the kernel does not have, or lacks."""
    wanted, given = set(launch.kernel.arg_names), set(launch.arguments)
    name = launch.kernel.fn.__name__
    found = [f"{name} lacks {argument}" for argument in sorted(wanted - given)]
    found += [f"{name} has no {argument}" for argument in sorted(given - wanted)]
    if any(not 0 <= size < 2**31 for size in launch.grid):
        found.append(f"{name} has the grid {launch.grid}")
    return found


def _uncompiled(launch: Launch, seen: set[str]) -> list[str]:
    """What keeps the launch from compiling for Hopper, each specialisation once."""
    from fp8_safeguard.kernels.triton_compile import compile_launch

    key = repr((launch.kernel.fn.__name__, launch.warps, launch.stages, _constants(launch)))
    if key in seen:
        return []
    seen.add(key)
    try:
        code = compile_launch(launch, HOPPER)
    except Exception as error:
        return [f"{launch.kernel.fn.__name__} does not compile: {error}"]
    return [f"{launch.kernel.fn.__name__} spills {code.spills} words"] if code.spills else []


def _constants(launch: Launch) -> list[Any]:
    """What the compiler specialises on: types, and the values of compile-time arguments."""
    return [
        launch.arguments[each.name]
        if each.is_constexpr
        else str(getattr(launch.arguments[each.name], "dtype", ""))
        for each in launch.kernel.params
        if each.name in launch.arguments
    ]
