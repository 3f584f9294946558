"""The characters that an API key may have, for clients and installations."""

from __future__ import annotations

import re

# A header's value: visible ASCII, with spaces only inside. The usual mistake is a newline at a file's end.
SENDABLE = re.compile(r"[!-~]([ -~]*[!-~])?")
UNSENDABLE = (
    "the API key has a line break, a space at its beginning or end, or a character outside ASCII; no client"
    " can send such a key in a header: remove these characters (`export OSTINATO_API_KEY=$(cat FILE)` drops"
    " a file's line break)"
)


def is_sendable(key: str) -> bool:
    return SENDABLE.fullmatch(key) is not None
