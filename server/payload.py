"""Request bodies: size caps, decompression, JSON and msgpack."""

import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgpack
import zstandard

from fp8_safeguard.monitor.document import distinct
from fp8_safeguard.server.problems import Problem

_JSON_TYPES = frozenset({"application/json"})
_MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
_PART_BYTES = 2**20
_ZSTD_PIECE_BYTES = 128
# A frame may ask its reader for a large window; RFC 9659 allows 8 MiB in a request.
_ZSTD_WINDOW_BYTES = 2**23
_MOST_VALUES = 2**23
"""Values in one document: the smallest take one byte in a body and sixty in memory."""


async def read_limited(
    stream: AsyncIterator[bytes],
    limit: int,
    *,
    told: int | None = None,
    take: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The body as it travelled, cut off at the first byte over the limit; `told` is what its header says of its length.

    `take` is asked for every part's room before it is kept. Raises Problem 413.
    """
    if told is not None and told > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in stream:
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        take(len(part))
        parts.append(part)
    return b"".join(parts)


def content_length(headers: Mapping[str, str]) -> int | None:
    """What the request says of its body's length, if anything."""
    told = headers.get("content-length", "")
    return int(told) if told.isascii() and told.isdigit() else None


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


def decompress(body: bytes, encoding: str, limit: int) -> bytes | bytearray:
    """Undo a Content-Encoding without ever holding more than `limit` bytes of the result.

    Raises Problem 400, 413 or 415.
    """
    if encoding in ("", "identity"):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    if encoding not in ("gzip", "zstd"):
        raise Problem(
            415,
            "unsupported-media-type",
            f"Content-Encoding {encoding!r} is not read here; send zstd, gzip or none",
            headers={"Accept-Encoding": "zstd, gzip, identity"},
        )
    plain = bytearray()
    for part in _gunzip(body) if encoding == "gzip" else _unzstd(body):
        if len(plain) + len(part) > limit:
            raise _too_large(limit)
        plain += part
    return plain


def _gunzip(body: bytes) -> Iterator[bytes]:
    rest = body
    # A gzip file may be several members one after the other.
    while True:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                part = member.decompress(rest, _PART_BYTES)
            except zlib.error as error:
                raise _bad_request(f"the body is not gzip: {error}") from error
            if not part and not member.eof:
                raise _bad_request("the gzip body ends in the middle")
            rest = member.unconsumed_tail
            yield part
        rest = member.unused_data
        if not rest:
            return


def _unzstd(body: bytes) -> Iterator[bytes]:
    rest = body
    while True:
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        place = 0
        # What a frame claims of its size is not believed. The decoder gives out all that its input holds,
        # at most 128 KiB for each 4 bytes, so it is fed in small pieces.
        while not frame.eof:
            piece = rest[place : place + _ZSTD_PIECE_BYTES]
            if not piece:
                raise _bad_request("the zstd body ends in the middle")
            place += len(piece)
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise _bad_request(f"the body is not zstd: {error}") from error
        rest = frame.unused_data + rest[place:]
        if not rest:
            return


def _parse_json(plain: bytes | bytearray, most: int = _MOST_VALUES) -> Any:
    if sum(plain.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise _too_many(most)
    try:
        value = json.loads(plain.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=distinct)
        if b"\\u" in plain:
            # A lone surrogate is legal JSON text and no Unicode; no store or answer could carry it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise _bad_request(f"the body is not JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f'bare {name} is not JSON; write the string "{name}"')


def _parse_msgpack(plain: bytes | bytearray, most: int = _MOST_VALUES) -> Any:
    left = most

    def count(size: int) -> None:
        nonlocal left
        left -= 1 + size
        if left < 0:
            raise _too_many(most)

    def checked_list(values: list[Any]) -> list[Any]:
        count(len(values))
        return values

    def checked_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        count(len(pairs))
        return distinct(pairs)

    try:
        return msgpack.unpackb(
            plain,
            raw=False,
            strict_map_key=True,
            max_array_len=most,
            max_map_len=most,
            list_hook=checked_list,
            object_pairs_hook=checked_map,
        )
    except Problem:
        raise
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        if "exceeds max_" in str(error):
            raise _too_many(most) from error
        raise _bad_request(f"the body is not msgpack: {str(error) or type(error).__name__}") from error


def _bad_request(detail: str) -> Problem:
    return Problem(400, "bad-request", detail)


def _too_many(most: int) -> Problem:
    return Problem(
        413, "body-too-large", f"the body holds more than {most} values; send fewer samples at a time"
    )


def _too_large(limit: int) -> Problem:
    return Problem(
        413,
        "body-too-large",
        f"the body is larger than {limit} bytes after decompression; send fewer samples at a time",
        limit_bytes=limit,
    )
