"""One POST to the server and what its answer means."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_MOST_ANSWER_BYTES = 64 * 2**20
_WHOLE_ANSWER_SECONDS = 60.0
_TOKEN_ADVICE = (
    "set FP8_SAFEGUARD_TOKEN, or token= of attach(), to a token of that server with the scope ingest"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one sample, or for the whole request."""

    kind: str
    """`accepted`, `slots-unknown`, `too-large` or `refused`; to be tried again: `unreachable`, `busy`, `foreign`
    (somebody else answered, such as a proxy), `held` (the service, and a person has to act), `failing` (either this
    very sample is at fault or the server: what it answers to the next one will tell)."""
    body: Mapping[str, Any]
    wait_seconds: float | None = None
    """How long the server asks to wait."""

    @property
    def waits(self) -> bool:
        """Whether the sample was not judged: it is sent again later."""
        return self.kind in ("unreachable", "busy", "foreign", "held", "failing")

    @property
    def reason(self) -> str:
        """The problem in the server's words."""
        words = [self.body.get(name) for name in ("status", "type", "title", "detail", "advice")]
        return " ".join(str(word) for word in words if word) or self.kind


@dataclass(frozen=True, slots=True)
class Answers:
    """An answer for each sample of a request."""

    each: list[Answer]
    whole: bool
    """Whether the request was answered as a whole: each sample has the same answer."""


class _NotOurs(logging.Filter):
    """The HTTP client tells every request at INFO; this project's are told where they matter, and once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is somebody else's, or worth a warning."""
        return record.levelno > logging.INFO or not threading.current_thread().name.startswith(
            "fp8-safeguard"
        )


_NOT_OURS = _NotOurs()


class Transport:
    """Talks to one run's endpoints. The HTTP client is imported with the first message."""

    def __init__(self, server: str, run: str, token: str | None) -> None:
        import httpx2

        logging.getLogger("httpx2").addFilter(_NOT_OURS)  # twice is once
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._run_url = f"{server}/api/v1/runs/{run}"
        self._client = httpx2.Client(
            headers=headers, timeout=httpx2.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        )

    def post(self, samples: Sequence[bytes]) -> Answers:
        """Send one packed sample, or several in one body. Never raises on what the network does."""
        number = len(samples)
        try:
            status, headers, content = self._post("/samples", "application/msgpack", _packed(samples))
        except Exception as error:
            # Whatever the network, a proxy's setting or a certificate is at fault: the samples are not.
            problem = {"title": f"{type(error).__name__}: {error}"}
            return Answers([Answer("unreachable", problem)] * number, whole=True)
        body = _object(content)
        results = body.get("results")
        if status == 200 and number > 1 and isinstance(results, list):
            answers = [_answer(_status(r), r, {}) for r in results if isinstance(r, dict)]
            if len(answers) == number:
                return Answers(answers, whole=False)
        return Answers([_answer(status, body, headers)] * number, whole=True)

    def end(self, attempt: str, group: str) -> Answers:
        """Say that this group of the attempt is done; a server without that endpoint does no harm."""
        content = json.dumps({"attempt": attempt, "group": group}).encode()
        try:
            self._post(":end", "application/json", content)
        except Exception as error:
            return Answers([Answer("unreachable", {"title": f"{type(error).__name__}: {error}"})], whole=True)
        return Answers([], whole=True)

    def _post(self, path: str, media_type: str, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        headers, end = {"Content-Type": media_type}, time.monotonic() + _WHOLE_ANSWER_SECONDS
        with self._client.stream("POST", self._run_url + path, content=content, headers=headers) as response:
            parts, size = [], 0
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > _MOST_ANSWER_BYTES:
                    break  # no answer of ours: what has come will not parse
                if time.monotonic() > end:
                    raise TimeoutError(f"the answer still trickles in after {_WHOLE_ANSWER_SECONDS:g} s")
            return response.status_code, response.headers, b"".join(parts)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def address_of(server: str) -> str:
    """The server's address as it may stand in a log: without a name and password."""
    parts = urlsplit(server)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _packed(samples: Sequence[bytes]) -> bytes:
    """One sample as it is, several as {"samples": [...]}; they are packed already."""
    import msgpack

    if len(samples) == 1:
        return samples[0]
    packer = msgpack.Packer()
    head = [packer.pack_map_header(1), packer.pack("samples"), packer.pack_array_header(len(samples))]
    return b"".join([*head, *samples])


def _object(content: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _status(result: Mapping[str, Any]) -> int:
    status = result.get("status", 200)
    return status if isinstance(status, int) else 200


def _answer(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
    if status == 200 and body.get("accepted") is True:
        return Answer("accepted", body)
    problem = {"status": status, **body}
    kind = body.get("type")
    ours = isinstance(kind, str) and status >= 400
    if status == 413 and ours:
        return Answer("too-large", problem)
    if status == 413:  # a proxy's: fewer samples may pass, and another setting of it lets this one pass
        return Answer("failing", _foreign(status, headers))
    if status == 500:
        return Answer("failing", problem)
    if status in _RETRIED and (ours or not headers.get("Content-Type", "").startswith("text/")):
        return Answer("busy", problem, _seconds(headers.get("Retry-After")))
    if not ours:
        return Answer("foreign", _foreign(status, headers), _seconds(headers.get("Retry-After")))
    if status in (401, 403):
        return Answer("held", {**problem, "advice": f"({_TOKEN_ADVICE})"})
    if status in (404, 405) or (status == 409 and kind == "schema"):
        return Answer("held", problem)
    if status == 409 and "slots-unknown" in str(kind):
        return Answer("slots-unknown", problem)
    return Answer("busy" if status >= 500 else "refused", problem)


def _foreign(status: int, headers: Mapping[str, str]) -> Mapping[str, Any]:
    """What somebody answered who is not the service."""
    found = headers.get("Content-Type") or "an answer without a type"
    target = headers.get("Location")
    detail = f"and sends to {target}" if target else ""
    return {"status": status, "title": found, "detail": detail}


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After in seconds; its date form is not worth a clock comparison."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None
