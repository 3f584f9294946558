"""Admission of requests to one base: at once, in turn, refused; and no request is ever lost."""

from __future__ import annotations

import asyncio
import heapq
import random
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane import errors
from controlplane.gateway.admission_queue import AdmissionQueue
from controlplane.state.terms import LatePolicy, Priority
from controlplane.traffic.base_router import BaseRouter, RoutingRules
from controlplane.traffic.member import Member, RoutedRequest
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant


class World:
    """A base whose workers take `limit` requests at once; time moves on demand."""

    def __init__(self, workers: int = 1, limit: int = 1, places: int = 100) -> None:
        self.now_s = 0.0
        self.router = BaseRouter(RoutingRules(), 0.0, is_ready=False)
        self.members = [Member(f"g{n}", limit) for n in range(workers)]
        self.router.set_members(self.members)
        self.queue = AdmissionQueue("base", self.router, places, lambda: self.now_s)

    def ask(self, **terms: Any) -> asyncio.Task[RoutedRequest]:
        request = InferenceRequest(RequestTerms(**terms), arrived_s=self.now_s)
        return asyncio.create_task(self.queue.enter(request))

    def end(self, routed: RoutedRequest) -> None:
        self.router.ended(routed)
        self.queue.pump()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def gone(*tasks: asyncio.Task[RoutedRequest]) -> list[bool]:
    await settle()
    return [task.done() for task in tasks]


def reason(task: asyncio.Task[RoutedRequest]) -> str:
    error = task.exception()
    assert isinstance(error, errors.Overloaded | errors.Late)
    assert isinstance(error, errors.Late) or (error.retry_after_s or 0) >= 1
    return str(error.details["reason"])


async def test_at_once_while_there_is_room_and_then_in_turn() -> None:
    world = World(workers=2)
    tasks = [world.ask() for _ in range(4)]
    assert await gone(*tasks) == [True, True, False, False]
    world.end(tasks[1].result())
    assert await gone(*tasks) == [True, True, True, False]
    assert tasks[2].result().member is tasks[1].result().member


async def test_a_new_request_does_not_pass_waiting_requests() -> None:
    world = World()
    first, waiting = world.ask(), world.ask()
    await settle()
    world.members.append(Member("new", 1))
    world.router.set_members(world.members)
    late = world.ask()
    assert await gone(first, waiting, late) == [True, True, False]


async def test_the_highest_priority_goes_first_and_the_lowest_is_displaced() -> None:
    world = World(places=2)
    running, low, normal = world.ask(), world.ask(priority=Priority.LOW), world.ask()
    await settle()
    high = world.ask(priority=Priority.HIGH)
    assert await gone(low, normal, high) == [True, False, False]
    assert reason(low) == "displaced"
    world.end(running.result())
    assert await gone(normal, high) == [False, True]


async def test_a_full_line_and_a_full_share_of_a_tenant_refuse_requests() -> None:
    world = World(places=3)
    small = Tenant("small", max_waiting=1)
    tasks = [world.ask(), world.ask(tenant=small)]
    await settle()
    refused = world.ask(tenant=small)
    await settle()
    assert reason(refused) == "full_tenant"
    assert "'small'" in str(refused.exception())
    tasks += [world.ask(), world.ask()]
    await settle()
    refused = world.ask()
    await settle()
    assert reason(refused) == "full_line"


async def test_a_promise_that_cannot_be_kept_is_not_made() -> None:
    """The line moves one request a second; a request that would wait past its target is refused."""
    world = World()
    tasks = [world.ask(tokens=10)]
    await settle()
    tasks += [world.ask(tokens=10) for _ in range(30)]
    await settle()
    for number in range(10):
        world.now_s += 1.0
        world.end(tasks[number].result())
        await settle()
    in_time, too_late = world.ask(tokens=10, ttft_s=60.0), world.ask(tokens=10, ttft_s=5.0)
    assert await gone(in_time, too_late) == [False, True]
    assert reason(too_late) == "promise"
    error = too_late.exception()
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_s == pytest.approx((21 + 1) * 1.25 - 5, abs=2)  # 21 turns, and its own


async def test_a_late_request_that_may_be_dropped_gets_no_turn() -> None:
    world = World()
    running = world.ask()
    await settle()
    late, patient = world.ask(ttft_s=1.0, late=LatePolicy.DROP), world.ask(ttft_s=1.0)
    await settle()
    world.now_s = 2.0
    world.end(running.result())
    assert await gone(late, patient) == [True, True]
    assert reason(late) == "late"
    assert patient.result().member is world.members[0]


async def test_a_cancelled_request_frees_its_place_and_its_turn() -> None:
    world = World()
    running, leaves, waits = world.ask(), world.ask(), world.ask()
    await settle()
    leaves.cancel()
    assert await gone(leaves, waits) == [True, False]
    assert len(world.queue) == 1
    world.end(running.result())
    waits.cancel()  # it has its turn, and does not know yet
    await settle()
    assert (len(world.queue), world.members[0].own) == (0, 0)
    assert await gone(world.ask()) == [True]


async def test_a_request_of_a_vanished_worker_goes_before_waiting_requests() -> None:
    world = World()
    first = world.ask()
    waiting = world.ask()
    await settle()
    routed = first.result()
    again = asyncio.create_task(world.queue.enter(routed.request, resent=True))
    await settle()
    world.end(routed)
    assert await gone(again, waiting) == [True, False]


async def test_requests_wait_without_workers_and_are_refused_after_the_limit() -> None:
    world = World(workers=0)
    old = world.ask()
    await settle()
    world.now_s = 10.0
    young = world.ask(ttft_s=0.001)
    await settle()
    world.queue.expire(5.0, lambda: errors.Unavailable("not there", retry_after_s=5))
    assert await gone(old, young) == [True, False]
    assert isinstance(old.exception(), errors.Unavailable)
    world.members.append(Member("new", 1))
    world.router.set_members(world.members)
    world.queue.begin()
    assert await gone(young) == [True]


async def test_a_request_takes_a_place_for_each_of_its_sequences() -> None:
    world = World(limit=4)
    first, wide = await world.ask(), world.ask(sequences=4)
    assert await gone(wide) == [False]
    # No request passes it, or it would never have all its places.
    narrow = world.ask()
    assert await gone(narrow) == [False]
    world.end(first)
    assert await gone(wide, narrow) == [True, False]
    world.end(wide.result())
    assert await gone(narrow) == [True]
    assert world.members[0].places == 1


async def test_a_request_wider_than_any_worker_goes_alone() -> None:
    world = World(limit=2)
    wide, narrow = world.ask(sequences=16), world.ask()
    assert await gone(wide, narrow) == [True, False]
    world.end(wide.result())
    assert await gone(narrow) == [True]


async def test_a_cancelled_wide_request_blocks_no_other_request() -> None:
    world = World(limit=4)
    first, wide = await world.ask(), world.ask(sequences=4)
    narrow = world.ask()
    assert await gone(wide, narrow) == [False, False]
    wide.cancel()
    assert await gone(narrow) == [True]
    assert first.member.places == 2


async def test_a_wide_request_goes_where_all_its_sequences_fit() -> None:
    world = World(workers=2, limit=4)
    in_flight = [await world.ask() for _ in range(2)]  # one each
    more = await world.ask(sequences=3)
    assert more.member.places == 4
    other = await world.ask(sequences=3)
    assert other.member is not more.member
    assert len(in_flight) == 2


@pytest.mark.parametrize("narrow", [1, 4, 8, 15])
async def test_the_widest_request_delays_others_by_two_answers_at_most(narrow: int) -> None:
    """An engine of 16 rows, on which every sequence takes a second: clients that each ask again after their
    answer, and one client that always asks for 16 sequences."""
    world = World(limit=16)
    waiting = {world.ask(): ("narrow", 0.0) for _ in range(narrow)}
    ends: list[tuple[float, int, RoutedRequest, str, float]] = []
    took: dict[str, list[float]] = {"narrow": [], "wide": []}
    order = count()
    for number in range(300):
        await settle()
        for task in [task for task in waiting if task.done()]:
            who, since_s = waiting.pop(task)
            heapq.heappush(ends, (world.now_s + 1.0, next(order), task.result(), who, since_s))
        world.now_s, _, routed, who, since_s = heapq.heappop(ends)
        took[who].append(world.now_s - since_s)
        world.end(routed)
        waiting[world.ask(sequences=16 if who == "wide" else 1)] = who, world.now_s
        if number == 50:
            waiting[world.ask(sequences=16)] = "wide", world.now_s
    assert max(took["narrow"]) <= 3.0
    assert len(took["wide"]) > 10
    for task in waiting:
        task.cancel()


async def test_no_request_starves_at_twice_the_capacity() -> None:
    """Two classes, each of which alone fills the worker: a request of the lower one goes within the time that
    `turns_at_most` allows: at most one of four turns is kept from it once it has waited 10 s."""
    world = World(places=400)
    running = [world.ask(priority=Priority.HIGH)]
    await settle()
    low = [world.ask(priority=Priority.LOW) for _ in range(5)]
    waited: list[float] = []
    for second in range(60):
        running += [world.ask(priority=Priority.HIGH) for _ in range(2)]
        await settle()
        world.now_s = float(second + 1)
        done = [task for task in (*running, *low) if task.done() and not task.result().ended]
        assert len(done) == 1
        world.end(done[0].result())
        await settle()
        waited = [task.result().sent_s for task in low if task.done()]
    assert len(waited) == 5
    assert max(waited) <= 10 + 4 * 5 + 1
    for task in running:
        task.cancel()
    await settle()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ("ask", "ask", "ask", "end", "end", "cancel", "broken", "come", "go", "time", "expire")
        ),
        st.integers(0, 10_000),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=2 * settings().max_examples)
@given(EVENTS)
def test_no_order_of_events_loses_a_request(events: list[tuple[str, int]]) -> None:
    asyncio.run(_play(events))


async def _play(events: list[tuple[str, int]]) -> None:  # noqa: PLR0915
    world = World(workers=1, limit=2, places=6)
    tasks: list[asyncio.Task[RoutedRequest]] = []
    cancelled: set[asyncio.Task[RoutedRequest]] = set()

    def running() -> list[RoutedRequest]:
        return [
            task.result()
            for task in tasks
            if task.done() and not task.cancelled() and task.exception() is None and not task.result().ended
        ]

    async def event(what: str, number: int) -> None:
        in_flight = running()
        if what == "ask":
            tasks.append(
                world.ask(
                    priority=list(Priority)[number % 3],
                    tenant=Tenant(str(number % 2), max_waiting=(None, 3)[number % 2]),
                    tokens=1 + number % 50,
                    ttft_s=(None, 5.0)[number % 2],
                    late=list(LatePolicy)[number % 2],
                    sequences=(1, 1, 1, 2, 5)[number % 5],
                )
            )
        elif what == "end" and in_flight:
            world.end(in_flight[number % len(in_flight)])
        elif what == "broken" and in_flight:
            routed = in_flight[number % len(in_flight)]
            tasks.append(asyncio.create_task(world.queue.enter(routed.request, resent=True)))
            world.end(routed)
        elif what == "cancel" and tasks:
            task = tasks[number % len(tasks)]
            if not task.done():
                task.cancel()
                cancelled.add(task)
        elif what == "come":
            world.members = [*world.members, Member(f"n{number}", 1 + number % 3)]
            world.router.set_members(world.members)
            world.queue.begin()
        elif what == "go" and world.members:
            world.members = world.members[1:]
            world.router.set_members(world.members)
        elif what == "time":
            world.now_s += number % 7
        elif what == "expire" and not world.members:
            world.queue.expire(world.now_s - 5.0, lambda: errors.Unavailable("gone"))

    rng = random.Random(len(events))
    for what, number in events:
        await event(what, number)
        if rng.random() < 0.5:
            await settle()
        for member in world.members:
            assert member.places <= member.limit or member.own == 1
    await settle()
    for member in world.members:
        own = [routed for routed in running() if routed.member is member]
        assert member.places == sum(routed.request.terms.sequences for routed in own)
    waiting = [task for task in tasks if not task.done()]
    assert len(world.queue) == len(waiting)
    if waiting and world.router.has_room:
        needed = world.queue._again[0].request.terms.sequences
        assert needed > 1, "somebody waits though there is room"
        assert not any(member.fits(needed) for member in world.members)
    here = [routed for routed in running() if routed.member.slot >= 0]
    assert sum(member.own for member in world.members) == len(here)
    world.members = [*world.members, Member("last", 1000)]
    world.router.set_members(world.members)
    world.queue.begin()
    await settle()
    for task in tasks:
        assert task.done(), "it waits for ever"
        if task.cancelled():
            assert task in cancelled
        elif task.exception() is not None:
            assert isinstance(task.exception(), errors.Overloaded | errors.Late | errors.Unavailable)
    for routed in running():
        world.end(routed)
    assert [member.own for member in world.members] == [0] * len(world.members)
