"""Token buckets, against a count of what went in every window of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.gateway.rate_book import RateBook
from controlplane.traffic import rate_limits
from controlplane.traffic.rate_limits import Bucket
from controlplane.traffic.tenants import Quota, Tenant

PER_MINUTE = st.integers(1, 1000)
# For each request: the time since the request before it, and its amount.
ASKED = st.lists(st.tuples(st.floats(0, 120), st.integers(1, 300)), max_size=60)


@given(PER_MINUTE, ASKED)
def test_no_window_of_time_has_more_than_its_share(per_minute: int, asked: list[tuple[float, int]]) -> None:
    bucket, now_s = rate_limits.full(per_minute, 0.0), 0.0
    went: list[tuple[float, int]] = []
    for pause_s, amount in asked:
        now_s += pause_s
        bucket, wait_s = rate_limits.take(bucket, per_minute, amount, now_s)
        if wait_s == 0:
            went.append((now_s, amount))
    for first, (begin_s, _) in enumerate(went):
        for last in range(first, len(went)):
            window_min = (went[last][0] - begin_s) / 60
            *before, (_, largest) = went[first : last + 1]
            # A request larger than a bucket goes when the bucket is full: all but the last are within the
            # share.
            assert (
                sum(a for _, a in before) + min(largest, per_minute) <= per_minute * (1 + window_min) + 1e-6
            )


@given(PER_MINUTE, ASKED, st.integers(1, 300))
def test_a_client_that_waits_as_told_is_admitted(
    per_minute: int, asked: list[tuple[float, int]], amount: int
) -> None:
    bucket, now_s = rate_limits.full(per_minute, 0.0), 0.0
    for pause_s, each in asked:
        now_s += pause_s
        bucket, _ = rate_limits.take(bucket, per_minute, each, now_s)
    after, wait_s = rate_limits.take(bucket, per_minute, amount, now_s)
    if wait_s:
        assert rate_limits.take(after, per_minute, amount, now_s + wait_s * (1 + 1e-9) + 1e-6)[1] == 0
        assert rate_limits.take(after, per_minute, amount, now_s + wait_s * 0.99 - 1e-6)[1] > 0


@given(PER_MINUTE, st.floats(-1000, 1000), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_bucket_fills_evenly_and_never_beyond_a_minute(
    per_minute: int, level: float, first_s: float, then_s: float
) -> None:
    begun = Bucket(min(level, per_minute), 5.0)
    at_once = rate_limits.filled(begun, per_minute, 5.0 + first_s + then_s)
    in_two = rate_limits.filled(
        rate_limits.filled(begun, per_minute, 5.0 + first_s), per_minute, 5.0 + first_s + then_s
    )
    assert at_once.level == pytest.approx(in_two.level, abs=1e-6)
    assert at_once.level <= per_minute
    assert rate_limits.filled(begun, per_minute, 4.0) == begun, "a clock that goes back fills nothing"


@given(PER_MINUTE, st.integers(1, 300), st.integers(0, 300))
def test_unused_tokens_are_returned(per_minute: int, taken: int, used: int) -> None:
    full = rate_limits.full(per_minute, 0.0)
    after, _ = rate_limits.take(full, per_minute, taken, 0.0)
    assert rate_limits.settle(after, per_minute, taken, used).level == min(per_minute, per_minute - used)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_tenant_gets_a_time_to_retry_and_others_are_unaffected() -> None:
    clock, quota = Clock(), Quota(requests_per_minute=2)
    book = RateBook(clock)
    a, b = Tenant("a", quota=quota), Tenant("b", quota=quota)
    for _ in range(2):
        book.request(a)
    with pytest.raises(errors.RateLimited) as caught:
        book.request(a)
    assert (caught.value.retry_after_s, caught.value.details) == (30, {"reason": "requests_per_minute"})
    book.request(b)
    book.request(Tenant("a"))  # its quota was taken out of the file
    clock.now_s += 30
    book.request(a)
    with pytest.raises(errors.RateLimited):
        book.request(a)


def test_tokens_are_charged_at_first_by_the_most_that_is_asked_for() -> None:
    book, tenant = RateBook(Clock()), Tenant("a", quota=Quota(tokens_per_minute=100))
    first = book.charge(tenant, 90)
    assert first is not None
    with pytest.raises(errors.RateLimited):
        book.charge(tenant, 11)
    first.settle(20)
    first.settle(0)  # the first word counts
    assert book.charge(tenant, 80) is not None
    with pytest.raises(errors.RateLimited) as caught:
        book.charge(tenant, 1)
    assert caught.value.details == {"reason": "tokens_per_minute"}
    assert RateBook(Clock()).charge(Tenant("a"), 10**9) is None


@pytest.mark.parametrize(
    ("body", "used"),
    [
        (b'{"choices": [], "usage": {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5}}', 12),
        (b'{"choices": [{"text": "\\"total_tokens\\": 1"}], "usage": {"total_tokens":12}}', 12),
        (b'{"choices": [{"text": "\\"total_tokens\\": 1"}]}', 60),
        (b"", 60),
    ],
)
def test_a_whole_answer_costs_the_engine_s_usage(body: bytes, used: int) -> None:
    book, tenant = RateBook(Clock()), Tenant("a", quota=Quota(tokens_per_minute=100))
    charged = book.charge(tenant, 60)
    assert charged is not None
    charged.whole(body)
    assert book.charge(tenant, 100 - used) is not None
    with pytest.raises(errors.RateLimited):
        book.charge(tenant, 1)


@pytest.mark.parametrize(
    ("pieces", "used"),
    [
        ([b'data: {"a"}\n\n'] * 6 + [b"data: [DONE]\n\n"], 10 + 5),
        ([b'data: {"a"}\n\ndata: {"b"}\n\n', b'data: {"c"}\n\ndata: [DONE]\n\n'], 10 + 2),
        ([b'data: {"a"}\n\n', b'data: {"usage": {"total_', b'tokens": 33}}\n\ndata: [DONE]\n\n'], 33),
        ([b'data: {"a"}\n\n'], 10),
    ],
)
def test_a_stream_costs_its_events_or_the_engine_s_usage(pieces: list[bytes], used: int) -> None:
    book, tenant = RateBook(Clock()), Tenant("a", quota=Quota(tokens_per_minute=100))
    charged = book.charge(tenant, 90)
    assert charged is not None
    for piece in pieces:
        charged.saw(piece)
    charged.streamed(prompt_tokens=10)
    assert book.charge(tenant, 100 - used) is not None
    with pytest.raises(errors.RateLimited):
        book.charge(tenant, 1)


# --- several gateways ----------------------------------------------------------------------------


def exchange(books: list[RateBook]) -> None:
    reports = [book.report() for book in books]
    for book in books:
        book.hear(reports)


def went(book: RateBook, tenant: Tenant, asked: int) -> int:
    """The number of admitted requests among N."""
    count = 0
    for _ in range(asked):
        try:
            book.request(tenant)
        except errors.RateLimited:
            continue
        count += 1
    return count


@pytest.mark.parametrize("gateways", [2, 3, 5])
def test_gateways_share_one_quota(gateways: int) -> None:
    clock, tenant = Clock(), Tenant("a", quota=Quota(requests_per_minute=60))
    books = [RateBook(clock) for _ in range(gateways)]
    exchange(books)
    assert sum(went(book, tenant, 60) for book in books) == 60
    exchange(books)
    assert sum(went(book, tenant, 60) for book in books) == 0
    clock.now_s += 30
    exchange(books)
    assert sum(went(book, tenant, 60) for book in books) == 30


def test_one_gateway_gives_the_whole_quota_to_a_tenant_that_uses_it_alone() -> None:
    """One share at a time: a refused client comes again within a second."""
    clock, tenant = Clock(), Tenant("a", quota=Quota(requests_per_minute=64))
    books = [RateBook(clock), RateBook(clock)]
    exchange(books)
    given = []
    for _ in range(8):
        given.append(went(books[0], tenant, 100))
        exchange(books)
    assert given == [32, 16, 8, 4, 2, 1, 1, 0]


def test_a_gateway_that_comes_later_knows_what_was_given() -> None:
    clock, tenant = Clock(), Tenant("a", quota=Quota(requests_per_minute=60))
    first, late = RateBook(clock), RateBook(clock)
    assert went(first, tenant, 60) == 60, "alone it gives all"
    exchange([first, late])
    assert went(late, tenant, 60) == 0
    exchange([first])
    clock.now_s += 60
    assert went(first, tenant, 100) == 60, "the other is gone"


@given(
    st.integers(2, 4),
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3), st.integers(1, 50)), max_size=60),
)
def test_no_window_of_time_has_more_over_all_gateways(
    gateways: int, per_minute: int, asked: list[tuple[float, int, int]]
) -> None:
    """One request each is the exception, which is paid back."""
    clock, tenant = Clock(), Tenant("a", quota=Quota(requests_per_minute=per_minute))
    books = [RateBook(clock) for _ in range(gateways)]
    exchange(books)
    given: list[tuple[float, int]] = []
    for pause_s, which, count in asked:
        clock.now_s += pause_s
        if pause_s:
            exchange(books)
        given.append((clock.now_s, went(books[which % gateways], tenant, count)))
    for first, (begin_s, _) in enumerate(given):
        for last in range(first, len(given)):
            window_min = (given[last][0] - begin_s) / 60
            total = sum(count for _, count in given[first : last + 1])
            assert total <= per_minute * (1 + window_min) + gateways + 1e-6


def test_unused_tokens_are_returned_at_all_gateways() -> None:
    clock, tenant = Clock(), Tenant("a", quota=Quota(tokens_per_minute=1000))
    books = [RateBook(clock), RateBook(clock)]
    exchange(books)
    charge = books[0].charge(tenant, 900)  # more than a share
    assert charge is not None
    with pytest.raises(errors.RateLimited) as refused:
        books[0].charge(tenant, 50)
    assert refused.value.retry_after_s == 1, "of what is left the other has a share"
    charge.settle(100)
    exchange(books)
    assert books[1].charge(tenant, 440) is not None
    exchange(books)
    assert {round(level) for book in books for level in book.report().levels.values()} == {460}
