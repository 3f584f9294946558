"""The forecast for a newcomer to a queue, and the requests that are refused for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.state.terms import Priority
from controlplane.traffic import forecast
from controlplane.traffic.admission import Admission, Reason, Refused, retry_after_s
from controlplane.traffic.forecast import Forecast, LastSeen, QueueSpeed, Shares, ShareUse
from controlplane.traffic.request_queue import LEAD, Joined, QueueLimits, RequestQueue, Waiting
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

LOW, NORMAL, HIGH = Priority
A, B, C = Tenant("a"), Tenant("b", weight=2.0), Tenant("c", weight=0.5, max_waiting=3)


def of(tenant: Tenant = A, priority: Priority = NORMAL, tokens: int = 1, **targets: Any) -> RequestTerms:
    return RequestTerms(tenant=tenant, priority=priority, tokens=tokens, **targets)


def joined(queue: RequestQueue | Admission, terms: RequestTerms, now_s: float = 0.0) -> Waiting:
    arrive = queue.add if isinstance(queue, RequestQueue) else queue.arrive
    outcome = arrive(terms, now_s)
    assert isinstance(outcome, Joined)
    return outcome.waiting


@pytest.mark.parametrize(
    ("ttft_s", "targets", "retry_s"),
    [
        (None, {"ttft_s": 1.0}, None),
        (9.0, {}, None),
        (1.0, {"ttft_s": 1.0}, None),
        (5.2, {"ttft_s": 1.0}, 4.2),
        (1.1, {"ttft_s": 1.0}, 1.0),
        (5.5, {"ttft_s": 9.0, "deadline_s": 2.5}, 3.0),
    ],
)
def test_a_promise_that_would_be_broken_is_not_made(
    ttft_s: float | None, targets: dict[str, Any], retry_s: float | None
) -> None:
    found = retry_after_s(ttft_s, of(**targets))
    assert found == (retry_s if retry_s is None else pytest.approx(retry_s))


def test_a_line_at_a_steady_pace_predicts_the_wait() -> None:
    speed, queue = QueueSpeed(), RequestQueue(QueueLimits(100))
    speed.begin(0.0)
    for k in range(1, 30):
        assert speed.wait_s(20) == (None if k <= 8 else pytest.approx(10.0))
        speed.moved(4, 2.0 * k)
    for tenant, priority in ((A, HIGH), (A, NORMAL), (A, NORMAL), (B, NORMAL), (B, NORMAL), (A, LOW)):
        joined(queue, of(tenant, priority, 4))
    # Tokens of others count up to their shares of the time until it goes: one of 4 tokens takes A four units
    # of it, B two and C eight.
    expected = {
        (A, HIGH): 4,
        (B, HIGH): 2,
        (A, NORMAL): (4 + 8) + 8,
        (B, NORMAL): 8 + 6,
        (C, LOW): 8 + 8,
    }
    for (tenant, priority), tokens in expected.items():
        assert queue.tokens_before(of(tenant, priority, 4)) == tokens
    assert queue.tokens_of_priority_before(of(A, NORMAL, 4)) == 8 + 8
    assert queue.own_tokens_before(of(A, NORMAL, 4)) == 4 + 8
    assert [queue.backlog()[priority].requests for priority in (LOW, NORMAL, HIGH)] == [1, 4, 1]


def _before(queue: RequestQueue, terms: RequestTerms) -> tuple[float, int]:
    """The forecast tokens before a newcomer, and those that then go before it."""
    said, one, went = queue.tokens_before(terms), joined(queue, terms), 0
    while (waiting := queue.take(0.0)) != one:
        assert waiting is not None
        went += waiting.terms.tokens
    return said, went


@pytest.mark.parametrize(
    ("waiting", "terms"),
    [
        ([(A, HIGH, 30), (B, LOW, 100)], of(A, HIGH, 4)),
        ([(A, HIGH, 10), (B, LOW, 10)], of(A, HIGH, 4)),
        ([(A, HIGH, 1), (B, LOW, 100)], of(A, HIGH, 4)),
        ([(A, HIGH, 50)], of(B, LOW, 4)),
        ([(A, NORMAL, 20), (B, NORMAL, 20), (C, NORMAL, 3)], of(A, NORMAL, 4)),
        ([(A, HIGH, 20), (A, LOW, 20), (B, NORMAL, 20)], of(A, LOW, 4)),
        ([(Tenant(f"t{n}"), priority, 1) for n in range(20) for priority in (LOW, HIGH)], of(A, HIGH, 4)),
        ([(Tenant(f"t{n}"), priority, 1) for n in range(20) for priority in (LOW, HIGH)], of(A, LOW, 4)),
    ],
)
@pytest.mark.parametrize("turns", [0, 7])
def test_the_forecast_tokens_go_before_a_newcomer(
    waiting: list[tuple[Tenant, Priority, int]], terms: RequestTerms, turns: int
) -> None:
    """The difference is within the lead that a tenant may have."""
    queue = RequestQueue(QueueLimits(1000, aging_s=1e9))
    for tenant, priority, count in waiting:
        for _ in range(count):
            joined(queue, of(tenant, priority, 4))
    for _ in range(turns):
        queue.take(0.0)
    said, went = _before(queue, terms)
    assert said == pytest.approx(went, abs=4 * (LEAD + 1))


def test_an_old_pace_is_forgotten() -> None:
    speed = QueueSpeed()
    speed.begin(0.0)
    for k in range(100):
        speed.moved(1, 10.0 * (k + 1))
    for k in range(100):
        speed.moved(1, 1000.0 + k + 1)
    assert speed.wait_s(1) == pytest.approx(1.0, rel=0.01)


def test_later_requests_that_go_before_a_newcomer_count_too() -> None:
    """There is one turn a second. Every second turn goes to a request of high priority that has just come:
    ten of a normal priority take twenty seconds, though the queue holds ten turns."""
    queue, told = RequestQueue(QueueLimits(100, aging_s=1e9)), Forecast()

    def come(terms: RequestTerms, now_s: float) -> None:
        told.asked(terms, now_s)
        told.joined(queue, joined(queue, terms, now_s), None, now_s)

    for _ in range(30):
        come(of(A, NORMAL, 4), 0.0)
    for second in range(1, 41):
        if second % 2:
            come(of(A, HIGH, 4), second - 0.5)
        waiting = queue.take(float(second))
        assert waiting is not None
        told.moved(queue, waiting, float(second))
    assert queue.backlog()[NORMAL].requests == 10
    assert told.wait_s(queue, of(A, NORMAL, 4), 40.0) == pytest.approx(20.0, rel=0.1)
    assert told.wait_s(queue, of(A, HIGH, 4), 40.0) == pytest.approx(0.0)
    assert Forecast().wait_s(queue, of(A, NORMAL, 4), 40.0) is None
    assert Forecast().ttft_s(queue, of(A, NORMAL, 4), None, 0.0) is None


SEEN = st.lists(st.tuples(st.floats(0, 20), st.floats(-5, 5)), max_size=250)


@given(SEEN, st.floats(-5, 5), st.sampled_from([use.value for use in ShareUse]))
def test_the_share_asked_for_of_the_last_observations_is_within_the_quantile(
    seen: list[tuple[float, float]], unseen: float, share: float
) -> None:
    last, now_s, kept = LastSeen(), 0.0, []
    for after_s, value in seen:
        now_s += after_s
        last.add(value, now_s)
        kept.append((now_s, value))
    recent = [value for at_s, value in kept[-forecast.LAST :] if at_s >= now_s - forecast.FORGET_S]
    recent += [unseen] * (forecast.FEW - len(recent))
    assert last.quantile(share, unseen, now_s) == np.quantile(recent, share, method="inverted_cdf")


def served(turns: int, every_s: float, first_s: float, at_once: int = 20) -> tuple[Admission, float]:
    """A line that never gets shorter than `at_once`: a turn every `every_s`, a first token `first_s` later.
    It, and the time."""
    queue, now_s = Admission(QueueLimits(10_000, aging_s=1e9)), 0.0
    for _ in range(at_once):
        joined(queue, of(tokens=4))
    for _ in range(turns):
        now_s += every_s
        assert queue.next(now_s) is not None
        queue.answered(first_s, now_s)
        joined(queue, of(tokens=4), now_s)
    return queue, now_s


def refused(queue: Admission, ttft_s: float, now_s: float) -> bool:
    """Whether a newcomer with this promise would be. It does not stay."""
    outcome = queue.arrive(of(tokens=4, ttft_s=ttft_s), now_s)
    if isinstance(outcome, Joined):
        queue.leave(outcome.waiting.number)
    return isinstance(outcome, Refused) and outcome.reason is Reason.PROMISE


def test_a_target_as_short_as_the_wait_is_admitted_when_forecasts_are_exact() -> None:
    """Twenty before it, four turns a second, half a second from there to the first token: with its own turn
    that is 5.75 seconds."""
    queue, now_s = served(300, 0.25, 0.5)
    assert refused(queue, 5.7, now_s)
    assert not refused(queue, 5.8, now_s)


def test_one_wrong_forecast_refuses_no_request_for_long() -> None:
    """After a stall of 100 s everybody's wait was longer than forecast. If all are refused then nothing new
    is seen of waits; but what was seen grows old."""
    queue, now_s = served(300, 1.0, 0.0)
    now_s += 100.0
    while queue.next(now_s) is not None:  # all who waited go at once, late
        pass
    two = [joined(queue, of(tokens=4), now_s) for _ in range(2)]
    assert refused(queue, 10.0, now_s)
    for waiting in two:
        queue.leave(waiting.number)
    assert not refused(queue, 10.0, now_s + forecast.FORGET_S + 1.0)


def test_the_next_request_is_not_refused_for_the_waits_of_others() -> None:
    """All forecasts were wrong; then lower priorities are served, and no request of its priority waits."""
    queue, now_s = served(300, 1.0, 0.0)
    now_s += 100.0
    while queue.next(now_s) is not None:
        pass
    for _ in range(2):
        joined(queue, of(tokens=4, priority=LOW), now_s)
    assert refused(queue, 1.0, now_s)
    assert queue.next(now_s) is not None
    assert not refused(queue, 1.0, now_s)
    joined(queue, of(tokens=4), now_s)
    assert refused(queue, 1.0, now_s)


def test_one_outlier_among_few_waits_does_not_decide() -> None:
    queue, now_s = served(forecast.ENOUGH + 2, 1.0, 0.0, at_once=2)
    queue.answered(1e6, now_s)
    assert not refused(queue, 10.0, now_s)
    for _ in range(math.ceil((1 - ShareUse.ALONE.value) * forecast.FEW)):
        queue.answered(1e6, now_s)
    assert refused(queue, 10.0, now_s)


def test_no_request_is_admitted_behind_a_request_that_is_passed_over() -> None:
    """Its priority had four turns a second until a higher one takes them all."""
    queue, now_s = served(300, 0.25, 0.0, at_once=2)
    for second in range(1, 6):
        joined(queue, of(priority=HIGH, tokens=4), now_s + second)
        assert queue.next(now_s + second) is not None
    assert refused(queue, 4.5, now_s + 5.0)


def test_only_admitted_tokens_count_against_a_share() -> None:
    """Three quarters of the weight are one's, which asks for half of all; the other is admitted for more than
    its quarter, and who is refused is not above its share for that."""
    shares, small, large = Shares(), Tenant("small", weight=3.0), Tenant("large", weight=1.0)
    for k in range(1000):
        now_s = 0.1 * k
        for tenant in (small, small, small, large):
            shares.asked(of(tenant, tokens=2), now_s)
        shares.joined(of(small, tokens=2), now_s)
        shares.joined(of(large, tokens=2), now_s)
        shares.went(4, now_s)
    assert shares.use_of(small, now_s) is ShareUse.WITHIN
    assert shares.use_of(large, now_s) is ShareUse.ABOVE
    shares.asked(of(small), now_s + forecast.FORGET_S + 0.1)
    assert shares.use_of(small, now_s) is ShareUse.ALONE  # the other one is forgotten
    for _ in range(10):
        shares.joined(of(small, tokens=1000), now_s)
    shares.asked(of(large), now_s + forecast.FORGET_S + 0.2)
    assert shares.use_of(small, now_s) is ShareUse.ABOVE


AGING_S = 10.0


def crowding(shares: Shares, seconds: float = 90.0) -> float:
    """A asks for half more in a high priority than is admitted in all, B for what it gets. When it ended."""
    now_s = 0.0
    for k in range(round(10 * seconds)):
        now_s = 0.1 * k
        shares.asked(of(A, HIGH, 40), now_s)
        shares.asked(of(B, NORMAL, 40), now_s)
        shares.joined(of(B, NORMAL, 40), now_s)
        if k % 3:
            shares.joined(of(A, HIGH, 40), now_s)
    return now_s


def test_a_tenant_s_urgent_requests_crowd_out_its_lower_priorities() -> None:
    shares = Shares()
    now_s = crowding(shares)
    assert shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)
    assert shares.is_crowded_out(of(A, LOW), now_s, AGING_S)
    assert not shares.is_crowded_out(of(A, HIGH), now_s, AGING_S)
    assert not shares.is_crowded_out(of(B, LOW), now_s, AGING_S)
    assert not shares.is_crowded_out(of(Tenant("new"), LOW), now_s, AGING_S)
    for _ in range(900):  # it asks for less, and gets all of it
        now_s += 0.1
        shares.asked(of(A, HIGH, 10), now_s)
        shares.joined(of(A, HIGH, 10), now_s)
    assert not shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)


def test_crowding_out_ends_with_the_urgent_requests() -> None:
    """Though none of its own was admitted since; nor one that is alone and asked for nothing for long."""
    shares = Shares()
    now_s = crowding(shares)
    for _ in range(110):
        now_s += 0.1
        shares.asked(of(A, NORMAL, 40), now_s)
    assert not shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)
    shares = Shares()
    now_s = crowding(shares) + forecast.FORGET_S + 1.0
    shares.asked(of(A, HIGH, 40), now_s)
    assert not shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)


def test_refused_requests_crowd_out_no_request() -> None:
    """Urgent requests with targets that cannot be kept come again and again, and go before no other
    request."""
    shares, now_s = Shares(), 0.0
    for k in range(900):
        now_s = 0.1 * k
        shares.asked(of(A, HIGH, 4000), now_s)
        shares.asked(of(A, NORMAL, 40), now_s)
        shares.joined(of(A, NORMAL, 40), now_s)
    assert not shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)
    shares = Shares()
    for _ in range(3):  # too few to say anything
        shares.asked(of(A, HIGH, 10), now_s)
    shares.joined(of(A, HIGH, 10), now_s)
    assert not shares.is_crowded_out(of(A, NORMAL), now_s, AGING_S)


def test_a_displaced_request_delays_no_other_request() -> None:
    """Were it still counted, its priority would have stood still since."""
    queue, now_s = Admission(QueueLimits(1, aging_s=1e9)), 0.0
    for _ in range(20):
        joined(queue, of(tokens=4), now_s)
        now_s += 1.0
        assert queue.next(now_s) is not None
    lost = joined(queue, of(tokens=4), now_s)
    joined(queue, of(tokens=4, priority=HIGH), now_s)
    assert [waiting.number for waiting in queue] == [lost.number + 1]
    assert queue.next(now_s + 0.5) is not None
    assert not refused(queue, 10.0, now_s + 100.0)


def test_waits_without_workers_do_not_count_in_forecasts() -> None:
    queue, now_s = served(300, 1.0, 0.0)
    joined(queue, of(tokens=4), now_s)
    queue.begin(now_s + 100.0)
    while queue.next(now_s + 100.0) is not None:
        pass
    joined(queue, of(tokens=4), now_s + 100.0)
    assert not refused(queue, 10.0, now_s + 100.0)
