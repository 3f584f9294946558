"""Estimate the work of parsing a JSON body, without parsing it. Pure.

Python parses JSON in one call, during which nothing else runs: 4 MiB of keys take half a second in a gateway,
and again in the engine's server. So the parts of a large body are counted first, at the speed of a byte
search.
"""

from __future__ import annotations

import json

from controlplane import errors

SMALL_BYTES = 16 << 10  # a body of this size is parsed within a millisecond, whatever it contains
DEEPEST = 96  # levels of lists and objects: a grammar has 32, a tool's schema in a message some more
MAX_BODY_PARTS = 1 << 16  # Python parses this number in 20 ms
NUMBERS_PER_PART = 4
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_parts(raw: bytes, most: int) -> None:
    """Errors: InvalidRequest for more than `most` texts, lists and objects, for many more numbers, and for
    deep nesting. Text that is not JSON may pass."""
    if len(raw) <= SMALL_BYTES:
        return
    text = _as_utf8(raw)
    quotes = text.count(b'"')
    if b"\\" in text:  # backslashes occur only inside texts
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = text.count(b'"')
    _check(quotes // 2, most)
    structure = b"".join(text.split(b'"')[::2])
    _check(quotes // 2 + structure.count(b"[") + structure.count(b"{"), most)
    _check_numbers(structure.count(b","), most)
    _check_depth(structure)


def _as_utf8(raw: bytes) -> bytes:
    """The text as UTF-8; UTF-16 and UTF-32 have zeros among the bytes of each bracket."""
    encoding = json.detect_encoding(raw[:4])
    return raw if encoding.startswith("utf-8") else raw.decode(encoding, "replace").encode()


def _check(parts: int, most: int) -> None:
    if parts > most:
        raise errors.InvalidRequest(
            f"the body has {parts} texts, lists and objects, but at most {most} are allowed;"
            " make it smaller, or send several requests"
        )


def _check_numbers(numbers: int, most: int) -> None:
    if numbers > most * NUMBERS_PER_PART:
        raise errors.InvalidRequest(
            f"the body has {numbers} values, but at most {most * NUMBERS_PER_PART} are allowed; make it "
            "smaller"
        )


def _check_depth(structure: bytes) -> None:
    depth = 0
    for bracket in structure.translate(None, _BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise errors.InvalidRequest(
                f"the body is nested more than {DEEPEST} levels deep; make it flatter"
            )
