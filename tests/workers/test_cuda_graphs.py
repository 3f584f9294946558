"""Which steps run as captured graphs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from workers.group.cuda_graphs import MAX_TOKENS, compilation, graph_sizes, sizes_for


@given(st.integers(1, 512), st.integers(1, 16384))
def test_every_step_up_to_the_largest_is_padded_by_little(max_sequences: int, batched_tokens: int) -> None:
    sizes = graph_sizes(max_sequences, batched_tokens)
    most = min(MAX_TOKENS, batched_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most  # a full step is not padded at all,
    assert min(max_sequences, most) in sizes  # nor one in which all sequences decode
    for before, size in itertools.pairwise(sizes):
        assert size - (before + 1) < max(8, (before + 1) / 8)
    assert len(sizes) <= 48


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(1, 64), st.integers(64, 4096))
def test_steps_run_in_the_graphs_that_they_would_run_in_with_all(
    steps: list[int], sequences: int, batched_tokens: int
) -> None:
    def runs_in(tokens: int, captured: list[int]) -> int | None:
        return min((size for size in captured if size >= tokens), default=None)

    every = graph_sizes(sequences, batched_tokens)
    few = sizes_for(steps, every)
    assert set(few) <= set(every)
    assert [runs_in(step, few) for step in steps] == [runs_in(step, every) for step in steps]


def test_vllm_is_given_our_graph_sizes() -> None:
    assert compilation(1, 4, 4) == {"cudagraph_capture_sizes": [1, 2, 4]}
    assert compilation(2, 4, 4)["pass_config"] == {"fuse_allreduce_rms": False, "enable_sp": False}
