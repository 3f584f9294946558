"""A rank's view of its device: the free memory before, graphs, and steps of the whole batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measurements import Setting
from testkit.engine_simulator import Request, land, schedule
from workers.measuring import free_memory_wait
from workers.measuring.free_memory_wait import (
    STABLE_SAMPLES,
    STABLE_SAMPLES_SHARED,
    Sample,
    is_stable,
    stable_free_bytes,
    taken,
)
from workers.measuring.timing import warm_up_tokens
from workers.patches.vllm import graph_memory


@given(st.lists(st.builds(Sample, st.tuples(st.integers(0, 2)), st.integers(0, 1)), min_size=1, max_size=60))
def test_memory_that_still_moves_is_not_taken_for_free(seen: list[Sample]) -> None:
    """The age of the last change, as a count."""
    changed = next((i for i, one in enumerate(reversed(seen)) if one != seen[-1]), len(seen))
    assert is_stable(seen) == (changed >= (STABLE_SAMPLES_SHARED if seen[-1].processes else STABLE_SAMPLES))


def test_memory_that_the_last_engine_returns_late_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory_wait, "POLL_S", 0.0)
    looks: Iterator[Sample] = iter(
        [Sample((1,), 1)] * 5 + [Sample((1,), 0), Sample((4,), 0)] + [Sample((9,), 0)] * 9
    )
    assert stable_free_bytes(lambda: next(looks)) == (9,)


def test_memory_that_never_stands_still_is_waited_for_a_while() -> None:
    assert stable_free_bytes(lambda: Sample((1,), 3), max_s=0.0) == (1,)


def test_memory_that_another_process_returned_is_no_measurement() -> None:
    assert taken(9, 2, 0) == 7
    with pytest.raises(RuntimeError, match="GPU 3 has 5 MiB more free"):
        taken(1 << 20, 6 << 20, 3)


class _Runner:
    def capture_model(self) -> int:
        return 123


def test_graphs_are_what_capturing_them_returned() -> None:
    class Worker:
        def __init__(self) -> None:
            self.model_runner: Any = _Runner()

        def compile_or_warm_up_model(self) -> str:
            return f"took {self.model_runner.capture_model()}"

    graph_memory.install(Worker)
    one, other = Worker(), Worker()
    assert one.compile_or_warm_up_model() == "took 123"
    assert tuple(map(graph_memory.graph_bytes, (one, other))) == (123, 0)


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("length", [128, 1024])
def test_most_steps_that_replay_a_graph_are_of_the_whole_batch(batch: int, length: int) -> None:
    """vLLM replays the graph of the next size that was captured where all of a step decode; up to 512."""
    requests = [Request(number, length) for number in range(batch)]
    tokens = warm_up_tokens(Setting((1,)).prefill_steps(batch, length), 1000)
    seen: Counter[int] = Counter()
    while step := schedule(requests, tokens, 2048):
        if all(count == 1 for _, count, _ in step.parts):
            seen[_captured(len(step.parts))] += 1
        land(step, 0.0)
    assert seen.most_common(1)[0][0] == _captured(batch)


def _captured(batch: int) -> int:
    return batch if batch in (1, 2, 4) else 8 * math.ceil(batch / 8)
