"""What travels beside a request from the gateway to a worker: headers, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable

from workers.messages import VariantRef

SECRET = "ostinato-secret"
VARIANT = "ostinato-variant"
# Set on an answer of the door itself: the engine never saw the request, so it may be sent elsewhere.
REFUSED = "ostinato-refused"


def request_headers(secret: str, variant: VariantRef | None) -> dict[str, str]:
    """The headers the door reads. JSON keeps a variant's name and path in ASCII and on one line."""
    headers = {SECRET: secret, "content-type": "application/json"}
    if variant is not None:
        headers[VARIANT] = json.dumps([variant.name, variant.uid, variant.path])
    return headers


def variant_of(headers: Iterable[tuple[bytes, bytes]]) -> VariantRef | None:
    """The variant an ASGI scope's headers name; None for the base."""
    name = VARIANT.encode()
    text = next((value for key, value in headers if key == name), None)
    return None if text is None else VariantRef(*json.loads(text))
