"""What the control plane and a worker say to each other. One frozen dataclass per message."""

from __future__ import annotations

from dataclasses import dataclass, field

from profiler.quantization import UNCOMPRESSED
from profiler.types import CPU
from workers.tiers import Tier

# How an engine says in a stream that it cannot go on, and a gateway to its client; no other event begins so.
ERROR_EVENT = b'data: {"error":'


@dataclass(frozen=True)
class RankConfig:
    """Where one rank of a group runs and what it may take there. `node` is empty where only one can be meant.

    Of `memory_bytes` on its device `kv_cache_bytes` are for keys and values, and `variant_memory_bytes` for
    the variants that may run at once. It carries `layers` of the model's.
    """

    layers: int
    memory_bytes: int
    kv_cache_bytes: int
    variant_memory_bytes: int = 0
    node: str = ""
    device_kind: str = CPU
    device_index: int = 0


@dataclass(frozen=True)
class EngineConfig:
    """Everything a worker needs to start its engine. `name` is the base model's name.

    `ranks` are numbered stage by stage, `tensor_parallel` of them to a stage. At most `max_variants` variants
    run at once; with 0 of them the engine serves its base alone. `variant_host_bytes` of each rank's host
    memory keep more of them ready; only variants of `variant_kinds` are accepted. `max_active_variants` is
    how many may run at once to begin with (DeltaZip's N); 0: as many as there are slots. A step takes at
    most `max_batched_tokens`. `quantization` is that of the hidden layers (`profiler.quantization`). Models
    and variants are read from folders below `roots`; none: from anywhere. A step of the echo engine takes
    `echo_tpot_s`. With `merged_slot` each rank has room for a copy of its weights beside the variants. It was
    launched by `installation`. `fingerprint` is the registered checkpoint's: an engine starts with no other.
    `tool_parser` and `reasoning_parser` are vLLM's names of what reads answers; "": none is known. Without
    the `needed_parsers` among them the engine does not start.
    """

    engine: str
    name: str
    model_path: str
    dtype: str
    tensor_parallel: int
    ranks: tuple[RankConfig, ...]
    max_model_len: int
    max_num_seqs: int
    max_variants: int
    max_lora_rank: int
    variant_host_bytes: int
    variant_kinds: tuple[str, ...]
    max_active_variants: int = 0
    max_batched_tokens: int = 2048
    quantization: str = UNCOMPRESSED
    load_format: str = "auto"
    log_requests: bool = False
    group: str = ""
    roots: tuple[str, ...] = ()
    echo_tpot_s: float = 0.0
    merged_slot: bool = False
    installation: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    needed_parsers: tuple[str, ...] = ()
    fingerprint: str = ""

    @property
    def group_name(self) -> str:
        """The worker group's name in the cluster: its own, or else its base's."""
        return self.group or self.name

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that one worker takes at once. Those beyond its batch wait in the engine."""
        return max(64, 4 * self.max_num_seqs)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(rank.layers for rank in self.ranks[:: self.tensor_parallel])

    @property
    def on_gpu(self) -> bool:
        return any(rank.device_kind != CPU for rank in self.ranks)


@dataclass(frozen=True)
class VariantRef:
    """All an engine needs to serve a variant it may never have heard of. `uid` names its weights."""

    name: str
    uid: int
    path: str


@dataclass(frozen=True)
class EngineCall:
    """One request for the engine's OpenAI application: a path, a JSON body, the variant it means.

    `variant_limit` is how many variants the deployment wants to run at once; None: it does not say. One that
    is not `counted` is no client's: it says nothing about how many engines there should be. `grammar` is the
    field that says what the answer may be; "": it may be anything.
    """

    path: str
    body: bytes
    variant: VariantRef | None = None
    variant_limit: int | None = None
    counted: bool = True
    grammar: str = ""


@dataclass(frozen=True)
class EngineReply:
    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class EngineHead:
    """First item of a streamed reply; the others are bytes."""

    status: int
    content_type: str


@dataclass(frozen=True)
class RankReport:
    """What one rank takes of its device, measured when its engine was ready.

    `process_bytes` is all its process holds: on a GPU what the driver says, on a CPU its resident memory, in
    which the KV cache is not yet, for nothing was written to it. `total_bytes` is with the whole KV cache.
    """

    rank: int
    pid: int
    node: str
    device_kind: str
    device_index: int
    layers: int
    planned_bytes: int
    weights_bytes: int
    kv_cache_bytes: int
    process_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says of itself. The gateway reaches its HTTP server by `address` and `secret`, and knows
    its answers by `proof` (older workers send none); the API never shows them."""

    pid: int
    node: str
    variants: tuple[str, ...]
    engine_version: str
    metrics_address: str = ""
    address: str = ""
    secret: str = field(default="", repr=False)
    max_ongoing_requests: int = 0
    ranks: tuple[RankReport, ...] = ()
    ongoing_requests: int = 0
    group: str = ""
    proof: str = field(default="", repr=False)


@dataclass(frozen=True)
class WorkerLoad:
    """What a worker has to do, and how its engine's steps went since the last such message to this gateway.

    `ongoing` requests are at its HTTP server, from all gateways; the engine runs `running` and has `waiting`
    ones, and uses `kv_usage` (0 to 1) of its KV cache. Of `steps` in which rows decoded the mean one came
    `step_s` after the one before. Prompts of which `prefill_tokens` were computed took `prefill_s` from their
    first step to the first token, added up; they count when their request has ended. `variants` are those in
    slots or in host memory, (uid, tier); all others are on disk.
    """

    ongoing: int
    running: int
    waiting: int
    kv_usage: float
    steps: int
    step_s: float
    prefill_tokens: int
    prefill_s: float
    variants: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds of a variant."""

    rank: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class VariantPlace:
    """Where a variant is; `reason` says why not on the device. It may have a `slot` before it is there."""

    uid: int
    tier: Tier
    slot: int | None
    ranks: tuple[RankBytes, ...]
    reason: str = ""


@dataclass(frozen=True)
class EngineResidency:
    """One engine's variants. `limit` of them run at once (DeltaZip's N), at most as many as `slots`.

    `skips` counts requests that passed others by whose variant was not running, `preemptions` those that
    gave such places back, `blocked` the requests that wait for a running variant to end.
    """

    slots: int
    limit: int
    skips: int
    preemptions: int
    blocked: int
    variants: tuple[VariantPlace, ...]
    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class DeviceReport:
    """What one device of a node can do, as measured there. `model` is its maker's name for it."""

    index: int
    kind: str
    memory_bytes_per_s: float
    flops_per_s: float
    model: str = ""


@dataclass(frozen=True)
class NodeReport:
    """`engine_version` is that of the vLLM that is installed there; empty without one."""

    node: str
    devices: tuple[DeviceReport, ...] = field(default_factory=tuple)
    engine_version: str = ""
