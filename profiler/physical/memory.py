"""Bytes of each rank of a plan: weights and KV cache by arithmetic, the rest as measured on fingerprints.

MaverIQ's W + (TP - 1) A + TP (PP - 1) A_p (section 5.2) is a sum over all GPUs. This module computes the
bytes of each rank: with uneven stages the fullest rank decides whether a plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # which imports a part of itself when that is first used

from profiler.measurements import Footprint, RankMemory
from profiler.physical.calibration import Calibration, Cut
from profiler.quantization import UNCOMPRESSED, once_bytes
from profiler.roofline import RUNTIME_BYTES, allowance_bytes, stage_weight_bytes
from profiler.shards import kv_bytes_per_token, layer_shard_bytes, layer_share
from profiler.types import ModelSpec, Plan

# On H200s: a rank that communicates with others, and a rank that passes batches to or from another stage.
CHANNEL_BYTES, HANDING_BYTES = 768 << 20, 1344 << 20
# With variants, vLLM captures every graph twice: with their kernels and without them
# (`cudagraph_specialize_lora`). Both share the fixed part, the memory in which all graphs run.
CAPTURES_WITH_VARIANTS = 2


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank needs before it holds any token; `kv_per_token` is what each token adds."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    kv_per_token: int

    @property
    def without_kv_cache(self) -> int:
        return self.weights + self.activations + self.graphs + self.runtime

    def kv_tokens(self, free_bytes: int) -> int:
        """Tokens whose keys and values fit into the rest of `free_bytes`."""
        return max(0, free_bytes - self.without_kv_cache) // self.kv_per_token


@dataclass(frozen=True)
class _Seen:
    """One measured rank, its part of the model, and whether it was the only rank. `beyond`: the memory that
    it had taken when it was ready, minus the sum of its parts."""

    layers: int
    is_first: bool
    is_last: bool
    is_alone: bool
    memory: RankMemory
    packed: int
    beyond: int

    @property
    def runtime(self) -> int:
        """Runtime bytes without weights that the engine holds outside of parameters: a CPU engine packs
        them."""
        return max(0, self.memory.runtime - self.packed)

    def activations(self, graphs: int) -> int:
        """The part of a pass's peak that stays in addition to `graphs` bytes; at the peak no graph exists
        yet."""
        return self.memory.activations - min(max(0, -self.beyond), self.memory.activations, graphs)

    @property
    def later(self) -> int:
        """Bytes that came with the first step: buffers between stages, logits."""
        return max(0, self.beyond)

    @property
    def place(self) -> tuple[bool, bool]:
        """Whether the rank was in the first stage, and in the last stage."""
        return self.is_first, self.is_last

    @property
    def is_stage(self) -> bool:
        """Whether the rank was in one of several stages."""
        return not all(self.place)


@dataclass(frozen=True)
class Ranks:
    """What is known of ranks of one cut. Without fingerprints of this cut, those of the nearest TP are used;
    without any in this quantization, those of other quantizations, except for weights; else allowances.

    `placed`: the `seen` ranks, and ranks of other quantizations for places in a pipeline that no `seen` rank
    had; there they take about the same. `graphs`: fixed bytes of captured graphs, and bytes for each layer.
    `runtimes`: of a rank that is alone, and of a rank among others. `handing`: what a stage of several takes
    later, whatever its cut. `is_measured`: there are fingerprints of exactly this cut. `layer_share`: a
    layer's stored bytes over its unquantized bytes; `quantization_bytes`: what the quantization takes once.
    """

    spec: ModelSpec
    seen: tuple[_Seen, ...]
    placed: tuple[_Seen, ...]
    graphs: tuple[float, float]
    runtimes: tuple[int, int]
    handing: int
    is_measured: bool
    layer_share: float = 1.0
    quantization_bytes: int = 0

    def stage(self, plan: Plan, stage: int) -> RankBytes:
        """Bytes of each rank of this stage."""
        spec, layers = self.spec, plan.layers_per_stage[stage]
        allowed = allowance_bytes(spec, plan, stage) - RUNTIME_BYTES
        once, each = self.graphs
        captures = CAPTURES_WITH_VARIANTS if plan.max_variants else 1
        graphs = round(once + captures * each * layers)
        as_it_is = replace(plan, quantization=UNCOMPRESSED)
        saved = (1 - self.layer_share) * layers * layer_shard_bytes(spec, plan.tensor_parallel)
        return RankBytes(
            weights=stage_weight_bytes(spec, as_it_is, stage) + self.quantization_bytes - round(saved),
            activations=max(
                (rank.activations(graphs) for rank in self._placed_as(plan, stage)), default=allowed
            ),
            graphs=graphs,
            runtime=self.runtimes[plan.world_size > 1] + self._later(plan, stage),
            kv_per_token=layers * kv_bytes_per_token(spec, plan.tensor_parallel),
        )

    def is_of_other_quantization(self, plan: Plan, stage: int) -> bool:
        """Whether this place was measured in other quantizations only."""
        return any(rank not in self.seen for rank in self._placed_as(plan, stage))

    def _later(self, plan: Plan, stage: int) -> int:
        """Later bytes of ranks in the same place; for a place without measurements, those of the largest
        rank."""
        first, last = stage == 0, stage == plan.pipeline_parallel - 1
        placed = [rank.later for rank in self.placed if rank.place == (first, last)]
        return max(placed, default=0 if first and last else self.handing)

    def _placed_as(self, plan: Plan, stage: int) -> Sequence[_Seen]:
        """The ranks measured in the most similar place. A rank that embeds or ends a step needs more: up to a
        copy of the embedding, or the logits. If no rank has this place, ranks that embed alike are used."""
        is_first, is_last = stage == 0, stage == plan.pipeline_parallel - 1

        def unlike(rank: _Seen) -> tuple[bool, bool]:
            return rank.is_first != is_first, rank.is_last != is_last

        nearest = min(map(unlike, self.placed), default=None)
        return [rank for rank in self.placed if unlike(rank) == nearest]


def known_ranks(calibration: Calibration, cut: Cut) -> Ranks:
    stored, cached = _stored(calibration.footprints, cut), _cached(calibration.footprints, cut)
    alike = _nearest(stored or cached, cut)
    degrees = {footprint.setting.tensor_parallel for footprint in alike}

    def ranks(footprints: Iterable[Footprint]) -> tuple[_Seen, ...]:
        return tuple(rank for footprint in footprints for rank in _ranks(calibration, footprint))

    seen, every = ranks(alike), ranks(calibration.footprints)
    others = ranks(footprint for footprint in cached if footprint.setting.tensor_parallel in degrees)
    places = {rank.place for rank in seen}
    on_gpus = bool(alike) and not any(footprint.packed for footprint in alike)
    return Ranks(
        calibration.spec,
        seen,
        (*seen, *(rank for rank in others if rank.place not in places)),
        _graphs(seen, every),
        _runtimes((seen, ranks(_nearest(cached, cut)), every), CHANNEL_BYTES if on_gpus else 0),
        max((rank.later for rank in every if rank.is_stage), default=HANDING_BYTES if on_gpus else 0),
        is_measured=any(Cut.of(footprint.setting) == cut for footprint in alike),
        layer_share=_layer_share(calibration, cut, stored),
        quantization_bytes=once_bytes(cut.quantization),
    )


def rank_bytes(calibration: Calibration, cut: Cut, plan: Plan) -> tuple[RankBytes, ...]:
    """One entry per rank, stage by stage."""
    known = known_ranks(calibration, cut)
    stages = [known.stage(plan, stage) for stage in range(plan.pipeline_parallel)]
    return tuple(stage for stage in stages for _ in range(plan.tensor_parallel))


def kv_tokens(ranks: Sequence[RankBytes], free_bytes: Sequence[int]) -> int:
    """Tokens that every rank can hold: the engine uses the smallest rank's number on all ranks."""
    return min(rank.kv_tokens(free) for rank, free in zip(ranks, free_bytes, strict=True))


def _nearest(footprints: Sequence[Footprint], cut: Cut) -> list[Footprint]:
    degrees = {fp.setting.tensor_parallel for fp in footprints}
    nearest = min(degrees, key=lambda tp: (abs(math.log2(tp / cut.tensor_parallel)), tp), default=0)
    return [fp for fp in footprints if fp.setting.tensor_parallel == nearest]


def _stored(footprints: Sequence[Footprint], cut: Cut) -> list[Footprint]:
    return [fp for fp in footprints if Cut.of(fp.setting).storage == cut.storage]


def _cached(footprints: Sequence[Footprint], cut: Cut) -> list[Footprint]:
    """Footprints in any quantization: memory other than weights differs little between quantizations."""
    return [fp for fp in footprints if fp.setting.kv_dtype == cut.kv_dtype]


def _ranks(calibration: Calibration, footprint: Footprint) -> Iterator[_Seen]:
    setting = footprint.setting
    last = len(setting.layers_per_stage) - 1
    for number, memory in enumerate(footprint.ranks):
        stage = number // setting.tensor_parallel
        held = _held(calibration, footprint, stage) if footprint.packed else 0
        packed = max(0, held - memory.weights)
        layers, is_alone = setting.layers_per_stage[stage], setting.world_size == 1
        beyond = footprint.taken(memory) - memory.without_kv_cache
        yield _Seen(layers, stage == 0, stage == last, is_alone, memory, packed, beyond)


def _held(calibration: Calibration, footprint: Footprint, stage: int) -> int:
    """Bytes of the weights that a rank of this stage held, by arithmetic."""
    setting, spec = footprint.setting, calibration.spec
    held = [min(n, footprint.distinct_layers or n) for n in setting.layers_per_stage]
    plan = Plan(setting.tensor_parallel, tuple(held), setting.quantization, 1, 0, 0, 0)
    return stage_weight_bytes(spec, plan, stage)


def _layer_share(calibration: Calibration, cut: Cut, footprints: Sequence[Footprint]) -> float:
    """Stored bytes of a layer over its unquantized bytes: the median over ranks of the footprints in this
    quantization, without embedding and head. Computed by arithmetic if there are no such footprints."""
    spec = calibration.spec
    if cut.quantization == UNCOMPRESSED:
        return 1.0
    shares = []
    for footprint in _nearest(footprints, cut):
        setting = footprint.setting
        layer = layer_shard_bytes(spec, setting.tensor_parallel)
        stored = layer_shard_bytes(spec, setting.tensor_parallel, setting.quantization)
        for number, memory in enumerate(footprint.ranks):
            stage = number // setting.tensor_parallel
            layers = min(setting.layers_per_stage[stage], footprint.distinct_layers or math.inf)
            outside = _held(calibration, footprint, stage) - layers * stored
            shares.append((memory.weights - outside) / (layers * layer))
    return float(np.median(shares)) if shares else layer_share(spec, cut.tensor_parallel, cut.quantization)


def _graphs(seen: Sequence[_Seen], every: Sequence[_Seen]) -> tuple[float, float]:
    """Bytes of captured graphs: a fixed part, and a part for each layer, by the line that fits the measured
    ranks best. If these have one depth only, the line takes its slope from other ranks, in proportion. If
    those have one depth as well, nothing depends on depth."""
    if not seen:
        return 0.0, 0.0
    if len({rank.layers for rank in seen}) > 1:
        return _line(seen)
    (depth,) = {rank.layers for rank in seen}
    most = float(max(rank.memory.graphs for rank in seen))
    others = [rank for rank in every if rank not in seen]
    once, each = _line(others) if len({rank.layers for rank in others}) > 1 else (1.0, 0.0)
    there = once + each * depth
    return (once * most / there, each * most / there) if there else (most, 0.0)


def _line(seen: Sequence[_Seen]) -> tuple[float, float]:
    matrix = np.array([[1.0, rank.layers] for rank in seen])
    solution, _ = scipy.optimize.nnls(matrix, np.array([float(rank.memory.graphs) for rank in seen]))
    return float(solution[0]), float(solution[1])


def _runtimes(groups: Sequence[Sequence[_Seen]], channel_bytes: int) -> tuple[int, int]:
    """Runtime bytes of a rank that is alone, and of a rank among others. The latter come from the first of
    `groups` that has such a rank (nearest in quantization and TP, in TP, any). If no group has one, they are
    those of a rank alone plus `channel_bytes`."""

    def largest(ranks: Sequence[_Seen], is_alone: bool) -> int | None:
        return max((rank.runtime for rank in ranks if rank.is_alone == is_alone), default=None)

    if not groups[0]:
        return RUNTIME_BYTES, RUNTIME_BYTES
    alone = largest(groups[0], True)
    company = next((runtime for ranks in groups if (runtime := largest(ranks, False)) is not None), None)
    if company is None:
        company = (alone or 0) + channel_bytes
    return company if alone is None else alone, company
