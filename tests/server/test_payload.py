"""Compressed bodies: capped by what they become, and honest about what is wrong."""

import gzip
import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from starlette.testclient import TestClient

from fp8_safeguard.server.payload import decompress
from fp8_safeguard.server.problems import Problem

URL = "/api/v1/runs/demo/samples"
LIMIT = 2**20


def unsized_zstd(plain: bytes) -> bytes:
    """A frame that does not state its size, as a streaming client makes it."""
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return packer.compress(plain) + packer.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "zstd": ("zstd", zstandard.compress),
    "zstd unsized": ("zstd", unsized_zstd),
    "identity": ("identity", bytes),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_each_encoding_is_read(client: TestClient, documents: Any, name: str) -> None:
    encoding, encode = ENCODERS[name]
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": encoding}
    body = encode(json.dumps(documents.sample(0)).encode())
    answer = client.post(URL, content=body, headers=headers)
    assert answer.json()["inserted"] == 16


@pytest.mark.parametrize("name", ENCODERS)
def test_the_limit_counts_decompressed_bytes(name: str) -> None:
    encoding, encode = ENCODERS[name]
    assert decompress(encode(b"a" * LIMIT), encoding, LIMIT) == b"a" * LIMIT
    with pytest.raises(Problem) as refused:
        decompress(encode(b"a" * (LIMIT + 1)), encoding, LIMIT)
    assert (refused.value.status, refused.value.kind) == (413, "body-too-large")


@pytest.mark.parametrize("name", ["gzip", "zstd", "zstd unsized"])
def test_b69_a_bomb_is_refused_without_being_unpacked(name: str) -> None:
    encoding, encode = ENCODERS[name]
    bomb = encode(bytes(2**28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Problem, match="larger than"):
        decompress(bomb, encoding, LIMIT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_b69_concatenated_members_are_one_body(name: str) -> None:
    encoding, encode = ENCODERS[name]
    assert decompress(encode(b"first ") + encode(b"second"), encoding, LIMIT) == b"first second"


@pytest.mark.parametrize("name", ["gzip", "zstd", "zstd unsized"])
def test_b69_truncated_and_garbled_bodies_are_400(client: TestClient, documents: Any, name: str) -> None:
    encoding, encode = ENCODERS[name]
    whole = encode(json.dumps(documents.sample(0)).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    for body in (whole[:-20], whole[: len(whole) // 2], b"not compressed at all", b""):
        answer = client.post(URL, content=body, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (400, "bad-request"), len(body)


@pytest.mark.parametrize("encoding", ["br", "gzip, zstd", "deflate"])
def test_other_encodings_are_415(client: TestClient, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = client.post(URL, content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (415, "unsupported-media-type")


def test_a_body_over_the_limit_is_413_whether_or_not_its_length_is_told(
    make_client: Callable[..., TestClient],
) -> None:
    client = make_client(max_body_bytes=1000)
    headers = {"Content-Type": "application/json"}
    assert client.post(URL, content=b" " * 1001, headers=headers).status_code == 413
    chunks = (b" " * 100 for _ in range(11))
    assert client.post(URL, content=chunks, headers=headers).status_code == 413
    assert client.post(URL, content=b" " * 1000, headers=headers).status_code == 400
