"""Large bodies and bombs against a real server: the right status, and little memory."""

import gzip
import http.client
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard

PATH = "/api/v1/runs/demo/samples"
MOST_GROWTH = 100 * 2**20


class Sender:
    """Sends bodies over a plain connection and reads how the server takes them."""

    def __init__(self, serving: Any) -> None:
        self._host = serving.url.removeprefix("http://")
        self._status = Path(f"/proc/{serving.process.pid}/status")

    def __call__(
        self,
        body: bytes | Iterator[bytes],
        kind: str = "application/json",
        *,
        to: tuple[str, str] = ("POST", PATH),
        **headers: str,
    ) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self._host, timeout=60)
        chunked = not isinstance(body, bytes)
        # A server that has seen enough answers and hangs up before the body has ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(*to, body, {"Content-Type": kind, **named}, encode_chunked=chunked)
        answer = connection.getresponse()
        status, content = answer.status, json.loads(answer.read())
        assert (answer.headers["Content-Type"] == "application/problem+json") == (status != 200)
        connection.close()
        return status, content

    def peak_bytes(self) -> int:
        """The most memory that the process ever had in use."""
        line = next(line for line in self._status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def send(tmp_path_factory: pytest.TempPathFactory, server_process: Any, documents: Any) -> Iterator[Sender]:
    folder = tmp_path_factory.mktemp("limits")
    serving = server_process(f"sqlite:///{folder}/store.db", folder / "log")
    sender = Sender(serving)
    assert sender(json.dumps(documents.sample(0)).encode())[0] == 200
    yield sender
    serving.end()


def zeros(size: int) -> Iterator[bytes]:
    part = bytes(2**20)
    for _ in range(size // len(part)):
        yield part


def gzipped(size: int) -> bytes:
    """A gzip stream of so many zeros, less its last few bytes: nobody reads as far."""
    packer = zlib.compressobj(9, wbits=31)
    first, *_, repeated = (packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(3))
    return first + repeated * (size // 2**24 - 1)


def zstandard_bomb(size: int, window_log: int = 0) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return b"".join([*(packer.compress(part) for part in zeros(size)), packer.flush()])


def test_b69_bodies_over_the_limit_are_413_and_take_little_memory(send: Sender) -> None:
    before = send.peak_bytes()
    small = zstandard_bomb(2**28)
    assert len(small) < 12_000
    large = gzipped(2**30)
    assert len(large) < 1.1 * 2**20
    for body, headers in (
        (bytes(100_000_000), {}),
        (zeros(100 * 2**20), {"Transfer_Encoding": "chunked"}),
        (small, {"Content_Encoding": "zstd"}),
        (gzipped(2**28), {"Content_Encoding": "gzip"}),
        (large, {"Content_Encoding": "gzip"}),
        (iter([large]), {"Content_Encoding": "gzip", "Transfer_Encoding": "chunked"}),
        (gzip.compress(b" ") * 3 + large, {"Content_Encoding": "gzip"}),
        (zstandard.compress(b" ") * 3 + small, {"Content_Encoding": "zstd"}),
    ):
        status, problem = send(body, **headers)
        assert (status, problem["type"]) == (413, "body-too-large"), headers
    assert send.peak_bytes() - before < MOST_GROWTH


def test_b69_a_frame_that_asks_for_a_large_window_is_refused(send: Sender) -> None:
    before = send.peak_bytes()
    status, problem = send(zstandard_bomb(2**20, window_log=27), Content_Encoding="zstd")
    assert (status, problem["type"]) == (400, "bad-request")
    assert send.peak_bytes() - before < MOST_GROWTH


def test_b69_a_body_in_chunks_and_members_is_read_whole(send: Sender, documents: Any) -> None:
    plain = json.dumps(documents.sample(1)).encode()
    half = len(plain) // 2
    for number, (pack, name) in enumerate([(gzip.compress, "gzip"), (zstandard.compress, "zstd")]):
        step = plain.replace(b'"step": 1', b'"step": %d' % (number + 1))
        body = pack(step[:half]) + pack(step[half:])
        chunks = iter([body[:100], body[100:101], body[101:]])
        status, reply = send(chunks, Content_Encoding=name, Transfer_Encoding="chunked")
        assert (status, reply["inserted"]) == (200, 16)
        for cut in (len(body) - 1, len(pack(step[:half])) + 3, 5):
            status, problem = send(body[:cut], Content_Encoding=name)
            assert (status, problem["type"]) == (400, "bad-request"), (name, cut)


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_a_body_of_more_values_than_memory_should_hold_is_413(send: Sender, kind: str) -> None:
    """Empty lists: one byte each in msgpack, sixty in memory."""
    many = 12_000_000
    if kind == "json":
        body = b"[" + b"[]," * many + b"[]]"
    else:
        body = b"\xdd" + many.to_bytes(4, "big") + b"\x90" * many
    status, problem = send(zstandard.compress(body), f"application/{kind}", Content_Encoding="zstd")
    assert (status, problem["type"]) == (413, "body-too-large")


CONTROLS = (
    ("PATCH", "/api/v1/runs/demo"),
    ("PATCH", "/api/v1/runs/samples"),
    ("PUT", "/api/v1/runs/demo/pins"),
    ("DELETE", "/api/v1/runs/demo/pins"),
    ("POST", "/api/v1/alerts/1:silence"),
    ("POST", "/api/v1/decisions/demo-1:approve"),
    ("POST", "/api/v1/runs/demo:end"),
)


@pytest.mark.parametrize("to", CONTROLS, ids=" ".join)
@pytest.mark.parametrize("chunked", [False, True])
def test_b69_what_is_no_sample_may_not_be_large_either(
    send: Sender, to: tuple[str, str], chunked: bool
) -> None:
    before = send.peak_bytes()
    whole = b'{"mode": "' + b"x" * 50_000_000 + b'"}'
    parts = (whole[start : start + 2**16] for start in range(0, len(whole), 2**16))
    status, problem = send(parts if chunked else whole, to=to)
    assert (status, problem["type"]) == (413, "body-too-large")
    assert send.peak_bytes() - before < 20_000_000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_is_said_to_be_no_json_is_415(send: Sender, kind: str) -> None:
    status, problem = send(b'{"mode": "advise"}', kind, to=("PATCH", "/api/v1/runs/demo"))
    assert (status, problem["type"]) == (415, "unsupported-media-type")
    assert "application/json" in problem["detail"]
    # Where there is none, nothing was said wrongly.
    assert send(b"", kind, to=("PATCH", "/api/v1/runs/demo"))[0] == 422
