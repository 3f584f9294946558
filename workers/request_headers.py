"""The headers that a request carries from the gateway to a worker, and their format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from workers.messages import VariantRef

SECRET = "ostinato-secret"
VARIANT = "ostinato-variant"
# Sent with a variant: how many may run at once. A restarted worker learns it with its first request.
LIMIT = "ostinato-limit"
# Set on an answer of the HTTP server itself: the engine never saw the request, so it may be sent elsewhere.
REFUSED = "ostinato-refused"
# On every answer of a worker's HTTP server: it proves that the answer is this worker's. Another process may
# have its port by now; that process then received the prompt, and the secret of a worker that is gone.
PROOF = "ostinato-proof"
_PROOF = PROOF.encode()
# On an error answer, if the worker knows more than its status says.
FAULT = "ostinato-fault"
OF_LOADING = b"loading"  # a variant could not be loaded, and its files are not the reason
OF_UNDERSTANDING = b"understanding"  # the engine's application failed at the request
# A POST here means that requests for its variant still wait at the gateway: the worker should read it ahead.
WANTED_PATH = "/ostinato/wanted"


def request_headers(secret: str, variant: VariantRef | None, limit: int | None = None) -> dict[str, str]:
    """The headers that the HTTP server reads. JSON keeps a variant's name and path in ASCII, on one line."""
    headers = {SECRET: secret, "content-type": "application/json"}
    if variant is not None:
        headers[VARIANT] = json.dumps([variant.name, variant.uid, variant.path])
        if limit is not None:
            headers[LIMIT] = str(limit)
    return headers


def variant_of(headers: Iterable[tuple[bytes, bytes]]) -> VariantRef | None:
    """The variant that an ASGI scope's headers name; None for the base."""
    text = _value(headers, VARIANT)
    return None if text is None else VariantRef(*json.loads(text))


def limit_of(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """How many variants may run at once, if the headers say so."""
    text = _value(headers, LIMIT)
    return None if text is None else int(text)


def _value(headers: Iterable[tuple[bytes, bytes]], name: str) -> bytes | None:
    key = name.encode()
    for header, value in headers:
        if header == key:
            return value
    return None


def proves(headers: Mapping[bytes, bytes], proof: str) -> bool:
    """Whether the head of an answer is from the worker with this proof. Older workers have no proof."""
    return not proof or headers.get(_PROOF) == proof.encode()
