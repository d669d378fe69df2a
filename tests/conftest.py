"""What holds for every test: nothing is written to the user's own folders, Ctrl-C means what it says."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

LEFT_OUT = {
    "slow": ("FP8_SAFEGUARD_SLOW", "its tests take a minute each; set FP8_SAFEGUARD_SLOW=1"),
    "distributed": (
        "FP8_SAFEGUARD_SLOW",
        "its tests start processes that wait for each other; set FP8_SAFEGUARD_SLOW=1",
    ),
    "frameworks": (
        "FP8_SAFEGUARD_SLOW",
        "set FP8_SAFEGUARD_SLOW=1 (make test-slow installs the frameworks and does)",
    ),
    "interpreter": (
        "TRITON_INTERPRET",
        "Triton reads TRITON_INTERPRET when kernels are decorated; set TRITON_INTERPRET=1 and run the folder alone",
    ),
    "compile": (
        "FP8_SAFEGUARD_COMPILE",
        "it compiles for minutes; set FP8_SAFEGUARD_COMPILE=1, leave TRITON_INTERPRET unset and run the folder alone",
    ),
}
"""Folders that run only if a variable is 1, and why not always. Here, where the process that prints sees them."""

WITHOUT = {folder: why for folder, (variable, why) in LEFT_OUT.items() if os.environ.get(variable) != "1"}

collect_ignore_glob = [f"{folder}/test_*.py" for folder in WITHOUT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which of the folders that were asked for were left out, and why."""
    asked = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    for folder, why in WITHOUT.items():
        if any(Path(__file__).with_name(folder).is_relative_to(path) for path in asked):
            terminalreporter.write_line(f"tests/{folder} not run: {why}")


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A state folder of the session's own, for child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Run in the background of a shell, a process and its children would ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the compiler does itself: it instantiates a function of autograd and asks an inner tensor for its .grad."""
    for item in items:
        if "fresh_compiler" in getattr(item, "fixturenames", ()):
            for warning in (
                "ignore:.*should not be instantiated:DeprecationWarning",
                "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of another test's, and none left for the next."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
