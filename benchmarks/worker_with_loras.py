"""A Llama shape with dummy weights, and streamed requests to a worker that serves it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import gpu_engine
from profiler.types import CPU
from workers.messages import EngineCall, EngineHead, VariantRef

if TYPE_CHECKING:
    from workers.server.worker import Worker

INPUT_TOKENS = 64
BASE = "dummy-7b"
MIB = 2**20
ON_CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Size:
    """A Llama's, as config.json names it; what is asked of it; and what serves it.

    `memory_bytes` is what the engine may take; None: what the plan's estimate says. `adapters_deviation` is
    that of a LoRA's B.
    """

    shape: dict[str, int]
    output_tokens: int = 128
    repeats: int = 3
    dtype: str = "bfloat16"
    device_kind: str = "nvidia-h200"
    memory_bytes: int | None = None
    adapters_deviation: float = 0.3


LLAMA_7B = Size({**gpu_engine.LLAMA_7B, "vocab_size": 49152})
REHEARSED = Size(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    output_tokens=6,
    repeats=1,
    dtype="float32",
    device_kind=CPU,
    memory_bytes=2048 * MIB,  # an engine on a CPU takes some, however small its model
    adapters_deviation=3.0,  # two layers of vLLM's tiny dummy weights hide smaller ones
)


@dataclass(frozen=True)
class Answered:
    """One request: its token ids, the time until the first, and from each to the next in the mean."""

    tokens: list[int]
    ttft_s: float
    tpot_s: float


async def completion(
    worker: Worker, name: str, prompt: list[int], output_tokens: int, variant: VariantRef | None, **more: Any
) -> Answered:
    """One streamed completion of exactly `output_tokens` tokens. Raises RuntimeError for any other answer."""
    body = {
        "model": variant.name if variant else name,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    began_s, times, tokens = time.perf_counter(), list[float](), list[int]()
    async for item in worker.stream(EngineCall("/v1/completions", json.dumps(body).encode(), variant)):
        if isinstance(item, EngineHead):
            if item.status != 200:
                raise RuntimeError(f"expected status 200 of a completion, got {item}")
            continue
        if new := [token for line in item.decode().splitlines() for token in _tokens_of(line)]:
            tokens += new
            times.append(time.perf_counter() - began_s)
    if len(tokens) != output_tokens:
        raise RuntimeError(f"expected {output_tokens} tokens of an answer, got {len(tokens)}")
    return Answered(tokens, times[0], (times[-1] - times[0]) / max(1, len(tokens) - 1))


def _tokens_of(line: str) -> list[int]:
    """The tokens in one event of a stream. Raises RuntimeError for an error."""
    if not line.startswith("data: {"):
        return []
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise RuntimeError(f"the engine answered an error: {event['error']}")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


async def ask(
    worker: Worker, variant: VariantRef | None, seed: int, salt: str, size: Size, request_id: str = ""
) -> Answered:
    """One streamed completion of a random prompt. vLLM makes the id up if none is given."""
    rng = np.random.default_rng(seed)
    prompt = [int(t) for t in rng.integers(100, size.shape["vocab_size"] - 100, INPUT_TOKENS)]
    named = {"request_id": request_id} if request_id else {}
    return await completion(worker, BASE, prompt, size.output_tokens, variant, cache_salt=salt, **named)
