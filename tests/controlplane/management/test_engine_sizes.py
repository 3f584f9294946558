"""The sizes of a deployment's engines: requested, chosen, recorded, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane import errors
from controlplane.controller.transitions import mark_starting
from controlplane.management.commands import deploy_model, place_anew
from controlplane.management.requested import require_ceilings
from controlplane.management.schemas.deploy import DeployModelRequest, EngineForm
from controlplane.planning.engine_config import engine_config
from controlplane.planning.placement_decision import decide
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ExpectedLoad, Model, Phase, dump, load
from controlplane.state.repository import Put, State
from controlplane.state.transactions import Context
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import CPU, Device, EngineSizes, Intent, Inventory, Placement, Slos, sizes_of
from profiler.types import DeviceRates, ModelSpec
from profiler.variants.types import HeldBytes, ModuleFacts, VariantKind, VariantSpec
from testkit.controlplane.builders import state as state_of
from testkit.in_memory import GIB

LINEAR = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
LAYER_BYTES = 2 * sum(out * into for out, into in LINEAR.values()) + 4 * 4096
# Llama-3.1-8B's shape; 128 KiB of keys and values for each token.
EIGHT_B = ModelSpec(
    "LlamaForCausalLM", 32, 4096, 32, 8, 128, 128256, 131072, 2, LAYER_BYTES, 2 * 2 * 128256 * 4096 + 8192,
    LINEAR, fingerprint="f", intermediate_size=14336,
)  # fmt: skip
KV_BYTES = 32 * 2 * 8 * 128 * 2
H200 = Device("n", 0, "h200", 140 * GIB, 139 * GIB, DeviceRates(4.2e12, 7e14), "NVIDIA H200", "0.26")
HOST = Device("n", 0, CPU, 64 * GIB, 60 * GIB, DeviceRates(4e10, 1e12), "", "0.32")
MODEL = Model("b", 9, Phase.READY, source="/b", path="/b", compression={"none": 100.0}, spec=EIGHT_B)
SETTINGS = Settings(home=Path("/nowhere"))
HERE = Inventory((H200,))


def wanted(intent: Intent, **more: object) -> Deployment:
    return replace(Deployment("b", 1, "b", Phase.PENDING, intent, None), **more)  # type: ignore[arg-type]


def adapter(rank: int, name: str = "v") -> Model:
    spec = VariantSpec(VariantKind.LORA, 2 * rank * 1000, dict.fromkeys(LINEAR, ModuleFacts(0, rank)))
    return Model(name, 70, Phase.READY, base="b", adapter="/v", path="/v", variant_spec=spec)


def test_an_8b_on_an_h200_gets_its_context_and_many_requests_by_its_name_alone() -> None:
    placed = decide(MODEL, wanted(Intent.MIN_LATENCY), HERE, SETTINGS)
    config = engine_config(MODEL, placed, SETTINGS)
    assert (config.max_model_len, config.max_num_seqs) == (131072, 128)
    assert (config.max_variants, config.max_lora_rank) == (8, 64)
    assert config.ranks[0].kv_cache_bytes == 128 * 2048 * KV_BYTES
    assert "context 131,072 (the model's limit), 128 requests at once" in placed.reason
    assert "rank 64 (for later adapters), 8 variants at once" in placed.reason


def test_least_memory_gets_the_usual_cache_and_least_cost_weighs_more() -> None:
    """The cost is GiB x s of a request: a quarter more memory is a quarter more of it."""
    found = {intent: decide(MODEL, wanted(intent), HERE, SETTINGS) for intent in Intent}
    memory = {intent: sum(placed.estimate.memory_bytes) for intent, placed in found.items()}
    cached = {intent: placed.plan.kv_cache_tokens for intent, placed in found.items()}
    assert cached[Intent.MIN_MEMORY] == 16 * 2048
    assert cached[Intent.MIN_MEMORY] < cached[Intent.MIN_COST] < cached[Intent.MIN_LATENCY]
    assert 1.1 < memory[Intent.MIN_COST] / memory[Intent.MIN_MEMORY] <= 1.25
    assert cached[Intent.MIN_GPU_HOURS] == cached[Intent.MIN_LATENCY]
    assert "as minCost allows" in found[Intent.MIN_COST].reason


@pytest.mark.parametrize("free_gib", [24, 28, 40, 80])
def test_the_cache_is_what_memory_leaves(free_gib: int) -> None:
    """No step larger fits: the rungs are at most half as large again."""
    device = replace(H200, free_bytes=free_gib * GIB)
    placed = decide(MODEL, wanted(Intent.MIN_LATENCY), Inventory((device,)), SETTINGS)
    taken = sum(placed.estimate.memory_bytes)
    assert taken <= free_gib * GIB
    assert taken + placed.plan.kv_cache_tokens * KV_BYTES > free_gib * GIB or placed.plan.sequences == 128
    assert placed.plan.kv_cache_tokens >= placed.plan.max_model_len
    assert "as memory allows" in placed.reason or free_gib >= 80


def test_a_small_gpu_gets_less_than_usual_before_it_is_refused() -> None:
    device = replace(H200, total_bytes=24 * GIB, free_bytes=20 * GIB)
    placed = decide(MODEL, wanted(Intent.MIN_COST), Inventory((device,)), SETTINGS)
    assert placed.choice.reduced
    assert placed.plan.kv_cache_tokens < 16 * 2048
    with pytest.raises(errors.NoFeasiblePlan, match="memory"):
        decide(MODEL, wanted(Intent.MIN_COST), Inventory((replace(device, free_bytes=16 * GIB),)), SETTINGS)


def test_a_limit_of_tpot_bounds_the_requests() -> None:
    """A token of 128 requests takes longer than one of 8: their keys and values are read."""
    free = decide(MODEL, wanted(Intent.MIN_LATENCY), HERE, SETTINGS)
    slo_s = free.estimate.tpot_s * 1.1
    placed = decide(MODEL, wanted(Intent.MIN_LATENCY, slos=Slos(tpot_s=slo_s)), HERE, SETTINGS)
    assert 1 <= placed.plan.sequences < 128
    assert f"{placed.plan.sequences} requests at once (as SLOs.tpot_ms allows)" in placed.reason
    assert placed.plan.max_model_len == 131072


def test_an_expected_rate_gets_the_requests_that_it_keeps_in_flight() -> None:
    idle = decide(MODEL, wanted(Intent.MIN_MEMORY), HERE, SETTINGS)
    rate = 30 / idle.choice.latency_s
    busy = decide(MODEL, wanted(Intent.MIN_MEMORY, load=ExpectedLoad(rate)), HERE, SETTINGS)
    assert idle.plan.sequences == 16
    assert busy.plan.sequences >= rate * busy.choice.latency_s


def test_on_a_cpu_nothing_above_the_usual_size_is_chosen() -> None:
    placed = decide(
        MODEL, wanted(Intent.MIN_LATENCY), Inventory((replace(HOST, free_bytes=63 * GIB),)), SETTINGS
    )
    assert (placed.plan.kv_cache_tokens, placed.plan.sequences) == (16 * 2048, 16)
    assert (placed.plan.max_variants, placed.plan.max_lora_rank) == (4, 16)


def test_requested_sizes_are_kept_and_the_rest_is_chosen() -> None:
    asked = EngineSizes(
        context_tokens=32768, requests_at_once=96, variant_slots=5, lora_rank=32, variant_host_bytes=3 * GIB
    )
    placed = decide(MODEL, wanted(Intent.MIN_COST, engine=asked), HERE, SETTINGS)
    found = replace(sizes_of(placed.plan), cached_tokens=None, merged_slot=None)
    assert found == asked
    assert placed.plan.kv_cache_tokens == 96 * 2048
    assert (
        "context 32,768 (as requested), 96 requests at once (as requested), rank 32 (as requested)"
        in placed.reason
    )
    alone = decide(MODEL, wanted(Intent.MIN_LATENCY, engine=EngineSizes(context_tokens=4096)), HERE, SETTINGS)
    assert (alone.plan.max_model_len, alone.plan.sequences) == (4096, 128)


def test_registered_variants_determine_slots_rank_and_host_memory() -> None:
    many = [adapter(128 if n == 3 else 8, f"v{n}") for n in range(12)]
    large = VariantSpec(VariantKind.SPARSE_DELTA, 5 * GIB, {}, held=HeldBytes(0, 0, 1 * GIB))
    sparse = replace(many[0], name="d", variant_spec=large)
    placed = decide(MODEL, wanted(Intent.MIN_LATENCY), HERE, SETTINGS, [*many, sparse])
    assert (placed.plan.max_variants, placed.plan.max_lora_rank) == (13, 128)
    assert placed.plan.variant_host_bytes >= 5 * GIB
    small_host = replace(HOST, free_bytes=12 * GIB)
    beside = decide(MODEL, wanted(Intent.MIN_LATENCY), Inventory((H200, small_host)), SETTINGS, [sparse])
    assert beside.plan.variant_host_bytes == 3 * GIB
    assert placed.plan.merged_slot  # a Hopper, least latency, a sparse delta
    assert "rank 128 (for registered adapters)" in placed.reason
    tight = replace(H200, free_bytes=36 * GIB)  # no room for the weights twice
    assert not decide(
        MODEL, wanted(Intent.MIN_LATENCY), Inventory((tight,)), SETTINGS, [sparse]
    ).plan.merged_slot


def test_the_settings_are_ceilings_of_what_is_chosen() -> None:
    bounded = SETTINGS.model_copy(
        update={"max_model_len": 8192, "concurrency": 24, "max_variants": 3, "max_lora_rank": 32}
    )
    plan = decide(MODEL, wanted(Intent.MIN_LATENCY), HERE, bounded).plan
    assert (plan.max_model_len, plan.sequences, plan.max_variants, plan.max_lora_rank) == (8192, 24, 3, 32)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(Intent)),
    st.integers(20, 139),
    st.sampled_from([None, 16, 1000, 131072]),
    st.sampled_from([None, 1, 7, 300]),
)
def test_any_engine_holds_one_request_of_its_context_and_fits(
    intent: Intent, free_gib: int, context: int | None, requests: int | None
) -> None:
    asked = EngineSizes(context_tokens=context, requests_at_once=requests)
    deployment = wanted(intent, engine=asked, load=ExpectedLoad(0.0, 8, 8))
    device = replace(H200, free_bytes=free_gib * GIB)
    try:
        placed = decide(MODEL, deployment, Inventory((device,)), SETTINGS)
    except errors.NoFeasiblePlan:
        assert free_gib < 24 or context == 131072 or requests == 300
        return
    plan = placed.plan
    assert plan.kv_cache_tokens >= plan.max_model_len >= 16
    assert sum(placed.estimate.memory_bytes) <= free_gib * GIB
    assert context in (None, plan.max_model_len)
    assert requests in (None, plan.sequences)


# --- records ------------------------------------------------------------------------------------------


def test_engines_that_are_placed_later_are_the_same() -> None:
    first = decide(MODEL, wanted(Intent.MIN_LATENCY), HERE, SETTINGS)
    recorded = wanted(Intent.MIN_LATENCY, chosen=sizes_of(first.plan))
    for free_gib in (139, 80):
        device = replace(H200, free_bytes=free_gib * GIB)
        again = decide(MODEL, recorded, Inventory((device,)), SETTINGS, [adapter(256)])
        assert sizes_of(again.plan) == sizes_of(first.plan)
        assert "context 131,072 (as chosen before)" in again.reason


def serving(placement: Placement, **more: object) -> Deployment:
    group = WorkerGroup(0, GroupPhase.SERVING, placement)
    given = {"groups": (group,), **more}
    return wanted(Intent.MIN_COST, phase=Phase.DEPLOYED, established=True, **given)


def test_an_older_record_keeps_the_sizes_of_its_engines() -> None:
    """2,048 tokens and 16 requests by the defaults of then."""
    old = EngineSizes(context_tokens=2048, requests_at_once=16, variant_slots=4, lora_rank=16)
    placed = decide(MODEL, wanted(Intent.MIN_COST, engine=old), HERE, SETTINGS)
    plan = replace(placed.plan, max_sequences=0, variant_host_bytes=0)
    text = dump(serving(replace(placed, plan=plan)))
    for name in ("engine", "chosen"):
        start = text.index(f'"{name}":')
        end = (
            text.index("}", start) + 1
            if text[start:].startswith(f'"{name}":{{')
            else text.index("null", start) + 4
        )
        text = text[: start - 1] + text[end:]
    assert '"chosen"' not in text
    read = load(Deployment, text)
    assert read.chosen == replace(old, cached_tokens=32768, merged_slot=False)
    again = decide(MODEL, replace(read, groups=()), HERE, SETTINGS).plan
    assert (again.max_model_len, again.kv_cache_tokens, again.sequences) == (2048, 32768, 16)
    assert (again.max_variants, again.max_lora_rank) == (4, 16)
    assert load(Deployment, dump(read)) == read


# --- requests -----------------------------------------------------------------------------------------


def context() -> Context:
    return Context("op", (5, 6), 0.0)


def served(rank: int = 16, **more: object) -> State:
    asked = EngineSizes(context_tokens=2048, lora_rank=rank)
    placed = decide(MODEL, wanted(Intent.MIN_COST, engine=asked), HERE, SETTINGS)
    return state_of(MODEL, adapter(64), serving(placed, **{"chosen": sizes_of(placed.plan), **more}))


def base_after(state: State, ctx: Context) -> Deployment:
    """The deployment of the base after its variant was deployed."""
    changes = deploy_model(state, DeployModelRequest(model="v"), ctx).changes
    records = [change.record for change in changes if isinstance(change, Put)]
    return next(r for r in records if isinstance(r, Deployment) and r.model == "b")


def test_an_adapter_of_a_larger_rank_than_the_engines_take_gets_new_engines() -> None:
    before = served(16).deployments["b"].record
    base = base_after(served(16), context())
    assert [(g.number, g.replaces) for g in base.groups] == [(0, None), (1, 0)]
    assert base.groups[1].reason == "replaces b, for LoRA adapters up to rank 64"
    plan = decide(MODEL, replace(base, groups=()), HERE, SETTINGS, [adapter(64)]).plan
    assert before.chosen is not None
    assert sizes_of(plan) == replace(before.chosen, lora_rank=64)
    begun = mark_starting(base, base.groups[1], decide(MODEL, base, HERE, SETTINGS, [adapter(64)]), 0, 0.0)
    assert begun.chosen == replace(before.chosen, lora_rank=64)
    assert base_after(served(64), context()).groups == served(64).deployments["b"].record.groups


def test_without_an_engine_the_next_one_takes_the_larger_rank() -> None:
    base = base_after(served(16, groups=()), context())
    assert base.groups == ()
    assert decide(MODEL, base, HERE, SETTINGS, [adapter(64)]).plan.max_lora_rank == 64


def test_a_rank_that_the_user_asked_for_is_changed_by_its_user() -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        base_after(served(16, engine=EngineSizes(lora_rank=16)), context())
    assert "'v' has rank 64, but the engines of 'b' take LoRA adapters up to rank 16" in refused.value.message
    assert "`ostinato tune b --lora-rank 64`" in refused.value.message


def test_a_tenant_does_not_replace_the_engines_of_the_installation() -> None:
    with pytest.raises(errors.InvalidRequest, match="an admin's key deploys it") as refused:
        base_after(served(16), replace(context(), tenant="t"))
    assert "`ostinato tune b --place-anew`" in refused.value.message


def test_while_an_engine_starts_a_larger_rank_waits() -> None:
    first = served(16).deployments["b"].record.groups[0]
    groups = (first, replace(first, number=1, phase=GroupPhase.STARTING))
    with pytest.raises(errors.NotReady, match="b@1 is starting; deploy 'v' again when it serves"):
        base_after(served(16, groups=groups), context())


def test_tuned_to_the_rank_that_was_named_new_engines_take_the_adapter() -> None:
    state = served(16)
    tuned = place_anew(state, state.deployments["b"].record, EngineForm(loraRank=64))
    assert [(g.number, g.replaces) for g in tuned.groups] == [(0, None), (1, 0)]
    plan = decide(MODEL, replace(tuned, groups=()), HERE, SETTINGS, [adapter(64)]).plan
    assert plan.max_lora_rank == 64
    assert deploy_model(state_of(MODEL, adapter(64), tuned), DeployModelRequest(model="v"), context()).changes


def test_placing_again_chooses_the_other_sizes_again() -> None:
    state = served(16)
    tuned = place_anew(state, state.deployments["b"].record)
    assert tuned.chosen is None


def test_a_rank_below_that_of_a_deployed_adapter_is_refused() -> None:
    base = served(64).deployments["b"].record
    deployed = replace(wanted(Intent.MIN_COST), model="v", base="b", phase=Phase.DEPLOYED)
    state = state_of(MODEL, adapter(64), base, deployed)
    with pytest.raises(
        errors.InvalidRequest, match=r"the deployed 'v' \(64\) need a larger LoRA rank than 8"
    ):
        place_anew(state, base, EngineForm(loraRank=8))


def test_a_variant_brings_sizes_to_its_base_and_none_to_engines_that_run() -> None:
    asked = DeployModelRequest(model="v", engine=EngineForm(contextTokens=4096, loraRank=64))
    made = [
        c.record
        for c in deploy_model(state_of(MODEL, adapter(64)), asked, context()).changes
        if isinstance(c, Put)
    ]
    sizes = {d.model: d.engine for d in made if isinstance(d, Deployment)}
    assert sizes == {"v": EngineSizes(), "b": EngineSizes(context_tokens=4096, lora_rank=64)}
    with pytest.raises(
        errors.InvalidRequest, match="leave `engine` out, or change the engines' sizes with `ostinato tune b`"
    ):
        deploy_model(served(64), asked, context())


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (EngineForm(contextTokens=200_000), "at most 131072, the positions of 'b'; got 200000"),
        (EngineForm(loraRank=8), "'v' has rank 64, but the engines of 'b' take LoRA adapters up to rank 8"),
    ],
)
def test_sizes_that_no_engine_of_the_model_has(sizes: EngineForm, said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said):
        deploy_model(state_of(MODEL, adapter(64)), DeployModelRequest(model="v", engine=sizes), context())


def test_sizes_above_what_the_installation_allows() -> None:
    bounded = SETTINGS.model_copy(update={"max_model_len": 8192})
    with pytest.raises(
        errors.InvalidRequest, match=r"at most 8192, .* got 16384; .* OSTINATO_MAX_MODEL_LEN"
    ) as e:
        require_ceilings(EngineForm(contextTokens=16384), bounded)
    assert e.value.param == "engine.contextTokens"
    require_ceilings(EngineForm(contextTokens=8192, mergedSlot=True), bounded)
    require_ceilings(None, bounded)
