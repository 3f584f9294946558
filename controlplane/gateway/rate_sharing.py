"""A quota over several gateways: each tells the others what it gave, and gives its share of what is left
until it hears them again.

So two gateways that are asked at once give no more together than one would. A request that asks for more than
a share goes if nothing else went since: together they may give too much by one request each, which is paid
back.
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
Key = tuple[str, str]  # a tenant's name, and what is counted


@dataclass(frozen=True)
class RateReport:
    """Of the book of one gateway: what it gave since it began, and how much it believes to be left."""

    book: str
    spent: Mapping[Key, float]
    levels: Mapping[Key, float]


@dataclass(frozen=True)
class Share:
    """What one gateway may give until it hears the others again."""

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
        """What is left by now, of all that anybody counts: ours less what they gave since they were heard
        last. Of a book that is new to us its word on what is left counts, if that is less."""
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
    """Hear the gateways again and again while quotas are `wanted`, until cancelled."""
    while True:
        if wanted():
            try:
                hear(await ask())
            except Exception as e:  # gateways come and go
                log.warning("the other gateways do not say what they gave: %r", e, extra=REPEATED)
        await asyncio.sleep(EXCHANGE_S)
