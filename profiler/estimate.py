"""What a plan would cost, from first principles: a roofline per pipeline stage.

A stage takes the longer of two times: moving its bytes at the device's sustained bandwidth, or doing its
FLOPs at the sustained rate. What one token passes through is the sum of the stages (MaverIQ, section 5.3,
equations 4 and 5: per-layer cost times layers, plus the rest). Parallelism adds communication, with
constants from runs on H200s (Llama-2-7B, vLLM 0.26): those are the model's only assumptions.

Known limits, until fingerprints correct them: kernels' own overheads (LoRA costs far more than its bytes);
PP batches are not overlapped, so TPOT at high load is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler.types import DeviceRates, Estimate, ModelSpec, Plan, Workload

MIB = 2**20
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})
KV_PROJECTIONS = frozenset({"k_proj", "v_proj"})
VOCAB_PADDING = 64  # vLLM pads the vocabulary to this multiple before it shards it

ALLREDUCE_S = 14.5e-6  # one all-reduce of a few KiB; (3.23 - 4.61 / 2) ms over 64 of them
HOP_S = 0.11e-3  # handing a batch to the next stage; 4.72 - 4.61 ms
LINK_TO_MEMORY = 1 / 40  # all-reduce bandwidth over memory bandwidth; from the rows for batches 32 and 128

RUNTIME_BYTES = 256 * MIB  # CUDA context or the process's own heap
PREFILL_CHUNK_TOKENS = 2048  # vLLM's default max_num_batched_tokens
LOGITS_ROWS = 256  # sequences whose logits are held at once, in float32


def estimate(
    spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], workload: Workload, accuracy: float
) -> Estimate:
    """Predict TTFT and TPOT (s) at low load and the memory of each rank (bytes).

    `rates` has one entry per rank, as `plan` numbers them; ranks that share a device share its rates, so
    the caller divides them. `workload.batch` requests run together: TTFT is that of the last of them, TPOT
    the mean over the output. Raises ValueError when the arguments do not belong together.
    """
    _check(spec, plan, rates, workload)
    mean_context = workload.input_tokens + workload.output_tokens / 2
    return Estimate(
        ttft_s=_pass_s(spec, plan, rates, workload.batch, workload.input_tokens, 0.0),
        tpot_s=_pass_s(spec, plan, rates, workload.batch, 1, mean_context),
        memory_bytes=tuple(
            stage_memory_bytes(spec, plan, stage)
            for stage in range(plan.pipeline_parallel)
            for _ in range(plan.tensor_parallel)
        ),
        accuracy=accuracy,
    )


def tp_fits(spec: ModelSpec, tensor_parallel: int) -> bool:
    """Whether vLLM can shard this model so: heads, KV heads (or copies), MLP, vocabulary."""
    kv, tp = spec.num_kv_heads, tensor_parallel
    kv_fits = kv % tp == 0 or tp % kv == 0
    mlp_fits = spec.linear_shapes["gate_proj"][0] % tp == 0
    return tp >= 1 and spec.num_heads % tp == 0 and kv_fits and mlp_fits and _padded_vocab(spec) % tp == 0


def _check(spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], workload: Workload) -> None:
    if len(rates) != plan.world_size:
        raise ValueError(f"expected rates of {plan.world_size} ranks, got {len(rates)}")
    if sum(plan.layers_per_stage) != spec.num_layers or min(plan.layers_per_stage, default=0) < 1:
        raise ValueError(f"stages {plan.layers_per_stage} do not make up {spec.num_layers} layers")
    if not tp_fits(spec, plan.tensor_parallel):
        raise ValueError(f"{spec.num_heads} heads cannot be split {plan.tensor_parallel} ways")
    if plan.quantization != "none":
        raise ValueError(f"no estimate for quantization {plan.quantization!r} yet; only for 'none'")
    if not all(0 < r < math.inf for rate in rates for r in (rate.memory_bytes_per_s, rate.flops_per_s)):
        raise ValueError("expected every device rate to be positive and finite")
    if min(workload.batch, workload.input_tokens, workload.output_tokens) < 1:
        raise ValueError(f"expected a workload of positive counts, got {workload}")


# --- memory -------------------------------------------------------------------------------------------


def stage_memory_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Bytes of every rank of one stage: weights, KV cache, variants and a working allowance."""
    layers = plan.layers_per_stage[stage]
    kv = layers * plan.kv_cache_tokens * kv_bytes_per_token(spec, plan.tensor_parallel)
    variants = variant_bytes(spec, plan, stage)
    return stage_weight_bytes(spec, plan, stage) + kv + variants + allowance_bytes(spec, plan, stage)


def variant_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """What a rank of one stage sets aside for the variants that may run at once."""
    layers = plan.layers_per_stage[stage]
    lora = layers * plan.max_variants * lora_slot_bytes(spec, plan)
    shards = spec.num_layers * plan.tensor_parallel
    deltas = -(-plan.delta_bytes * layers // shards) + plan.full_bytes
    return max(lora, deltas)


def stage_weight_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Linear weights are sharded; norms and biases are held whole. Embedding first, head and norm last.

    A tied head is the embedding itself, but a pipeline's last stage needs its own copy of it.
    """
    tp, table = plan.tensor_parallel, vocab_table_bytes(spec, plan.tensor_parallel)
    first, last = stage == 0, stage == plan.pipeline_parallel - 1
    shared = first and last and _tied(spec)
    tables = 1 if shared else int(first) + int(last)
    norm = spec.hidden_size * spec.dtype_bytes if last else 0
    return plan.layers_per_stage[stage] * layer_shard_bytes(spec, tp) + tables * table + norm


def layer_shard_bytes(spec: ModelSpec, tp: int) -> int:
    linear = sum(math.prod(shape) for shape in spec.linear_shapes.values()) * spec.dtype_bytes
    whole = spec.layer_weight_bytes - linear
    sharded = sum(math.prod(_shard(spec, module, tp)) for module in spec.linear_shapes)
    return whole + sharded * spec.dtype_bytes


def kv_bytes_per_token(spec: ModelSpec, tp: int) -> int:
    """Keys and values of one token in one layer on one rank; KV heads are replicated when TP exceeds them."""
    return 2 * _kv_heads(spec, tp) * spec.head_dim * spec.dtype_bytes


def lora_slot_bytes(spec: ModelSpec, plan: Plan) -> int:
    """A LoRA adapter of the largest allowed rank on all seven modules: one layer's part on one rank.

    A is (rank, in) and B is (out, rank); column-parallel layers shard B, row-parallel ones A.
    """
    shards = (_shard(spec, module, plan.tensor_parallel) for module in spec.linear_shapes)
    return plan.max_lora_rank * spec.dtype_bytes * sum(out + into for out, into in shards)


def vocab_table_bytes(spec: ModelSpec, tp: int) -> int:
    """A rank's shard of the embedding or of the head: (padded vocabulary / TP, hidden)."""
    return _padded_vocab(spec) // tp * spec.hidden_size * spec.dtype_bytes


def allowance_bytes(spec: ModelSpec, plan: Plan, stage: int) -> int:
    """Working memory: the runtime's own, one prefill chunk's activations and the last stage's logits.

    At the MLP a chunk holds two residual streams, the input and the gate and up outputs (sharded).
    """
    tp = plan.tensor_parallel
    widest = 2 * spec.linear_shapes["gate_proj"][0] // tp
    activations = PREFILL_CHUNK_TOKENS * (3 * spec.hidden_size + widest) * spec.dtype_bytes
    logits = LOGITS_ROWS * spec.vocab_size * 4 if stage == plan.pipeline_parallel - 1 else 0
    return RUNTIME_BYTES + activations + logits


def _shard(spec: ModelSpec, module: str, tp: int) -> tuple[int, int]:
    """(out, in) of one rank's part of a module."""
    out, into = spec.linear_shapes[module]
    if module in ROW_PARALLEL:
        return out, into // tp
    return (_kv_heads(spec, tp) * spec.head_dim if module in KV_PROJECTIONS else out // tp), into


def _kv_heads(spec: ModelSpec, tp: int) -> int:
    return max(1, spec.num_kv_heads // tp)


def _padded_vocab(spec: ModelSpec) -> int:
    return -(-spec.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def _tied(spec: ModelSpec) -> bool:
    return spec.other_weight_bytes < 2 * spec.vocab_size * spec.hidden_size * spec.dtype_bytes


# --- time ---------------------------------------------------------------------------------------------


def _pass_s(
    spec: ModelSpec, plan: Plan, rates: Sequence[DeviceRates], batch: int, new_tokens: int, past_tokens: float
) -> float:
    """One forward pass of `batch` sequences, each with `new_tokens` after `past_tokens` cached ones."""
    tp, total = plan.tensor_parallel, (plan.pipeline_parallel - 1) * HOP_S
    for stage, layers in enumerate(plan.layers_per_stage):
        moved = _stage_moved_bytes(spec, plan, stage, batch, past_tokens)
        flops = _stage_flops(spec, plan, stage, batch, new_tokens, past_tokens)
        ranks = rates[stage * tp : (stage + 1) * tp]
        total += max(max(moved / r.memory_bytes_per_s, flops / r.flops_per_s) for r in ranks)
        link = min(r.memory_bytes_per_s for r in ranks) * LINK_TO_MEMORY
        total += layers * _allreduces_s(spec, tp, batch * new_tokens, link)
    return total


def _stage_moved_bytes(spec: ModelSpec, plan: Plan, stage: int, batch: int, past_tokens: float) -> float:
    """Per rank: every weight once (of the embedding only the few rows looked up), the cached KV of each
    sequence, and the adapters of as many variants as the batch can hold.
    """
    tp, layers = plan.tensor_parallel, plan.layers_per_stage[stage]
    head = vocab_table_bytes(spec, tp) if stage == plan.pipeline_parallel - 1 else 0
    kv = batch * past_tokens * kv_bytes_per_token(spec, tp)
    lora = min(batch, plan.max_variants) * lora_slot_bytes(spec, plan)
    return layers * (layer_shard_bytes(spec, tp) + kv + lora) + head


def _stage_flops(
    spec: ModelSpec, plan: Plan, stage: int, batch: int, new_tokens: int, past_tokens: float
) -> float:
    """Per rank: 2 per weight and token; attention 4 per query head dimension and (query, key) pair.

    Only the last token of each sequence passes the head. Adapters, when there are slots, add theirs.
    """
    tp, layers = plan.tensor_parallel, plan.layers_per_stage[stage]
    weights = sum(math.prod(_shard(spec, module, tp)) for module in spec.linear_shapes)
    lora = lora_slot_bytes(spec, plan) // spec.dtype_bytes if plan.max_variants else 0
    pairs = new_tokens * (past_tokens + (new_tokens + 1) / 2)
    attention = 4 * spec.num_heads // tp * spec.head_dim * pairs
    head = 2 * _padded_vocab(spec) // tp * spec.hidden_size if stage == plan.pipeline_parallel - 1 else 0
    return batch * (layers * (2 * new_tokens * (weights + lora) + attention) + head)


def _allreduces_s(spec: ModelSpec, tp: int, tokens: int, link_bytes_per_s: float) -> float:
    """The two all-reduces of a layer (after o_proj and down_proj), each of (tokens, hidden)."""
    if tp == 1:
        return 0.0
    volume = 2 * (tp - 1) / tp * tokens * spec.hidden_size * spec.dtype_bytes
    return 2 * (ALLREDUCE_S + volume / link_bytes_per_s)
