"""Keeps FlashAttention's buffers small if graphs are larger than decoding needs.

For a step that may run as one whole graph, vLLM makes FlashAttention 3 split each sequence's keys into up to
32 parts. Their partial results take [32, heads, tokens, head size] floats, 1.2 GB for 14 prompts of 128
tokens and 40 heads. vLLM assumes this for any step of up to the largest graph's tokens. But whole graphs are
only for decoding (at most `max_num_seqs` tokens); larger graphs do not capture attention and need no bound.
"""

from __future__ import annotations

from typing import Any

from profiler.patches.target import Target

BUILDER = Target(
    "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionMetadataBuilder.__init__",
    read={"0.26": "a86c25314e91", "0.32": "b2326acf5a29"},
)


def install(builder: Any = None) -> None:
    """Limit the buffers in a rank's process on a GPU, before its model runner is built.

    `builder` is the class of attention metadata builders; without it, vLLM's.
    """
    BUILDER.call_after(_bound, builder)


def _bound(made: Any, *args: Any, **kwargs: Any) -> None:
    largest = made.max_cudagraph_size
    if largest is not None:
        speculative = getattr(made.vllm_config, "num_speculative_tokens", 0)
        decoding = made.vllm_config.scheduler_config.max_num_seqs * (1 + speculative)
        made.max_cudagraph_size = min(largest, decoding)
