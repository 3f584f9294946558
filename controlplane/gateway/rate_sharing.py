"""A quota over several gateways: each reports what it has spent, and spends only its share of the rest until
it hears the others' reports again.

So two gateways that get requests at the same time together spend at most what one would spend. A request for
more than a share is allowed if nothing else was spent since: together the gateways may exceed the quota by
one request each, which is paid back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.repeated_lines import REPEATED, Rarely

log = logging.getLogger(__name__)
log.addFilter(Rarely())

EXCHANGE_S = 0.5
Key = tuple[str, str]  # a tenant's name, and the counted quantity


@dataclass(frozen=True)
class RateReport:
    """The report of one gateway's book: what it has spent since it began, and what it believes to be left."""

    book: str
    spent: Mapping[Key, float]
    levels: Mapping[Key, float]


@dataclass(frozen=True)
class Share:
    """What one gateway may spend until it hears the others' reports again."""

    left: float
    touched: bool = False

    def allows(self, amount: float) -> bool:
        return self.left >= amount or not self.touched

    def after(self, amount: float) -> Share:
        return Share(self.left - amount, True)


@dataclass
class Others:
    """What is known of the other gateways' books."""

    count: int = 0
    seen: dict[str, Mapping[Key, float]] = field(default_factory=dict)

    def hear(self, reports: Iterable[RateReport], levels: Mapping[Key, float]) -> dict[Key, float]:
        """What is left now of every counted quantity: our level minus what the others spent since their last
        reports. For a book without an earlier report, its own level counts if that is lower."""
        found, known, self.seen = dict(levels), self.seen, {}
        for report in reports:
            before = known.get(report.book)
            for key, spent in report.spent.items():
                if before is None or key not in found:
                    found[key] = min(found.get(key, report.levels[key]), report.levels[key])
                else:
                    found[key] -= spent - before.get(key, 0.0)
            self.seen[report.book] = dict(report.spent)
        self.count = len(self.seen)
        return found


async def keep_sharing(
    ask: Callable[[], Awaitable[Iterable[RateReport]]],
    hear: Callable[[Iterable[RateReport]], None],
    wanted: Callable[[], bool],
) -> None:
    """Exchange reports with the gateways periodically while quotas are `wanted`, until cancelled."""
    while True:
        if wanted():
            try:
                hear(await ask())
            except Exception as e:  # gateways start and stop
                log.warning("the other gateways do not report their used quotas: %r", e, extra=REPEATED)
        await asyncio.sleep(EXCHANGE_S)
