"""What a gateway refuses when more requests come than it can do in time. Pure: the caller gives the time.

A gateway has more than it can do when the smallest request takes long there, and goes on to.
Then requests beyond a budget are refused while they are cheap: before anything is done for them. The budget
is at first a part of what was answered lately, so that what waits is done soon. It follows the delay from
there: less while that is long, more when it is short again. Once some are refused, who is refused is above
its share, so the delay may be held much lower than the one that began it; but not lower than what the
smallest request takes on this machine when there is no crowd. It is held lower still where of all tenants
that it keeps from something most is refused later as well: then to pass on less takes nothing from
anybody, and all refusals are sooner.

Tenants share the budget by weight, max-min fairly: each has a token bucket, and all buckets are filled at the
same level of requests a second and unit of weight. So a tenant that asks for less than its share is refused
nothing, whatever others ask for. One that asks alone delays nobody else, and has more patience.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# A busy machine is slow at times. Half of all looks, for this long, say that it has too much to do.
LATE_S, LATE_ALONE_S = 0.25, 1.0
WINDOW_S = 0.5
LATE_FOR_S = 1.0  # without a window in time, before anybody is refused: less is a burst, and over soon
STILL_S = 2 * WINDOW_S  # a window that is longer is of a machine that stood still
LOOKS = 2  # one that is late may be a machine that stood still
# While requests are refused less is passed on where the smallest one takes longer than LONG, a part of the
# limit, and more where it takes less than SHORT; neither is less than so many times what it takes without a
# crowd.
LONG, LONG_OF_ALONE = 0.3, 2.5
SHORT, SHORT_OF_ALONE = 0.15, 1.5
MOST_SHORT = 0.9  # of what is long
# The same part where of each tenant above its share more than WASTED of what is passed on is refused
# later; above LATE_WASTED some begin to be refused.
WASTED, LATE_WASTED, LONG_WASTED = 0.5, 0.2, 0.1
# That is over when so many windows in turn say so: a gateway that stands still refuses nobody, either.
UNWASTED_WINDOWS = 3
ALONE_WINDOWS = 20  # of which the shortest says what it takes without a crowd
SETTLED_S = 5.0  # after the last cut: what waited is done by then
# The first budget, of what was answered; later ones, of the one before. At least so much of what was passed
# on: long answers that are not streamed begin when they are finished.
FIRST, LESS, LESS_WASTED, MORE, SLOWLY_MORE = 0.6, 0.85, 0.7, 1.03, 1.015
# There is nothing to win then near the last budget that was too much, for a while.
NEAR, TOO_MUCH_FOR_S = 0.75, 300.0
OF_PASSED = 0.5
UNKNOWN = ""  # the name of all whom nobody knows
# Any machine passes so many requests on in a second: what delays them then are not requests.
LEAST_PER_S = 40.0
ASKING_PER_S = 0.5
BURST_S, LEAST_BURST = 0.2, 20.0
# A budget so many times what comes limits nobody, and grows no further. There is none any more when the path
# was in time with it for so long: another crowd would be noticed late.
ROOM, CALM_S = 1.25, 15.0
LONGEST_RETRY_S = 30.0
FORGOTTEN_PER_S = 0.01


@dataclass(slots=True)
class _Tenant:
    """What it asked for, what of that was passed on, and what of that was answered and refused: in this
    window, and lately, a second. `tokens` are what it may still ask for, as of `at_s`."""

    weight: float
    asked: int = 0
    passed: int = 0
    answered: int = 0
    refused: int = 0
    asked_per_s: float = 0.0
    passed_per_s: float = 0.0
    answered_per_s: float = 0.0
    refused_per_s: float = 0.0
    tokens: float = math.inf
    at_s: float = 0.0

    def end_window(self, took_s: float) -> None:
        self.asked_per_s = _mean(self.asked_per_s, self.asked / took_s)
        self.passed_per_s = _mean(self.passed_per_s, self.passed / took_s)
        self.answered_per_s = _mean(self.answered_per_s, self.answered / took_s)
        self.refused_per_s = _mean(self.refused_per_s, self.refused / took_s)
        self.asked = self.passed = self.answered = self.refused = 0

    @property
    def is_wasted(self) -> bool:
        """Whether most of what is passed on of it is refused all the same. Long answers come much later than
        refusals."""
        return self.refused_per_s > WASTED * max(self.passed_per_s, self.answered_per_s)


class LoadShedding:
    """`arrive` for each request of a tenant, `answer` when the first of its answer is there (`is_refusal`:
    it is a refusal all the same), and `look` several times in WINDOW_S."""

    def __init__(self) -> None:
        self._budget_per_s = math.inf
        self._level_per_s = math.inf
        self._tenants: dict[str, _Tenant] = {}
        self._late_s: list[float] = []
        self._was_late_s = 0.0
        self._since_s: float | None = None
        self._alone_s: deque[float] = deque(maxlen=ALONE_WINDOWS)
        self._passed = self._answered = 0
        self._passed_per_s = self._answered_per_s = 0.0
        self._is_wasted = self._was_wasted = False
        self._unwasted_windows = 0
        self._carried_per_s = 0.0  # by the path, when the present budget was begun
        self._asked_per_s = self._asked_lately_per_s = 0.0
        self._late_for_s = self._calm_for_s = 0.0
        self._since_less_s = 0.0
        self._too_much_per_s = self._since_too_much_s = math.inf

    @property
    def budget_per_s(self) -> float:
        """How many requests a second are passed on at most; infinite: all."""
        return self._budget_per_s

    @property
    def is_crowded(self) -> bool:
        """Whether so much comes that the next look matters."""
        return self._asked_per_s > LEAST_PER_S or self._budget_per_s < math.inf

    def arrive(self, name: str, weight: float, now_s: float) -> float | None:
        """None: pass the request of this tenant on. Else refuse it, and say after how many seconds to try
        again."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(weight)
        tenant.weight = weight
        tenant.asked += 1
        if self._level_per_s < math.inf and not self._take(tenant, now_s):
            may_per_s = self._level_per_s * weight
            return min(LONGEST_RETRY_S, max(1.0, tenant.asked_per_s / may_per_s))
        self._passed += 1
        tenant.passed += 1
        return None

    def answer(self, name: str, is_refusal: bool = False) -> None:
        """A request of this tenant that was passed on is answered, or begins to be."""
        self._answered += 1
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.answered += 1
            tenant.refused += is_refusal

    def leave_out(self, name: str) -> None:
        """A request of this tenant that was passed on just now, and whose answer nobody will see."""
        self._passed = max(0, self._passed - 1)
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.passed = max(0, tenant.passed - 1)

    def look(self, late_s: float, now_s: float) -> None:
        """`late_s`: how long the smallest request takes now."""
        if self._since_s is None:
            self._since_s = now_s
        self._late_s.append(late_s)
        took_s = now_s - self._since_s
        if took_s >= WINDOW_S and len(self._late_s) >= LOOKS:
            self._end_window(took_s)
            self._since_s = now_s

    def _take(self, tenant: _Tenant, now_s: float) -> bool:
        rate = self._level_per_s * tenant.weight
        burst = max(LEAST_BURST, rate * BURST_S)
        tenant.tokens = min(burst, tenant.tokens + rate * max(0.0, now_s - tenant.at_s))
        tenant.at_s = now_s
        if tenant.tokens < 1.0:
            return False
        tenant.tokens -= 1.0
        return True

    def _end_window(self, took_s: float) -> None:
        late_s = statistics.median_low(self._late_s)
        self._asked_per_s = sum(tenant.asked for tenant in self._tenants.values()) / took_s
        self._asked_lately_per_s = _mean(self._asked_lately_per_s, self._asked_per_s)
        self._answered_per_s = _mean(self._answered_per_s, self._answered / took_s)
        self._passed_per_s = _mean(self._passed_per_s, self._passed / took_s)
        for tenant in self._tenants.values():
            tenant.end_window(took_s)
        self._was_wasted, self._is_wasted = self._is_wasted, self._still_wastes()
        self._budget_per_s = self._next_budget(late_s, took_s)
        self._tenants = {
            name: each for name, each in self._tenants.items() if each.asked_per_s > FORGOTTEN_PER_S
        }
        self._level_per_s = self._level(self._budget_per_s)
        if self._level_per_s == math.inf:
            for tenant in self._tenants.values():
                tenant.tokens = math.inf
        self._passed = self._answered = 0
        self._was_late_s = late_s
        self._late_s.clear()

    def _next_budget(self, late_s: float, took_s: float) -> float:
        """`late_s`: what half of all looks found, or more."""
        stood_still = took_s > STILL_S  # then what came meanwhile may not be read yet
        if self._asked_per_s <= LEAST_PER_S and not (stood_still and self._budget_per_s < math.inf):
            self._late_for_s = 0.0
            return math.inf  # it is not requests that delay others
        limit_s = LATE_S if self._tenants_asking() > 1 else LATE_ALONE_S
        self._late_for_s = self._late_for_s + took_s if late_s > self._begins_s(limit_s) else 0.0
        self._since_less_s += took_s
        self._since_too_much_s += took_s
        self._see_alone(late_s, limit_s)
        if self._budget_per_s == math.inf:
            return self._first() if self._late_for_s >= LATE_FOR_S else math.inf
        if self._was_wasted and not self._is_wasted:  # somebody wants what was left out
            return max(self._budget_per_s, LESS * self._carried_per_s)
        long_s, short_s = self._band(limit_s)
        is_calm = late_s <= long_s and self._budget_per_s >= self._asked_lately_per_s
        self._calm_for_s = self._calm_for_s + took_s if is_calm else 0.0
        if self._calm_for_s >= CALM_S:
            return math.inf
        return self._lower(late_s) if late_s > long_s else self._higher(is_soon=late_s <= short_s)

    def _begins_s(self, limit_s: float) -> float:
        """Later than this some begin to be refused."""
        return min(limit_s, max(LATE_WASTED * limit_s, self._long_alone_s)) if self._is_wasted else limit_s

    def _lower(self, late_s: float) -> float:
        """The next budget where the path is late. Where what waits becomes less, or what was refused is not
        felt yet, there is nothing to do."""
        is_felt = late_s >= self._was_late_s and self._since_less_s > late_s
        return self._less() if is_felt else self._budget_per_s

    def _higher(self, is_soon: bool) -> float:
        """The next budget where the path is in time."""
        most_per_s = max(ROOM * self._asked_lately_per_s, LEAST_PER_S)
        if self._is_wasted and self._since_too_much_s < TOO_MUCH_FOR_S:
            most_per_s = min(most_per_s, NEAR * self._too_much_per_s)
        more = SLOWLY_MORE if self._since_less_s > SETTLED_S else 1.0
        if is_soon and not self._is_wasted:
            more = MORE
        return max(self._budget_per_s, min(most_per_s, more * self._budget_per_s))

    def _see_alone(self, late_s: float, limit_s: float) -> None:
        """What the smallest request takes when nobody is refused, or as few are passed on as ever."""
        is_settled = self._budget_per_s == LEAST_PER_S and self._since_less_s > SETTLED_S
        if is_settled or (self._budget_per_s == math.inf and late_s <= limit_s):
            self._alone_s.append(late_s)

    def _band(self, limit_s: float) -> tuple[float, float]:
        """Above the first less is passed on, below the second more."""
        long = LONG_WASTED if self._is_wasted else LONG
        long_s = min(limit_s, max(long * limit_s, self._long_alone_s))
        return long_s, min(MOST_SHORT * long_s, max(SHORT * limit_s, SHORT_OF_ALONE * self._least_s))

    def _level(self, budget_per_s: float) -> float:
        return fair_level([(each.asked_per_s, each.weight) for each in self._tenants.values()], budget_per_s)

    def _still_wastes(self) -> bool:
        self._unwasted_windows = 0 if self._wastes() else self._unwasted_windows + 1
        return self._unwasted_windows < (UNWASTED_WINDOWS if self._is_wasted else 1)

    def _wastes(self) -> bool:
        """Whether of every tenant above its share most is refused all the same."""
        level = self._level(min(self._budget_per_s, self._first_of(self._used())))
        above = [each for each in self._tenants.values() if each.asked_per_s > level * each.weight]
        return bool(above) and all(each.is_wasted for each in above)

    @property
    def _least_s(self) -> float:
        """What the smallest request takes without a crowd; 0: it is not known yet."""
        return min(self._alone_s, default=0.0)

    @property
    def _long_alone_s(self) -> float:
        return LONG_OF_ALONE * self._least_s

    def _first(self) -> float:
        self._since_less_s = self._calm_for_s = self._since_too_much_s = 0.0
        self._too_much_per_s = self._carried_per_s = self._used()
        return self._first_of(self._too_much_per_s)

    def _used(self) -> float:
        return max(self._answered_per_s, OF_PASSED * self._passed_per_s)

    def _first_of(self, used_per_s: float) -> float:
        return max(LEAST_PER_S, FIRST * used_per_s)

    def _less(self) -> float:
        """What is not used up says nothing of how much can be done."""
        used = self._budget_per_s
        if self._asked_per_s > used:
            used = min(used, self._used())
        self._too_much_per_s, self._since_too_much_s = max(LEAST_PER_S / NEAR, used), 0.0
        if self._budget_per_s > LEAST_PER_S:
            self._since_less_s = 0.0
        return max(LEAST_PER_S, (LESS_WASTED if self._is_wasted else LESS) * used)

    def _tenants_asking(self) -> int:
        """Who is not known counts if it asks for much: else anybody could make a tenant be refused sooner."""
        least = {UNKNOWN: max(ASKING_PER_S, 0.1 * self._asked_per_s)}
        return sum(each.asked_per_s > least.get(name, ASKING_PER_S) for name, each in self._tenants.items())


def _mean(before_per_s: float, now_per_s: float) -> float:
    """Of windows, each of which counts half as much as the one after it."""
    return (before_per_s + now_per_s) / 2.0


def fair_level(asked: list[tuple[float, float]], budget: float) -> float:
    """How many requests a second go to each unit of weight, of tenants that ask for so much (by weight).

    Where they ask for more than the budget: the level at which the sum of min(asked, level * weight) is the
    budget. Else there is room above what any of them asks for, and it is divided by weight, too.
    """
    left, weights = budget, sum(weight for _, weight in asked)
    everyone, level = weights, 0.0
    for amount, weight in sorted(asked, key=lambda each: each[0] / each[1]):
        if amount * weights >= left * weight:
            return left / weights
        left -= amount
        weights -= weight
        level = amount / weight
    return level + left / (everyone or 1.0)
