"""Read the server's REST interface, and say plainly what went wrong."""

from collections.abc import Mapping
from typing import Any

import httpx2

DEFAULT_SERVER = "http://127.0.0.1:8787"


class ApiError(Exception):
    """The server could not be asked, or it answered with a problem."""


class Api:
    """One server's `/api/v1`, read with an optional bearer token."""

    def __init__(self, server: str | None, token: str | None = None, timeout_seconds: float = 10.0) -> None:
        self.server = (server or DEFAULT_SERVER).rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.Client(base_url=self.server, headers=headers, timeout=timeout_seconds)

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON answer to GET /api/v1<path>; ApiError for a problem or no answer."""
        wanted = {name: value for name, value in params.items() if value is not None}
        try:
            answer = self._client.get(f"/api/v1{path}", params=wanted)
        except httpx2.TransportError as error:
            raise ApiError(
                f"No answer from {self.server} ({error}). Start it with `fp8-safeguard serve`, or name another with --server."
            ) from error
        if answer.status_code != 200:
            raise ApiError(self._problem(answer))
        try:
            return answer.json()
        except ValueError as error:
            raise ApiError(
                f"{self.server} answered something other than JSON: is it an fp8-safeguard server?"
            ) from error

    def items(self, path: str, **params: Any) -> list[Mapping[str, Any]]:
        """All items of a list, page after page."""
        found: list[Mapping[str, Any]] = []
        token: str | None = None
        while True:
            page = self.get(path, page_token=token, **params)
            found.extend(page["items"])
            token = page.get("next_page_token")
            if not token:
                return found

    def latest_run(self) -> str:
        """The run that reported last."""
        runs = self.get("/runs")["items"]
        if not runs:
            raise ApiError(
                f"{self.server} has no run yet. Attach a trainer to it, or try `fp8-safeguard demo`."
            )
        return str(max(runs, key=lambda run: run.get("last_report") or "")["id"])

    def _problem(self, answer: httpx2.Response) -> str:
        try:
            problem = answer.json()
            text = problem.get("detail") or problem.get("title") or answer.text
        except ValueError:
            text = answer.text[:200]
        return f"{self.server} answered {answer.status_code}: {text}"
