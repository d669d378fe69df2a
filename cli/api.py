"""Read the server's REST interface, and say plainly what went wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from fp8_safeguard.cli.output import printable

if TYPE_CHECKING:
    import httpx2

DEFAULT_SERVER = "http://127.0.0.1:8787"
MOST_PAGE = 1000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiError(Exception):
    """There is no answer, or the answer is a problem."""

    def __init__(self, text: str, *, status: int | None = None, kind: str = "") -> None:
        super().__init__(text)
        self.status = status
        """The answer's HTTP status; None where there was no answer."""
        self.kind = kind
        """The problem's stable type, such as `run-not-found`."""

    @property
    def exit_code(self) -> int:
        """2 where the question itself was wrong, 1 otherwise."""
        return 2 if self.status in (400, 422) else 1


class AddressError(ApiError):
    """What was given as a server's address is none."""

    exit_code = 2


class UnreachableError(ApiError):
    """Nobody answers at the server's address."""


def server_url(address: str) -> str:
    """The base URL of an address; `host:port` means http. Raises AddressError."""
    url = address if "://" in address else f"http://{address}"
    wrong = f"{address!r} is not a server's address; give it as {DEFAULT_SERVER}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"{wrong} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise AddressError(wrong)
    if parts.query or parts.fragment or parts.username is not None or not address.isprintable():
        raise AddressError(f"{wrong}, without a query, a fragment or a password")
    return url.rstrip("/")


class Api:
    """One server's `/api/v1`, read with an optional bearer token."""

    def __init__(self, server: str | None, token: str | None = None, timeout_seconds: float = 10.0) -> None:
        import httpx2

        self.server = server_url(server or DEFAULT_SERVER)
        self._has_token = bool(token)
        headers = {"Accept": "application/json"}
        if token:
            if not (token.isascii() and token.isprintable()):
                raise ApiError("the token holds characters that no token has; copy it again", status=422)
            headers["Authorization"] = f"Bearer {token}"
        # A proxy named in the environment cannot reach this machine's own addresses.
        local = urlsplit(self.server).hostname in _LOOPBACK
        self._client = httpx2.Client(
            base_url=self.server, headers=headers, timeout=timeout_seconds, trust_env=not local
        )

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON answer to GET /api/v1<path>; ApiError for a problem or no answer."""
        wanted = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=wanted)

    def post(self, path: str, body: Mapping[str, Any], timeout_seconds: float | None = None) -> Any:
        """The JSON answer to POST /api/v1<path>; ApiError for a problem or no answer."""
        waiting = {} if timeout_seconds is None else {"timeout": timeout_seconds}
        return self._ask("POST", path, json=dict(body), **waiting)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to PATCH /api/v1<path>; ApiError for a problem or no answer."""
        return self._ask("PATCH", path, json=dict(body))

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to PUT /api/v1<path>; ApiError for a problem or no answer."""
        return self._ask("PUT", path, json=dict(body))

    def delete(self, path: str, *, scope: str = "admin", **params: Any) -> None:
        """DELETE /api/v1<path>, which takes a token of that scope; ApiError for a problem or no answer."""
        with self._reaching():
            answer = self._client.delete(f"/api/v1{path}", params=params)
        if answer.status_code not in (200, 204):
            raise self._problem(answer, scope)

    def items(self, path: str, *, limit: int | None = None, **params: Any) -> list[Mapping[str, Any]]:
        """All items of a list, page after page; at most `limit`."""
        found: list[Mapping[str, Any]] = []
        token: str | None = None
        while True:
            page = self.get(path, page_token=token, page_size=min(limit or MOST_PAGE, MOST_PAGE), **params)
            found.extend(self._member(page, "items"))
            token = page.get("next_page_token")
            if not token or (limit is not None and len(found) >= limit):
                return found[:limit]

    @contextmanager
    def stream(self, path: str, **params: Any) -> Iterator[Iterator[bytes]]:
        """The answer's body in pieces, as it arrives."""
        with self._reaching(), self._client.stream("GET", f"/api/v1{path}", params=params) as answer:
            if answer.status_code != 200:
                answer.read()
                raise self._problem(answer, "read")
            yield answer.iter_bytes()

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        with self._reaching():
            answer = self._client.request(method, f"/api/v1{path}", **request)
        if answer.status_code != 200:
            raise self._problem(answer, "read" if method == "GET" else "control")
        try:
            return answer.json()
        except ValueError as error:
            raise self._stranger() from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise UnreachableError(
                f"No answer from {self.server} ({error or type(error).__name__}). "
                "Start it with `fp8-safeguard serve`, or name another with --server."
            ) from error

    def _member(self, answer: Any, name: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise self._stranger()
        return answer[name]

    def _stranger(self) -> ApiError:
        return ApiError(
            f"{self.server} answered something other than this API's JSON: is it an fp8-safeguard server?"
        )

    def _problem(self, answer: "httpx2.Response", scope: str) -> ApiError:
        try:
            problem = answer.json()
        except ValueError:
            problem = {}
        if not isinstance(problem, dict):
            problem = {}
        status, kind = answer.status_code, str(problem.get("type", ""))
        words = problem.get("detail") or problem.get("title") or answer.reason_phrase
        text = f"{self.server} answered {status}: {words}"
        elsewhere = answer.headers.get("Location")
        if elsewhere and 300 <= status < 400:
            text = f"{self.server} sends on to {printable(elsewhere)} ({status}); give that address with --server"
        elif not kind:
            text += "; is it an fp8-safeguard server?"
        if kind == "mode-conflict" and problem.get("run"):
            text += f". That is: `fp8-safeguard run mode {printable(str(problem['run']))} advise`"
        if status in (401, 403) and kind != "cross-origin":
            text += f". {self._about_tokens(scope)}"
        return ApiError(text, status=status, kind=kind)

    def _about_tokens(self, scope: str) -> str:
        sent = "The token sent does not do" if self._has_token else "No token was sent"
        return (
            f"{sent}: this needs one with the scope {scope}, in FP8_SAFEGUARD_TOKEN or --token. "
            f"`fp8-safeguard token create NAME --scope {scope}` makes one, where the database is."
        )


def in_path(name: str) -> str:
    """A run's or decision's id as one part of a path, whatever was typed."""
    return quote(name, safe="").replace(".", "%2E") if set(name) <= {"."} else quote(name, safe="")
