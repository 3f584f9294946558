"""Which variants stay in a host's memory, against an ordered dictionary."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.routing.snapshot import ELSEWHERE, IN_HOST_MEMORY
from controlplane.simulation import host_memory
from controlplane.simulation.run import run
from controlplane.simulation.world import World, room_for_ended
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Machine

VARIANTS = 6
MACHINE = Machine(
    row_s=(0.0,) * (VARIANTS + 1), prompt_s=(0.0,) * (VARIANTS + 1), load_s=(0.0, *(0.1,) * VARIANTS)
)


def new(sizes: list[int], limit: float, requests: list[Asked] | None = None) -> World:
    world = worlds.new(MACHINE, requests or [])
    world.truth.variants.bytes[0, 1:] = sizes
    host_memory.fill(world, limit)
    return world


SIZES = st.lists(st.integers(1, 5), min_size=VARIANTS, max_size=VARIANTS)
# A variant that is used, and whether it has a slot from then on.
USES = st.lists(st.tuples(st.integers(1, VARIANTS), st.booleans()), max_size=30)


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(SIZES, st.integers(0, 25), USES)
def test_the_least_recently_used_variants_leave_unless_they_are_in_a_slot(
    sizes: list[int], limit: int, uses: list[tuple[int, bool]]
) -> None:
    world = new(sizes, float(limit))
    held: OrderedDict[int, int] = OrderedDict()
    total = 0
    for variant, size in enumerate(sizes, start=1):
        total += size
        if total <= limit:
            held[variant] = size
    in_slot: set[int] = set()
    for variant, slot in uses:
        world.where.slot[0, variant] = 0 if slot else -1
        in_slot = in_slot | {variant} if slot else in_slot - {variant}
        host_memory.keep(world, 0, variant)
        held[variant] = sizes[variant - 1]
        held.move_to_end(variant)
        for other in list(held):
            if sum(held.values()) > limit and other != variant and other not in in_slot:
                del held[other]
        there = {v for v in range(1, VARIANTS + 1) if world.where.in_host[0, v]}
        assert there == set(held)
        assert world.engines.host_bytes[0] == sum(held.values())


@given(SIZES)
def test_all_variants_stay_without_a_bound(sizes: list[int]) -> None:
    world = new(sizes, math.inf)
    for variant in range(1, VARIANTS + 1):
        host_memory.keep(world, 0, variant)
    assert world.where.in_host[0].all()


@pytest.mark.parametrize("fetch_s", [0.0, 0.5, 50.0])
def test_a_variant_that_waits_for_a_slot_is_fetched_meanwhile(fetch_s: float) -> None:
    """One slot; the second request comes while the first runs, and begins when its variant is there."""
    world = new([1] * VARIANTS, 1.0, [Asked(0.0, 1, 100, 1), Asked(0.2, 1, 1, 2)])
    world.truth.models.slots = 1
    world.slots.variant[0, 1:], world.slots.busy[0, 1:] = 0, 1
    world.truth.variants.fetch_s[0, 2] = fetch_s
    world.where.in_host[0, 2] = 0
    run(world, worlds.rules(limit=1), math.inf, room_for_ended(world))
    first, second = world.outcomes
    free_s, seen_s = first.end_s, 0.2
    begins_s = max(free_s, seen_s + fetch_s) + 0.1  # where 0.1 is the load from the host's memory
    assert second.first_s - MACHINE.prefill_s(1) == pytest.approx(begins_s, abs=0.03)  # a step of the first


@pytest.mark.parametrize(("limit", "fetched"), [(2.0, False), (1.0, True)])
def test_an_evicted_variant_is_fetched_again(limit: float, fetched: bool) -> None:
    """Two variants of one byte, asked in turn, in an engine with one slot."""
    requests = [Asked(0.0, 1, 1, 1), Asked(10.0, 1, 1, 2), Asked(20.0, 1, 1, 1)]
    world = new([1] * VARIANTS, limit, requests)
    world.truth.models.slots = 1
    world.slots.variant[0, 1:], world.slots.busy[0, 1:] = 0, 1
    world.truth.variants.fetch_s[0] = 2.0
    run(world, worlds.rules(limit=1), 19.0, room_for_ended(world))
    where = world.seen.held.where[:, 0]
    assert where[1] == (ELSEWHERE if fetched else IN_HOST_MEMORY)
    run(world, worlds.rules(limit=1), math.inf, room_for_ended(world))
    taken_s = world.outcomes.first_s - world.asked.arrival_s
    expected_s = 0.1 + MACHINE.prefill_s(1) + (2.0 if fetched else 0.0)
    assert taken_s[2] == pytest.approx(expected_s)
