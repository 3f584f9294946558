"""A placement becomes an engine's configuration, rank by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.planning.engine_config import engine_config
from controlplane.settings import Settings
from placement.types import Placement, Plan, RankPlacement
from profiler.types import Estimate
from testkit.controlplane.builders import ready_base
from workers.group.members import members_of

GIB = 2**30
SETTINGS = Settings(engine="vllm", engine_dtype="float32")


def placement_of(layers: tuple[int, ...], places: list[tuple[str, int, int]], tp: int = 1) -> Placement:
    """Ranks at (node, GPU, GiB), in their order."""
    ranks, start = [], 0
    for stage, count in enumerate(layers):
        for tp_rank in range(tp):
            rank = stage * tp + tp_rank
            node, index, gib = places[rank]
            ranks.append(
                RankPlacement(rank, stage, tp_rank, node, index, "gpu", start, start + count, gib * GIB)
            )
        start += count
    plan = Plan(tp, layers, "none", 64, 1000, 2, 4)
    return Placement(plan, tuple(ranks), Estimate(1.0, 1.0, (GIB,) * len(ranks), 100.0), "because")


def test_every_rank_gets_its_own_place_and_memory(files: Path) -> None:
    placed = placement_of((1, 3), [("a", 5, 7), ("a", 2, 8), ("b", 0, 21), ("b", 1, 22)], tp=2)
    config = engine_config(ready_base(files), placed, SETTINGS)
    assert config.layers_per_stage == (1, 3)
    assert [
        (r.node, r.device_kind, r.device_index, r.layers, r.memory_bytes // GIB) for r in config.ranks
    ] == [
        ("a", "gpu", 5, 1, 7),
        ("a", "gpu", 2, 1, 8),
        ("b", "gpu", 0, 3, 21),
        ("b", "gpu", 1, 3, 22),
    ]
    assert [member.gpus for member in members_of(config)] == [(5, 2), (0, 1)]


@pytest.mark.parametrize("layers", [(2,), (1, 2), (10, 20), (1, 1, 30)])
def test_keys_and_values_get_memory_in_proportion_to_layers(files: Path, layers: tuple[int, ...]) -> None:
    """The base has one head of 4 elements: 2 x 4 x 4 bytes a token and layer, for 1000 tokens."""
    placed = placement_of(layers, [("a", gpu, 9) for gpu in range(len(layers))])
    ranks = engine_config(ready_base(files), placed, SETTINGS).ranks
    assert [rank.kv_cache_bytes for rank in ranks] == [1000 * 2 * 4 * 4 * count for count in layers]
    by_layer = {rank.variant_memory_bytes / rank.layers for rank in ranks}
    assert len(by_layer) == 1, "slots of LoRA adapters hold each layer's"
    assert by_layer != {0}
