"""Heads of answers and chunks of their bodies, as bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple

Headers = Iterable[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {code: f"HTTP/1.1 {code} {_PHRASES.get(code, '')}\r\n".encode() for code in range(100, 600)}
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


class Head(NamedTuple):
    """A head, and how the body follows: by chunks, by its length, or (neither) until the connection ends."""

    data: bytes
    length: int | None
    is_chunked: bool
    closes: bool


def answer_head(status: int, headers: Headers, keeps_alive: bool, may_chunk: bool) -> Head:
    """The head of an answer. `may_chunk`: there may be a body, and its client knows chunks.

    Raises ValueError for a header that is not one line, and for a length that is not a number.
    """
    parts = [_STATUS_LINES[status]]
    length, is_chunked, closes = None, False, False
    lines = 1
    for key, value in headers:
        name = key.lower()
        parts += (name, b": ", value, b"\r\n")
        lines += 1
        if name in _FRAMING:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                is_chunked = value.lower() == b"chunked"
            else:
                closes = b"close" in (token.strip() for token in value.lower().split(b","))
    if not (keeps_alive or closes):
        parts.append(b"connection: close\r\n")
        lines += 1
    if length is None and not is_chunked and may_chunk:
        is_chunked = True
        parts.append(b"transfer-encoding: chunked\r\n")
        lines += 1
    data = b"".join(parts)
    if data.count(b"\n") != lines or data.count(b"\r") != lines:
        raise ValueError("expected headers of one line each, got a header with a line break")
    return Head(data + b"\r\n", None if is_chunked else length, is_chunked, closes or not keeps_alive)


def chunk(body: bytes, is_last: bool) -> bytes:
    """A piece of a body. An empty one would end it."""
    framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return framed + b"0\r\n\r\n" if is_last else framed
