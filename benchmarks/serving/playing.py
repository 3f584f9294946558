"""Sends a case's requests at their times and notes what comes back when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.serving.metrics import Outcome
from benchmarks.serving.workload import Request

Prompt = Callable[[Request, int], list[int]]
Variants = Callable[[int], Any]  # from a variant's number to vLLM's request for it, None for the base


async def play(
    llm: Any, requests: Sequence[Request], prompt: Prompt, variants: Variants, drain_s: float
) -> tuple[list[Outcome], float]:
    """All outcomes, and how long it took. What is not done `drain_s` after the last arrival ends."""
    outcomes = [Outcome() for _ in requests]
    prompts = [prompt(request, index) for index, request in enumerate(requests)]
    start = time.perf_counter()
    tasks = [
        asyncio.create_task(_ask(llm, request, prompts[i], variants, start, outcomes[i]))
        for i, request in enumerate(requests)
    ]
    done, pending = await asyncio.wait(tasks, timeout=requests[-1].at_s + drain_s)
    duration_s = time.perf_counter() - start
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()  # raises what went wrong
    return outcomes, duration_s


async def _ask(
    llm: Any, request: Request, prompt: list[int], variants: Variants, start: float, outcome: Outcome
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=request.output_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    await asyncio.sleep(max(0.0, start + request.at_s - time.perf_counter()))
    sent = start + request.at_s
    try:
        answer = llm.generate(
            {"prompt_token_ids": prompt},
            sampling,
            f"{start}-{id(outcome)}",
            lora_request=variants(request.variant),
        )
        async for chunk in answer:
            outcome.tokens += len(chunk.outputs[0].token_ids)
            if outcome.ttft_s is None and outcome.tokens:
                outcome.ttft_s = time.perf_counter() - sent
        if outcome.tokens != request.output_tokens:
            raise RuntimeError(f"expected {request.output_tokens} tokens, got {outcome.tokens}")
        outcome.e2e_s = time.perf_counter() - sent
    finally:
        outcome.given_up_s = max(0.0, time.perf_counter() - sent)


async def tokens_of(llm: Any, prompt: list[int], variant: Any, count: int, name: str) -> list[int]:
    """The greedy answer of one variant."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    found: list[int] = []
    async for chunk in llm.generate({"prompt_token_ids": prompt}, sampling, name, lora_request=variant):
        found = list(chunk.outputs[0].token_ids)
    return found
