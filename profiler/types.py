"""Facts read from checkpoints' files; plans, and the cost of serving them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from profiler.linears import Heads, Linear, Sharding

# vLLM's models of these architectures make the tables on every stage of a pipeline (0.26; in 0.32 Phi and
# GPT-NeoX do not).
TABLES_EVERYWHERE = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Gemma", "Gemma2", "Gemma3", "Phi", "Falcon", "GPTJ", "GPTNeoX"),
        *("Mixtral", "Qwen2Moe", "Qwen3Moe"),
    )
)


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of a base model, from its `config.json` and safetensors headers.

    `linear_shapes` maps each adaptable module (`q_proj`, ..., `down_proj`) to (out, in) features; it is empty
    if variants of this architecture cannot be served. `linears` has every linear layer of a hidden layer,
    experts included, by its name below `layer_prefix`N. (`linears_of` for records without it).
    `layer_shapes` has every tensor of a hidden layer by such names, `other_shapes` every other tensor by its
    full name, without the head if it is `tied` to the embedding. `intermediate_size` is the MLP's width, or
    one expert's width. In `sliding_layers` layers a token attends to the last `sliding_window` tokens.
    `fingerprint` identifies a checkpoint (profiler/checkpoint_digest.py); empty if it was not computed.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype_bytes: int
    layer_weight_bytes: int
    other_weight_bytes: int
    linear_shapes: dict[str, tuple[int, int]]
    layer_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: bool = False
    fingerprint: str = ""
    linears: dict[str, Linear] = field(default_factory=dict)
    layer_prefix: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    intermediate_size: int = 0
    sliding_window: int | None = None
    sliding_layers: int = 0
    allreduces_per_layer: int = 2

    @cached_property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def tables_everywhere(self) -> bool:
        """Whether every stage of a pipeline holds embedding and head, and not only the stages that use
        them."""
        return self.architecture in TABLES_EVERYWHERE

    @property
    def adaptable(self) -> bool:
        """Whether variants of this model can be served."""
        return bool(self.linear_shapes)

    @property
    def sliding_share(self) -> float:
        """The share of the layers that have a sliding window."""
        return self.sliding_layers / self.num_layers

    @property
    def weight_bytes(self) -> int:
        return self.num_layers * self.layer_weight_bytes + self.other_weight_bytes

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Keys and values of one token in one layer, unsharded."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


# How Llama's modules are sharded; the oldest records, without `linears`, imply this.
_LLAMA = {
    "q_proj": Sharding.HEADS,
    "k_proj": Sharding.KV_HEADS,
    "v_proj": Sharding.KV_HEADS,
    "o_proj": Sharding.ROW,
    "gate_proj": Sharding.COLUMN,
    "up_proj": Sharding.COLUMN,
    "down_proj": Sharding.ROW,
}


def adaptable_linears(spec: ModelSpec) -> dict[str, Linear]:
    """The modules that variants may change, by short name, without biases."""
    return {name: Linear(*shape, _LLAMA[name]) for name, shape in spec.linear_shapes.items()}


def linears_of(spec: ModelSpec) -> dict[str, Linear]:
    """Every linear layer of a hidden layer; for records with only the adaptable layers, these."""
    return spec.linears or adaptable_linears(spec)


@dataclass(frozen=True)
class TensorRef:
    """The place of a tensor: `size_bytes` bytes from byte `offset` of `file`, in a folder that the caller
    knows.

    `offset` counts from the start of the file; `dtype` is safetensors' name (F16, BF16, U8, ...).
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


CPU = "cpu"  # the kind of a CPU host; others are GPUs


@dataclass(frozen=True)
class DeviceRates:
    """The rates that one device sustains, measured when the device joins; decisions never assume them."""

    memory_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Workload:
    """The load for which a plan is judged: one batch of requests, lengths in tokens."""

    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Plan:
    """How one copy of a base model is split and configured.

    `layers_per_stage` has one entry per pipeline stage; its sum is the model's number of layers.
    Ranks are numbered stage by stage: rank = stage * tensor_parallel + tp_rank.

    At most `max_variants` variants run in one batch. `room` is the memory that each rank reserves for all
    variants of the base. For each TP it has lines of (bytes outside the layers, bytes of each layer of the
    rank's stage), of which the largest counts. A step of the engine takes at most `batched_tokens` tokens;
    longer prompts take several steps. With `merged_slot` each rank keeps a copy of its weights, and it keeps
    variants ready in `variant_host_bytes` of host memory. At most `max_sequences` run at once.

    Plans without `room` come from older records. They have memory for `max_variants` LoRA adapters of
    `max_lora_rank`, or for variants of other kinds, whichever is more: `delta_bytes` in the hidden layers,
    which TP shards; `whole_bytes` in these layers, which each rank holds whole (BOFT's rotations); and
    `full_bytes` (tensors that replace the base's). `uncoded` is the additional memory of low-rank deltas, for
    each TP whose cuts need it: (TP, bytes that TP shards, bytes that each rank holds whole).
    """

    tensor_parallel: int
    layers_per_stage: tuple[int, ...]
    quantization: str
    max_model_len: int
    kv_cache_tokens: int
    max_variants: int
    max_lora_rank: int
    delta_bytes: int = 0
    full_bytes: int = 0
    batched_tokens: int = 2048
    whole_bytes: int = 0
    merged_slot: bool = False
    uncoded: tuple[tuple[int, int, int], ...] = ()
    room: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    max_sequences: int = 0
    variant_host_bytes: int = 0

    @property
    def sequences(self) -> int:
        """How many run at once. The KV cache of older records holds each of them at full length."""
        return self.max_sequences or max(1, self.kv_cache_tokens // self.max_model_len)

    @property
    def uncoded_bytes(self) -> tuple[int, int]:
        """The additional bytes of low-rank deltas with this plan's TP: (sharded, whole)."""
        here = (rest for tp, *rest in self.uncoded if tp == self.tensor_parallel)
        sharded, whole = next(here, (0, 0))
        return sharded, whole

    @property
    def pipeline_parallel(self) -> int:
        return len(self.layers_per_stage)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class Interval:
    """A figure and the range that holds it nine times out of ten; 0 <= low <= value <= high."""

    value: float
    low: float
    high: float

    def holds(self, actual: float) -> bool:
        return self.low <= actual <= self.high


class Basis(StrEnum):
    """What an estimate is based on: measurements of this architecture on this device, or its data sheet."""

    PROFILE = "profile"  # profiler.physical, calibrated by fingerprints
    ROUGH = "rough"  # profiler.roofline: the roofline of a device that was only probed


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of one plan. Seconds and bytes; `memory_bytes` has one figure per rank."""

    ttft_s: float
    tpot_s: float
    memory_bytes: tuple[int, ...]
    accuracy: float
    basis: Basis = Basis.ROUGH

    def latency_s(self, output_tokens: int) -> float:
        return self.ttft_s + self.tpot_s * max(0, output_tokens - 1)
