"""The memory of each rank of a plan under a load, and the load that the devices' free memory can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from profiler.physical.calibration import Cut
from profiler.physical.memory import RankBytes, Ranks, known_ranks
from profiler.predicting.intervals import ALLOWED_MEMORY, MEASURED_MEMORY, PLACED_MEMORY
from profiler.predicting.types import Ground, RankCost
from profiler.roofline import (
    RUNTIME_BYTES,
    allowance_bytes,
    merged_slot_bytes,
    stage_weight_bytes,
    variant_bytes,
)
from profiler.shards import kv_bytes_per_token
from profiler.types import Interval, Plan

Key = tuple[object, ...]


class Memory:
    """Costs of stages that hold `tokens` tokens; equal stages are computed once for all plans."""

    def __init__(self, ground: Ground, tokens: int) -> None:
        self._ground, self._tokens = ground, tokens
        self._ranks: dict[Key, Ranks | None] = {}
        self._stages: dict[Key, RankCost] = {}

    def ranks(self, plan: Plan) -> tuple[RankCost, ...]:
        """One entry per rank, stage by stage."""
        tp, last = plan.tensor_parallel, plan.pipeline_parallel - 1
        common = (
            tp,
            plan.quantization,
            plan.batched_tokens,
            plan.max_variants,
            plan.max_lora_rank,
            plan.delta_bytes,
            plan.full_bytes,
            plan.whole_bytes,
            plan.uncoded_bytes,
            plan.room,
            plan.merged_slot,
        )
        costs: list[RankCost] = []
        for stage, layers in enumerate(plan.layers_per_stage):
            key = (*common, layers, stage == 0, stage == last)
            if key not in self._stages:
                self._stages[key] = self._cost(plan, stage)
            costs += [self._stages[key]] * tp
        return tuple(costs)

    def parts(self, plan: Plan, stage: int) -> RankBytes:
        """Bytes of a rank. Activations grow with a step's tokens: only footprints of the same step size are
        used."""
        known = self._known(plan)
        if known is not None:
            return known.stage(plan, stage)
        spec = self._ground.spec
        return RankBytes(
            weights=stage_weight_bytes(spec, plan, stage),
            activations=allowance_bytes(spec, plan, stage) - RUNTIME_BYTES,
            graphs=0,
            runtime=self._ground.overheads.of(plan),
            kv_per_token=plan.layers_per_stage[stage] * kv_bytes_per_token(spec, plan.tensor_parallel),
        )

    def _known(self, plan: Plan) -> Ranks | None:
        key = (plan.tensor_parallel, plan.quantization, plan.batched_tokens)
        if key not in self._ranks:
            calibration = self._ground.calibration
            if calibration is not None:
                alike = (f for f in calibration.footprints if f.setting.batched_tokens == plan.batched_tokens)
                calibration = dataclasses.replace(calibration, footprints=tuple(alike))
            cut = Cut(plan.tensor_parallel, plan.quantization)
            self._ranks[key] = known_ranks(calibration, cut) if calibration else None
        return self._ranks[key]

    def _cost(self, plan: Plan, stage: int) -> RankCost:
        part, known = self.parts(plan, stage), self._known(plan)
        variants = variant_bytes(self._ground.spec, plan, stage) + merged_slot_bytes(
            self._ground.spec, plan, stage
        )
        kv_cache = self._tokens * part.kv_per_token
        total = part.without_kv_cache + kv_cache + variants
        if known is None or not known.is_measured:
            share = ALLOWED_MEMORY
        else:
            share = PLACED_MEMORY if known.is_of_other_quantization(plan, stage) else MEASURED_MEMORY
        unsure = share * (part.activations + part.graphs + part.runtime)
        return RankCost(
            part.weights,
            part.activations,
            part.graphs,
            part.runtime,
            variants,
            kv_cache,
            Interval(total, total - unsure, total + unsure),
        )


def kv_capacity(ranks: Sequence[RankCost], tokens: int, free_bytes: Sequence[int]) -> int | None:
    """Tokens that every rank can hold; with the caches in `ranks` each holds `tokens`. The engine uses the
    smallest rank's number on all ranks. None if free memory is unknown."""
    if not free_bytes:
        return None
    return min(
        max(0, free - round(cost.total.value) + cost.kv_cache) * tokens // cost.kv_cache
        for cost, free in zip(ranks, free_bytes, strict=True)
    )
