"""Keeps FlashAttention's buffers small if graphs are larger than decoding needs.

For a step that may run as one whole graph, vLLM makes FlashAttention 3 split each sequence's keys into up to
32 parts. Their partial results take [32, heads, tokens, head size] floats, 1.2 GB for 14 prompts of 128
tokens and 40 heads. vLLM assumes this for any step of up to the largest graph's tokens. But whole graphs are
only for decoding (at most `max_num_seqs` tokens); larger graphs do not capture attention and need no bound.
"""

from __future__ import annotations

from typing import Any

from workers.group.after_init import after_init


def install() -> None:
    """Limit the buffers in a rank's process on a GPU, before its model runner is built. May run twice."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    bound(FlashAttentionMetadataBuilder)


def bound(builder: Any) -> None:
    """Make a class of vLLM's attention metadata builders treat only decoding steps as whole graphs."""
    after_init(builder, _bound)


def _bound(made: Any, *args: Any, **kwargs: Any) -> None:
    largest = getattr(made, "max_cudagraph_size", None)
    if largest is not None:
        speculative = getattr(made.vllm_config, "num_speculative_tokens", 0)
        decoding = made.vllm_config.scheduler_config.max_num_seqs * (1 + speculative)
        made.max_cudagraph_size = min(largest, decoding)
