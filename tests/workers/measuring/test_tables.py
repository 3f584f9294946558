"""Families whose embedding and head lie on every stage of a pipeline, by the engine's own parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.checkpoint import read_model
from profiler.measurements import Footprint, Point, Setting, Timing, read
from profiler.roofline import stage_weight_bytes
from profiler.types import Plan
from testkit.tiny_families import Tiny
from testkit.workers.measuring_jobs import job_of, measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = (1, 1, 1)
VOCABULARY = 4096  # so that a table is more than all else of a stage
SIZES = {
    "num_hidden_layers": len(STAGES),
    "hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 256}
FAMILIES = (
    Tiny(
        "Gemma3", {**GROUPED, "head_dim": 64, "sliding_window": 8, "sliding_window_pattern": 2}, "Gemma3Text"
    ),
    Tiny("Mixtral", {**GROUPED, "num_local_experts": 2}),
)


@pytest.mark.parametrize(
    "tiny", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.long)], ids=lambda tiny: tiny.family
)
def test_tables_are_where_they_were_predicted(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    job = job_of(folder, tmp_path, Setting(STAGES), (Point(1, 16),))
    measured(job, tmp_path)
    found, timing = read(job.out)
    assert isinstance(found, Footprint)
    assert isinstance(timing, Timing)
    spec, table = read_model(folder), VOCABULARY * 128 * 4
    plan = Plan(1, STAGES, "none", 128, 0, 0, 0)
    predicted = [stage_weight_bytes(spec, plan, stage) for stage in range(len(STAGES))]
    # The engine packs linear layers elsewhere, so of those its parameters have less.
    assert [rank.weights // table for rank in found.ranks] == [held // table for held in predicted]
