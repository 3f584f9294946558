"""Parses the body of an inference request."""

from __future__ import annotations

import json
import re
from typing import Any

from controlplane import errors

# Half of a surrogate pair, possibly a lone half. Both patterns begin with bytes that are fast to search for.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_CODED_HALF = re.compile(rb"\xed[\xa0-\xbf]")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as a dictionary. Errors: InvalidRequest when it is not a JSON object that names a model."""
    text = raw.decode("ascii") if is_plain(raw) else raw
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise errors.InvalidRequest(f"the body is not valid JSON: {e}; correct it") from e
    if not isinstance(body, dict):
        raise errors.InvalidRequest(f"expected a JSON object as the body, got a {type(body).__name__}")
    if (b"\\u" in raw or text is raw) and _may_have_half(raw):
        _check_text(body)
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise errors.InvalidRequest("`model` must be the name of a served model", param="model")
    return body


def _may_have_half(raw: bytes) -> bool:
    in_utf16 = b"\0" in raw[:4]  # or in UTF-32
    return in_utf16 or bool(_ESCAPED_HALF.search(raw) or _CODED_HALF.search(raw))


def _check_text(body: dict[str, Any]) -> None:
    """Errors: InvalidRequest for half of a surrogate pair, which cannot be encoded."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise errors.InvalidRequest(
            f"the body has half of a surrogate pair, {e.object[e.start]!a}; expected both halves of a "
            "character"
        ) from e
    except RecursionError as e:
        raise errors.InvalidRequest("the body is nested too deeply") from e


def is_plain(raw: bytes) -> bool:
    """Whether `raw` is an object in ASCII. (UTF-16 and UTF-32 have a zero next to the bracket.)"""
    return raw.isascii() and raw[:1] == b"{" and raw[1:2] != b"\0"
