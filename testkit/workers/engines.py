"""Whole engines of vLLM on a CPU, in this process, driven step by step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testkit import random_variants
from workers.bus.client import new_address
from workers.variant_config import ADDRESS_VARIABLE, VariantConfig

OURS = "workers.engine.scheduler.make_scheduler"
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# Sizes that vLLM's attention on CPU takes.
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
BLOCK = 32
DEADLINE_S = 120


def write_base(folder: Path) -> Path:
    return random_variants.write_tiny_base(folder, **SMALL)


@dataclass
class Engine:
    """`steps` counts those that computed something; `tokens` and `ended` are by request, the latter
    the step of the last token and why it was the last."""

    llm: Any
    address: str = ""
    steps: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    ended: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def start(cls, base: Path, slots: int, scheduler: str | None = OURS, **options: Any) -> Engine:
        os.environ.pop(ADDRESS_VARIABLE, None)
        if scheduler is not None:
            os.environ[ADDRESS_VARIABLE] = new_address()
        from vllm import LLM

        config = VariantConfig(slots, 64 << 20, 1 << 30, max_rank=16)
        llm = LLM(
            model=str(base),
            skip_tokenizer_init=True,
            dtype="float32",
            enable_lora=True,
            max_loras=slots,
            max_lora_rank=16,
            max_num_seqs=16,
            max_model_len=256,
            block_size=BLOCK,
            enforce_eager=True,
            worker_cls="workers.group.cpu_pipeline.CpuRank",
            scheduler_cls=scheduler,
            additional_config=config.as_json(),
            **options,
        )
        return cls(llm, os.environ.get(ADDRESS_VARIABLE, ""))

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def add(self, name: str, prompt: list[int], variant: Any = None, tokens: int = 16, **others: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = {"prompt_token_ids": prompt, **others}
        self.llm.llm_engine.add_request(name, asked, params, lora_request=variant)

    def step(self) -> None:
        """As the engine's own loop does it, with its pause where nothing could be computed."""
        before = sum(len(found) for found in self.tokens.values())
        for output in self.llm.llm_engine.step():
            name = output.request_id
            (made,) = output.outputs
            self.tokens[name] = list(made.token_ids)
            if made.token_ids:
                self.begun.setdefault(name, self.steps)
            if output.finished:
                self.ended[name] = (self.steps, str(made.finish_reason))
        if sum(len(found) for found in self.tokens.values()) > before:
            self.steps += 1
        else:
            time.sleep(0.001)

    def run(self) -> None:
        """Run until no requests are left."""
        deadline = time.monotonic() + DEADLINE_S
        while self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline, self.scheduler
            self.step()

    def until(self, what: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline
            self.step()
