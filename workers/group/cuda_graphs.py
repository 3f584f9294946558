"""The sizes of steps that run as captured CUDA graphs on GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MAX_TOKENS = 2048  # a larger step keeps any GPU busy longer than its host needs to launch it
# On H200s, vLLM 0.26 cannot capture graphs with TP unless these two passes are off.
TP_PASSES = {"fuse_allreduce_rms": False, "enable_sp": False}


def graph_sizes(max_sequences: int, batched_tokens: int) -> list[int]:
    """The token counts of steps for which graphs are captured, ascending; a step runs in the next larger
    graph.

    Each is at most an eighth (or 8 tokens) above the one before, up to the largest step. vLLM by itself stops
    at twice `max_sequences`. Prefill steps are then launched one kernel at a time, which takes the host 0.4
    to 0.8 ms a layer. With TP or a small model that is longer than the GPU needs.
    """
    most = min(MAX_TOKENS, batched_tokens)
    sizes, size = {1, 2, 4, min(max_sequences, most), most}, 8
    while size < most:
        sizes.add(size)
        size += max(8, size // 64 * 8)
    return sorted(size for size in sizes if size <= most)


def sizes_for(steps: Iterable[int], sizes: Sequence[int]) -> list[int]:
    """The `sizes`, ascending, of the graphs in which steps of these token counts run."""
    return sorted({next((size for size in sizes if size >= tokens), sizes[-1]) for tokens in steps})


def compilation(tensor_parallel: int, max_sequences: int, batched_tokens: int) -> dict[str, Any]:
    """vLLM's compilation config for engines on GPUs."""
    passes = {"pass_config": TP_PASSES} if tensor_parallel > 1 else {}
    return {"cudagraph_capture_sizes": graph_sizes(max_sequences, batched_tokens), **passes}
