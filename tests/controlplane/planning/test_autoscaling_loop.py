"""Scaling in a loop with engines that answer more slowly the more requests they have: it comes to rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from controlplane.planning.autoscaling import History, noted, wanted
from controlplane.state.records import Scaling

SLOTS = 16
TICK_S = 0.1
HALF_HOUR_S = 1800


@dataclass
class Installation:
    """Groups that run up to SLOTS requests at once, 0.5 s and 0.05 s for each of them; the others wait."""

    rate_per_s: float
    start_s: float
    most: int = 8
    groups: int = 1
    starting: list[float] = field(default_factory=list)
    requests: float = 0.0
    answered: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        history: History | None = None
        area = 0.0
        for tick in range(int(seconds / TICK_S)):
            now_s = tick * TICK_S
            self._serve(now_s)
            area += self.requests * TICK_S
            if tick % 10 == 9:
                history = self._look(history, area, now_s)
                area = 0.0

    def _serve(self, now_s: float) -> None:
        self.groups += sum(ready <= now_s for ready in self.starting)
        self.starting = [ready for ready in self.starting if ready > now_s]
        share = min(float(SLOTS), self.requests / self.groups)
        done = self.groups * share / (0.5 + 0.05 * share) * TICK_S
        self.requests += self.rate_per_s * TICK_S - done
        self.answered += done

    def _look(self, history: History | None, in_flight: float, now_s: float) -> History:
        there = self.groups + len(self.starting)
        history = noted(history, in_flight, now_s, there, bool(self.starting))
        count = wanted(Scaling(1, self.most), float(SLOTS), there, history, now_s)
        if count != there:
            self.changes.append((now_s, count))
        self.starting += [now_s + self.start_s] * (count - there)
        going = max(0, there - count)
        kept = len(self.starting) - min(going, len(self.starting))
        self.groups -= going - (len(self.starting) - kept)
        self.starting = self.starting[:kept]
        return history


@pytest.mark.parametrize("start_s", [5.0, 30.0, 240.0])
@pytest.mark.parametrize("rate", [3.0, 8.0, 10.0, 12.0, 12.5, 13.0, 14.0, 15.0, 18.0, 24.0, 25.0, 30.0, 60.0])
def test_scaling_settles_and_keeps_up_under_a_constant_rate(rate: float, start_s: float) -> None:
    loop = Installation(rate, start_s)
    loop.run(HALF_HOUR_S)
    assert len(loop.changes) <= 10, loop.changes
    assert not [at for at, _ in loop.changes if at > HALF_HOUR_S * 2 / 3]
    assert loop.requests <= SLOTS * loop.groups, "requests wait for ever"
    assert loop.answered + loop.requests == pytest.approx(rate * HALF_HOUR_S)


def test_no_further_groups_are_started_while_groups_start() -> None:
    """The requests that pile up meanwhile are no reason: the one that comes will take them."""
    loop = Installation(14.0, 60.0)
    loop.run(66.0)
    assert [count for _, count in loop.changes] == [2]


def test_groups_go_one_by_one_when_the_load_goes() -> None:
    loop = Installation(60.0, 5.0)
    loop.run(300.0)
    most = loop.groups
    assert most >= 4
    loop.rate_per_s, loop.changes = 1.0, []
    loop.run(HALF_HOUR_S)
    assert [count for _, count in loop.changes] == list(range(most - 1, 0, -1))
