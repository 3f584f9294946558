"""No placement of the deployment path breaks a rule, for any request on any devices."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from controlplane import errors
from controlplane.planning.placement_decision import decide
from controlplane.settings import Settings
from controlplane.state.records import AutoRelax, Deployment, ExpectedLoad, Model, Phase, PlanConstraints
from controlplane.state.worker_groups import WorkerGroup
from placement.types import CPU, Device, Intent, Inventory, Placement, RankPlacement, Scope, Slos
from profiler.types import DeviceRates, ModelSpec
from testkit.known_models import llama

GIB, MIB = 1 << 30, 1 << 20
T = TypeVar("T")

SPECS = (
    llama(30, 576, 9, 3, 1536, 49152, 2, tied=True),
    llama(32, 4096, 32, 32, 11008, 32000, 2, tied=False),
    llama(40, 5120, 40, 8, 13824, 32000, 2, tied=False),
)
KINDS = {
    "h200": (140, DeviceRates(4e12, 5e14)),
    "l4": (22, DeviceRates(3e11, 1e14)),
    CPU: (32, DeviceRates(2e10, 1e12)),
}
SETTINGS = Settings(home=Path("/nowhere"), max_model_len=1024, concurrency=8, max_variants=2)


def random_inventory(rng: random.Random) -> Inventory:
    devices = []
    for node in "abc"[: rng.randint(1, 3)]:
        kind = rng.choice(("h200", "l4", "l4", CPU))
        total, rates = KINDS[kind]
        for index in range(1 if kind == CPU else rng.randint(1, 4)):
            free = rng.choice((total, rng.randint(0, total), rng.randint(0, 6))) * GIB
            load = rng.choice((0.0, rng.random()))
            devices.append(
                Device(node, index, kind, total * GIB, free, rates, kind, "0.26", load, index // 2)
            )
    return Inventory(tuple(devices))


def random_deployment(rng: random.Random, spec: ModelSpec) -> Deployment:
    def maybe(value: T) -> T | None:
        return rng.choice((None, None, value))

    split = rng.randint(1, spec.num_layers - 1)
    constraints = rng.choice(
        (
            PlanConstraints(),
            PlanConstraints(),
            PlanConstraints(tensor_parallel=(1, 3)),
            PlanConstraints(pipeline_parallel=(2,)),
            PlanConstraints(layers_per_stage=(split, spec.num_layers - split)),
            PlanConstraints(group="g", scope=rng.choice((Scope.GPU, Scope.NODE))),
        )
    )
    slos = Slos(
        maybe(10 ** rng.uniform(-1, 2)), maybe(rng.random()), maybe(rng.random() / 10), None, maybe(90.0)
    )
    return Deployment(
        "m",
        1,
        "m",
        Phase.PENDING,
        rng.choice(tuple(Intent)),
        rng.choice((16, 256)),
        slos,
        load=ExpectedLoad(rng.choice((0.0, 0.1, 2.0)), maybe(200), maybe(100)),
        constraints=constraints,
        auto_relax=rng.choice((AutoRelax(), AutoRelax(True), AutoRelax(True, 1.5))),
    )


def neighbour(rng: random.Random, inventory: Inventory) -> Deployment:
    """Another deployment of the same group, on some device."""
    device = rng.choice(inventory.devices)
    rank = RankPlacement(0, 0, 0, device.node, device.index, device.kind, 0, 1, MIB)
    ranks = replace(decide_alone(SPECS[0]), ranks=(rank,))
    return Deployment(
        "other",
        2,
        "other",
        Phase.DEPLOYED,
        Intent.MIN_COST,
        16,
        constraints=PlanConstraints(group="g"),
        groups=(WorkerGroup(0, placement=ranks),),
    )


def decide_alone(spec: ModelSpec) -> Placement:
    total, rates = KINDS["h200"]
    device = Device("z", 0, "h200", total * GIB, total * GIB, rates)
    return decide(
        model(spec),
        Deployment("m", 1, "m", Phase.PENDING, Intent.MIN_COST, 16),
        Inventory((device,)),
        SETTINGS,
    )


def model(spec: ModelSpec) -> Model:
    return Model("m", 1, Phase.READY, source="/m", path="/m", spec=spec, compression={"none": 95.0})


def least_bytes(spec: ModelSpec, placed: Placement, stage: int, on_cpu: bool) -> int:
    """Weights of the layers, the embedding or head, and the cache of 8 sequences: Llama's, by hand."""
    tp, layers, width = placed.plan.tensor_parallel, placed.plan.layers_per_stage, 4 if on_cpu else 2
    linear = sum(out * into for out, into in spec.linear_shapes.values())
    kv = 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim * placed.plan.kv_cache_tokens
    table = spec.vocab_size * spec.hidden_size // tp if stage in (0, len(layers) - 1) else 0
    return width * (layers[stage] * (linear // tp + kv) + table)


def broken(spec: ModelSpec, wanted: Deployment, inventory: Inventory, placed: Placement) -> list[str]:
    devices = {(d.node, d.kind, d.index): d for d in inventory.devices}
    plan, wrong = placed.plan, []
    seats = [devices[r.node, r.device_kind, r.device_index] for r in placed.ranks]
    held: dict[Device, int] = defaultdict(int)
    for rank, seat in zip(placed.ranks, seats, strict=True):
        held[seat] += rank.memory_bytes
        if rank.memory_bytes < least_bytes(spec, placed, rank.stage, seat.kind == CPU):
            wrong.append(f"rank {rank.rank} is given too little")
    wrong += [f"{d} holds {size}" for d, size in held.items() if size > d.free_bytes]
    if len({d.kind for d in seats}) != 1:
        wrong.append("devices of several kinds")
    on_cpu = seats[0].kind == CPU
    if (len(held) != 1) if on_cpu else max(Counter(seats).values()) > 1:
        wrong.append("a host carries all ranks, a GPU one")
    start = 0
    for stage, layers in enumerate(plan.layers_per_stage):
        mine = [(r, d) for r, d in zip(placed.ranks, seats, strict=True) if r.stage == stage]
        if len({(d.node, d.model) for _, d in mine}) != 1 or len(mine) != plan.tensor_parallel:
            wrong.append(f"stage {stage} is on one node and kind")
        if layers < 1 or any((r.layer_start, r.layer_end) != (start, start + layers) for r, _ in mine):
            wrong.append(f"stage {stage} begins with layer {start}")
        start += layers
    tp, kv = plan.tensor_parallel, spec.num_kv_heads
    if start != spec.num_layers or spec.num_heads % tp or (kv % tp and tp % kv):
        wrong.append("all layers, heads divided")
    return wrong + ([] if placed.choice.relaxed else beyond(wanted, placed))


def beyond(wanted: Deployment, placed: Placement) -> list[str]:
    """The requested limits that are not kept."""
    plan, constraints, slos, choice = placed.plan, wanted.constraints, wanted.slos, placed.choice
    pairs = (
        (slos.latency_s, choice.latency_s),
        (slos.ttft_s, placed.estimate.ttft_s),
        (slos.tpot_s, placed.estimate.tpot_s),
    )
    wrong = [f"{value} is more than {limit}" for limit, value in pairs if limit is not None and value > limit]
    if placed.estimate.accuracy < (slos.accuracy or 0) or choice.throughput_per_s < wanted.load.rate_per_s:
        wrong.append("accuracy, rate")
    if plan.tensor_parallel not in (constraints.tensor_parallel or (plan.tensor_parallel,)):
        wrong.append("TP")
    if plan.pipeline_parallel not in (constraints.pipeline_parallel or (plan.pipeline_parallel,)):
        wrong.append("PP")
    if plan.layers_per_stage != (constraints.layers_per_stage or plan.layers_per_stage):
        wrong.append("layers")
    return wrong


def outcome_of(deciding: Callable[[], Placement]) -> Placement | errors.NoFeasiblePlan:
    try:
        return deciding()
    except errors.NoFeasiblePlan as refusal:
        return refusal


def check(seed: int) -> bool:
    """Whether something was placed."""
    rng = random.Random(seed)
    spec, inventory = rng.choice(SPECS), random_inventory(rng)
    wanted, beside = random_deployment(rng, spec), neighbour(rng, inventory)
    before = copy.deepcopy((spec, wanted, inventory, beside))
    placed = outcome_of(lambda: decide(model(spec), wanted, inventory, SETTINGS, others=[beside]))
    if isinstance(placed, errors.NoFeasiblePlan):
        assert placed.message
        assert placed.details["binding"]
        assert all(one["factor"] >= 1 and one["text"] for one in placed.details["relaxations"])
        return False
    assert (spec, wanted, inventory, beside) == before
    assert decide(model(spec), wanted, inventory, SETTINGS, others=[beside]) == placed
    assert broken(spec, wanted, inventory, placed) == []
    if wanted.constraints.scope is not Scope.NONE:
        at = beside.placement.ranks[0] if beside.placement else None
        assert at is not None
        for rank in placed.ranks:
            assert rank.node != at.node or (
                wanted.constraints.scope is Scope.GPU
                and (rank.device_kind, rank.device_index) != (at.device_kind, at.device_index)
            )
    for one in placed.choice.relaxed:
        assert wanted.auto_relax.allowed
        assert one.factor <= (wanted.auto_relax.max_factor or one.factor)
    return True


@examples(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_rule_is_broken(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@examples(max_examples=max(50, examples().max_examples), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_rule_is_broken_in_many_more_cases(seed: int) -> None:
    check(seed)


def test_both_ends_occur() -> None:
    """Otherwise the tests above would prove nothing."""
    assert {check(seed) for seed in range(10)} == {True, False}
