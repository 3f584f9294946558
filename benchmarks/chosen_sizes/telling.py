"""The output of an experiment: its progress, its data, and a table."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from controlplane.state.worker_groups import WorkerGroup
from placement.types import Inventory, Placement
from profiler.types import Interval

BEGAN_S = time.monotonic()


def tell(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s  {text}", flush=True)


def devices(seen: Inventory, free: Inventory) -> list[dict[str, Any]]:
    """`available_bytes` are those that a placement may take: without headroom and what is promised."""
    return [
        {
            "index": d.index,
            "kind": d.kind,
            "total_bytes": d.total_bytes,
            "free_bytes": d.free_bytes,
            "available_bytes": left.free_bytes,
            "load": d.load,
            "uses": {str(use.holder): use.memory_bytes for use in d.uses},
        }
        for d, left in zip(seen.devices, free.devices, strict=True)
    ]


def plan(placement: Placement) -> dict[str, Any]:
    made, choice, estimate = placement.plan, placement.choice, placement.estimate

    def range_of(figure: Interval | None) -> dict[str, float] | None:
        return dataclasses.asdict(figure) if figure else None

    return {
        "tensor_parallel": made.tensor_parallel,
        "layers_per_stage": list(made.layers_per_stage),
        "kv_cache_tokens": made.kv_cache_tokens,
        "context_tokens": made.max_model_len,
        "requests_at_once": made.sequences,
        "variant_slots": made.max_variants,
        "lora_rank": made.max_lora_rank,
        "variant_host_bytes": made.variant_host_bytes,
        "reason": placement.reason,
        "basis": estimate.basis,
        "ttft_s": estimate.ttft_s,
        "ttft_range_s": range_of(choice.ttft),
        "tpot_s": estimate.tpot_s,
        "tpot_range_s": range_of(choice.tpot),
        "ranks": [dataclasses.asdict(rank) for rank in placement.ranks],
    }


def ranks(group: WorkerGroup) -> list[dict[str, Any]]:
    """An engine without memory reports has no row: the echo engine."""
    assert group.placement is not None
    if not group.measured:
        return []
    return [
        {
            "rank": rank.rank,
            "device": rank.device_index,
            "layers": rank.layer_end - rank.layer_start,
            "planned_bytes": found.planned_bytes,
            "measured_bytes": found.measured_bytes,
            "ratio": round(found.measured_bytes / found.planned_bytes, 4),
        }
        for rank, found in zip(group.placement.ranks, group.measured, strict=True)
    ]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
