"""What holds for every test: nothing is written to the user's own folders, Ctrl-C means what it says."""

import signal
from collections.abc import Iterator

import pytest


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
