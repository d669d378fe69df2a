"""Schemathesis finds nothing: the service does what its OpenAPI document says, whatever it is sent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import positive_data_acceptance

from fp8_safeguard.server.openapi import OPERATIONS
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

EXAMPLES = 8
TOKEN = "fuzz-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CONFIG = {
    "seed": 20,
    "generation": {"max-examples": EXAMPLES, "deterministic": True, "database": "none"},
    "headers": BEARER,
}
API = "/api/v1"
OUTSIDE = ("/livez", "/readyz", "/metrics")
LIVE = ("GET /runs/{run}/events",)
"""The live stream does not end; test_events.py reads it."""
BEYOND_A_SCHEMA = ("POST /runs/{run}/samples", "DELETE /runs/{run}/pins")
"""Columns are as long as there are slots; a pin is named by the body or by the query."""


class Served:
    """A server with a run that has samples, decisions and alerts."""

    def __init__(self, url: str, documents: Any) -> None:
        self.client = httpx2.Client(base_url=url, headers=BEARER, timeout=60)
        self.documents = documents
        self.post("demo", self.broken(0, mode="advise"))
        for step in range(1, 4):
            self.post("demo", self.broken(step))
        self.decisions = [item["id"] for item in self.items("decisions")]
        self.alerts = [item["id"] for item in self.items("alerts")]
        assert self.decisions
        assert self.alerts

    def broken(self, step: int, **header: Any) -> dict[str, Any]:
        slots = self.documents.slots(8)
        values = [self.documents.values(slot) for slot in slots]
        values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
        values[16].update(amax="NaN", nan=3, sum_sq="Infinity")
        run = {"loss": 2.0 if step else "NaN"}
        sample: dict[str, Any] = self.documents.sample(step, slots, values, run=run, **header)
        return sample

    def post(self, run: str, sample: dict[str, Any]) -> None:
        self.client.post(f"{API}/runs/{run}/samples", json=sample).raise_for_status()

    def items(self, what: str) -> list[Any]:
        found: list[Any] = self.client.get(f"{API}/runs/demo/{what}").json()["items"]
        return found

    def aim(self, case: Any) -> None:
        """Let a request that is valid as such ask for what there is."""
        place = case.path_parameters or {}
        if "run" in place:
            place["run"] = "demo"
        if "decision" in place:
            place["decision"] = self.decisions[0]
        if "alert" in place:
            place["alert"] = self.alerts[0]
        if case.method == "DELETE" and case.path == f"{API}/runs/{{run}}":
            place["run"] = "spare"
            self.post("spare", self.documents.sample(0))
        query = case.query if isinstance(case.query, dict) else {}
        # A token is only ever the server's own; what it makes is turned in test_lists.py.
        query.pop("page_token", None)
        if "metric" in query and "layer" not in query and case.path.endswith("/series"):
            query["layer"] = ""
        for name, value in {"a": "demo", "b": "demo", "layer": "blocks.0.mlp", "metric": "amax"}.items():
            if name in query:
                query[name] = value


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, documents: Any) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    settings = Settings(database_url=f"sqlite:///{folder}/store.db", tokens={TOKEN: ["admin"]})
    with running_server(settings) as url:
        serving = Served(url, documents)
        yield serving
        serving.client.close()


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    config = SchemathesisConfig.from_dict(CONFIG)
    return schemathesis.openapi.from_url(str(served.client.base_url.join("/openapi.json")), config=config)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in LIVE])
def test_nothing_is_found(api: Any, served: Served, name: str) -> None:
    """Every phase and every check that is on by default, for one operation."""

    def check(case: Any) -> None:
        if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
            served.aim(case)
        excluded = [positive_data_acceptance] if name in BEYOND_A_SCHEMA else []
        case.call_and_validate(headers=BEARER, excluded_checks=excluded)

    method, path = name.split()
    operation = api[path if path in OUTSIDE else API + path][method]
    project = api.config
    settings = HypothesisTestConfig(
        project=project,
        modes=list(HypothesisTestMode),
        settings=project.get_hypothesis_settings(operation=operation, phase="fuzzing"),
        seed=project.seed,
    )
    create_test(operation=operation, test_func=check, config=settings)()
