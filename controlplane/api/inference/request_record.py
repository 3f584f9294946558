"""The record of one request: when it began, what it is charged, how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from controlplane import errors
from controlplane.api.services import Services
from controlplane.gateway.metrics import UNKNOWN
from controlplane.gateway.rate_book import Charge
from controlplane.gateway.stream_events import NAMED, NamedUsage, has_token, tokens_in
from controlplane.gateway.stream_usage import StreamUsage
from controlplane.traffic.attainment import Outcome, attained
from controlplane.traffic.endpoints import Endpoint, Format
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from controlplane.traffic.route_table import Route
from workers.messages import EngineHead

CLIENT_GONE = "client_disconnected"
# Errors of requests that no engine worked on, or worked on in vain: they cost no tokens.
_FREE = (
    errors.InvalidRequest,
    errors.NotReady,
    errors.Overloaded,
    errors.RateLimited,
    errors.EngineFailed,
    errors.Unavailable,
)


@dataclass(slots=True)
class RequestRecord:
    """The times, metrics and quota of one request. It counts how the request ended, once; a request that is
    not `counted` (a probe) shows in no metric.

    As a context it records the error that leaves it. A stream goes on after the context; `end` closes it.
    """

    services: Services
    model: str = UNKNOWN
    start_s: float = 0.0
    ended: bool = False
    counted: bool = True
    terms: RequestTerms = NO_TERMS
    streams: bool = False
    first_s: float | None = None
    chunks: int = 0
    deltas: int = 0  # events that stand for a token, if the events have names
    charge: Charge | None = None

    def __post_init__(self) -> None:
        self.start_s = time.perf_counter()

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, errors.OstinatoError):
            self.fail(error)
        elif isinstance(error, asyncio.CancelledError):
            self.end(CLIENT_GONE)
        elif isinstance(error, Exception):
            self.end(errors.OstinatoError.code)

    def resolved(self, route: Route) -> None:
        """The model's name was resolved."""
        self.model = route.model
        if self.counted:
            self.services.metrics.of(self.model).begin()

    def charge_tenant(
        self, terms: RequestTerms, endpoint: Endpoint, stream: Mapping[str, Any] | None = None
    ) -> None:
        """Charge the tenant for the most tokens that the request may cost. `stream` is the body of a request
        for a stream. Errors: RateLimited."""
        self.terms, self.streams = terms, stream is not None
        if not endpoint.generates:
            return
        self.charge = self.services.rates.charge(terms.tenant, terms.tokens)
        if self.charge is None:
            return
        self.charge.format = endpoint.format
        if stream is not None:
            is_named = endpoint.format is not Format.OPENAI
            self.charge.usage = NamedUsage(terms.prompt_tokens) if is_named else StreamUsage(stream)

    def chunk(self, item: EngineHead | bytes) -> None:
        """A piece of the stream came."""
        self.chunks += 1
        if isinstance(item, bytes):
            if item.startswith(NAMED):
                self.deltas += tokens_in(item)
            if self.charge is not None:
                self.charge.saw(item)
        if self.first_s is None and isinstance(item, bytes) and has_token(item):
            self.first_s = time.perf_counter() - self.start_s
            if self.counted:
                self.services.metrics.of(self.model).ttft.observe(self.first_s)

    def shown(self, piece: bytes) -> bytes:
        """The part of a stream's piece that goes to the client."""
        usage = None if self.charge is None else self.charge.usage
        return piece if usage is None else usage.passed(piece)

    def fail(self, error: errors.OstinatoError) -> None:
        """The request ended with this error."""
        if self.counted and not self.ended:
            self.services.metrics.refused_as(self.model, error)
        if self.charge is not None and not self.chunks and isinstance(error, _FREE):
            self.charge.settle(0)
        self.end(error.code)

    def end(self, code: str, by_client: bool = False) -> None:
        """The request ended. `by_client`: the client ended it, which says nothing about targets."""
        if self.charge is not None and self.chunks:
            self.charge.streamed(self.terms.prompt_tokens)
        if self.ended or not self.counted:
            return
        self.ended = True
        took_s = time.perf_counter() - self.start_s
        metrics = self.services.metrics
        of_model = metrics.of(self.model)
        of_model.ended(code).inc()
        if self.model != UNKNOWN:
            of_model.in_flight -= 1
            of_model.duration.observe(took_s)
            chunks = self.deltas + 1 if self.deltas else self.chunks
            seen = Outcome(CLIENT_GONE if by_client else code, self.streams, self.first_s, took_s, chunks)
            for target, is_kept in attained(self.terms, seen):
                metrics.targets.labels(self.model, target, str(is_kept).lower()).inc()
