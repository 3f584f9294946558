"""Families without variants, from a checkpoint that transformers wrote, through read_model and our worker:
the engine gives each token the log-probability that transformers gives it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from profiler.checkpoint import read_model
from profiler.plans import candidate_plans
from testkit import random_adapters
from testkit.engine_configs import ranks_of, vllm_config
from testkit.tiny_families import Tiny
from workers.messages import EngineCall, EngineConfig, VariantRef
from workers.server.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("own_environment")]

TOKENS = 8
TOLERANCE = 5e-4  # float32 throughout, summed in another order
PROMPT = [5, 17, 33, 60, 8, 9, 10, 44, 3, 7, 51, 12, 13]
# Sizes that vLLM's attention on CPU takes; large enough weights for tokens to differ.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": 96,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 256}
FAMILIES = {
    "no adapters in vLLM": Tiny("Falcon", SIZES),
    "mixture of experts": Tiny("Mixtral", {**GROUPED, "num_local_experts": 4}),
}


COMPILED = (
    "no adapters in vLLM"  # as deployments without variants run; tests/conftest.py spares the others this
)


def write(tiny: Tiny, folder: Path) -> Path:
    """The checkpoint and a tokenizer of as many words."""
    torch.manual_seed(1)
    tiny.write(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w2").save_pretrained(folder)
    return folder


def config_of(folder: Path) -> EngineConfig:
    """The engine of the first plan: slots for variants were asked for, the plan has none."""
    (plan,) = candidate_plans(read_model(folder), ("none",), 1, 128, 2, max_variants=4, max_lora_rank=16)
    return vllm_config(
        folder,
        ranks_of(plan.layers_per_stage, plan.tensor_parallel),
        tensor_parallel=plan.tensor_parallel,
        max_model_len=plan.max_model_len,
        max_num_seqs=2,
        max_variants=plan.max_variants,
        max_lora_rank=plan.max_lora_rank,
        variant_host_bytes=1 << 20,
    )


@pytest.mark.parametrize("what", FAMILIES)
async def test_the_engine_agrees_with_transformers(what: str, tmp_path: Path) -> None:
    if what == COMPILED:
        os.environ["TORCH_COMPILE_DISABLE"] = "0"
    folder = write(FAMILIES[what], tmp_path / "model")
    worker = Worker(config_of(folder), "127.0.0.1")
    body = {"model": "base", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    asked = json.dumps({**body, "logprobs": 1, "return_token_ids": True}).encode()
    try:
        await worker.start()
        reply = await worker.call(EngineCall("/v1/completions", asked, None))
        refused = await worker.call(EngineCall("/v1/completions", asked, VariantRef("v", 1, str(tmp_path))))
        slots = (await worker.residency()).slots
    finally:
        await worker.close()
    assert reply.status == 200, reply.body
    choice = json.loads(reply.body)["choices"][0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = random_adapters.log_probabilities(reference, PROMPT, choice["token_ids"])
    chosen = expected[torch.arange(TOKENS), torch.tensor(choice["token_ids"])]
    given = torch.tensor(choice["logprobs"]["token_logprobs"])
    assert (chosen - given).abs().max() < TOLERANCE
    assert (expected.max(dim=-1).values - chosen).max() < TOLERANCE
    assert chosen.min() < -0.1, "every token is certain: the test would show nothing"
    assert (refused.status, slots) == (422, 0)
    assert b"without slots" in refused.body


def test_every_architecture_is_in_vllm() -> None:
    """0.26, which serves GPUs, has them all under their own names; here the installed version is checked."""
    from vllm.model_executor.models.registry import ModelRegistry

    from profiler.architectures.registry import FAMILIES as ARCHITECTURES

    assert set(ARCHITECTURES) <= set(ModelRegistry.get_supported_archs())
