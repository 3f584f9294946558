"""The cost of a plan from first principles: a roofline per layer.

A layer takes the longer of two times: moving its bytes at the device's sustained bandwidth, or doing its
FLOPs at the sustained rate; the same holds for the head. A token's time is the sum over the stages
(MaverIQ, section 5.3, equations 4 and 5: per-layer cost times layers, plus the rest). Parallelism adds
communication, with constants measured on H200s (Llama-2-7B, vLLM 0.26): the model's only assumptions.

Known limits, until fingerprints correct them: the overheads of kernels are missing (LoRA costs far more than
its bytes); PP batches do not overlap, so TPOT at high load is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.quantization import SERVABLE, UNCOMPRESSED, once_bytes
from profiler.shards import (
    active_shard_elements,
    head_is_embedding,
    kv_bytes_per_token,
    layer_moved_bytes,
    layer_shard_bytes,
    lora_slot_bytes,
    mlp_width,
    outer_bytes,
    padded_vocab,
    tp_fits,
    tp_problem,
    vocab_table_bytes,
)
from profiler.types import DeviceRates, Estimate, ModelSpec, Plan, Workload

__all__ = [
    "allowance_bytes",
    "arena_bytes",
    "estimate",
    "has_merged_slot",
    "kv_bytes_per_token",
    "layer_shard_bytes",
    "lora_slot_bytes",
    "merged_slot_bytes",
    "stage_memory_bytes",
    "stage_weight_bytes",
    "tp_fits",
    "variant_bytes",
    "vocab_table_bytes",
]

MIB = 2**20

ALLREDUCE_S = 14.5e-6  # one all-reduce of a few KiB; (3.23 - 4.61 / 2) ms over 64 of them
HOP_S = 0.11e-3  # handing a batch to the next stage; 4.72 - 4.61 ms
LINK_TO_MEMORY = 1 / 40  # all-reduce bandwidth over memory bandwidth; from the rows for batches 32 and 128

RUNTIME_BYTES = 256 * MIB  # CUDA context
MERGING_BYTES = (
    20 * MIB
)  # workers/variants/merged_slot.py: the buffer for an embedding that comes from host memory
MOVED_AT_ONCE_BYTES = 2 * MIB  # workers/variants/device.py: the buffer for a variant that moves a short way
LOGITS_ROWS = 256  # sequences whose logits are held at once, in float32


@dataclass(frozen=True)
class Overheads:
    """Bytes that an engine takes of a rank's device in addition to the model and its activations, if they
    were not measured: its process with captured graphs; `company`: channels of a rank that communicates with
    others; `handing`: buffers of a stage that passes batches to the next stage or receives them."""

    process: int = RUNTIME_BYTES
    company: int = 0
    handing: int = 0

    def of(self, plan: Plan) -> int:
        company = self.company if plan.world_size > 1 else 0
        return self.process + company + (self.handing if plan.pipeline_parallel > 1 else 0)


CONTEXT_ONLY = Overheads()
# Enough for plans of 7B to 30B on H200s in bfloat16 (benchmarks/results/profiling/truth.jsonl), including
# activations there that exceed the allowance.
VLLM_ON_GPU = Overheads(1792 * MIB, 1408 * MIB, 512 * MIB)
VLLM_ON_CPU = Overheads(2048 * MIB)  # a process with torch and vLLM; SmolLM2-135M: 1.9 to 2.2 GB


def estimate(
    spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], workload: Workload, accuracy: float
) -> Estimate:
    """Predict TTFT and TPOT (s) at low load and the memory of each rank (bytes).

    `rates` has one entry per rank, as `plan` numbers them. Ranks that share a device share its rates, so the
    caller divides them. `workload.batch` requests run together: TTFT is that of the last request, TPOT the
    mean over the output. Raises ValueError when the arguments do not match.
    """
    _check(spec, plan, rates, workload)
    mean_context = workload.input_tokens + workload.output_tokens / 2
    return Estimate(
        ttft_s=_pass_s(spec, plan, rates, Pass(workload.batch, workload.input_tokens, 0.0)),
        tpot_s=_pass_s(spec, plan, rates, Pass(workload.batch, 1, mean_context)),
        memory_bytes=tuple(
            stage_memory_bytes(spec, plan, stage)
            for stage in range(plan.pipeline_parallel)
            for _ in range(plan.tensor_parallel)
        ),
        accuracy=accuracy,
    )


def _check(spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], workload: Workload) -> None:
    if len(rates) != plan.world_size:
        raise ValueError(f"expected rates of {plan.world_size} ranks, got {len(rates)}")
    if sum(plan.layers_per_stage) != spec.num_layers or min(plan.layers_per_stage, default=0) < 1:
        raise ValueError(f"stages {plan.layers_per_stage} do not make up {spec.num_layers} layers")
    problem = tp_problem(spec, plan.tensor_parallel)
    if problem:
        raise ValueError(problem)
    if plan.quantization not in SERVABLE:
        raise ValueError(f"no estimate for quantization {plan.quantization!r}; only for {sorted(SERVABLE)}")
    if not all(0 < r < math.inf for rate in rates for r in (rate.memory_bytes_per_s, rate.flops_per_s)):
        raise ValueError("expected every device rate to be positive and finite")
    if min(workload.batch, workload.input_tokens, workload.output_tokens) < 1:
        raise ValueError(f"expected a workload of positive counts, got {workload}")


# --- memory -------------------------------------------------------------------------------------------


def stage_memory_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Bytes of every rank of one stage: weights, KV cache, variants and a working allowance."""
    layers = plan.layers_per_stage[stage]
    kv = layers * plan.kv_cache_tokens * kv_bytes_per_token(spec, plan.tensor_parallel)
    variants = variant_bytes(spec, plan, stage) + merged_slot_bytes(spec, plan, stage)
    return stage_weight_bytes(spec, plan, stage) + kv + variants + allowance_bytes(spec, plan, stage)


def variant_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Bytes that a rank of one stage reserves for the variants that may run at once."""
    return max(fixed + plan.layers_per_stage[stage] * each for fixed, each in variant_lines(spec, plan))


def arena_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """The part of `variant_bytes` that the variants themselves may take, without the buffer for moving
    them."""
    return variant_bytes(spec, plan, stage) - (MOVED_AT_ONCE_BYTES if plan.room else 0)


def merged_slot_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Bytes of the copy of a rank's weights that one variant may replace, and of the buffer for merging."""
    return stage_weight_bytes(spec, plan, stage) + MERGING_BYTES if has_merged_slot(plan) else 0


def has_merged_slot(plan: Plan) -> bool:
    """Whether a rank has a merged slot; no delta is merged into quantized weights."""
    return plan.merged_slot and plan.quantization == UNCOMPRESSED


def variant_lines(spec: ModelSpec, plan: Plan) -> tuple[tuple[int, int], ...]:
    """Lines of (bytes outside the layers, bytes in each layer), of which the largest counts: the plan's room
    for its base's variants. A plan without room has LoRA adapters in all slots, or deltas of older
    records."""
    if plan.room:
        return dict(plan.room)[plan.tensor_parallel]
    shards = spec.num_layers * plan.tensor_parallel
    lora = plan.max_variants * lora_slot_bytes(spec, plan)
    sharded, whole = plan.uncoded_bytes
    layer = -(-(plan.delta_bytes + sharded) // shards) - (-(plan.whole_bytes + whole) // spec.num_layers)
    return (0, lora), (plan.full_bytes, layer)


def stage_weight_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Bytes of a rank's weights. Linear weights are sharded; norms are held whole. The first stage has the
    embedding, the last stage the head and the last norm; in most families every stage has both tables
    (`tables_everywhere`).

    A tied head is the embedding itself, but a pipeline's last stage needs its own copy of it. The bytes that
    an engine takes once for a quantization are included.
    """
    tp, table = plan.tensor_parallel, vocab_table_bytes(spec, plan.tensor_parallel)
    first, last = stage == 0, stage == plan.pipeline_parallel - 1
    embeds, ends = (True, True) if spec.tables_everywhere else (first, last)
    shared = embeds and ends and head_is_embedding(spec)
    tables = 1 if shared else int(embeds) + int(ends)
    outer = outer_bytes(spec) if last else 0
    outer += once_bytes(plan.quantization)
    layer = layer_shard_bytes(spec, tp, plan.quantization)
    return plan.layers_per_stage[stage] * layer + tables * table + outer


def allowance_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Working memory: the runtime's own, the activations of one full step and the last stage's logits.

    At the MLP a step holds two residual streams, the input, and the gate and up outputs (sharded).
    """
    widest = 3 * spec.hidden_size + mlp_width(spec, plan.tensor_parallel)
    activations = plan.batched_tokens * widest * spec.dtype_bytes
    logits = LOGITS_ROWS * spec.vocab_size * 4 if stage == plan.pipeline_parallel - 1 else 0
    return RUNTIME_BYTES + activations + logits


# --- time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A forward pass of `batch` sequences; each has `new_tokens` after `past_tokens` cached tokens."""

    batch: float
    new_tokens: int
    past_tokens: float


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage: each of its layers and, on the last stage, the rest (head). While several batches
    take turns, each other stage has a gap of `gap_s` between two of them."""

    layer_s: float
    rest_s: float
    gap_s: float = 0.0

    def of(self, layers: int, *, is_last: bool) -> float:
        return layers * self.layer_s + (self.rest_s if is_last else 0.0)

    def times(self, factor: float) -> StageTime:
        return StageTime(self.layer_s * factor, self.rest_s * factor, self.gap_s * factor)


def stage_time(spec: ModelSpec, plan: Plan, rates: DeviceRates, load: Pass) -> StageTime:
    """The time of a stage whose ranks have these rates and links in proportion to them."""
    layer = roofline_s(_layer_moved_bytes(spec, plan, load), _layer_flops(spec, plan, load), rates)
    tokens = load.batch * load.new_tokens
    layer += allreduces_s(spec, plan.tensor_parallel, tokens, rates.memory_bytes_per_s * LINK_TO_MEMORY)
    # Only the last token of each sequence goes through the head.
    head = 2 * padded_vocab(spec) // plan.tensor_parallel * spec.hidden_size * load.batch
    return StageTime(layer, roofline_s(vocab_table_bytes(spec, plan.tensor_parallel), head, rates))


def roofline_s(moved_bytes: float, flops: float, rates: DeviceRates) -> float:
    return max(moved_bytes / rates.memory_bytes_per_s, flops / rates.flops_per_s)


def allreduces_s(spec: ModelSpec, tp: int, tokens: float, link_bytes_per_s: float) -> float:
    """A layer's all-reduces (after attention and MLP, or one for both), each of (tokens, hidden)."""
    hidden_bytes = spec.hidden_size * spec.dtype_bytes
    return spec.allreduces_per_layer * allreduce_s(tp, tokens * hidden_bytes, link_bytes_per_s)


def allreduce_s(tp: int, volume_bytes: float, link_bytes_per_s: float) -> float:
    """One ring all-reduce of a tensor among `tp` ranks."""
    return 0.0 if tp == 1 else ALLREDUCE_S + 2 * (tp - 1) / tp * volume_bytes / link_bytes_per_s


def _pass_s(spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], load: Pass) -> float:
    tp, total = plan.tensor_parallel, (plan.pipeline_parallel - 1) * HOP_S
    for stage, layers in enumerate(plan.layers_per_stage):
        ranks = set(rates[stage * tp : (stage + 1) * tp])
        is_last = stage == plan.pipeline_parallel - 1
        total += max(stage_time(spec, plan, rank, load).of(layers, is_last=is_last) for rank in ranks)
    return total


def _layer_moved_bytes(spec: ModelSpec, plan: Plan, load: Pass) -> float:
    """Bytes per rank: every weight once (only the experts that a token uses), the cached KV of each sequence,
    and the adapters of as many variants as the batch can hold."""
    tp = plan.tensor_parallel
    weights = layer_moved_bytes(spec, tp, load.batch * load.new_tokens, plan.quantization)
    kv = load.batch * _seen(spec, load.past_tokens) * kv_bytes_per_token(spec, tp)
    return weights + kv + min(load.batch, plan.max_variants) * lora_slot_bytes(spec, plan)


def _seen(spec: ModelSpec, past_tokens: float) -> float:
    """Cached tokens that attention reads, as a mean over layers: at most its window if the window slides."""
    if spec.sliding_window is None:
        return past_tokens
    share = spec.sliding_share
    return share * min(past_tokens, spec.sliding_window) + (1 - share) * past_tokens


def _layer_flops(spec: ModelSpec, plan: Plan, load: Pass) -> float:
    """FLOPs per rank: 2 per weight and token (only the experts that it uses); for attention 4 per query head
    dimension and (query, key) pair. Adapters, if there are slots, add theirs.
    """
    tp, new = plan.tensor_parallel, load.new_tokens
    weights = active_shard_elements(spec, tp)
    lora = lora_slot_bytes(spec, plan) // spec.dtype_bytes if plan.max_variants else 0
    pairs = new * _seen(spec, load.past_tokens + (new + 1) / 2)
    attention = 4 * spec.num_heads // tp * spec.head_dim * pairs
    return load.batch * (2 * new * (weights + lora) + attention)
