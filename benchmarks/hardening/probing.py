"""One small call again and again during an attack: how long it takes, and whether it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from benchmarks.live.background import Background

Call = tuple[str, str, Any]  # method, path, JSON


class Probe(Background):
    """`with Probe(url, call):` asks every `every_s`, on a connection of its own each time unless `keeps`."""

    def __init__(
        self,
        url: str,
        call: Call,
        *,
        every_s: float = 0.05,
        headers: Mapping[str, str] | None = None,
        keeps: bool = True,
    ) -> None:
        self._url, self._call, self._every_s = url, call, every_s
        self._headers, self._keeps = dict(headers or {}), keeps
        super().__init__()
        self.seconds: list[float] = []
        self.failed: list[str] = []

    def summary(self) -> dict[str, Any]:
        return {"asked": len(self.seconds) + len(self.failed), "failed": len(self.failed), **ms(self.seconds)}

    def _run(self) -> None:
        http = self._client()
        while not self._stop.wait(self._every_s):
            if not self._keeps:
                http.close()
                http = self._client()
            self._ask(http)
        http.close()

    def _client(self) -> httpx.Client:
        # Reading the certificates of all authorities would take longer than the call.
        return httpx.Client(
            base_url=self._url, headers=self._headers, timeout=30, trust_env=False, verify=False
        )

    def _ask(self, http: httpx.Client) -> None:
        method, path, body = self._call
        began_s = time.perf_counter()
        try:
            reply = http.request(method, path, json=body)
        except httpx.HTTPError as e:
            self.failed.append(type(e).__name__)
            return
        if reply.is_success:
            self.seconds.append(time.perf_counter() - began_s)
        else:
            self.failed.append(str(reply.status_code))


def ms(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {"p50_ms": None, "p99_ms": None, "max_ms": None}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "p50_ms": round(1e3 * float(p50), 2),
        "p99_ms": round(1e3 * float(p99), 2),
        "max_ms": round(1e3 * max(seconds), 2),
    }


def waiting_for(holds: Callable[[], bool], limit_s: float, every_s: float = 0.1) -> float | None:
    """Seconds until it holds; None: it did not come about."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > limit_s:
            return None
        time.sleep(every_s)
    return round(time.monotonic() - began_s, 2)
