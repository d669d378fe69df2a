"""Tokens of the store: made once, known by their hash alone, worthless at once; and sessions of browsers."""

import base64
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.migrate import upgrade
from fp8_safeguard.server.serve import run
from fp8_safeguard.server.settings import InsecureBindError, Settings
from fp8_safeguard.server.store import Store, open_store
from fp8_safeguard.server.tables import tokens
from fp8_safeguard.server.tokens import (
    TokenNameError,
    TokenScopeError,
    UnknownTokenError,
    create_token,
    list_tokens,
    revoke_token,
)

API = "/api/v1/runs"
OWN = {"Origin": "http://testserver"}


on_both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def store(settings: Settings, clock: Any) -> Iterator[Store]:
    """The service's own store, as the command line opens it beside the running service."""
    opened = open_store(settings, clock)
    upgrade(opened)
    yield opened
    opened.close()


@pytest.fixture
def browser(store: Store, make_client: Callable[..., TestClient]) -> TestClient:
    """A browser before a service that asks for tokens."""
    create_token(store, name="unused", scopes=["read"])
    client = make_client()
    client.headers["Accept"] = "text/html,application/xhtml+xml"
    client.follow_redirects = False
    return client


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def log_in(browser: TestClient, secret: str, place: str = "/") -> Any:
    return browser.post("/login", data={"token": secret, "next": place}, headers=OWN)


def test_the_secret_is_shown_once_and_stored_nowhere(store: Store, settings: Settings, clock: Any) -> None:
    info, secret = create_token(store, name="trainer", scopes=["read", "ingest"], expires_at=clock.now + 60)
    assert secret.startswith("fp8s_")
    assert len(secret) >= 40
    assert (info.name, sorted(info.scopes)) == ("trainer", ["ingest", "read"])
    assert (info.created_at, info.expires_at, info.revoked_at, info.last_used_at) == (
        clock.now, clock.now + 60, None, None,
    )  # fmt: skip
    assert list_tokens(store) == [info]
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]
    folder = Path(settings.database_url.removeprefix("sqlite:///")).parent
    assert all(secret.encode() not in file.read_bytes() for file in folder.iterdir())
    assert create_token(store, name="second", scopes=["read"])[1] != secret


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201, "\ud800"])
def test_a_name_that_cannot_be_one_is_refused(store: Store, name: str) -> None:
    with pytest.raises(TokenNameError, match="1 to 200 printable"):
        create_token(store, name=name, scopes=["read"])


@on_both
def test_a_name_is_used_once_even_after_its_token_is_revoked(store: Store) -> None:
    create_token(store, name="ci", scopes=["read"])
    revoke_token(store, "ci")
    with pytest.raises(TokenNameError, match="there is a token 'ci' already"):
        create_token(store, name="ci", scopes=["read"])


@pytest.mark.parametrize("scopes", [[], ["write"], ["read", "Read"], "read"])
def test_scopes_that_are_none_are_refused(store: Store, scopes: Any) -> None:
    with pytest.raises(TokenScopeError, match="ingest, read, control, admin"):
        create_token(store, name="x", scopes=scopes)
    assert list_tokens(store) == []


def test_revoking_is_idempotent_and_names_what_is_missing(store: Store, clock: Any) -> None:
    create_token(store, name="ci", scopes=["read"])
    first = revoke_token(store, "ci")
    clock.now += 5
    assert revoke_token(store, "ci") == first
    with pytest.raises(UnknownTokenError, match="no token 'nobody'"):
        revoke_token(store, "nobody")


@on_both
def test_stored_tokens_open_what_their_scopes_say(client: TestClient, store: Store, documents: Any) -> None:
    secret = {scope: create_token(store, name=scope, scopes=[scope])[1] for scope in ("ingest", "read")}
    sample = documents.sample(0)
    assert client.post(f"{API}/demo/samples", json=sample).status_code == 401
    assert (
        client.post(f"{API}/demo/samples", json=sample, headers=bearer(secret["ingest"])).status_code == 200
    )
    assert client.get(f"{API}/demo", headers=bearer(secret["read"])).status_code == 200
    answer = client.get(f"{API}/demo", headers=bearer(secret["ingest"]))
    assert (answer.status_code, answer.json()["type"]) == (403, "forbidden")
    assert answer.headers["www-authenticate"] == (
        'Bearer realm="fp8-safeguard", error="insufficient_scope", scope="read"'
    )


def test_a_token_of_the_settings_goes_on_working_beside_stored_ones(
    make_client: Callable[..., TestClient], store: Store
) -> None:
    _, secret = create_token(store, name="x", scopes=["read"])
    client = make_client(tokens={"ü; {odd}": ["read"]})
    odd = {"Authorization": "Bearer ü; {odd}".encode()}
    assert client.get(API, headers=odd).status_code == 200  # type: ignore[arg-type]
    assert client.get(API, headers=bearer(secret)).status_code == 200
    assert client.get(API, headers=bearer("other")).status_code == 401


def test_revocation_and_expiry_take_effect_at_the_next_request(
    client: TestClient, store: Store, clock: Any
) -> None:
    _, short_lived = create_token(store, name="short", scopes=["read"], expires_at=clock.now + 60)
    _, revoked = create_token(store, name="revoked", scopes=["read"])
    assert [client.get(API, headers=bearer(secret)).status_code for secret in (short_lived, revoked)] == [
        200,
        200,
    ]
    revoke_token(store, "revoked")
    clock.now += 60
    for secret in (short_lived, revoked):
        answer = client.get(API, headers=bearer(secret))
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith(
            'Bearer realm="fp8-safeguard", error="invalid_token"'
        )


def test_revoking_the_last_token_opens_nothing(client: TestClient, store: Store) -> None:
    assert client.get(API).status_code == 200
    create_token(store, name="only", scopes=["read"])
    assert client.get(API).status_code == 401
    revoke_token(store, "only")
    assert client.get(API).status_code == 401


@on_both
def test_the_last_use_is_noted_at_most_once_a_minute(client: TestClient, store: Store, clock: Any) -> None:
    _, secret = create_token(store, name="x", scopes=["read"])

    def used() -> float | None:
        client.get(API, headers=bearer(secret))
        (info,) = list_tokens(store)
        return info.last_used_at

    start = clock.now
    assert used() == start
    clock.now = start + 59
    assert used() == start
    clock.now = start + 60
    assert used() == start + 60


def test_a_use_is_answered_while_somebody_else_writes(live_settings: Settings, store: Store) -> None:
    _, secret = create_token(store, name="x", scopes=["read"])
    with TestClient(create_app(live_settings)) as client, store.write() as conn:
        conn.execute(select(func.count()).select_from(tokens))
        # The note about its use finds no turn, and gives up without a word.
        assert client.get(API, headers=bearer(secret)).status_code == 200
    assert [info.last_used_at for info in list_tokens(store)] == [None]


@pytest.fixture
def live_settings(settings: Settings) -> Settings:
    """Of a service that waits for its turn to write for a moment only."""
    return settings.model_copy(update={"busy_timeout_seconds": 0.05})


@on_both
def test_a_public_address_needs_a_token_that_opens_something(
    store: Store, settings: Settings, clock: Any
) -> None:
    public = settings.model_copy(update={"host": "0.0.0.0"})
    _, secret = create_token(store, name="x", scopes=["read"], expires_at=clock.now + 60)
    with TestClient(create_app(public, clock=clock)) as client:
        assert client.get(API).status_code == 401
        assert client.get(API, headers=bearer(secret)).status_code == 200
    clock.now += 61
    with pytest.raises(InsecureBindError, match="fp8-safeguard token create"):
        create_app(public, clock=clock)


def test_looking_for_a_token_makes_no_store(tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path}/none.db", host="0.0.0.0")
    for start in (create_app, run):
        with pytest.raises(InsecureBindError):
            start(settings)
    assert list(tmp_path.iterdir()) == []


def test_who_acts_is_the_tokens_name_unless_somebody_is_named(
    client: TestClient, store: Store, documents: Any
) -> None:
    _, secret = create_token(store, name="ada's laptop", scopes=["ingest", "control"])
    slots = documents.slots(1)
    values = [documents.values(slot, nan=1 if slot.get("operand") == "x" else 0) for slot in slots]
    client.post(f"{API}/demo/samples", json=documents.sample(0, slots, values), headers=bearer(secret))
    url = "/api/v1/alerts/1"
    assert client.post(f"{url}:ack", headers=bearer(secret)).json()["acknowledged_by"] == "ada's laptop"
    named = client.post(f"{url}:ack", headers=bearer(secret), json={"by": "bob"})
    assert named.json()["acknowledged_by"] == "bob"


def test_a_browser_is_led_to_the_login_page_and_back(browser: TestClient, store: Store) -> None:
    _, secret = create_token(store, name="ada", scopes=["read"])
    away = browser.get("/runs/demo", params={"metric": "a b", "q": "ü&x"})
    assert away.status_code == 303
    page = browser.get(away.headers["location"])
    assert page.status_code == 200
    assert 'name="next" value="/runs/demo?metric=a+b&amp;q=%C3%BC%26x"' in page.text
    assert "form-action 'self'" in page.headers["content-security-policy"]
    back = log_in(browser, f" {secret}\n", "/runs/demo?metric=a+b&q=%C3%BC%26x")
    assert (back.status_code, back.headers["location"]) == (303, "/runs/demo?metric=a+b&q=%C3%BC%26x")
    cookie = back.headers["set-cookie"].lower()
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/", "max-age=43200"))
    assert secret not in cookie
    assert browser.get("/").status_code == 200


def test_a_program_gets_401_and_no_page(browser: TestClient) -> None:
    for accept in ("*/*", "application/json"):
        answer = browser.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.json()["type"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == (
            'Bearer realm="fp8-safeguard", Basic realm="fp8-safeguard"'
        )
    # A script of the page must not make the browser ask for a password.
    script = browser.get("/", headers={"Accept": "*/*", "Sec-Fetch-Mode": "cors"})
    assert script.headers["www-authenticate"] == 'Bearer realm="fp8-safeguard"'


def test_a_wrong_token_begins_no_session(browser: TestClient) -> None:
    for secret in ("", "wrong", "unused", "x" * 1000):
        answer = log_in(browser, secret)
        assert answer.status_code == 401
        assert "unknown, revoked or expired" in answer.text
        assert "set-cookie" not in answer.headers
    assert browser.post("/login", content=b"\xff" * 10_000, headers=OWN).status_code == 413
    assert browser.post("/login", content=b"token=%ff%00&&&=", headers=OWN).status_code == 401


@pytest.mark.parametrize(
    ("scopes", "said"),
    [(["ingest"], "has only ingest;"), (["control", "ingest"], "has only control and ingest;")],
)
def test_a_token_that_may_not_read_begins_no_session(
    browser: TestClient, store: Store, scopes: list[Any], said: str
) -> None:
    _, secret = create_token(store, name="trainer", scopes=scopes)
    answer = log_in(browser, secret)
    assert answer.status_code == 403
    assert f"This token {said} a browser needs read." in answer.text
    assert "set-cookie" not in answer.headers
    _, all_of_it = create_token(store, name="boss", scopes=["admin"])
    assert log_in(browser, all_of_it).status_code == 303


@pytest.mark.parametrize(
    "place",
    ["http://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "", "/\tx", "x"],
)
def test_a_login_leads_nowhere_but_here(browser: TestClient, store: Store, place: str) -> None:
    _, secret = create_token(store, name="ada", scopes=["read"])
    assert log_in(browser, secret, place).headers["location"] == "/"
    page = browser.get("/login", params={"next": place})
    assert 'name="next" value="/"' in page.text


def test_a_session_changes_things_only_from_a_page_of_this_server(
    browser: TestClient, store: Store, documents: Any
) -> None:
    _, secret = create_token(store, name="ada", scopes=["read", "control", "ingest"])
    browser.post(f"{API}/demo/samples", json=documents.sample(0), headers=bearer(secret))
    log_in(browser, secret)
    change: dict[str, Any] = {"url": f"{API}/demo", "json": {"mode": "advise"}}
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        answer = browser.patch(**change, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (403, "cross-origin")
    assert browser.patch(**change, headers=OWN).json()["mode"] == "advise"
    # A program with the token itself needs no origin.
    assert browser.patch(**change, headers=bearer(secret)).status_code == 200


def test_a_session_has_no_more_than_the_scopes_of_its_token(browser: TestClient, store: Store) -> None:
    _, secret = create_token(store, name="ada", scopes=["read"])
    log_in(browser, secret)
    assert browser.post(f"{API}/demo:kill-switch", headers=OWN).status_code == 403


def test_a_session_ends_with_its_token_and_with_logging_out(browser: TestClient, store: Store) -> None:
    _, secret = create_token(store, name="ada", scopes=["read"])
    log_in(browser, secret)
    assert browser.get("/").status_code == 200
    assert browser.post("/logout", headers={"Origin": "http://evil.example"}).status_code == 403
    out = browser.post("/logout", headers=OWN)
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert browser.get("/").status_code == 303
    log_in(browser, secret)
    revoke_token(store, "ada")
    assert browser.get("/").status_code == 303
    assert browser.get("/", headers={"Accept": "*/*"}).status_code == 401


def test_a_login_from_another_sites_page_is_refused(browser: TestClient, store: Store) -> None:
    _, secret = create_token(store, name="ada", scopes=["read"])
    answer = browser.post("/login", data={"token": secret}, headers={"Origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["type"]) == (403, "cross-origin")


def test_without_tokens_nobody_is_asked_to_log_in(make_client: Callable[..., TestClient]) -> None:
    client = make_client()
    answer = client.get("/login", params={"next": "/runs/x"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/x")


def test_a_cookie_that_is_none_of_ours_is_an_unknown_token(browser: TestClient) -> None:
    for value in ("!", base64.b64encode(b"\xff").decode(), base64.b64encode(b"x").decode()):
        answer = browser.get(API, headers={"Cookie": f"fp8_safeguard_session={value}", "Accept": "*/*"})
        assert answer.status_code == 401
