"""An engine with variants of every kind, and what transformers answers with their merged weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from profiler.variants.types import VariantKind
from testkit import random_adapters, random_variants, started_worker
from testkit.cluster import small_models
from testkit.engine_configs import ranks_of, vllm_config
from workers.deltas.merge import merge
from workers.messages import EngineConfig, VariantRef

Prompt = str | list[int]

BASE = "base"
TOKENS = 12
LOGPROB_TOLERANCE = 5e-4
TIE = 1e-4
PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea, there lived")
KINDS = tuple(variant.name for variant in random_variants.EVERY_KIND)
MODELS = (BASE, *KINDS)
# SmolLM2's own sizes in fewer layers: there is every shape, in two stages of different depth.
LAYERS = 3
VOCABULARY = 15_360  # three ranks share it


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Checkpoints:
    """The base in float32, variants of it, and the log-probabilities that merged weights give."""

    base: Path
    variants: dict[str, VariantRef]
    merged: dict[str, Path]

    def differences(self, model: str, answers: list[Answer]) -> tuple[float, float]:
        """The distance of the worst token from the reference's best, and the largest |log-probability|
        error."""
        reference = AutoModelForCausalLM.from_pretrained(self.merged[model], dtype=torch.float32).eval()
        short, error = 0.0, 0.0
        for answer in answers:
            expected = random_adapters.log_probabilities(reference, answer.prompt, answer.tokens)
            chosen = expected[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
            short = max(short, float((expected.max(dim=-1).values - chosen).max()))
            error = max(error, float((chosen - torch.tensor(answer.logprobs)).abs().max()))
        return short, error


def written(smollm2: Path, folder: Path) -> Checkpoints:
    """Few layers and tokens of SmolLM2 and their variants, in `folder`."""
    base = random_variants.first_layers(smollm2, folder / BASE, LAYERS)
    return with_variants(small_models.fewer_tokens(base, VOCABULARY), folder)


def with_variants(base: Path, folder: Path) -> Checkpoints:
    """Variants of every kind of `base`, in `folder`."""
    variants, merged = {}, {BASE: base}
    for uid, variant in enumerate(random_variants.EVERY_KIND, 1):
        made = random_variants.write(base, folder / variant.name, variant)
        merged[variant.name] = folder / f"{variant.name}.merged"
        merge(base, made, merged[variant.name])
        variants[variant.name] = VariantRef(variant.name, uid, str(made))
    return Checkpoints(base, variants, merged)


@dataclass
class Lab(started_worker.Lab):
    checkpoints: Checkpoints

    async def ask(self, model: str, prompt: Prompt, salt: str | None) -> Answer:
        named = {"cache_salt": salt} if salt else {}
        variant = self.checkpoints.variants.get(model)
        call = started_worker.greedy(model, prompt, variant, max_tokens=TOKENS, logprobs=1, **named)
        reply = await self.worker.call(call)
        assert reply.status == 200, reply.body
        choice = json.loads(reply.body)["choices"][0]
        return Answer(choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def check(self, rows: Sequence[tuple[str, Prompt]], passes: Sequence[Sequence[Answer]]) -> None:
        """Check that each model's answers are those of its merged weights.

        Float32 everywhere: the engine only sums in another order than transformers.
        """
        for model in MODELS:
            mine = [a for answers in passes for a, (m, _) in zip(answers, rows, strict=True) if m == model]
            short, error = self.checkpoints.differences(model, mine)
            print(f"{model}: largest |delta log-probability| {error:.1e}")
            assert short < TIE, f"{model}: a token is worse than the reference's best by {short:.4f}"
            assert error < LOGPROB_TOLERANCE

    async def ask_all(self, rows: Sequence[tuple[str, Prompt]], salted: bool) -> list[Answer]:
        asked = [self.ask(m, p, f"{m}{i}" if salted else None) for i, (m, p) in enumerate(rows)]
        return list(await asyncio.gather(*asked))


@contextlib.contextmanager
def running(checkpoints: Checkpoints, config: EngineConfig) -> Iterator[Lab]:
    with started_worker.started(config, started_worker.ONE_THREAD) as (worker, loop):
        yield Lab(worker, loop, checkpoints)


def engine_config(base: Path, tensor_parallel: int, layers_per_stage: tuple[int, ...]) -> EngineConfig:
    return vllm_config(
        base,
        ranks_of(layers_per_stage, tensor_parallel, variant_memory_bytes=640 << 20),
        tensor_parallel=tensor_parallel,
        max_num_seqs=len(MODELS) * len(PROMPTS),
        max_variants=len(KINDS),
        variant_host_bytes=1 << 30,
        variant_kinds=tuple(VariantKind),
    )
