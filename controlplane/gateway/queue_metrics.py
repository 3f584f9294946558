"""Waiting requests of a gateway, and the errors of its step predictions, as metrics that are read at a
scrape.

Labels are bounded: deployed bases, three priorities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controlplane.gateway.engine_client import BaseTraffic

log = logging.getLogger(__name__)

_TRIES = 5


class _Families(NamedTuple):
    requests: GaugeMetricFamily
    longest_wait: GaugeMetricFamily
    step_error: GaugeMetricFamily


class QueueMetrics(Collector):
    """`views` is called from the thread of the server that serves metrics."""

    def __init__(self, views: Callable[[], Mapping[str, BaseTraffic]]) -> None:
        self._views = views

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(_families())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = _families()
        for base, view in self._read().items():
            for priority, waiting in view.waiting.items():
                families.requests.add_metric([base, str(priority)], waiting.requests)
                families.longest_wait.add_metric([base, str(priority)], waiting.longest_s)
            if view.step_error is not None:
                families.step_error.add_metric([base], view.step_error)
        return iter(families)

    def _read(self) -> Mapping[str, BaseTraffic]:
        """Read the views again if the event loop changed them meanwhile, which Python may report as an
        error."""
        for _ in range(_TRIES):
            try:
                return self._views()
            except RuntimeError as e:
                log.debug("the queues changed while they were read: %s", e)
        return {}


def _families() -> _Families:
    return _Families(
        GaugeMetricFamily(
            "ostinato_line_requests",
            "Requests that wait in the gateway's queue.",
            labels=["model", "priority"],
        ),
        GaugeMetricFamily(
            "ostinato_line_longest_wait_seconds",
            "How long the oldest request in the queue has waited.",
            labels=["model", "priority"],
        ),
        GaugeMetricFamily(
            "ostinato_step_error",
            "Mean relative error of predicted times per token.",
            labels=["model"],
        ),
    )
