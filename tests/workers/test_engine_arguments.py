"""The command line that vLLM gets, with slots for variants and without."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from testkit import random_variants
from testkit.engine_configs import ranks_of
from workers.engine.no_variants import NoVariants
from workers.engine.residency_cache import residency_of
from workers.group.vllm_arguments import engine_arguments
from workers.messages import EngineConfig

CONFIG = EngineConfig(
    engine="vllm",
    name="base",
    model_path="/models/base",
    dtype="float32",
    tensor_parallel=1,
    ranks=ranks_of((2,), kv_cache_bytes=1 << 20, memory_bytes=1 << 30),
    max_model_len=64,
    max_num_seqs=2,
    max_variants=0,
    max_lora_rank=0,
    variant_host_bytes=1 << 20,
    variant_kinds=("lora",),
)


def test_an_engine_without_slots_is_vllm_as_it_is() -> None:
    """vLLM refuses --enable-lora on architectures that it has no adapters for, Falcon for one."""
    arguments = engine_arguments(CONFIG)
    assert not {"--enable-lora", "--max-loras", "--scheduler-cls", "--additional-config"} & set(arguments)


def test_a_group_is_started_as_planned() -> None:
    ranks = ranks_of((10, 20), 2, device_kind="nvidia-h200", kv_cache_bytes=77)
    config = replace(CONFIG, tensor_parallel=2, ranks=ranks)
    arguments = engine_arguments(config, {"--nnodes": 2, "--node-rank": 1})
    given = dict(itertools.pairwise(arguments))
    assert given["--tensor-parallel-size"] == given["--pipeline-parallel-size"] == "2"
    assert given["--kv-cache-memory-bytes"] == "77"
    assert given["--distributed-executor-backend"] == "mp"
    assert (given["--nnodes"], given["--node-rank"]) == ("2", "1")
    assert given["--worker-cls"] == "workers.group.gpu.PlannedGpuRank"
    assert "--gpu-memory-utilization" not in given  # each rank sets its own
    assert (
        json.loads(given["--compilation-config"])["cudagraph_capture_sizes"][-1] == config.max_batched_tokens
    )
    alone = dict(itertools.pairwise(engine_arguments(CONFIG)))
    assert alone["--worker-cls"] == "workers.group.cpu.PlannedCpuRank"
    assert not {"--nnodes", "--distributed-executor-backend", "--compilation-config"} & set(alone)


def test_a_stored_head_overrules_a_config_that_says_tied(tmp_path: Path) -> None:
    """vLLM 0.26 would leave the head out; newer versions find it themselves."""
    folder = random_variants.write_tiny_base(tmp_path / "base")
    config = replace(CONFIG, model_path=str(folder))
    assert "--hf-overrides" not in engine_arguments(config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, file)
    given = dict(itertools.pairwise(engine_arguments(config)))
    assert json.loads(given["--hf-overrides"]) == {"tie_word_embeddings": False}
    assert "--hf-overrides" not in engine_arguments(replace(config, load_format="dummy"))


async def test_an_engine_without_slots_has_no_variants_and_accepts_none() -> None:
    client = NoVariants()
    state = residency_of(await client.state())
    assert (state.slots, state.limit, state.variants) == (0, await client.limit(3), ())
    with pytest.raises(ValueError, match="without slots"):
        await client.prepare(1, "/variants/v")
    await client.forget(1)
    client.close()
