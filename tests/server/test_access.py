"""Tokens, scopes, public addresses, and problems as the only form of error."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.serve import run
from fp8_safeguard.server.settings import InsecureBindError, Settings, is_loopback

API = "/api/v1/runs"
TOKENS = {
    "tok-i": ["ingest"],
    "tok-r": ["read"],
    "tok-c": ["control"],
    "tok-a": ["admin"],
    "tok-ir": ["ingest", "read"],
}


@pytest.fixture
def guarded(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client(tokens=TOKENS)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_without_a_known_token_every_door_is_closed(guarded: TestClient, documents: Any) -> None:
    for headers in (
        {},
        bearer(""),
        bearer("wrong"),
        {"Authorization": "tok-r"},
        {"Authorization": "Basic !"},
    ):
        for method, url in (("GET", API), ("POST", f"{API}/demo/samples"), ("PATCH", f"{API}/demo")):
            answer = guarded.request(method, url, headers=headers, json=documents.sample(0))
            assert (answer.status_code, answer.json()["type"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")


def test_each_scope_opens_its_own_doors(guarded: TestClient, documents: Any) -> None:
    doors = {
        "ingest": ("POST", f"{API}/demo/samples", documents.sample(0)),
        "read": ("GET", f"{API}/demo", None),
        "control": ("PATCH", f"{API}/demo", {"mode": "observe"}),
        "admin": ("DELETE", f"{API}/demo", None),
    }
    for token, scopes in TOKENS.items():
        guarded.post(f"{API}/demo/samples", json=documents.sample(0), headers=bearer("tok-i"))
        for scope, (method, url, body) in doors.items():
            answer = guarded.request(method, url, headers=bearer(token), json=body)
            allowed = scope in scopes or "admin" in scopes
            assert (answer.status_code < 300) == allowed, (token, scope, answer.text)
            if not allowed:
                assert (answer.status_code, answer.json()["type"]) == (403, "forbidden")


def test_probes_are_open_and_metrics_are_not(guarded: TestClient) -> None:
    assert guarded.get("/livez").status_code == 200
    assert guarded.get("/readyz").status_code == 200
    assert guarded.get("/metrics").status_code == 401
    assert guarded.get("/metrics", headers=bearer("tok-r")).status_code == 200


def test_a_password_reads_and_never_changes_anything(guarded: TestClient, documents: Any) -> None:
    password = base64.b64encode(b"anyone:tok-a").decode()
    headers = {"Authorization": f"Basic {password}"}
    assert guarded.get(API, headers=headers).status_code == 200
    answer = guarded.post(f"{API}/demo/samples", json=documents.sample(0), headers=headers)
    assert answer.status_code == 401


def test_the_pages_need_the_read_scope(guarded: TestClient) -> None:
    assert guarded.get("/").status_code == 401
    assert guarded.get("/", headers=bearer("tok-r")).status_code == 200
    assert guarded.get("/runs/demo/figures/loss").status_code == 401


def test_a_page_of_another_site_changes_nothing(client: TestClient, documents: Any) -> None:
    headers = {"Origin": "http://evil.example"}
    answer = client.post(f"{API}/demo/samples", json=documents.sample(0), headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (403, "cross-origin")
    assert client.post(f"{API}/demo:kill-switch", headers=headers).status_code == 403
    own = {"Origin": "http://testserver"}
    assert client.post(f"{API}/demo/samples", json=documents.sample(0), headers=own).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.com"])
def test_a_public_address_without_a_token_is_refused(tmp_path: Path, host: str) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/s.db", host=host)
    for start in (create_app, run):
        with pytest.raises(InsecureBindError, match="FP8_SAFEGUARD_TOKEN"):
            start(settings)
    assert not (tmp_path / "s.db").exists()


def test_a_public_address_with_a_token_is_allowed(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/s.db", host="0.0.0.0", token="secret")
    with TestClient(create_app(settings)) as client:
        assert client.get(API).status_code == 401
        assert client.get(API, headers=bearer("secret")).status_code == 200


def test_loopback_is_recognised() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", ""))


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_SAFEGUARD_DATABASE_URL", "sqlite:////tmp/x.db")
    monkeypatch.setenv("FP8_SAFEGUARD_RUN_STALE_SECONDS", "7.5")
    monkeypatch.setenv("FP8_SAFEGUARD_TOKENS", json.dumps({"a": ["read"]}))
    monkeypatch.setenv("FP8_SAFEGUARD_TOKEN", "b")
    monkeypatch.setenv("FP8_SAFEGUARD_SOMETHING_ELSE", "ignored")
    settings = Settings()
    assert settings.database_url == "sqlite:////tmp/x.db"
    assert settings.run_stale_seconds == 7.5
    assert settings.token_scopes()["a"] == {"read"}
    assert settings.token_scopes()["b"] == {"ingest", "read", "control", "admin"}
    assert "b" not in repr(settings.token)


@pytest.mark.parametrize(
    ("method", "url", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "not-found"),
        ("GET", "/api/v1/nowhere", 404, "not-found"),
        ("DELETE", "/livez", 405, "method-not-allowed"),
        ("POST", f"{API}/demo", 405, "method-not-allowed"),
        ("GET", f"{API}/demo", 404, "run-not-found"),
        ("GET", f"{API}?page_size=0", 422, "validation"),
        ("GET", f"{API}?page_token=x", 422, "validation"),
        ("GET", f"{API}?page_token=eyJpZCI6MS41fQ", 422, "validation"),
        ("GET", "/api/v1/compare?a=x", 422, "validation"),
        ("POST", "/api/v1/alerts/x:ack", 422, "validation"),
        ("POST", "/api/v1/alerts/99999999999999999999:ack", 422, "validation"),
        ("POST", f"{API}/demo:kill-switch", 404, "run-not-found"),
    ],
)
def test_every_error_is_a_problem_with_a_stable_type(
    client: TestClient, method: str, url: str, status: int, kind: str
) -> None:
    answer = client.request(method, url)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["type"], problem["status"]) == (kind, status)
    assert problem["title"]
    assert problem["detail"]


def test_a_crash_is_a_problem_that_says_nothing_about_the_inside(settings: Settings) -> None:
    app = create_app(settings)

    @app.get("/crash")
    def crash() -> None:
        raise RuntimeError("a secret")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/crash")
    assert (answer.status_code, answer.json()["type"]) == (500, "internal")
    assert "secret" not in answer.text


CONTRACT = """
GET /livez
GET /readyz
GET /metrics
GET /docs
GET /openapi.json
GET /api/v1/runs
GET /api/v1/runs/demo
PATCH /api/v1/runs/demo
POST /api/v1/runs/demo/samples
GET /api/v1/runs/demo/attempts
GET /api/v1/runs/demo/layers
GET /api/v1/runs/demo/series
GET /api/v1/runs/demo/heatmap
GET /api/v1/runs/demo/plan
GET /api/v1/runs/demo/decisions
POST /api/v1/decisions/demo-1:approve
POST /api/v1/decisions/demo-1:reject
POST /api/v1/decisions/demo-1:revert
PUT /api/v1/runs/demo/pins
DELETE /api/v1/runs/demo/pins
POST /api/v1/runs/demo:kill-switch
GET /api/v1/runs/demo/alerts
POST /api/v1/alerts/1:ack
POST /api/v1/alerts/1:silence
GET /api/v1/runs/demo/baselines
GET /api/v1/compare?a=demo&b=demo
GET /api/v1/runs/demo/export
DELETE /api/v1/runs/demo
GET /
GET /runs/demo
"""


def test_every_address_of_the_contract_is_served(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0))
    for line in CONTRACT.split("\n")[1:-1]:
        method, url = line.split()
        answer = client.request(method, url)
        unknown = "json" in answer.headers.get("content-type", "") and answer.json()
        kind = unknown.get("type") if isinstance(unknown, dict) else None
        assert kind not in ("not-found", "method-not-allowed", "internal"), line
        assert answer.status_code < 500, line


def test_the_api_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for asset in ("/docs/docs.js", "/docs/docs.css", "/openapi.json"):
        assert asset in page.text
        assert client.get(asset).status_code == 200
    assert "://" not in page.text.replace("http://testserver", "")


def test_deleting_a_run_removes_all_of_it(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0))
    client.post(f"{API}/kept/samples", json=documents.sample(0))
    assert client.delete(f"{API}/demo").status_code == 204
    assert client.get(f"{API}/demo").status_code == 404
    assert [item["id"] for item in client.get(API).json()["items"]] == ["kept"]
    assert client.post(f"{API}/demo/samples", json=documents.sample(0)).json()["inserted"] == 16
    client.delete(f"{API}/demo")
    client.delete(f"{API}/kept")
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        tables = ("runs", "attempts", "samples", "slot_lists", "run_slot_lists", "decisions", "alerts")
        left = {name: conn.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar() for name in tables}
    assert set(left.values()) == {0}, left
