"""One engine, on a folder as Mistral's hub and trainers leave it, with adapters of several layouts.

The folder also has other weights in Mistral's layout (which vLLM would take first), another file of the same
names and an adapter's; the tokenizer is tekken.json alone. The answers are those of transformers and PEFT.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM

from profiler.checkpoint import read_model
from testkit import adapter_layouts, random_adapters
from testkit.base_layouts import sharded, stray
from testkit.engine_configs import ranks_of, vllm_config
from testkit.tiny_families import Tiny
from workers.messages import EngineCall, EngineConfig, VariantRef
from workers.server.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("own_environment")]

MERGES = ("th", "he", "the", " t", " the", " q", "qu", "ic", "ick")
SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
VOCABULARY = len(SPECIAL) + 256 + len(MERGES)
MISTRAL = Tiny("Mistral", {**adapter_layouts.SIZES, "vocab_size": VOCABULARY, "sliding_window": None})
ADAPTERS = ("as PEFT writes it", "axolotl's patterns", "targets that the base lacks", "no alpha")
TEXT, TOKENS, TOLERANCE = "the quick fox", 6, 1e-3


def write_tekken(folder: Path) -> None:
    """Mistral's file of a tokenizer: all bytes, a few merges, the special tokens."""
    tokens = [bytes([n]) for n in range(256)] + [text.encode() for text in MERGES]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [{"rank": n, "token_str": text, "is_control": True} for n, text in enumerate(SPECIAL)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": VOCABULARY,
        "default_num_special_tokens": len(SPECIAL),
        "version": "v7",
    }
    raw = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(raw))


def write_base(folder: Path) -> Path:
    stray(sharded(folder, MISTRAL), "consolidated.safetensors", params=True)
    stray(folder, "a_before_training.safetensors")
    stray(folder, "adapter_model.safetensors")
    (folder / "tokenizer.json").unlink()
    write_tekken(folder)
    return folder


def config_of(folder: Path) -> EngineConfig:
    return vllm_config(
        folder,
        ranks_of((2,), 1, variant_memory_bytes=16 << 20),
        max_model_len=128,
        max_variants=4,
        variant_host_bytes=16 << 20,
        fingerprint=read_model(folder).fingerprint,
    )


async def answered(worker: Worker, variant: VariantRef | None) -> dict[str, Any]:
    body = {
        "model": variant.name if variant else "base",
        "prompt": TEXT,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    asked = {**body, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    reply = await worker.call(EngineCall("/v1/completions", json.dumps(asked).encode(), variant))
    assert reply.status == 200, reply.body
    choice: dict[str, Any] = json.loads(reply.body)["choices"][0]
    return choice


async def test_the_served_weights_are_the_read_weights(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    folders = {name: adapter_layouts.SERVED[name](tmp_path / name.replace(" ", "-")) for name in ADAPTERS}
    variants = {n: VariantRef(f"v{i}", i, str(f)) for i, (n, f) in enumerate(folders.items(), 1)}
    worker = Worker(config_of(base), "127.0.0.1")
    try:
        await worker.start()
        choices = {"": await answered(worker, None)}
        for name, variant in variants.items():
            await worker.load_variant(variant)
            choices[name] = await answered(worker, variant)
        chat = {"model": "base", "messages": [{"role": "user", "content": "the"}], "max_tokens": 2}
        body = json.dumps({**chat, "return_token_ids": True}).encode()
        said = await worker.call(EngineCall("/v1/chat/completions", body, None))
    finally:
        await worker.close()
    tekken = MistralTokenizer.from_file(str(base / "tekken.json")).instruct_tokenizer.tokenizer
    ids = tekken.encode(TEXT, bos=True, eos=False)
    for name, choice in choices.items():
        assert choice["prompt_token_ids"] == ids
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        if name:
            model = PeftModel.from_pretrained(model, folders[name]).merge_and_unload()
        with torch.inference_mode():
            expected = random_adapters.log_probabilities(model, ids, choice["token_ids"])
        chosen = expected[torch.arange(TOKENS), torch.tensor(choice["token_ids"])]
        given = torch.tensor(choice["logprobs"]["token_logprobs"])
        assert (chosen - given).abs().max() < TOLERANCE, name
        assert (expected.max(dim=-1).values - chosen).max() < TOLERANCE, name
    assert said.status == 200, said.body
    begin, end = (SPECIAL.index(text) for text in ("[INST]", "[/INST]"))
    the = tekken.encode("the", bos=False, eos=False)
    assert json.loads(said.body)["prompt_token_ids"] == [SPECIAL.index("<s>"), begin, *the, end]
