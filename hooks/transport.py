"""One POST to the server and what its answer means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one sample, or for the whole request."""

    kind: str
    """`accepted`, `retry`, `slots-unknown`, `too-large` or `refused`."""
    body: Mapping[str, Any]
    wait_seconds: float | None = None
    """How long the server asks to wait."""

    @property
    def reason(self) -> str:
        """The problem in the server's words."""
        words = [self.body.get(name) for name in ("status", "type", "title", "detail")]
        return " ".join(str(word) for word in words if word) or self.kind


class Transport:
    """Talks to one run's sample endpoint. The HTTP client is imported with the first message."""

    def __init__(self, server: str, run: str, token: str | None) -> None:
        import httpx2

        headers = {"Content-Type": "application/msgpack", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._url = f"{server}/api/v1/runs/{run}/samples"
        self._client = httpx2.Client(
            headers=headers, timeout=httpx2.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        )
        self._unreachable = httpx2.HTTPError

    def post(self, samples: list[dict[str, Any]]) -> list[Answer]:
        """Send one sample, or several in one body: one answer for each. Never raises on what the network does."""
        import msgpack

        body = samples[0] if len(samples) == 1 else {"samples": samples}
        try:
            response = self._client.post(self._url, content=msgpack.packb(body))
        except self._unreachable as error:
            return [Answer("retry", {"title": f"{type(error).__name__}: {error}"})] * len(samples)
        content = _object(response.content)
        results = content.get("results")
        if response.status_code == 200 and len(samples) > 1 and isinstance(results, list):
            answers = [_answer(int(r.get("status", 200)), r, None) for r in results if isinstance(r, dict)]
            if len(answers) == len(samples):
                return answers
        return [_answer(response.status_code, content, response.headers.get("Retry-After"))] * len(samples)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _object(content: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(content)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _answer(status: int, body: Mapping[str, Any], retry_after: str | None) -> Answer:
    if status == 200 and body.get("accepted") is True:
        return Answer("accepted", body)
    if status in _RETRIED:
        return Answer("retry", {"status": status, **body}, _seconds(retry_after))
    if status == 409 and "slots-unknown" in str(body.get("type", "")):
        return Answer("slots-unknown", body)
    if status == 413:
        return Answer("too-large", {"status": status, **body})
    return Answer("refused", {"status": status, **(body or {"title": "not an answer of this service"})})


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After in seconds; its date form is not worth a clock comparison."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None
