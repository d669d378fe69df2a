"""Fixtures of the service's tests: a store in a folder, a client, and sample documents."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

COUNTS = ("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed")
SUMS = ("amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")
HEALTHY: dict[str, Any] = {
    "count": 65536,
    "zeros": 0,
    "underflow": 0,
    "saturated": 0,
    "nan": 0,
    "inf": 0,
    "rows": 64,
    "rows_flushed": 0,
    "amax": 4.5,
    "sum_sq": 65536.0,
    "sum_sq_q": 65540.0,
    # -31.8 dB: the noise floor of E4M3 blocks.
    "sum_sq_err": 43.3,
    "sum_4th": 3.0 * 65536,
    "tile_sqnr_hist": [0] * 12 + [100, 400, 12, 0],
}
RECOMPUTED_NULL = ("zeros", "underflow", "saturated", "rows", "rows_flushed", "sum_4th", "tile_sqnr_hist")
SLOT_KINDS: tuple[dict[str, str], ...] = (
    {"operand": "x", "layout": "row"},
    {"operand": "x", "layout": "col"},
    {"operand": "w", "layout": "tile"},
    {"operand": "dy", "layout": "row"},
    {"operand": "dy", "layout": "col"},
    {"gemm": "fprop"},
    {"gemm": "dgrad"},
    {"gemm": "wgrad"},
)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Documents:
    """Builds sample documents as a client sends them."""

    def slots(self, layers: int = 2, kinds: tuple[dict[str, str], ...] = SLOT_KINDS) -> list[dict[str, Any]]:
        """All slots of layers `blocks.<n>.mlp` in model order."""
        listed = [{"layer": f"blocks.{n}.mlp", **kind} for n in range(layers) for kind in kinds]
        return [{"index": index, **slot} for index, slot in enumerate(listed)]

    def values(self, slot: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Healthy column values of one slot, with changes."""
        null = dict.fromkeys(RECOMPUTED_NULL) if "gemm" in slot else {}
        return {**HEALTHY, **null, **changes}

    def sample(
        self,
        step: int,
        slots: list[dict[str, Any]] | None = None,
        values: list[dict[str, Any]] | None = None,
        **header: Any,
    ) -> dict[str, Any]:
        """One sample; healthy values unless given."""
        slots = self.slots() if slots is None else slots
        values = [self.values(slot) for slot in slots] if values is None else values
        columns = {name: [row[name] for row in values] for name in HEALTHY}
        document = {"schema": 1, "batch_id": f"b{step}", "attempt": {"id": "0"}, "group": "0", "step": step}
        return {**document, "slots": slots, "columns": columns, **header}


@pytest.fixture
def documents() -> Documents:
    return Documents()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(database_url=f"sqlite:///{tmp_path}/store.db")


@pytest.fixture
def make_client(settings: Settings, clock: Clock) -> Iterator[Callable[..., TestClient]]:
    """Makes clients of an in-process service on the test's store; settings may be changed by name."""
    opened: list[TestClient] = []

    def make(**changes: Any) -> TestClient:
        client = TestClient(create_app(settings.model_copy(update=changes), clock=clock))
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()


@pytest.fixture
def live(settings: Settings) -> Iterator[httpx2.Client]:
    """A client of a real server on a loopback port."""
    with running_server(settings) as url, httpx2.Client(base_url=url, timeout=30) as client:
        yield client
