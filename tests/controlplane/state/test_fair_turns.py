"""Several tenants wait for the same resource: no tenant waits for another tenant's many items."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning import compressing, reconcile
from controlplane.planning.compressing import Queued
from controlplane.profiling import queue
from controlplane.settings import Settings
from controlplane.state.deltas import Delta, Recipe
from controlplane.state.fair_turns import Asked, shares, turns
from controlplane.state.records import Model, ModelProfile, NodeLedger, OperationKind, Phase, Reservation
from controlplane.state.repository import State
from placement.types import Inventory
from testkit.controlplane.builders import operation, ready_base, state
from testkit.in_memory import CPU

ASKED = st.lists(
    st.builds(
        Asked,
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from([f"p{n}" for n in range(12)]),
        st.floats(0, 100),
        st.booleans(),
    ),
    max_size=30,
)


@given(ASKED)
def test_each_tenant_s_first_item_goes_before_any_second_item(asked: list[Asked]) -> None:
    """However much the others asked for, and however early."""
    order = turns(asked)
    for tenant in {a.tenant for a in asked}:
        mine = {a.what for a in asked if a.tenant == tenant}
        ahead = [w for w in order if order[w] < min(order[w] for w in mine)]
        others = {t: {a.what for a in asked if a.tenant == t} for t in {a.tenant for a in asked} - {tenant}}
        assert all(len(mine_of_theirs & set(ahead)) <= len(others) for mine_of_theirs in others.values())
        assert len(ahead) <= len(others)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3000), max_size=8), st.integers(0, 2000))
def test_shares_fill_the_room_and_cut_only_the_largest(counts: dict[str, int], room: int) -> None:
    got = shares(counts, room)
    assert sum(got.values()) == min(room, sum(counts.values()))
    assert all(0 <= got[key] <= counts[key] for key in counts)
    cut = [got[key] for key in counts if got[key] < counts[key]]
    if cut:
        assert max(got.values()) <= min(cut) + 1, "nobody has more than one that was cut"


def profiled(number: int, tenant: str, model: Model, phase: Phase = Phase.PENDING) -> tuple[object, ...]:
    key = f"k{number}"
    profile = ModelProfile(key, key, "float32", "cpu", "0", phase)
    named = replace(model, name=f"m{number}", profile=key, tenant=tenant, created_at_s=float(number))
    asked = replace(
        operation(OperationKind.PROFILE, named.name),
        id=f"op-{number}",
        created_at_s=float(number),
        tenant=tenant,
    )
    return named, profile, asked


def test_eight_architectures_of_one_tenant_hold_up_another_by_one(files: Path) -> None:
    model = ready_base(files)
    first = profiled(0, "a", model, Phase.PROFILING)
    flood = [record for n in range(1, 8) for record in profiled(n, "a", model)]
    now = state(*first, *flood, *profiled(9, "b", model), *profiled(10, "b", model))
    assert queue._before(now, "k9") == []
    assert queue._before(now, "k1") == ["k9"]
    assert queue._before(now, "k10") == ["k9", "k1"]
    assert queue._before(now, "k7") == ["k9", "k1", "k10", *(f"k{n}" for n in range(2, 7))]


def fine_tune(name: str, tenant: str, created_at_s: float) -> Model:
    made = Delta(Recipe("magnitude"), tuned=f"/m/{name}")
    return Model(
        name, 7, Phase.COMPRESSING, base="base", tenant=tenant, created_at_s=created_at_s, delta=made
    )


def test_a_queue_of_one_tenants_fine_tunes_holds_up_another_by_one(files: Path, settings: Settings) -> None:
    flood = [fine_tune(f"a{n}", "a", float(n)) for n in range(5)]
    other = fine_tune("b0", "b", 50.0)
    under_way = NodeLedger("node", (Reservation("compressing:a0", 7, 0, "cpu", 0, 1, 0.0),))
    base = replace(ready_base(files), name="base")
    records = (base, *flood, other)
    assert [m.name for m in compressing.waiting(state(*records, under_way))] == ["b0", "a1", "a2", "a3", "a4"]
    assert [m.name for m in compressing.waiting(state(*records))] == ["a0", "b0", "a1", "a2", "a3", "a4"]
    begins = [
        name
        for name in ("a0", "a1", "b0")
        if not isinstance(compressing.next_job(state(*records), name, Inventory((CPU,)), settings), Queued)
    ]
    assert begins == ["a0"]


def of_tenants(**counts: int) -> State:
    """N operations of each target; those of the first are the newest."""
    ended = []
    for place, (tenant, count) in enumerate(counts.items()):
        for n in range(count):
            at_s = 1e6 - 1e5 * place + n
            ended.append(
                replace(
                    operation(OperationKind.DEPLOY, "x"),
                    id=f"{tenant}-{n}",
                    phase=Phase.FAILED,
                    tenant=tenant,
                    updated_at_s=at_s,
                )
            )
    return state(*ended)


def test_a_flood_of_one_tenant_forgets_none_of_anothers() -> None:
    now = of_tenants(a=3000, b=40)
    old = reconcile.old_operations(now)
    assert set(old) == {f"a-{n}" for n in range(3000 - (reconcile.KEEP_OPERATIONS - 40))}
    assert reconcile.old_operations(of_tenants(a=900, b=100)) == []
    left = {"a": 900, "b": 800, "c": 30}
    for name in reconcile.old_operations(of_tenants(**left)):
        left[name.partition("-")[0]] -= 1
    assert left == {"a": 485, "b": 485, "c": 30}
