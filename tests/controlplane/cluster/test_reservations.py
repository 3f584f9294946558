"""Free memory for the next placement, and promises to holders, against simulations of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cluster import reservations
from controlplane.state.records import NodeLedger, Phase, Reservation
from controlplane.state.repository import Versioned
from controlplane.state.worker_groups import GroupPhase
from placement.types import Device, DeviceKey, HolderMemory, Inventory, Placement, RankPlacement
from profiler.types import DeviceRates
from testkit.controlplane import builders
from testkit.controlplane.ledger_steps import after
from workers.agent.sampling import OWN

GIB = 1 << 30
RATES = DeviceRates(1e12, 1e14)


def gpu(index: int, total: int, used: int, *uses: HolderMemory, node: str = "n") -> Device:
    return Device(node, index, "h200", total, total - used, RATES, uses=uses)


def placement(*ranks: tuple[str, int, int]) -> Placement:
    """One of ranks (node, GPU, bytes)."""
    seats = tuple(
        RankPlacement(n, n, 0, node, index, "h200", n, n + 1, size)
        for n, (node, index, size) in enumerate(ranks)
    )
    return replace(builders.PLACED, ranks=seats)


# --- one device, lived through ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tenant:
    """The holders of a device's memory: what each was promised, and what it has taken by now."""

    promised: int
    taken: int
    seen: bool  # whether the node can name its processes


TENANTS = st.lists(st.builds(Tenant, st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=5)


def tenancy(tenants: list[Tenant], strangers: int, total: int) -> tuple[Device, dict[str, int]]:
    uses = [HolderMemory(f"m{n}" if t.seen else None, t.taken) for n, t in enumerate(tenants) if t.taken]
    used = sum(t.taken for t in tenants) + strangers
    return gpu(0, total, used, *uses), {f"m{n}": t.promised for n, t in enumerate(tenants) if t.promised}


@given(tenants=TENANTS, strangers=st.integers(0, 40), spare=st.integers(0, 200))
def test_free_memory_is_neither_used_nor_promised(tenants: list[Tenant], strangers: int, spare: int) -> None:
    """Each tenant ends with the more of what it was promised and what it took; strangers keep theirs."""
    tenants = [replace(t, seen=True) for t in tenants]
    total = sum(t.taken for t in tenants) + strangers + spare
    device, promises = tenancy(tenants, strangers, total)
    left = total - strangers - sum(max(t.promised, t.taken) for t in tenants)
    assert reservations.memory_usage(device, promises, 0.0).free == max(0, left)


@given(tenants=TENANTS, strangers=st.integers(0, 40), spare=st.integers(0, 200), share=st.floats(0, 0.5))
def test_an_account_adds_up(tenants: list[Tenant], strangers: int, spare: int, share: float) -> None:
    device, promises = tenancy(tenants, strangers, sum(t.taken for t in tenants) + strangers + spare + 1)
    a = reservations.memory_usage(device, promises, share)
    parts = sum(a.ours.values()) + a.others + a.headroom
    assert a.free == max(0, device.total_bytes - parts)
    assert a.free <= device.free_bytes
    assert min(a.others, a.headroom, a.free) >= 0
    assert set(a.ours) == set(promises)
    assert all(a.ours[holder] >= count for holder, count in promises.items())


@given(tenants=TENANTS, strangers=st.integers(0, 40), spare=st.integers(0, 200), more=st.integers(1, 40))
def test_a_promise_to_a_holder_without_memory_takes_its_bytes(
    tenants: list[Tenant], strangers: int, spare: int, more: int
) -> None:
    tenants = [replace(t, seen=True) for t in tenants]
    device, promises = tenancy(tenants, strangers, sum(t.taken for t in tenants) + strangers + spare + 1)
    before = reservations.memory_usage(device, promises, 0.0).free
    assert reservations.memory_usage(device, {**promises, "new": more}, 0.0).free == max(0, before - more)


def test_an_engine_that_its_node_cannot_name_is_not_counted_twice() -> None:
    device = gpu(0, 100, 35, HolderMemory(None, 30))
    a = reservations.memory_usage(device, {"m": 40}, 0.0)
    assert (a.ours, a.others, a.free) == ({"m": 40}, 5, 55)
    seen = gpu(
        0, 100, 65, HolderMemory(None, 30), HolderMemory("m", 30)
    )  # here it can: the other 30 belong to another process
    assert reservations.memory_usage(seen, {"m": 40}, 0.0).free == 100 - 40 - 35


def test_an_engine_without_a_promise_is_a_stranger() -> None:
    device = gpu(0, 100, 30, HolderMemory("old", 30))
    assert reservations.memory_usage(device, {}, 0.1).free == 60


def test_a_stale_holder_has_memory_without_a_promise_of_the_device() -> None:
    state = builders.state()
    for holder, index in (("m", 0), ("new", 1)):
        state = after(state, reservations.reserve(state, holder, 1, placement(("n", index, 9)), 0.0))
    uses = (HolderMemory("m", 9), HolderMemory("old", 9), HolderMemory("", 9), HolderMemory(None, 9))
    inventory = Inventory((gpu(0, 100, 36, *uses),))
    assert reservations.stale_holders(inventory, state.ledgers) == {"old"}
    assert reservations.stale_holders(inventory, state.ledgers, "m") == {"old", "m"}  # it is placed again
    elsewhere = Inventory((gpu(1, 100, 9, HolderMemory("m", 9)),))
    assert reservations.stale_holders(elsewhere, state.ledgers) == {"m"}


# --- reserving and releasing -----------------------------------------------------------------------

SEATS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=4
)


@given(asked=st.lists(st.tuples(st.sampled_from("xyz"), st.none() | SEATS), max_size=8))
def test_ledgers_hold_the_last_placement(asked: list[tuple[str, list[tuple[str, int, int]] | None]]) -> None:
    """Against a dictionary of each holder's seats; None releases."""
    state, model = builders.state(), dict[str, list[tuple[str, int, int]]]()
    for holder, seats in asked:
        if seats is None:
            model.pop(holder, None)
            state = after(state, reservations.release(state, holder))
        else:
            model[holder] = seats
            state = after(state, reservations.reserve(state, holder, 1, placement(*seats), 5.0))
    expected: dict[tuple[str, str, int], dict[str, int]] = {}
    for holder, seats in model.items():
        for node, index, size in seats:
            device = expected.setdefault((node, "h200", index), {})
            device[holder] = device.get(holder, 0) + size
    assert reservations.promised(state.ledgers) == expected
    assert set(state.ledgers) == {node for node, _, _ in expected}  # an empty one is none


def test_a_reservation_names_its_holder_device_and_time() -> None:
    state = builders.state()
    state = after(state, reservations.reserve(state, "m", 7, placement(("a", 1, 9), ("b", 0, 3)), 5.0))
    assert state.ledgers["a"].record == NodeLedger("a", (Reservation("m", 7, 0, "h200", 1, 9, 5.0),))
    assert state.ledgers["b"].record == NodeLedger("b", (Reservation("m", 7, 1, "h200", 0, 3, 5.0),))


def test_a_group_that_is_placed_again_does_not_block_itself() -> None:
    state = builders.state()
    for holder, size in (("m", 60), ("other", 10)):
        state = after(state, reservations.reserve(state, holder, 1, placement(("n", 0, size)), 0.0))
    inventory = Inventory((gpu(0, 100, 0), gpu(1, 100, 0)))

    def free(besides: str) -> list[int]:
        return [d.free_bytes for d in reservations.available(inventory, state.ledgers, 0.1, besides).devices]

    assert free("") == [20, 90]
    assert free("m") == [80, 90]


@given(
    tenants=TENANTS,
    strangers=st.integers(0, 40),
    spare=st.integers(0, 200),
    share=st.floats(0, 0.5),
    own=st.builds(Tenant, st.integers(1, 40), st.integers(0, 40), st.just(True)),
)
def test_a_measurement_s_memory_counts_until_it_ends(
    tenants: list[Tenant], strangers: int, spare: int, share: float, own: Tenant
) -> None:
    """Then the device is as if it had never been there."""
    tenants = [replace(t, seen=True) for t in tenants]
    total = sum(t.taken for t in (*tenants, own)) + strangers + spare + 1
    before, promises = tenancy(tenants, strangers, total)
    state = builders.state()
    for holder, size in promises.items():
        state = after(state, reservations.reserve(state, holder, 1, placement(("n", 0, size)), 0.0))

    def free(device: Device, measured: bool) -> int:
        found = reservations.available(Inventory((device,)), state.ledgers, share, measured=measured)
        return found.devices[0].free_bytes

    without = free(before, True)
    assert free(before, False) == without
    state = after(
        state, reservations.reserve_to_measure(state, "k", 1, [DeviceKey("n", "h200", 0)], own.promised, 0.0)
    )
    assert reservations.being_measured(state.ledgers) == {("n", "h200", 0): "k"}
    assert builders.holders(state) == {*promises, "measuring:k"}
    uses = (*before.uses, HolderMemory("measuring:k", own.taken)) if own.taken else before.uses
    now = replace(before, free_bytes=before.free_bytes - own.taken, uses=uses)
    assert free(now, False) == without
    left = total - strangers - sum(max(t.promised, t.taken) for t in (*tenants, own))
    assert free(now, True) == max(0, left - int(total * share))
    assert after(state, reservations.release(state, "measuring:k")).ledgers.keys() == (
        {"n"} if promises else set()
    )


def test_a_measurement_reserves_each_of_its_devices() -> None:
    state = builders.state()
    devices = [DeviceKey("a", "h200", 1), DeviceKey("a", "h200", 0)]
    state = after(state, reservations.reserve_to_measure(state, "k", 3, devices, 9, 5.0))
    held = tuple(Reservation("measuring:k", 3, rank, "h200", 1 - rank, 9, 5.0) for rank in range(2))
    assert state.ledgers["a"].record == NodeLedger("a", held)
    state = after(state, reservations.reserve_to_measure(state, "k", 3, [DeviceKey("b", "h200", 0)], 7, 6.0))
    assert set(state.ledgers) == {"b"}  # in the place of what it had
    taken = reservations.reserve(state, "m", 1, placement(("a", 0, 2), ("b", 0, 3)), 7.0, ("measuring:k",))
    state = after(state, taken)
    assert builders.holders(state) == {"m"}
    assert reservations.being_measured(state.ledgers) == {}


@pytest.mark.parametrize("uid", [1, 2])
def test_reservations_of_a_deleted_deployment_are_orphans(uid: int) -> None:
    """A deployment of the same name and another uid is another one."""
    state = builders.state(builders.deployment("m", Phase.DEPLOYED))
    state = after(state, reservations.reserve(state, "m", uid, placement(("n", 0, 9)), 0.0))
    state = after(state, reservations.reserve(state, "gone", 1, placement(("n", 1, 9)), 0.0))
    assert reservations.orphans(state) == (["gone"] if uid == 1 else ["gone", "m"])
    for holder in ("gone", "m"):
        state = after(state, reservations.without_orphans(state, holder))
    kept = {r.holder for found in state.ledgers.values() for r in found.record.reservations}
    assert kept == ({"m"} if uid == 1 else set())
    assert reservations.orphans(state) == []


# --- time -------------------------------------------------------------------------------------------


def test_load_that_will_be_gone_is_not_counted_and_what_others_use_is() -> None:
    """Shares of the last two minutes: a serving engine took a tenth, an undeployed one two tenths, measuring
    four, compressing one, the control plane a twentieth; other processes took the rest."""
    work = (("serves", 0.1), ("gone", 0.2), ("measuring:k", 0.4), ("compressing:m", 0.1), (OWN, 0.05))
    device = replace(gpu(0, 100, 0), load=0.95, work=work)
    promises = {"serves": 10, "measuring:k": 10, "compressing:m": 10}
    assert reservations.lasting_load(device, promises) == pytest.approx(0.1 + 0.1)
    assert reservations.lasting_load(replace(device, work=()), promises) == 0.95  # its holder is unknown
    assert reservations.lasting_load(replace(device, load=0.5), promises) == 0.0


def test_the_next_placement_s_free_time_is_counted_as_well() -> None:
    ledger = NodeLedger("n", (Reservation("serves", 1, 0, "h200", 0, 10 * GIB, 0.0),))
    device = replace(gpu(0, 100 * GIB, 0), load=0.9, work=(("serves", 0.3), ("measuring:k", 0.5)))
    (free,) = reservations.available(Inventory((device,)), {"n": Versioned(ledger, 1)}, 0.0).devices
    assert free.load == pytest.approx(0.4)
    # The group's own engine is to be placed again: that engine will not stand in its way.
    anew = reservations.available(Inventory((device,)), {"n": Versioned(ledger, 1)}, 0.0, "serves")
    assert anew.devices[0].load == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("phase", "since_s", "expected"),
    [
        (GroupPhase.STARTING, 0.0, 0.2),
        (GroupPhase.SERVING, 950.0, 0.2),  # the samples of two minutes show its start
        (GroupPhase.SERVING, 800.0, 0.7),
    ],
)
def test_load_of_an_engine_s_start_does_not_count_once_it_serves(
    phase: GroupPhase, since_s: float, expected: float
) -> None:
    deployment = builders.deployment("b", Phase.DEPLOYED)
    groups = tuple(replace(g, phase=phase, since_s=since_s) for g in deployment.groups)
    (group_id,) = deployment.group_ids()
    state = builders.state(replace(deployment, groups=groups))
    device = replace(gpu(0, 100, 0), load=0.7, work=((group_id, 0.5),))
    (found,) = reservations.without_starts(Inventory((device,)), state, 1000.0).devices
    assert found.load == pytest.approx(expected)
