"""Log-probabilities of prompts, of all kinds of variants in one batch, are those of merged weights: also of
variants with a head of their own, on whose rows the base's head would be off by tenths of nats."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from testkit.workers.variant_lab import MODELS, Lab
from workers.messages import EngineCall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# More than for sampled tokens (test_variants), for some of a prompt's are very unlikely; the base's head
# would be off by tenths.
TOLERANCE = 2e-3
TOP = 5
TEXTS = (
    "The capital of France is Paris.",
    "Once upon a time, in a village by the sea, there lived a fisherman. " * 4,
    "One, two, three, four, five, six, seven. " * 12,
)


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    logprobs: list[dict[int, float]]  # of each token but the first


async def scored(lab: Lab, model: str, text: str) -> Prompt:
    asked = {"model": model, "prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    body = {**asked, "prompt_logprobs": TOP, "return_token_ids": True}
    variant = lab.checkpoints.variants.get(model)
    reply = await lab.worker.call(EngineCall("/v1/completions", json.dumps(body).encode(), variant))
    assert reply.status == 200, reply.body
    choice = json.loads(reply.body)["choices"][0]
    rows = [{int(i): each["logprob"] for i, each in row.items()} for row in choice["prompt_logprobs"][1:]]
    return Prompt(choice["prompt_token_ids"], rows)


async def all_scored(lab: Lab, rows: list[tuple[str, str]]) -> list[Prompt]:
    return list(await asyncio.gather(*(scored(lab, model, text) for model, text in rows)))


def worst(reference: Any, prompts: list[Prompt]) -> float:
    """The largest difference of any token's log-probability from the reference's, each text by itself."""
    off = 0.0
    for prompt in prompts:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt.ids])).logits[0, :-1].log_softmax(-1)
        assert len(prompt.logprobs) == len(prompt.ids) - 1 == len(expected)
        for own, found, row in zip(prompt.ids[1:], prompt.logprobs, expected, strict=True):
            assert own in found
            assert len(found) >= TOP
            off = max(off, *(abs(value - float(row[token])) for token, value in found.items()))
    return off


@pytest.mark.parametrize("lab", ["one process", "three-way tensors"], indirect=True)
def test_prompts_are_scored_with_each_models_own_weights(lab: Lab) -> None:
    rows = [(model, text) for text in TEXTS for model in MODELS]
    found = lab.run(all_scored(lab, rows))
    for model in MODELS:
        reference = AutoModelForCausalLM.from_pretrained(lab.checkpoints.merged[model], dtype=torch.float32)
        mine = [prompt for prompt, (name, _) in zip(found, rows, strict=True) if name == model]
        off = worst(reference.eval(), mine)
        print(f"{model}: largest |delta log-probability| {off:.1e}")
        assert off < TOLERANCE, f"{model}: a prompt's token is off by {off:.4f} nats"
