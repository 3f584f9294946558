"""Text that a terminal shows and does not obey: it may hold what a stranger wrote."""

from __future__ import annotations

import re

# What begins an escape sequence (C0 and C1) or turns around what follows it. Lines and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """With each control character as an escape of Python's, such as \\x1b."""
    lines = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), lines)
