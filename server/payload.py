"""Request bodies: size caps, decompression, JSON and msgpack."""

import json
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgpack
import zstandard

from fp8_safeguard.server.problems import Problem

_JSON_TYPES = frozenset({"application/json"})
_MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
# A frame may ask its reader for a large window; the encoder's default needs 8 MiB at most.
_ZSTD_WINDOW_BYTES = 2**27


async def read_limited(stream: AsyncIterator[bytes], limit: int) -> bytes:
    """The body as it travelled, cut off at the first byte over the limit.

    Raises Problem 413.
    """
    parts: list[bytes] = []
    size = 0
    async for part in stream:
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def decode_body(body: bytes, headers: Mapping[str, str], limit: int) -> Any:
    """The decoded JSON or msgpack document of a request; `limit` caps its bytes after decompression.

    Raises Problem 400, 413 or 415.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _JSON_TYPES | _MSGPACK_TYPES:
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Type {media_type!r} is not read here; send application/json or application/msgpack",
            headers={"Accept": "application/json, application/msgpack"},
        )
    plain = decompress(body, headers.get("content-encoding", "identity").strip().lower(), limit)
    return _parse_json(plain) if media_type in _JSON_TYPES else _parse_msgpack(plain)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a Content-Encoding without ever holding more than `limit` bytes of the result.

    Raises Problem 400, 413 or 415.
    """
    if encoding in ("", "identity"):
        plain = body
    elif encoding == "gzip":
        plain = _gunzip(body, limit)
    elif encoding == "zstd":
        plain = _unzstd(body, limit)
    else:
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Encoding {encoding!r} is not read here; send zstd, gzip or none",
            headers={"Accept-Encoding": "zstd, gzip, identity"},
        )
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


def _gunzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit + 1
    rest = body
    # A gzip file may be several members one after the other.
    while rest and left > 0:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(rest, left)
        except zlib.error as error:
            raise _bad_request(f"the body is not gzip: {error}") from error
        parts.append(part)
        left -= len(part)
        if not member.eof and left > 0:
            raise _bad_request("the gzip body ends in the middle")
        rest = member.unused_data
    return b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    # The stream reader is asked for limit + 1 bytes and gives no more, whatever the frame claims.
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    parts: list[bytes] = []
    left = limit + 1
    try:
        with decoder.stream_reader(body, read_across_frames=True) as reader:
            while left > 0:
                part = reader.read(min(left, 2**20))
                if not part:
                    break
                parts.append(part)
                left -= len(part)
    except zstandard.ZstdError as error:
        raise _bad_request(f"the body is not zstd: {error}") from error
    return b"".join(parts)


def _parse_json(plain: bytes) -> Any:
    try:
        value = json.loads(plain.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in plain:
            # A lone surrogate is legal JSON text and no Unicode; no store or answer could carry it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise _bad_request(f"the body is not JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f'bare {name} is not JSON; write the string "{name}"')


def _parse_msgpack(plain: bytes) -> Any:
    try:
        return msgpack.unpackb(plain, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise _bad_request(f"the body is not msgpack: {error or type(error).__name__}") from error


def _bad_request(detail: str) -> Problem:
    return Problem(400, "bad-request", detail)


def _too_large(limit: int) -> Problem:
    return Problem(
        413,
        "body-too-large",
        f"the body is larger than {limit} bytes after decompression; send fewer samples at a time",
        limit_bytes=limit,
    )
