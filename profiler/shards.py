"""Bytes of a model on one rank, for a degree of tensor parallelism. Pure arithmetic."""

from __future__ import annotations

from profiler.linears import Linear, Sharding, distinct_experts
from profiler.quantization import QUANTIZATIONS, UNCOMPRESSED
from profiler.types import ModelSpec, Plan, adaptable_linears, linears_of

VOCAB_PADDING = 64  # vLLM pads the vocabulary to this multiple before it shards it


def tp_fits(spec: ModelSpec, tensor_parallel: int) -> bool:
    """Whether vLLM can shard this model over this many ranks."""
    return tp_problem(spec, tensor_parallel) is None


def tp_problem(spec: ModelSpec, tensor_parallel: int) -> str | None:
    """Why vLLM cannot shard this model: heads, KV heads (or copies), linears, experts, vocabulary."""
    tp, kv = tensor_parallel, spec.num_kv_heads
    if tp < 1:
        return f"expected a positive tensor parallelism, got {tp}"
    if spec.num_heads % tp:
        return f"{spec.num_heads} heads cannot be split {tp} ways"
    if kv % tp and tp % kv:
        return f"{kv} KV heads cannot be split or copied {tp} ways"
    if padded_vocab(spec) % tp:
        return f"a padded vocabulary of {padded_vocab(spec)} cannot be split {tp} ways"
    problems = (linear.problem(name, tp) for name, linear in linears_of(spec).items())
    return next((problem for problem in problems if problem), None)


def cut_problem(spec: ModelSpec, tensor_parallel: int, quantization: str) -> str | None:
    """Why vLLM cannot shard this model in this quantization; None if it can."""
    if problem := tp_problem(spec, tensor_parallel):
        return problem
    known = QUANTIZATIONS.get(quantization)
    for name, linear in linears_of(spec).items() if known else ():
        out, into = linear.shard(tensor_parallel, spec.heads)
        if known and linear.quantizable and (out % known.multiple or into % known.multiple):
            return (
                f"{quantization} needs multiples of {known.multiple}, but {name} is {out} x {into} on each "
                f"of {tensor_parallel} ranks"
            )
    return None


def layer_shard_bytes(spec: ModelSpec, tp: int, quantization: str = UNCOMPRESSED) -> int:
    """A rank's part of a hidden layer: linear layers are sharded, norms (and biases of old records) whole.

    A layer in an unknown quantization counts as unquantized.
    """
    linears = linears_of(spec).values()
    whole = spec.layer_weight_bytes - sum(linear.elements for linear in linears) * spec.dtype_bytes
    return whole + sum(_linear_bytes(spec, linear, tp, quantization) for linear in linears)


def layer_share(spec: ModelSpec, tp: int, quantization: str) -> float:
    """A rank's part of a hidden layer in this quantization, divided by its uncompressed part."""
    return layer_shard_bytes(spec, tp, quantization) / layer_shard_bytes(spec, tp)


def layer_moved_bytes(spec: ModelSpec, tp: int, tokens: float, quantization: str = UNCOMPRESSED) -> float:
    """Bytes that a rank reads of a layer's weights in a pass of `tokens`: without experts that no token
    uses."""
    idle = sum(
        (1 - distinct_experts(linear.experts, linear.active, tokens) / linear.experts)
        * _linear_bytes(spec, linear, tp, quantization)
        for linear in linears_of(spec).values()
    )
    return layer_shard_bytes(spec, tp, quantization) - idle


def _linear_bytes(spec: ModelSpec, linear: Linear, tp: int, quantization: str) -> int:
    """One rank's part of a linear layer, with all its experts."""
    elements, known = linear.shard_elements(tp, spec.heads), QUANTIZATIONS.get(quantization)
    if known is None or not linear.quantizable:
        return elements * spec.dtype_bytes
    outs = linear.experts * linear.shard(tp, spec.heads)[0]
    biases = outs * linear.bias
    return (elements - biases) * known.weight_bytes + outs * known.output_bytes + biases * spec.dtype_bytes


def active_shard_elements(spec: ModelSpec, tp: int) -> int:
    """Number of a rank's weights in a layer that multiply one token: only the experts that the token uses."""
    total = 0
    for linear in linears_of(spec).values():
        out, into = linear.shard(tp, spec.heads)
        total += linear.active * out * into
    return total


def mlp_width(spec: ModelSpec, tp: int) -> int:
    """Features of a token that a rank holds between the MLP's two halves: gate and up, of all its experts.

    Each expert also returns a hidden state of its own before these are added up.
    """
    total = 0
    for linear in linears_of(spec).values():
        if linear.sharding is Sharding.COLUMN:
            total += linear.active * linear.shard(tp, spec.heads)[0]
        elif linear.experts > 1 and linear.sharding is Sharding.ROW:
            total += linear.active * linear.out
    return total


def kv_bytes_per_token(spec: ModelSpec, tp: int) -> int:
    """Keys and values of one token in one layer on one rank; KV heads are replicated when TP exceeds them."""
    return 2 * spec.heads.kv_of_rank(tp) * spec.head_dim * spec.dtype_bytes


def lora_slot_bytes(spec: ModelSpec, plan: Plan) -> int:
    """A LoRA adapter of the largest allowed rank on all adaptable modules: one layer's part on one rank.

    A is (rank, in) and B is (out, rank); column-parallel layers shard B, row-parallel ones A.
    """
    tp = plan.tensor_parallel
    shards = (linear.shard(tp, spec.heads) for linear in adaptable_linears(spec).values())
    return plan.max_lora_rank * spec.dtype_bytes * sum(out + into for out, into in shards)


def vocab_table_bytes(spec: ModelSpec, tp: int) -> int:
    """A rank's shard of the embedding or of the head: (padded vocabulary / TP, hidden)."""
    return padded_vocab(spec) // tp * spec.hidden_size * spec.dtype_bytes


def outer_bytes(spec: ModelSpec) -> int:
    """Bytes of the last norm and the head's bias, without embedding and head; whole, on the last stage."""
    tables = (1 if head_is_embedding(spec) else 2) * spec.vocab_size * spec.hidden_size * spec.dtype_bytes
    return spec.other_weight_bytes - tables


def head_is_embedding(spec: ModelSpec) -> bool:
    return spec.other_weight_bytes < 2 * spec.vocab_size * spec.hidden_size * spec.dtype_bytes


def padded_vocab(spec: ModelSpec) -> int:
    return -(-spec.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
