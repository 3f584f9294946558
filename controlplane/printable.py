"""Text that is safe to show on a terminal: it may quote untrusted input."""

from __future__ import annotations

import re

# Characters that begin an escape sequence (C0 and C1) or reverse the text after them. Newlines and tabs stay.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace each control character by a Python escape such as \\x1b."""
    lines = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), lines)
