"""The scheduler's account of slots against ranks that answer late, in any order, or not as hoped."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.scheduling.policy import ABSENT, LOADING, READY
from workers.scheduling.residency import Residency

SIZES = {1: 40, 2: 60, 3: 30, 4: 100, 5: 10}  # bytes of each variant on every rank
NOBODY: frozenset[int] = frozenset()


@dataclass
class Rank:
    """A rank as it is specified: reads in any order, places one after the other, and does nothing
    about a slot that a newer order has overtaken. `slots` is what really lies on its device."""

    number: int
    arena: int
    slots: dict[int, int] = field(default_factory=dict)
    reading: list[dict[str, Any]] = field(default_factory=list)
    placing: list[dict[str, Any]] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    host: dict[int, int] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    says_bytes: bool = False  # what variants need, before they are there

    def receive(self, message: dict[str, Any]) -> None:
        if message["do"] in ("place", "clear"):
            self.newest[message["slot"]] = message["order"]
        (self.placing if message["do"] in ("clear", "forget") else self.reading).append(message)

    @property
    def busy(self) -> bool:
        return bool(self.reading or self.placing or self.reports)

    def work(self, rng: random.Random) -> None:
        """One thing that may happen next on this rank."""
        if self.placing and (not self.reading or rng.random() < 0.5):
            self.place(self.placing.pop(0))
        elif self.reading:
            self.read(self.reading.pop(rng.randrange(len(self.reading))))

    def read(self, message: dict[str, Any]) -> None:
        if message["uid"] in self.broken:
            self.report(message, did="failed", error=f"no {message['path']}", fault="files")
            return
        self.host[message["uid"]] = SIZES[message["uid"]]
        if message["do"] == "prepare":
            self.report(message, did="prepared", **self.needs(message))
        else:
            self.placing.append(message)

    def place(self, message: dict[str, Any]) -> None:
        if message["do"] == "forget":
            self.host.pop(message["uid"], None)
            return
        slot = message["slot"]
        if message["do"] == "clear":
            self.slots.pop(slot, None)
            return
        if self.newest[slot] != message["order"]:
            return
        uid = message["uid"]
        self.slots = {s: u for s, u in self.slots.items() if s != slot and u != uid}
        if sum(SIZES[u] for u in self.slots.values()) + SIZES[uid] > self.arena:
            self.report(message, did="no_room", error="full", **self.needs(message))
            return
        self.slots[slot] = uid
        self.report(message, did="placed", bytes=SIZES[uid])

    def needs(self, message: dict[str, Any]) -> dict[str, int]:
        return {"bytes": SIZES[message["uid"]]} if self.says_bytes else {}

    def report(self, message: dict[str, Any], **what: Any) -> None:
        about = {key: message.get(key) for key in ("uid", "slot", "order")}
        self.reports.append({**about, **what, "host": {str(uid): size for uid, size in self.host.items()}})


class World:
    """A Residency and its ranks; messages are delivered in order, everything else in any. With an odd seed
    the ranks say what they have room for, and what variants take."""

    def __init__(self, slots: int, ranks: int, arena: int, seed: int) -> None:
        self.residency = Residency(slots, ranks)
        self.ranks = [Rank(number, arena + 5 * number) for number in range(ranks)]
        self.rng = random.Random(seed)
        if seed % 2:
            for rank in self.ranks:
                rank.says_bytes = True
                self.residency.has_room(rank.number, rank.arena)

    def send(self) -> None:
        for message in self.residency.outbox:
            for rank in self.ranks:
                rank.receive(message)
        self.residency.outbox.clear()

    def is_failing(self) -> bool:
        return self.residency.failing

    def has_departing(self) -> bool:
        return self.residency.departing

    def happen(self) -> None:
        rank = self.rng.choice(self.ranks)
        if rank.reports and self.rng.random() < 0.4:
            report = rank.reports.pop(self.rng.randrange(len(rank.reports)))
            self.residency.reported(rank.number, report)
            self.send()
        else:
            rank.work(self.rng)

    def load(self, uid: int, busy: frozenset[int] = NOBODY) -> bool:
        done = self.residency.load(uid, f"/{uid}", busy)
        self.send()
        return done

    def settle(self) -> None:
        while any(rank.busy for rank in self.ranks):
            self.happen()

    def ready(self) -> set[int]:
        return {uid for uid in SIZES if self.residency.readiness(uid) == READY}

    def check(self) -> None:
        """A variant that may run is in its place on every rank, and overlaps no other variant."""
        slot_of = {v["uid"]: v["slot"] for v in self.residency.snapshot() if v["slot"] is not None}
        assert len(set(slot_of.values())) == len(slot_of)
        for uid in self.ready():
            for rank in self.ranks:
                assert rank.slots.get(slot_of[uid]) == uid


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["load", "prepare", "ahead", "wait", "break", "mend", "forget"]),
        st.sampled_from(sorted(SIZES)),
    ),
    max_size=40,
)


@settings(max_examples=3 * settings().max_examples)
@given(STEPS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_a_variant_may_run_once_every_rank_holds_it(
    steps: list[tuple[str, int]], slots: int, ranks: int, seed: int
) -> None:
    world = World(slots, ranks, 100, seed)
    for step, uid in steps:
        busy = frozenset(u for u in world.ready() if world.rng.random() < 0.5)
        match step:
            case "load" if not world.residency.error(uid):
                world.load(uid, busy)
            case "prepare":
                world.residency.prepare(uid, f"/{uid}")
                world.send()
            case "ahead":
                world.residency.read_ahead(uid, f"/{uid}")
                world.send()
            case "forget":
                world.residency.forget(uid)
                world.residency.let_go(busy)
                world.send()
            case "break":
                world.ranks[-1].broken.add(uid)
            case "mend":
                world.ranks[-1].broken.discard(uid)
        assert busy <= world.ready()  # none of those in use has lost its slot
        world.check()
        for _ in range(world.rng.randrange(12)):
            world.happen()
            assert busy <= world.ready()
            world.check()
    world.settle()
    world.check()
    for rank in world.ranks:
        held = {uid for uid in rank.slots.values() if uid not in world.ready()}
        lost = set(SIZES) - {v["uid"] for v in world.residency.snapshot() if v["slot"] is not None}
        assert not held & lost  # no memory is taken by what the scheduler has given up


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_everything_wanted_is_ready_in_the_end(wanted: list[int], slots: int, ranks: int, seed: int) -> None:
    """A variant that is requested again and again gets a slot and room, though others must leave for it."""
    world = World(slots, ranks, 100, seed)
    for uid in wanted:
        for _ in range(2000):
            if world.residency.readiness(uid) == READY:
                break
            if world.residency.readiness(uid) != LOADING:
                world.load(uid)
            world.happen()
            world.check()
        assert world.residency.readiness(uid) == READY


def test_an_error_is_reported_once_and_the_next_request_tries_again() -> None:
    world = World(2, 2, 100, 0)
    world.ranks[1].broken.add(3)
    assert world.load(3)
    world.settle()
    assert world.residency.readiness(3) == ABSENT
    assert world.residency.error(3) == "no /3"
    assert world.residency.take_failures() == {3: "no /3"}
    assert world.residency.error(3) == ""
    (described,) = world.residency.snapshot()
    assert described["reason"] == "no /3"  # people may still read it
    assert (described["error"], described["fault"]) == ("no /3", "files")
    assert world.ranks[0].slots == {}  # the other rank's memory is free again
    world.ranks[1].broken.clear()
    assert world.load(3)
    world.settle()
    assert world.ready() == {3}
    assert world.residency.snapshot()[0]["reason"] == world.residency.snapshot()[0]["error"] == ""


@pytest.mark.parametrize("renew", ["forgive", "prepare"])
def test_forgive_and_prepare_clear_an_error(renew: str) -> None:
    world = World(1, 1, 100, 0)
    world.ranks[0].broken.add(1)
    world.load(1)
    world.settle()
    assert world.is_failing()
    getattr(world.residency, renew)(*((1, "/1") if renew == "prepare" else (1,)))
    assert not world.is_failing()
    assert world.residency.error(1) == ""


def test_a_variant_that_runs_does_not_need_its_files() -> None:
    """Its requests go on although it can no longer be read, say after it left host memory."""
    world = World(1, 2, 100, 0)
    world.load(2)
    world.settle()
    world.ranks[0].broken.add(2)
    world.residency.prepare(2, "/2")
    assert world.residency.prepared(2)
    world.send()
    world.settle()
    assert world.ready() == {2}
    assert not world.is_failing()


def test_a_report_about_an_older_order_is_ignored() -> None:
    """A lost slot was given back meanwhile: what the rank placed first has been overwritten since."""
    residency = Residency(1, 1)
    for uid in (1, 2, 1):
        residency.load(uid, f"/{uid}", NOBODY)
    first, second, third = (m["order"] for m in residency.outbox if m["do"] == "place")
    placed = {"did": "placed", "slot": 0, "bytes": 1, "host": {}}
    residency.reported(0, {**placed, "uid": 1, "order": first})
    assert residency.readiness(1) == LOADING
    residency.reported(0, {**placed, "uid": 2, "order": second})
    assert residency.readiness(2) == ABSENT
    residency.reported(0, {**placed, "uid": 1, "order": third})
    assert residency.readiness(1) == READY


def test_prepared_means_that_every_rank_has_read_it_even_if_one_forgot_it_since() -> None:
    residency = Residency(1, 2)
    residency.prepare(1, "/1")
    order = residency.outbox[0]["order"]
    report = {"uid": 1, "slot": None, "order": order, "did": "prepared"}
    residency.reported(0, {**report, "host": {"1": 5}})
    assert not residency.prepared(1)
    residency.reported(0, {"uid": 9, "slot": None, "order": 99, "did": "prepared", "host": {"9": 5}})
    residency.reported(1, {**report, "host": {"1": 5}})
    assert residency.prepared(1)
    assert residency.snapshot()[0]["tier"] == "disk"  # not on rank 0 any more


class Ahead:
    """A Residency of one slot and two ranks, which get only the messages of `report`."""

    def __init__(self) -> None:
        self.residency = Residency(1, 2)

    def read(self, uid: int) -> None:
        self.residency.read_ahead(uid, f"/{uid}")

    def report(self, uid: int, rank: int, did: str = "prepared", **what: Any) -> None:
        order = next(m["order"] for m in reversed(self.residency.outbox) if m["uid"] == uid)
        told = {"uid": uid, "slot": None, "order": order, "did": did, "host": {str(uid): 5}}
        self.residency.reported(rank, {**told, **what})

    def ordered(self) -> list[tuple[str, int]]:
        return [(m["do"], m["uid"]) for m in self.residency.outbox]


def test_one_variant_at_a_time_is_read_ahead() -> None:
    """Variants without a slot that are not in host memory on every rank; once for each slot they get."""
    ahead = Ahead()
    for uid in (1, 1, 2):
        ahead.read(uid)
    ahead.report(1, 0)
    ahead.read(2)
    assert ahead.ordered() == [("prepare", 1)]  # rank 1 still reads
    ahead.report(1, 1)
    ahead.read(1)  # it is there
    ahead.residency.load(3, "/3", NOBODY)
    ahead.read(3)  # it has a slot
    ahead.read(2)
    assert ahead.ordered()[1:] == [("place", 3), ("prepare", 2)]


def test_a_failed_prefetch_delays_no_request_and_ends_nothing() -> None:
    """The placement is another try, and is reported."""
    ahead = Ahead()
    ahead.read(1)
    for rank in range(2):
        ahead.report(1, rank, "failed", error="no file", host={})
    assert not ahead.residency.failing
    ahead.read(1)
    ahead.read(2)
    assert ahead.ordered() == [("prepare", 1), ("prepare", 2)]
    ahead.residency.load(1, "/1", NOBODY)
    ahead.report(1, 0, "failed", slot=0, error="no file", host={})
    assert ahead.residency.error(1) == "no file"


def test_a_forgotten_variant_that_is_read_ahead_goes_when_it_was_read() -> None:
    """Otherwise its memory would be taken for good: it is kept when it has been read."""
    ahead = Ahead()
    ahead.residency.prepare(1, "/1")
    for rank in range(2):
        ahead.report(1, rank, host={})
    ahead.residency.forget(1)  # a request of it still waits
    ahead.read(1)
    ahead.residency.let_go(NOBODY)
    assert ("forget", 1) not in ahead.ordered()
    for rank in range(2):
        ahead.report(1, rank)
    ahead.residency.let_go(NOBODY)
    assert ahead.ordered()[-1] == ("forget", 1)
    assert not ahead.residency.departing


@pytest.mark.parametrize("ends", ["prepared", "failed"])
def test_a_forgotten_variant_that_is_asked_for_goes_when_every_rank_has_answered(ends: str) -> None:
    """Otherwise the request would wait for ever, and a rank would keep what it reads."""
    ahead = Ahead()
    ahead.residency.prepare(1, "/1")
    ahead.residency.forget(1)
    ahead.residency.let_go(NOBODY)
    ahead.report(1, 0, ends, error="no file", fault="files", host={})
    ahead.residency.let_go(NOBODY)
    assert ahead.ordered() == [("prepare", 1)]
    assert ahead.residency.departing
    assert ahead.residency.error(1) == ("no file" if ends == "failed" else "")
    ahead.report(1, 1, host={})
    assert ahead.residency.error(1) or ahead.residency.prepared(1)
    ahead.residency.let_go(NOBODY)
    assert ahead.ordered() == [("prepare", 1), ("forget", 1)]
    assert not ahead.residency.departing


def test_a_slot_is_taken_from_who_was_used_longest_ago() -> None:
    world = World(3, 1, 1000, 0)
    for uid in (1, 2, 3):
        world.load(uid)
        world.settle()
    world.residency.touch([1])
    world.load(4, frozenset({2}))
    world.settle()
    assert world.ready() == {1, 2, 4}
    assert not world.load(5, frozenset({1, 2, 4}))


def test_a_deleted_variant_leaves_once_no_request_needs_it() -> None:
    world = World(2, 2, 100, 0)
    for uid in (1, 2):
        assert world.load(uid)
    world.settle()
    world.residency.forget(1)
    world.residency.let_go(frozenset({1}))  # a request of it still runs
    assert world.has_departing()
    assert world.ready() == {1, 2}
    world.residency.let_go(NOBODY)
    world.send()
    world.settle()
    assert not world.has_departing()
    assert [v["uid"] for v in world.residency.snapshot()] == [2]
    assert [rank.slots for rank in world.ranks] == [{1: 2}, {1: 2}]
    assert [set(rank.host) for rank in world.ranks] == [{2}, {2}]


def test_a_variant_wanted_again_before_it_went_stays() -> None:
    world = World(1, 1, 100, 0)
    assert world.load(1)
    world.settle()
    world.residency.forget(1)
    world.residency.prepare(1, "/1")
    world.residency.let_go(NOBODY)
    world.send()
    world.settle()
    assert world.ready() == {1}


def report(residency: Residency, rank: int, did: str, host: tuple[int, ...] = (1,), **others: Any) -> None:
    """The reports about the newest order for variant 1."""
    variant = residency._variants[1]
    order = variant.preparing if did == "prepared" else variant.placing
    slot = None if did == "prepared" else variant.slot
    about = {"uid": 1, "slot": slot, "order": order, "host": {str(uid): 40 for uid in host}}
    residency.reported(rank, {**about, "did": did, "bytes": 40, "error": "", **others})


def test_steps_wait_for_a_slot_only_where_all_ranks_begin_to_fill_it_at_once() -> None:
    residency = Residency(slots=1, ranks=2)
    residency.prepare(1, "one")
    assert not residency.soon(1)
    for rank in range(2):
        report(residency, rank, "prepared", streams=True)
    assert not residency.soon(1)  # no slot was ordered
    assert residency.load(1, "one", NOBODY)
    assert residency.soon(1)
    report(residency, 0, "placed", streams=True)
    assert residency.soon(1)
    assert residency.readiness(1) == LOADING  # all ranks must have begun: a step is of all of them
    report(residency, 1, "placed", streams=True)
    assert not residency.soon(1)
    assert residency.readiness(1) == READY

    residency.load(2, "two", NOBODY)  # takes the slot
    residency.load(1, "one", NOBODY)
    report(residency, 0, "prepared", host=())  # it has left a rank's host memory
    assert not residency.soon(1)


def test_a_rank_that_fails_after_all_had_begun_takes_the_variant_from_its_slot() -> None:
    residency = Residency(slots=1, ranks=2)
    residency.load(1, "one", NOBODY)
    for rank in range(2):
        report(residency, rank, "placed", streams=True)
    assert residency.readiness(1) == READY
    residency.outbox.clear()
    report(residency, 1, "failed", error="lost", fault="engine")
    report(residency, 0, "failed", error="lost, too")
    assert residency.readiness(1) == LOADING  # no caller is let in
    assert residency.take_failures() == {1: "lost"}
    residency.give_up({1})  # a step in flight reads the slot
    assert not residency.load(2, "two", frozenset({1}))
    assert not residency.outbox
    residency.give_up(())
    assert residency.readiness(1) == ABSENT
    assert [message["do"] for message in residency.outbox] == ["clear"]
    report(residency, 0, "failed", error="late")  # of an order that is over
    assert residency.load(1, "one", NOBODY)
    assert residency.readiness(1) == LOADING
