"""The attention that vLLM takes for a whole graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers.patches.vllm import attention_splits


def builder_class() -> Any:
    class Builder:
        """vLLM's builder reads the largest graph's size when it is made."""

        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            self.max_cudagraph_size = vllm_config.compilation_config.max_cudagraph_capture_size

    return Builder


@pytest.mark.parametrize(("largest", "sequences", "expected"), [(2048, 8, 8), (4, 8, 4), (None, 8, None)])
def test_only_decoding_is_taken_for_a_whole_graph(
    largest: int | None, sequences: int, expected: int | None
) -> None:
    builder = builder_class()
    attention_splits.install(builder)
    attention_splits.install(builder)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=largest),
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        num_speculative_tokens=0,
    )
    assert builder(config).max_cudagraph_size == expected
