"""A rank's share of every family, against counts by hand and by brute force."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.profiling.keys import served_spec
from controlplane.state.records import Model, Phase, dump, load
from profiler.architectures.registry import describe
from profiler.checkpoint import spec_of
from profiler.linears import Sharding, distinct_experts
from profiler.plans import candidate_plans, even_stages
from profiler.roofline import estimate, stage_weight_bytes
from profiler.shards import kv_bytes_per_token, layer_moved_bytes, layer_shard_bytes, tp_fits, tp_problem
from profiler.types import DeviceRates, ModelSpec, Plan, Workload, linears_of
from testkit.tiny_families import TINY, Tiny

EVERY = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
RATES = DeviceRates(20e9, 100e9)
# The code follows vLLM 0.26's models: each looks at its place in the pipeline before it makes a table.
ONLY_WHERE_USED = {"Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"}


def spec_from(tiny: Tiny) -> ModelSpec:
    raw = json.loads(tiny.make_config().to_json_string(use_diff=False))
    return spec_of(describe(raw, Path("config.json")), 2)


def plan(spec: ModelSpec, tp: int = 1, pp: int = 1, **changes: Any) -> Plan:
    return replace(Plan(tp, even_stages(spec.num_layers, pp), "none", 64, 0, 0, 0), **changes)


def of(family: str, title: str = "") -> ModelSpec:
    return spec_from(next(t for t in TINY if (t.family, t.title) == (family, title)))


@EVERY
def test_one_rank_holds_the_model(tiny: Tiny) -> None:
    spec = spec_from(tiny)
    padding = (64 - 40) * 16 * 2 * (1 if spec.tied else 2)  # of the vocabulary, to 64
    assert stage_weight_bytes(spec, plan(spec), 0) == spec.weight_bytes + padding


@EVERY
def test_stages_hold_the_model_together(tiny: Tiny) -> None:
    """For most families vLLM makes embedding and head on every stage (workers/measuring/test_tables.py)."""
    spec = spec_from(tiny)
    three = plan(spec, pp=3)
    table, real = 64 * 16 * 2, 40 * 16 * 2
    outside = spec.other_weight_bytes - (real if spec.tied else 2 * real)
    copies = (3 if spec.tied else 6) if tiny.family not in ONLY_WHERE_USED else 2
    whole = 3 * spec.layer_weight_bytes + outside + copies * table
    assert sum(stage_weight_bytes(spec, three, stage) for stage in range(3)) == whole


@EVERY
def test_ranks_hold_a_layer_together(tiny: Tiny) -> None:
    """All is held once, but for what every rank needs: norms, summands' biases, routers, shared KV heads."""
    spec = spec_from(tiny)
    linears = linears_of(spec).values()
    norms = spec.layer_weight_bytes // 2 - sum(linear.elements for linear in linears)
    for tp in (t for t in (2, 4) if tp_fits(spec, t)):
        copies = (tp - 1) * norms
        for linear in linears:
            if linear.sharding is Sharding.REPLICATED:
                copies += (tp - 1) * linear.elements
            elif linear.sharding is Sharding.ROW:
                copies += (tp - 1) * linear.experts * linear.out * linear.bias
            elif linear.sharding in (Sharding.KV_HEADS, Sharding.QKV):
                matrices = 2 if linear.sharding is Sharding.QKV else 1
                more_heads = max(0, tp - spec.num_kv_heads) * matrices
                copies += more_heads * spec.head_dim * (linear.into + linear.bias)
        assert tp * layer_shard_bytes(spec, tp) == spec.layer_weight_bytes + 2 * copies


# Per rank, in numbers, with 2 ranks; h=16, 4 heads of 4, 2 KV heads, MLP 24.
BY_HAND = {
    ("Llama", ""): 8 * 16 + 2 * 4 * 16 + 16 * 8 + 3 * 12 * 16 + 2 * 16,
    ("Phi3", ""): (8 + 2 * 4) * 16 + 16 * 8 + 2 * 12 * 16 + 16 * 12 + 2 * 16,
    ("Gemma", "one KV head"): 512 * 16 + 2 * 256 * 16 + 16 * 512 + 3 * 12 * 16 + 2 * 16,
    ("Falcon", "7B"): (8 + 2 * 4) * 16 + 16 * 8 + 2 * 32 * 16 + 2 * 16,
    ("Falcon", "40B"): (8 + 8) * 17 + 16 * 8 + 16 + 32 * 17 + 16 * 32 + 16 + 4 * 16,
    ("GPTJ", ""): 3 * 8 * 16 + 16 * 8 + 32 * 17 + 16 * 32 + 16 + 2 * 16,
    ("GPTNeoX", ""): 24 * 17 + 16 * 8 + 16 + 12 * 17 + 16 * 12 + 16 + 4 * 16,
    ("Mixtral", ""): 8 * 16 + 2 * 4 * 16 + 16 * 8 + 3 * 16 + 3 * 3 * 12 * 16 + 2 * 16,
    ("Qwen2Moe", ""): 8 * 17 + 2 * 4 * 17 + 16 * 8 + 3 * 16 + 3 * 3 * 6 * 16 + 3 * 7 * 16 + 16 + 2 * 16,
}


@pytest.mark.parametrize("case", BY_HAND, ids=" ".join)
def test_two_ranks_hold_the_bytes_computed_by_hand(case: tuple[str, str]) -> None:
    assert layer_shard_bytes(of(*case), 2) == 2 * BY_HAND[case]


def test_each_family_has_its_possible_numbers_of_ranks() -> None:
    def fitting(spec: ModelSpec) -> set[int]:
        return {tp for tp in range(1, 17) if tp_fits(spec, tp)}

    assert fitting(of("Llama")) == fitting(of("Phi3")) == fitting(of("Falcon", "40B")) == {1, 2, 4}
    assert fitting(of("Falcon", "7B")) == {1, 2, 4}  # one KV head, which all ranks have
    assert fitting(of("Mixtral")) == {1, 2}  # 3 experts
    assert fitting(of("Qwen2Moe")) == {1, 2}  # the shared expert's width is 14
    seven = spec_from(Tiny("Falcon", {}))  # the real one: 71 heads
    assert fitting(seven) == {1}


@pytest.mark.parametrize(
    ("case", "tp", "words"),
    [
        (("Llama", ""), 3, "4 heads cannot be split 3 ways"),
        (("Llama", ""), 0, "a positive tensor parallelism, got 0"),
        (("Mixtral", ""), 4, "has only 3 experts for 4 ranks"),
        (("Qwen2Moe", ""), 4, "4 ranks|outputs of mlp"),
    ],
)
def test_a_refused_number_of_ranks_has_its_reason(case: tuple[str, str], tp: int, words: str) -> None:
    spec = of(*case)
    problem = tp_problem(spec, tp)
    assert problem
    with pytest.raises(ValueError, match=words):
        estimate(spec, plan(spec, tp), [RATES] * tp, Workload(1, 1, 1), 1.0)


def test_fused_halves_are_cut_one_by_one() -> None:
    """Gate and up of width 25 in one matrix of 50 rows cannot be halved, though 50 can."""
    raw = json.loads(
        Tiny("Phi3", {"pad_token_id": 0, "intermediate_size": 25}).make_config().to_json_string()
    )
    spec = spec_of(describe({**raw, "architectures": ["Phi3ForCausalLM"]}, Path("config.json")), 2)
    assert "25 outputs" in (tp_problem(spec, 2) or "")


@given(experts=st.integers(1, 8), active=st.integers(1, 8), tokens=st.integers(0, 4))
def test_distinct_experts_is_the_mean_over_all_choices(experts: int, active: int, tokens: int) -> None:
    """Every way in which 4 tokens can choose is too many; a choice of each is as likely as any other."""
    active = min(active, experts)
    choices = list(itertools.combinations(range(experts), active))
    generator = random.Random(0)
    drawn = [
        len(set(itertools.chain.from_iterable(generator.choice(choices) for _ in range(tokens))))
        for _ in range(2000)
    ]
    expected = distinct_experts(experts, active, tokens)
    assert sum(drawn) / len(drawn) == pytest.approx(expected, abs=0.15)
    assert expected <= min(experts, active * tokens) + 1e-9


def test_idle_experts_are_not_read() -> None:
    spec = of("Mixtral")  # 3 experts of 3 x 24 x 16, 2 for each token
    expert = 3 * 24 * 16 * 2
    assert layer_moved_bytes(spec, 1, 1) == pytest.approx(spec.layer_weight_bytes - expert)
    assert layer_moved_bytes(spec, 1, 2) == pytest.approx(spec.layer_weight_bytes - expert / 3)
    assert layer_moved_bytes(spec, 1, 1000) == pytest.approx(spec.layer_weight_bytes)
    assert layer_moved_bytes(of("Llama"), 1, 1) == of("Llama").layer_weight_bytes


def test_decoding_reads_active_experts_and_prefill_multiplies_with_them() -> None:
    """Closed forms for Mixtral 8x7B on one rank: 2 of 8 experts at batch 1, all of them at a long prompt."""
    spec = spec_from(Tiny("Mixtral", {}))
    made = estimate(spec, plan(spec), [RATES], Workload(1, 512, 2), 1.0)
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
    active = attention + 8 * 4096 + 2 * 3 * 14336 * 4096
    head = 32000 * 4096
    kv = 513 * 2 * 1024 * 2
    assert made.tpot_s == pytest.approx((32 * (2 * (active + 2 * 4096) + kv) + 2 * head) / 20e9)
    pairs = 512 * 513 / 2
    flops = 32 * (2 * 512 * active + 4 * 4096 * pairs)
    assert made.ttft_s == pytest.approx(flops / 100e9 + 2 * head / 20e9)


def test_a_window_bounds_what_attention_reads() -> None:
    full = spec_from(Tiny("Mistral", {"num_hidden_layers": 4, "sliding_window": None}))
    sliding = replace(full, sliding_window=100, sliding_layers=3)
    token = 2 * 8 * 128 * 2

    def tpot(spec: ModelSpec) -> float:
        return estimate(spec, plan(spec), [RATES], Workload(1, 1000, 2), 1.0).tpot_s

    assert tpot(full) - tpot(sliding) == pytest.approx(3 * (1001 - 100) * token / 20e9)
    assert tpot(replace(full, sliding_window=5000, sliding_layers=4)) == tpot(full)


def test_kv_heads_are_copied_when_there_are_fewer_than_ranks() -> None:
    spec = of("Falcon", "7B")
    assert kv_bytes_per_token(spec, 1) == kv_bytes_per_token(spec, 4) == 2 * 4 * 2


@EVERY
def test_every_family_gets_plans_and_slots_only_where_variants_can_be(tiny: Tiny) -> None:
    spec = spec_from(tiny)
    plans = candidate_plans(spec, ("none",), 4, 64, 2, 4, 16)
    assert plans
    adaptable = tiny.family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
    assert {(p.max_variants, p.max_lora_rank) for p in plans} == {(4, 16) if adaptable else (0, 0)}
    for p in plans:
        made = estimate(spec, p, [RATES] * p.world_size, Workload(2, 16, 16), 1.0)
        assert 0 < made.tpot_s < made.ttft_s * 100
        assert min(made.memory_bytes) > spec.weight_bytes / p.world_size


@EVERY
def test_a_spec_survives_the_store(tiny: Tiny) -> None:
    model = Model("m", 1, Phase.READY, spec=spec_from(tiny))
    assert load(Model, dump(model)) == model
    assert model.spec is not None
    assert served_spec(model.spec, "float32").weight_bytes == 2 * model.spec.weight_bytes


def test_a_record_of_the_first_version_keeps_its_meaning() -> None:
    """It knows only the adaptable modules: the same shares and the same estimate follow from them."""
    spec = of("Llama")
    record = json.loads(dump(Model("m", 1, Phase.READY, spec=spec)))
    new = ("linears", "layer_prefix", "embedding", "head", "intermediate_size", "allreduces_per_layer")
    for key in (*new, "sliding_window", "sliding_layers"):
        del record["spec"][key]
    old = load(Model, json.dumps(record)).spec
    assert old is not None
    for tp in (1, 2, 4):
        p = plan(spec, tp, max_variants=2, max_lora_rank=8, kv_cache_tokens=64)
        load_ = Workload(2, 16, 16)
        assert estimate(old, p, [RATES] * tp, load_, 1.0) == estimate(spec, p, [RATES] * tp, load_, 1.0)
