"""What the control plane and a worker say to each other. One frozen dataclass per message."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineConfig:
    """Everything a worker needs to start its engine. `name` is the base model's name.

    `memory_bytes` is what the plan gives one rank; `kv_cache_bytes` its part for keys and values,
    `variant_memory_bytes` its part for the `max_variants` variants that may run at once.
    `variant_host_bytes` of each rank's host memory keep more of them ready; only variants of
    `variant_kinds` are accepted.
    """

    engine: str
    name: str
    model_path: str
    dtype: str
    device_kind: str
    tensor_parallel: int
    layers_per_stage: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    memory_bytes: int
    max_variants: int
    max_lora_rank: int
    variant_memory_bytes: int
    variant_host_bytes: int
    variant_kinds: tuple[str, ...]
    load_format: str = "auto"
    log_requests: bool = False

    @property
    def max_ongoing_requests(self) -> int:
        """What one worker takes at once; beyond its batch they wait in the engine."""
        return max(64, 4 * self.max_num_seqs)


@dataclass(frozen=True)
class VariantRef:
    """All an engine needs to serve a variant it may never have heard of. `uid` names its weights."""

    name: str
    uid: int
    path: str


@dataclass(frozen=True)
class EngineCall:
    """One request for the engine's OpenAI application: a path, a JSON body, the variant it means."""

    path: str
    body: bytes
    variant: VariantRef | None = None


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
class WorkerReport:
    """What a worker says of itself. `address` and `secret` open its door to the gateway: not for the API."""

    pid: int
    node: str
    variants: tuple[str, ...]
    engine_version: str
    metrics_address: str = ""
    address: str = ""
    secret: str = field(default="", repr=False)
    max_ongoing_requests: int = 0


@dataclass(frozen=True)
class DeviceReport:
    """One device of a node, as measured there."""

    index: int
    kind: str
    total_bytes: int
    free_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class NodeReport:
    node: str
    devices: tuple[DeviceReport, ...] = field(default_factory=tuple)
