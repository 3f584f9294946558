"""Limits on the API's waits for a client or an operation, and on one request: constants of the product.
Tests pass other values."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.api.request_bounds import Bounds
from controlplane.traffic.body_bounds import MAX_BODY_PARTS

WRITE_TIMEOUT_S = 17.0


@dataclass(frozen=True)
class RequestLimits:
    """`body_timeout_s`: for the whole body to arrive. `body_parts`: texts, lists and objects in it.
    `write_timeout_s`: a client that reads nothing of its answer for this time is disconnected.
    `loading_timeout_s`: for each operation of a call that loads or unloads a variant."""

    body_timeout_s: float = 9.0
    body_parts: int = MAX_BODY_PARTS
    write_timeout_s: float = WRITE_TIMEOUT_S
    loading_timeout_s: float = 900.0
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def stream_write_s(self) -> float:
        """The gateway ends a stream before its connection is reset, and so knows why the stream ended."""
        return 0.8 * self.write_timeout_s
