"""Requests that a gateway refuses when more come than it can serve in time. Pure: the caller gives the time.

A gateway is overloaded when the smallest request takes long there for a while. Then requests beyond a budget
are refused while that is cheap: before any work is done for them. The first budget is a part of the recently
answered requests, so that waiting requests are served soon. Afterwards it follows the delay: lower while the
delay is long, higher when it is short again.

Once refusals have begun, only tenants above their share are refused, so the delay may be held much lower than
the delay that began them. But it is not held below the time of the smallest request on this machine without
load. It is held lower still if most requests of all limited tenants are refused later anyway: then a smaller
budget takes nothing from any tenant, and all refusals come sooner.

Tenants share the budget by weight, max-min fairly: each has a token bucket, and all buckets are filled at the
same level of requests per second and unit of weight. So a tenant that asks for less than its share is never
refused, whatever others ask for. A tenant that is alone delays no other tenant, so its limit is more patient.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# A busy machine is slow at times. It is overloaded if half of all looks, for this long, find a longer delay.
LATE_S, LATE_ALONE_S = 0.25, 1.0
WINDOW_S = 0.5
LATE_FOR_S = 1.0  # without a window in time, before refusals begin: a shorter burst ends soon
STILL_S = 2 * WINDOW_S  # a longer window means that the machine stood still
LOOKS = 2  # a single late look may be a machine that stood still
# While requests are refused, the budget falls if the smallest request takes longer than LONG, a part of the
# limit, and rises if it takes less than SHORT. Both are at least LONG_OF_ALONE and SHORT_OF_ALONE times its
# time without load.
LONG, LONG_OF_ALONE = 0.3, 2.5
SHORT, SHORT_OF_ALONE = 0.15, 1.5
MOST_SHORT = 0.9  # of the long delay
# LONG_WASTED replaces LONG if, for each tenant above its share, more than WASTED of what is passed on is
# refused later. Then refusals begin above LATE_WASTED.
WASTED, LATE_WASTED, LONG_WASTED = 0.5, 0.2, 0.1
# The waste ends after this number of windows without it: a gateway that stands still refuses nothing, either.
UNWASTED_WINDOWS = 3
ALONE_WINDOWS = 20  # the shortest of these windows gives the time without load
SETTLED_S = 5.0  # after the last cut: by then, waiting requests are served
# FIRST: the first budget, as a part of what was answered; the others relative to the previous budget. At
# least OF_PASSED of what was passed on counts, because long answers that are not streamed begin at their end.
FIRST, LESS, LESS_WASTED, MORE, SLOWLY_MORE = 0.6, 0.85, 0.7, 1.03, 1.015
# For this time the budget stays below NEAR times the last budget that was too high: more would gain nothing.
NEAR, TOO_MUCH_FOR_S = 0.75, 300.0
OF_PASSED = 0.5
UNKNOWN = ""  # the name for all unknown clients
# Any machine passes on this number of requests per second; below it, delays have another cause.
LEAST_PER_S = 40.0
ASKING_PER_S = 0.5
BURST_S, LEAST_BURST = 0.2, 20.0
# A budget of ROOM times the arrivals limits no tenant, and grows no further. It is removed when the path was
# in time for CALM_S with it: otherwise another overload would be noticed late.
ROOM, CALM_S = 1.25, 15.0
LONGEST_RETRY_S = 30.0
FORGOTTEN_PER_S = 0.01


@dataclass(slots=True)
class _Tenant:
    """What a tenant asked for, what of that was passed on, and what of that was answered and refused: in this
    window, and recently, per second. `tokens` are what it may still ask for, as of `at_s`."""

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
        """Whether most of what is passed on for this tenant is refused later. Long answers come much later
        than refusals."""
        return self.refused_per_s > WASTED * max(self.passed_per_s, self.answered_per_s)


class LoadShedding:
    """Call `arrive` for each request of a tenant, `answer` when its answer begins (`is_refusal`: it was
    refused after all), and `look` several times in WINDOW_S."""

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
        self._carried_per_s = 0.0  # by the path, when the current budget began
        self._asked_per_s = self._asked_lately_per_s = 0.0
        self._late_for_s = self._calm_for_s = 0.0
        self._since_less_s = 0.0
        self._too_much_per_s = self._since_too_much_s = math.inf

    @property
    def budget_per_s(self) -> float:
        """The most requests per second that are passed on; infinite: all."""
        return self._budget_per_s

    def arrive(self, name: str, weight: float, now_s: float) -> float | None:
        """None: pass on the tenant's request. Otherwise refuse it, with the number of seconds until a
        retry."""
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
        """A request of this tenant that was passed on is answered, or its answer begins."""
        self._answered += 1
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.answered += 1
            tenant.refused += is_refusal

    def leave_out(self, name: str) -> None:
        """Do not count a request of this tenant that was just passed on: its answer will not be seen."""
        self._passed = max(0, self._passed - 1)
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.passed = max(0, tenant.passed - 1)

    def look(self, late_s: float, now_s: float) -> None:
        """`late_s`: the current time of the smallest request."""
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
        """The next budget. `late_s`: the median of all looks."""
        stood_still = took_s > STILL_S  # then requests that came meanwhile may not be read yet
        if self._asked_per_s <= LEAST_PER_S and not (stood_still and self._budget_per_s < math.inf):
            self._late_for_s = 0.0
            return math.inf  # the delay has another cause than requests
        limit_s = LATE_S if self._tenants_asking() > 1 else LATE_ALONE_S
        self._late_for_s = self._late_for_s + took_s if late_s > self._begins_s(limit_s) else 0.0
        self._since_less_s += took_s
        self._since_too_much_s += took_s
        self._see_alone(late_s, limit_s)
        if self._budget_per_s == math.inf:
            return self._first() if self._late_for_s >= LATE_FOR_S else math.inf
        if self._was_wasted and not self._is_wasted:  # requests that were left out would be served now
            return max(self._budget_per_s, LESS * self._carried_per_s)
        long_s, short_s = self._band(limit_s)
        is_calm = late_s <= long_s and self._budget_per_s >= self._asked_lately_per_s
        self._calm_for_s = self._calm_for_s + took_s if is_calm else 0.0
        if self._calm_for_s >= CALM_S:
            return math.inf
        return self._lower(late_s) if late_s > long_s else self._higher(is_soon=late_s <= short_s)

    def _begins_s(self, limit_s: float) -> float:
        """The delay above which refusals begin."""
        return min(limit_s, max(LATE_WASTED * limit_s, self._long_alone_s)) if self._is_wasted else limit_s

    def _lower(self, late_s: float) -> float:
        """The next budget if the path is late. It stays while the delay falls, or while the last cut has not
        had its effect yet."""
        is_felt = late_s >= self._was_late_s and self._since_less_s > late_s
        return self._less() if is_felt else self._budget_per_s

    def _higher(self, is_soon: bool) -> float:
        """The next budget if the path is in time."""
        most_per_s = max(ROOM * self._asked_lately_per_s, LEAST_PER_S)
        if self._is_wasted and self._since_too_much_s < TOO_MUCH_FOR_S:
            most_per_s = min(most_per_s, NEAR * self._too_much_per_s)
        more = SLOWLY_MORE if self._since_less_s > SETTLED_S else 1.0
        if is_soon and not self._is_wasted:
            more = MORE
        return max(self._budget_per_s, min(most_per_s, more * self._budget_per_s))

    def _see_alone(self, late_s: float, limit_s: float) -> None:
        """Note the time of the smallest request while nothing is refused, or while the budget is lowest."""
        is_settled = self._budget_per_s == LEAST_PER_S and self._since_less_s > SETTLED_S
        if is_settled or (self._budget_per_s == math.inf and late_s <= limit_s):
            self._alone_s.append(late_s)

    def _band(self, limit_s: float) -> tuple[float, float]:
        """The delay above which the budget falls, and the delay below which it rises."""
        long = LONG_WASTED if self._is_wasted else LONG
        long_s = min(limit_s, max(long * limit_s, self._long_alone_s))
        return long_s, min(MOST_SHORT * long_s, max(SHORT * limit_s, SHORT_OF_ALONE * self._least_s))

    def _level(self, budget_per_s: float) -> float:
        return fair_level([(each.asked_per_s, each.weight) for each in self._tenants.values()], budget_per_s)

    def _still_wastes(self) -> bool:
        self._unwasted_windows = 0 if self._wastes() else self._unwasted_windows + 1
        return self._unwasted_windows < (UNWASTED_WINDOWS if self._is_wasted else 1)

    def _wastes(self) -> bool:
        """Whether most requests of every tenant above its share are refused later anyway."""
        level = self._level(min(self._budget_per_s, self._first_of(self._used())))
        above = [each for each in self._tenants.values() if each.asked_per_s > level * each.weight]
        return bool(above) and all(each.is_wasted for each in above)

    @property
    def _least_s(self) -> float:
        """The time of the smallest request without load; 0: unknown."""
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
        """The next lower budget. A budget that was not used up says nothing about the capacity."""
        used = self._budget_per_s
        if self._asked_per_s > used:
            used = min(used, self._used())
        self._too_much_per_s, self._since_too_much_s = max(LEAST_PER_S / NEAR, used), 0.0
        if self._budget_per_s > LEAST_PER_S:
            self._since_less_s = 0.0
        return max(LEAST_PER_S, (LESS_WASTED if self._is_wasted else LESS) * used)

    def _tenants_asking(self) -> int:
        """Tenants that ask for something. Unknown clients count only if they ask for much: otherwise a
        stranger could cause refusals for a tenant sooner."""
        least = {UNKNOWN: max(ASKING_PER_S, 0.1 * self._asked_per_s)}
        return sum(each.asked_per_s > least.get(name, ASKING_PER_S) for name, each in self._tenants.items())


def _mean(before_per_s: float, now_per_s: float) -> float:
    """The mean over windows, in which each window counts half as much as the next one."""
    return (before_per_s + now_per_s) / 2.0


def fair_level(asked: list[tuple[float, float]], budget: float) -> float:
    """Requests per second for each unit of weight. `asked`: (requests per second, weight) of each tenant.

    If tenants ask for more than the budget: the level at which the sum of min(asked, level * weight) equals
    the budget. Otherwise the room above all requests is divided by weight, too.
    """
    left, weights = budget, sum(weight for _, weight in asked)
    everyone, level = weights, 0.0
    for amount, weight in sorted(asked, key=_level):
        if amount * weights >= left * weight:
            return left / weights
        left -= amount
        weights -= weight
        level = amount / weight
    return level + left / (everyone or 1.0)


def _level(asked: tuple[float, float]) -> float:
    amount, weight = asked
    return amount / weight
