"""The measuring process on the real engine: what it writes, and that it goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.measurements import Footprint, Point, Setting, SyntheticVariant, Timing, read
from testkit.workers import counted_operations
from testkit.workers.measuring_jobs import a_job, measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POINTS = (Point(1, 16), Point(3, 40))
BURST = Point(64, 8)
MIX = (
    SyntheticVariant("lora", rank=4),
    SyntheticVariant("sparse_delta", bits=4),
    SyntheticVariant("boft", 0, 0, 1, 8),
)
MIXED = tuple(Point(3, 16, mix) for mix in (MIX[:1], MIX))


def test_every_point_is_measured_once(tmp_path: Path) -> None:
    """First a burst, in an engine of another process; then the others, in one of the measuring process."""
    job = a_job(tmp_path, Setting((2,)), (BURST,), own_process=True)
    measured(job, tmp_path)
    before = read(job.out)
    assert [type(m) for m in before] == [Footprint, Timing]
    burst = before[1]
    assert isinstance(burst, Timing)
    # Its prompts fit one step: all first tokens come together, however long it takes to send the prompts.
    assert burst.ttft_s == pytest.approx(burst.ttft_last_s, rel=1e-6)
    more = {"points": (BURST, *POINTS), "own_process": False}
    printed = measured(job.model_copy(update=more), tmp_path)
    assert "2/2 batch 3, 40 tokens in" in printed
    found = read(job.out)
    assert found[:2] == before
    footprint, *timings = found
    assert isinstance(footprint, Footprint)
    assert [m.point for m in timings if isinstance(m, Timing)] == [BURST, *POINTS]
    assert all(
        0 < m.ttft_s <= m.ttft_last_s < m.latency_s < m.taken_s for m in timings if isinstance(m, Timing)
    )
    (memory,) = footprint.ranks
    assert memory.without_kv_cache > 10 << 20
    assert memory.kv_tokens >= 128
    assert memory.kv_cache == memory.kv_tokens * 2 * (2 * 1 * 64 * 4)  # layers, keys and values in float32


def test_variants_of_each_kind_in_one_batch_of_a_model_whose_layers_repeat(tmp_path: Path) -> None:
    barrier = tmp_path / "barrier"
    barrier.touch()
    loads = (POINTS[0], *MIXED)
    job = a_job(tmp_path, Setting((4,)), loads, distinct_layers=2, start_barrier=barrier)
    printed = measured(job, tmp_path, counted_operations.__file__)
    assert "batch 3, 16 tokens in of lora, sparse_delta, boft: TTFT" in printed
    footprint, *timings = read(job.out)
    assert isinstance(footprint, Footprint)
    assert footprint.distinct_layers == 2
    assert [m.point for m in timings if isinstance(m, Timing)] == list(loads)
    lines = [line for line in printed.splitlines() if line.startswith(counted_operations.MARK)]
    computed = [set(json.loads(line.removeprefix(counted_operations.MARK))) for line in lines]
    assert computed == [set(), {"lora"}, {"lora", "sparse_delta", "boft"}]
