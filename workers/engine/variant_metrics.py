"""Metrics of an engine's variants. Each scrape asks the scheduler for them.

Labels are bounded: tiers and ranks, never variants. The series are left out while the scheduler does not
answer, so that a stalled engine does not look like an empty one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.messages import EngineConfig, EngineResidency
from workers.tiers import Tier

log = logging.getLogger(__name__)

READ_SECONDS = Histogram(
    "ostinato_variant_read_seconds",
    "Time from a variant's first request or deployment until every rank has read and checked the variant.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)


class VariantCollector(Collector):
    """The collector. `ask` blocks until the scheduler has answered; the scrape's thread calls it."""

    def __init__(self, ask: Callable[[], EngineResidency], config: EngineConfig) -> None:
        self._ask = ask
        self._config = config

    def describe(self) -> Iterable[Metric]:
        """No metrics: the registration of this collector must not wait for an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            seen = self._ask()
        except Exception as e:
            log.warning("the metrics lack the variants' places, because the scheduler does not answer: %r", e)
            return
        yield _by_tier(seen)
        yield _gauge("slots", "Slots for variants on every rank's device.", seen.slots)
        yield _gauge("limit", "Variants that may run at once.", seen.limit)
        yield _gauge("blocked_requests", "Requests that wait for a running variant to end.", seen.blocked)
        yield _counter(
            "skips",
            "Requests that overtook other requests, because their own variant was running.",
            seen.skips,
        )
        yield _counter(
            "preemptions",
            "Requests that were preempted for requests that had been overtaken.",
            seen.preemptions,
        )
        yield self._bytes(seen)
        yield self._capacity()

    def _bytes(self, seen: EngineResidency) -> Metric:
        total: Counter[tuple[Tier, int]] = Counter()
        for held in (rank for variant in seen.variants for rank in variant.ranks):
            total[Tier.HOST, held.rank] += held.host_bytes
            total[Tier.DEVICE, held.rank] += held.device_bytes
        family = GaugeMetricFamily(
            "ostinato_variant_bytes", "Memory that variants take.", labels=["tier", "rank"]
        )
        for tier in (Tier.DEVICE, Tier.HOST):
            for rank in range(len(self._config.ranks)):
                family.add_metric([tier, str(rank)], total[tier, rank])
        return family

    def _capacity(self) -> Metric:
        family = GaugeMetricFamily(
            "ostinato_variant_capacity_bytes", "Memory set aside for variants.", labels=["tier", "rank"]
        )
        for number, rank in enumerate(self._config.ranks):
            family.add_metric([Tier.DEVICE, str(number)], rank.variant_memory_bytes)
            family.add_metric([Tier.HOST, str(number)], self._config.variant_host_bytes)
        return family


def _by_tier(seen: EngineResidency) -> Metric:
    count = Counter(variant.tier for variant in seen.variants)
    family = GaugeMetricFamily(
        "ostinato_variants",
        "Variants, by the nearest tier in which every rank has the variant.",
        labels=["tier"],
    )
    for tier in Tier:
        family.add_metric([tier], count[tier])
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ostinato_variant_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"ostinato_variant_{name}", text, value=value)
