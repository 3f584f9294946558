"""Proposed moves on random clusters: what they promise holds, with the memory of both places counted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from placement.rebalancing import Move, Proposal, Tenant, less, to_fit, to_free_a_device, without
from placement.types import CPU, Device, Inventory, Placement, RankPlacement
from profiler.types import DeviceRates, Estimate, Plan

RATES = DeviceRates(1e12, 1e14)
PLAN = Plan(1, (2,), "none", 64, 64, 1, 16)
TOTAL = 10


def placed(*seats: tuple[int, int]) -> Placement:
    """Ranks by GPU and bytes."""
    ranks = tuple(
        RankPlacement(n, n, 0, "n", gpu, "h200", n, n + 1, size) for n, (gpu, size) in enumerate(seats)
    )
    return Placement(PLAN, ranks, Estimate(1.0, 1.0, (1,), 100.0), "it fits")


@dataclass(frozen=True)
class World:
    """GPUs of TOTAL bytes, groups of one or two ranks of equal size, and bytes taken by other processes."""

    groups: tuple[tuple[tuple[int, int], ...], ...]
    others: tuple[int, ...]
    newcomer: int

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(
            Tenant(f"g{n}", placed(*seats), 100 * sum(s for _, s in seats), 1.0)
            for n, seats in enumerate(self.groups)
        )

    def used(self) -> Counter[int]:
        return Counter(dict(enumerate(self.others))) + Counter(
            {
                gpu: sum(s for seats in self.groups for g, s in seats if g == gpu)
                for gpu in range(len(self.others))
            }
        )

    @property
    def inventory(self) -> Inventory:
        used = self.used()
        return Inventory(
            tuple(Device("n", n, "h200", TOTAL, TOTAL - used[n], RATES) for n in range(len(self.others)))
        )

    def decide(
        self, name: str, inventory: Inventory, moves: Sequence[Move], settled: bool
    ) -> Placement | None:
        """Best fit, each rank on a GPU of its own."""
        seats = [(0, self.newcomer)] if name == "new" else list(self.groups[int(name[1:])])
        free = sorted((d.free_bytes, d.index) for d in inventory.devices)
        chosen: list[tuple[int, int]] = []
        for _, size in seats:
            fits = [index for room, index in free if room >= size and index not in dict(chosen)]
            if not fits:
                return None
            chosen.append((fits[0], size))
        return placed(*chosen)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    gpus = draw(st.integers(1, 4))
    left = [TOTAL] * gpus
    others = []
    for n in range(gpus):
        others.append(draw(st.integers(0, 3)))
        left[n] -= others[n]
    groups = []
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(1, 6))
        wanted = draw(st.lists(st.integers(0, gpus - 1), min_size=1, max_size=2, unique=True))
        if all(left[gpu] >= size for gpu in wanted):
            for gpu in wanted:
                left[gpu] -= size
            groups.append(tuple((gpu, size) for gpu in wanted))
    return World(tuple(groups), tuple(others), draw(st.integers(1, TOTAL)))


def check_moves(world: World, proposal: Proposal) -> Counter[int]:
    """The memory afterwards. Meanwhile no GPU's memory is exceeded, with all in both places."""
    moved = {move.tenant.name for move in proposal.moves}
    assert len(moved) == len(proposal.moves)
    used = world.used()
    for move in proposal.moves:
        old = [(r.device_index, r.memory_bytes) for r in move.tenant.placement.ranks]
        new = [(r.device_index, r.memory_bytes) for r in move.placement.ranks]
        assert sorted(size for _, size in old) == sorted(size for _, size in new)
        everywhere = {("n", "h200", gpu) for gpu in range(len(world.others))}
        assert set(move.avoid) == everywhere - {("n", "h200", gpu) for gpu, _ in new}
        for gpu, size in new:
            used[gpu] += size
    assert all(used[n] <= TOTAL for n in range(len(world.others)))
    for move in proposal.moves:
        for rank in move.tenant.placement.ranks:
            used[rank.device_index] -= rank.memory_bytes
    return used


def occupied(world: World, proposal: Proposal | None) -> set[int]:
    moves = {move.tenant.name: move.placement for move in proposal.moves} if proposal else {}
    return {r.device_index for t in world.tenants for r in moves.get(t.name, t.placement).ranks}


@given(world=worlds())
def test_a_freed_device_is_free_and_no_other_is_taken_for_it(world: World) -> None:
    tenants, inventory = world.tenants, world.inventory
    before = copy.deepcopy((tenants, inventory))
    found = to_free_a_device(inventory, tenants, world.decide)
    assert (tenants, inventory) == before
    assert found == to_free_a_device(inventory, tenants, world.decide)
    if found is None:
        return
    check_moves(world, found)
    assert found.freed is not None
    assert found.freed.index not in occupied(world, found)
    assert len(occupied(world, found)) < len(occupied(world, None))
    assert found.load_bytes == sum(
        100 * r.memory_bytes for m in found.moves for r in m.tenant.placement.ranks
    )


@given(world=worlds())
def test_a_device_with_one_group_is_freed_if_the_group_fits_elsewhere(world: World) -> None:
    """Completeness where it is plain: one rank, alone on its GPU, and a GPU in use that has room for it."""
    simple = replace(world, groups=tuple(seats for seats in world.groups if len(seats) == 1))
    inventory = simple.inventory
    free = {d.index: d.free_bytes for d in inventory.devices}
    homes = [seats[0] for seats in simple.groups]
    movable = [
        gpu
        for gpu, size in homes
        if [g for g, _ in homes].count(gpu) == 1
        and any(other != gpu and free[other] >= size for other, _ in homes)
        # best fit must not choose an unused GPU instead: then nothing would be gained
        and not any(free[n] >= size for n in free if n not in [g for g, _ in homes])
    ]
    if movable:
        assert to_free_a_device(inventory, simple.tenants, simple.decide) is not None


@given(world=worlds())
def test_a_newcomer_fits_at_its_proposed_place(world: World) -> None:
    found = to_fit(world.inventory, world.tenants, world.decide, "new")
    free = {d.index: d.free_bytes for d in world.inventory.devices}
    if any(room >= world.newcomer for room in free.values()):
        assert found is not None
        assert found.moves == ()
    if found is None:
        assert not single_move_suffices(world)
        return
    used = check_moves(world, found)
    assert found.newcomer is not None
    (rank,) = found.newcomer.ranks
    assert used[rank.device_index] + world.newcomer <= TOTAL


def single_move_suffices(world: World) -> bool:
    """Brute force: some group to some other GPUs, then room for the newcomer, whatever best fit would do.

    Only groups of one rank, with one other GPU to go to: there is nothing to choose.
    """
    free = {d.index: d.free_bytes for d in world.inventory.devices}
    for seats in world.groups:
        if len(seats) > 1:
            continue
        ((home, size),) = seats
        targets = [gpu for (gpu,) in permutations(free, 1) if gpu != home and free[gpu] >= size]
        if len(targets) == 1 and free[home] + size >= world.newcomer:
            return True
    return False


def test_a_balanced_cluster_has_no_moves() -> None:
    empty = World((), (0, 0), 3)
    assert to_free_a_device(empty.inventory, (), empty.decide) is None
    alone = World((((0, 5),),), (0, 0), 3)
    assert to_free_a_device(alone.inventory, alone.tenants, alone.decide) is None  # it would take the other


@dataclass(frozen=True)
class FirstFit(World):
    """The group takes the first GPU with room, even if only that GPU could hold a larger group."""

    def decide(
        self, name: str, inventory: Inventory, moves: Sequence[Move], settled: bool
    ) -> Placement | None:
        ((_, size),) = self.groups[int(name[1:])]
        free = (d.index for d in inventory.devices if d.free_bytes >= size)
        return next((placed((index, size)) for index in free), None)


def test_moves_go_where_they_were_proposed_in_whatever_order_they_are_made() -> None:
    """The small one, launched first, would take the only place of the large one."""
    world = FirstFit((((0, 2),), ((0, 4),), ((1, 6),), ((2, 7),)), (0, 0, 0), 1)
    found = to_free_a_device(world.inventory, world.tenants, world.decide)
    assert found is not None
    assert {m.tenant.name: m.placement.ranks[0].device_index for m in found.moves} == {"g1": 1, "g0": 2}
    for order in permutations(found.moves):
        left = world.inventory
        for move in order:
            place = world.decide(move.tenant.name, without(left, move.avoid), (), False)
            assert place == move.placement
            left = less(left, [move.placement])


def test_a_device_with_a_group_that_stays_is_not_freed() -> None:
    world = World((((0, 2),), ((1, 5),)), (4, 0), 1)
    staying = (placed((0, 4)),)
    assert to_free_a_device(world.inventory, world.tenants, world.decide, staying) is None
    roomy = World((((0, 2),), ((1, 3),)), (4, 0), 1)
    found = to_free_a_device(roomy.inventory, roomy.tenants, roomy.decide, staying)
    assert found is not None
    assert found.freed is not None
    assert found.freed.index == 1


def test_to_share_a_device_with_a_group_that_stays_is_a_gain() -> None:
    world = World((((0, 2),),), (0, 4), 1)
    assert to_free_a_device(world.inventory, world.tenants, world.decide) is None
    found = to_free_a_device(world.inventory, world.tenants, world.decide, (placed((1, 4)),))
    assert found is not None
    assert [m.placement.ranks[0].device_index for m in found.moves] == [1]


def test_nothing_moves_between_gpus_and_cpu_hosts() -> None:
    world = World((((0, 2),), ((1, 9),)), (0, 0), 1)
    host = Device("n", 0, CPU, TOTAL, TOTAL, RATES)
    inventory = replace(world.inventory, devices=(*world.inventory.devices, host))
    seen: set[str] = set()

    def decide(name: str, left: Inventory, moves: Sequence[Move], settled: bool) -> Placement | None:
        seen.update(d.kind for d in left.devices)
        return None

    assert to_free_a_device(inventory, world.tenants, decide) is None
    assert seen == {"h200"}
    on_host = replace(placed((0, 2)), ranks=(replace(placed((0, 2)).ranks[0], device_kind=CPU),))
    seen.clear()
    other = replace(host, node="m")
    to_free_a_device(
        replace(inventory, devices=(*inventory.devices, other)), (Tenant("c", on_host, 1, 1.0),), decide
    )
    assert seen == {CPU}
