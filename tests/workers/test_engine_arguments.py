"""The command line that vLLM gets, with slots for variants and without."""

from __future__ import annotations

import pytest

from workers.messages import EngineConfig
from workers.no_variants import NoVariants
from workers.residency import residency_of
from workers.vllm_engine import engine_arguments

CONFIG = EngineConfig(
    engine="vllm",
    name="base",
    model_path="/models/base",
    dtype="float32",
    device_kind="cpu",
    tensor_parallel=1,
    layers_per_stage=(2,),
    max_model_len=64,
    max_num_seqs=2,
    kv_cache_bytes=1 << 20,
    memory_bytes=1 << 30,
    max_variants=0,
    max_lora_rank=0,
    variant_memory_bytes=0,
    variant_host_bytes=1 << 20,
    variant_kinds=("lora",),
)


def test_an_engine_without_slots_is_vllm_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses --enable-lora on architectures that it has no adapters for, Falcon for one."""
    monkeypatch.setattr("workers.vllm_engine._on_cpu", lambda: True)
    arguments = engine_arguments(CONFIG)
    assert not {"--enable-lora", "--max-loras", "--scheduler-cls", "--additional-config"} & set(arguments)


async def test_it_has_no_variants_and_takes_none() -> None:
    client = NoVariants()
    state = residency_of(await client.state())
    assert (state.slots, state.limit, state.variants) == (0, await client.limit(3), ())
    with pytest.raises(ValueError, match="without slots"):
        await client.prepare(1, "/variants/v")
    await client.forget(1)
    client.close()
