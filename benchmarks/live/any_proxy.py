"""A client of an API that has several addresses, as a load balancer's clients have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

# With another address to ask, a client does not wait for a silent one; though it waits for as long as a proxy
# takes to notice that a gateway is silent.
PATIENCE = httpx.Timeout(4.0, connect=1.0)


class AnyProxy:
    """Asks one address until it does not answer, or reports that it cannot; the next request goes to the next
    address. For one thread."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str]) -> None:
        timeout = PATIENCE if len(urls) > 1 else httpx.Timeout(60.0)
        # Reading the certificates of all authorities would take longer than the calls.
        self._clients = [
            httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False, verify=False)
            for url in urls
        ]
        self._now = 0

    def request(
        self, method: str, path: str, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Errors: httpx.HTTPError."""
        try:
            reply = self._clients[self._now].request(method, path, json=json, headers=headers)
        except httpx.HTTPError:
            self._next()
            raise
        if reply.status_code >= 500:
            self._next()
        return reply

    def _next(self) -> None:
        self._now = (self._now + 1) % len(self._clients)
