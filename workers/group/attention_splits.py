"""Keeps FlashAttention's buffers small where graphs reach beyond decoding.

For a step that may run as one whole graph vLLM has FlashAttention 3 split each sequence's keys into up to 32
parts, whose partial results it holds: [32, heads, tokens, head size] floats, 1.2 GB for 14 prompts of 128
tokens and 40 heads. vLLM takes any step of up to the largest graph's tokens for one. Whole graphs are of
decoding only (at most `max_num_seqs` tokens); in larger ones attention is not captured and needs no bound.
"""

from __future__ import annotations

from typing import Any

from workers.group.after_init import after_init


def install() -> None:
    """Called in every process of a rank on a GPU, before its model runner is built. May run twice."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    bound(FlashAttentionMetadataBuilder)


def bound(builder: Any) -> None:
    """Have a class of vLLM's builders of attention metadata take no more than decoding for whole graphs."""
    after_init(builder, _bound)


def _bound(made: Any, *args: Any, **kwargs: Any) -> None:
    largest = getattr(made, "max_cudagraph_size", None)
    if largest is not None:
        speculative = getattr(made.vllm_config, "num_speculative_tokens", 0)
        decoding = made.vllm_config.scheduler_config.max_num_seqs * (1 + speculative)
        made.max_cudagraph_size = min(largest, decoding)
