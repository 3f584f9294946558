"""The way from a model and an inventory to an engine's configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.planning.engine_config import engine_config
from controlplane.planning.placement_decision import decide
from controlplane.profiling.keys import served_spec, spec_of
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ExpectedLoad, Model, Phase
from placement.types import Device, EngineSizes, Intent, Inventory, Slos
from profiler.chat_format import ChatFormat
from profiler.roofline import arena_bytes
from profiler.variants.types import VariantKind, VariantSpec
from testkit.controlplane.builders import ready_base
from testkit.in_memory import CPU, GIB
from workers.group.vllm_arguments import FORCED_TOOLS, engine_arguments
from workers.messages import EngineConfig

HERE = Inventory((CPU,))
DEPLOYMENT = Deployment("b", 1, "b", Phase.PENDING, Intent.MIN_COST, 16)


@pytest.fixture
def base(files: Path) -> Model:
    return replace(ready_base(files), compression={"none": 97.0})


def test_the_only_device_is_chosen(base: Model, settings: Settings) -> None:
    placement = decide(base, DEPLOYMENT, HERE, settings)
    config = engine_config(base, placement, settings)
    assert config.max_active_variants == 0
    for asked, runs in ((1, 1), (99, config.max_variants)):
        limited = replace(DEPLOYMENT, max_active_variants=asked)
        assert engine_config(base, placement, settings, (), limited).max_active_variants == runs
    assert [(r.node, r.device_kind) for r in placement.ranks] == [("node", "cpu")]
    assert placement.estimate.accuracy == 97.0
    assert (config.engine, config.name, config.model_path) == ("echo", "b", base.path)
    assert (config.dtype, config.on_gpu, config.max_model_len) == ("float32", False, 64)
    assert [(r.node, r.device_kind, r.device_index, r.layers) for r in config.ranks] == [
        ("node", "cpu", 0, 2)
    ]
    assert (config.max_variants, config.max_lora_rank, config.max_num_seqs) == (4, 16, 16)


@pytest.mark.parametrize(
    ("limit", "expected", "answer"),
    [
        (None, None, 256),  # the context's rest would be 3,968, and few answers fill it
        (4000, None, 256),  # a limit is no expectation
        (16, None, 16),  # an answer cannot be longer
        (None, 1000, 1000),
        (16, 1000, 1000),
    ],
)
def test_an_answer_without_an_expected_length_has_256_tokens_in_the_reason(
    base: Model, settings: Settings, limit: int | None, expected: int | None, answer: int
) -> None:
    assert base.spec is not None
    long = replace(base, spec=replace(base.spec, max_position=4096))
    deployment = replace(DEPLOYMENT, max_output_tokens=limit, load=ExpectedLoad(output_tokens=expected))
    wide = settings.model_copy(update={"max_model_len": 4096})
    placement = decide(long, deployment, HERE, wide)
    choice = placement.choice
    assert (choice.input_tokens, choice.output_tokens) == (128, answer)
    assert f" GiB s for an answer of {answer} tokens to a prompt of 128, the best of" in placement.reason
    quick = decide(long, replace(deployment, intent=Intent.MIN_LATENCY), HERE, wide)
    assert f" s for an answer of {answer} tokens to a prompt of 128, the best of" in quick.reason
    assumed = f"answers are assumed to have {answer} tokens"
    assert any(assumed in note for note in choice.notes) is (expected is None)
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(long, replace(deployment, slos=Slos(latency_s=1e-9)), HERE, wide)
    assert (assumed in refusal.value.message) is (expected is None)
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(long, replace(deployment, slos=Slos(ttft_s=1e-9)), HERE, wide)
    assert "assumed" not in refusal.value.message  # a first token does not depend on the answer's length


def test_a_base_that_can_have_no_variants_gets_an_engine_without_slots(
    base: Model, settings: Settings
) -> None:
    assert base.spec is not None
    model = replace(base, spec=replace(base.spec, architecture="FalconForCausalLM", linear_shapes={}))
    config = engine_config(model, decide(model, DEPLOYMENT, HERE, settings), settings)
    assert (config.max_variants, config.max_lora_rank, config.ranks[0].variant_memory_bytes) == (0, 0, 0)


def test_the_cache_holds_every_sequence_at_full_length(base: Model, settings: Settings) -> None:
    placement = decide(base, DEPLOYMENT, HERE, settings)
    config = engine_config(base, placement, settings)
    tokens = config.max_num_seqs * config.max_model_len
    (rank,) = config.ranks
    assert rank.kv_cache_bytes >= tokens * 2 * 4 * 4 * 2  # K and V, 1 head of 4, 4 bytes, 2 layers
    assert rank.memory_bytes > rank.kv_cache_bytes


def test_the_context_is_bounded_by_the_model(base: Model, settings: Settings) -> None:
    longer = settings.model_copy(update={"max_model_len": 4096})
    assert decide(base, DEPLOYMENT, HERE, longer).plan.max_model_len == 64


def test_a_dtype_may_be_set(base: Model, settings: Settings) -> None:
    half = settings.model_copy(update={"engine_dtype": "bfloat16"})
    assert engine_config(base, decide(base, DEPLOYMENT, HERE, half), half).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "dtype", "asked", "kept"),
    [
        (VariantKind.SPARSE_DELTA, "bfloat16", True, True),
        (VariantKind.SPARSE_DELTA, "bfloat16", False, False),
        (VariantKind.SPARSE_DELTA, "float32", True, False),
        (VariantKind.LORA, "bfloat16", True, False),
    ],
)
def test_the_weights_are_kept_twice_where_a_sparse_delta_can_be_merged(
    base: Model, settings: Settings, kind: VariantKind, dtype: str, asked: bool, kept: bool
) -> None:
    variant = Model("v", 2, Phase.READY, base="b", variant_spec=VariantSpec(kind, 100, {}))
    chosen = settings.model_copy(update={"engine_dtype": dtype})
    placements = [
        decide(base, replace(DEPLOYMENT, engine=EngineSizes(merged_slot=slot)), HERE, chosen, [variant])
        for slot in (asked, False)
    ]
    config = engine_config(base, placements[0], chosen, [variant])
    assert config.merged_slot == kept
    assert json.loads(argument(config, "--additional-config"))["ostinato"]["merged_slot"] == kept
    (more,), (fewer,) = (placement.estimate.memory_bytes for placement in placements)
    assert (more > fewer) == kept
    assert config.ranks[0].variant_memory_bytes == arena_bytes(
        served_spec(spec_of(base), dtype), placements[1].plan, 0
    )


def argument(config: EngineConfig, flag: str) -> str:
    arguments = engine_arguments(config)
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("changes", "slos", "devices"),
    [
        ({}, Slos(), ()),
        ({}, Slos(), (replace(CPU, total_bytes=GIB, free_bytes=1000),)),
        ({}, Slos(latency_s=1e-12), (CPU,)),
        ({}, Slos(accuracy=99.0), (CPU,)),
        ({"compression": {"int4": 90.0}}, Slos(), (CPU,)),
    ],
    ids=["no devices", "no memory", "too fast", "too good", "no technique"],
)
def test_an_infeasible_deployment_is_refused(
    base: Model, settings: Settings, changes: dict[str, Any], slos: Slos, devices: tuple[Device, ...]
) -> None:
    wanted = replace(DEPLOYMENT, intent=Intent.MIN_COST, slos=slos)
    with pytest.raises(errors.NoFeasiblePlan) as refusal:
        decide(replace(base, **changes), wanted, Inventory(devices), settings)
    assert len(refusal.value.message) > 20


def test_a_model_that_was_not_profiled(base: Model, settings: Settings) -> None:
    with pytest.raises(errors.NotReady):
        decide(replace(base, spec=None), DEPLOYMENT, HERE, settings)


def test_a_cpu_engine_without_a_profile_has_room_for_its_process(base: Model, settings: Settings) -> None:
    """vLLM's process takes 1.9 to 2.2 GB in addition to the smallest of models; the echo engine's takes next
    to nothing."""
    ample = Inventory((replace(CPU, free_bytes=64 * GIB, total_bytes=64 * GIB),))
    vllm = settings.model_copy(update={"engine": "vllm"})
    needed = decide(base, DEPLOYMENT, ample, vllm).ranks[0].memory_bytes
    assert 1.9e9 < needed < 3e9
    assert decide(base, DEPLOYMENT, ample, settings).ranks[0].memory_bytes < 0.5e9


def test_an_engine_reads_answers_as_its_model_writes_them(base: Model, settings: Settings) -> None:
    """Unless it was deployed otherwise: those parsers it must have."""
    placement = decide(base, DEPLOYMENT, HERE, settings)
    model = replace(base, chat=ChatFormat("hermes", "why", "qwen3", "why"))

    def parsers(model: Model, **asked: str) -> tuple[str, str, tuple[str, ...]]:
        config = engine_config(model, placement, settings, (), replace(DEPLOYMENT, **asked))  # type: ignore[arg-type]
        return config.tool_parser, config.reasoning_parser, config.needed_parsers

    assert parsers(base) == ("", "", ())
    assert parsers(model) == ("hermes", "qwen3", ())
    assert parsers(model, tool_parser="mistral") == ("mistral", "qwen3", ("mistral",))
    assert parsers(model, tool_parser="", reasoning_parser="deepseek_r1") == (
        "",
        "deepseek_r1",
        ("deepseek_r1",),
    )


def test_an_engine_s_arguments_name_what_reads_its_answers(base: Model, settings: Settings) -> None:
    config = engine_config(base, decide(base, DEPLOYMENT, HERE, settings), settings)
    plain = engine_arguments(config)
    assert "--enable-auto-tool-choice" in plain
    assert plain[plain.index("--tool-call-parser") + 1] == FORCED_TOOLS
    assert "--reasoning-parser" not in plain
    known = engine_arguments(replace(config, tool_parser="hermes", reasoning_parser="qwen3"))
    assert known[known.index("--tool-call-parser") + 1] == "hermes"
    assert known[known.index("--reasoning-parser") + 1] == "qwen3"
