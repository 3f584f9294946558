"""The gateway's metrics. Labels are bounded: names of deployed models, documented codes."""

from __future__ import annotations

from functools import cached_property

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from controlplane import errors

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
UNKNOWN = "unknown"


def audit_lost(registry: CollectorRegistry) -> Counter:
    return Counter(
        "ostinato_audit_lines_lost", "Lines of the audit log that could not be written.", registry=registry
    )


class ModelMetrics:
    """The metrics of one model: looking up a metric by its labels takes longer than counting."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._ended: dict[str, Counter] = {}
        self._shows = False
        self.in_flight = 0  # read at a scrape

    def begin(self) -> None:
        """A request is in flight."""
        if not self._shows:
            self._shows = True
            self._metrics.in_flight.labels(self._model).set_function(lambda: float(self.in_flight))
        self.in_flight += 1

    @cached_property
    def ttft(self) -> Histogram:
        return self._metrics.ttft.labels(self._model)

    @cached_property
    def duration(self) -> Histogram:
        return self._metrics.duration.labels(self._model)

    def ended(self, code: str) -> Counter:
        """The counter of requests that ended with this code."""
        found = self._ended.get(code)
        if found is None:
            found = self._ended[code] = self._metrics.requests.labels(self._model, code)
        return found


class Metrics:
    """One set per process and registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.requests = Counter(
            "ostinato_requests",
            "Inference requests ended, by model and outcome.",
            ["model", "code"],
            registry=registry,
        )
        self.ttft = Histogram(
            "ostinato_ttft_seconds",
            "From a streamed request's arrival at the gateway to its first chunk.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "ostinato_request_seconds",
            "From arrival at the gateway to the last byte.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "ostinato_requests_in_flight", "Inference requests being answered.", ["model"], registry=registry
        )
        self.refused = Counter(
            "ostinato_requests_refused",
            "Requests answered 429, by reason: queue full, tenant's part of the queue full, displaced by "
            "another request, wait longer than the target, or tenant's quota used up.",
            ["model", "reason"],
            registry=registry,
        )
        self.refused_early = Counter(
            "ostinato_requests_refused_early",
            "Requests answered 429 on arrival, by tenant, because the gateway had more requests than it "
            "could handle.",
            ["tenant"],
            registry=registry,
        )
        self.dropped = Counter(
            "ostinato_requests_dropped",
            "Requests that ended without a complete answer, because they were late.",
            ["model", "reason"],
            registry=registry,
        )
        self.targets = Counter(
            "ostinato_targets",
            "Targets of ended requests, by whether they were met.",
            ["model", "target", "kept"],
            registry=registry,
        )
        self.audit_lost = audit_lost(registry)
        self.probe_marker = ""
        self._of: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model that is or was deployed."""
        found = self._of.get(model)
        if found is None:
            found = self._of[model] = ModelMetrics(self, model)
        return found

    def refused_as(self, model: str, error: errors.OstinatoError) -> None:
        """Count the error, if it is a refusal or a drop with a reason."""
        reason = error.details.get("reason")
        if reason is not None and isinstance(error, errors.Overloaded | errors.RateLimited | errors.Late):
            counter = self.dropped if isinstance(error, errors.Late) else self.refused
            counter.labels(model, reason).inc()

    def is_probe(self, request_id: object) -> bool:
        """Whether a request measures the request path at this time: then it is not counted."""
        marker = self.probe_marker
        return bool(marker) and isinstance(request_id, str) and request_id.startswith(marker)
