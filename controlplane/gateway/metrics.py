"""The gateway's metrics. Labels are bounded: model names are those deployed, codes those documented."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
UNKNOWN = "unknown"


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
        self.probe_marker = ""

    def is_probe(self, request_id: object) -> bool:
        """Whether a request measures the request path, now: then it is not counted."""
        marker = self.probe_marker
        return bool(marker) and isinstance(request_id, str) and request_id.startswith(marker)
