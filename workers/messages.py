"""The messages between the control plane and a worker. One frozen dataclass per message.

Messages of every request are named tuples: making one takes a third of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from profiler.quantization import UNCOMPRESSED
from profiler.types import CPU
from workers.tiers import Tier

# The error event in an engine's stream, and in a gateway's stream to its client; no other event has this
# beginning.
ERROR_EVENT = b'data: {"error":'
# Stands for the slash of a model's name where a slash would begin a folder. No name has it.
_SLASH = "+"


def in_file_names(name: str) -> str:
    """A name of a model or a worker group as a part of file names; `from_file_name` reverses it."""
    return name.replace("/", _SLASH)


def from_file_name(text: str) -> str:
    return text.replace(_SLASH, "/")


@dataclass(frozen=True)
class RankConfig:
    """The place of one rank of a group, and its memory there. `node` is empty if only one is possible.

    It takes `memory_bytes` on its device: `kv_cache_bytes` for keys and values, `variant_memory_bytes` for
    the variants that may run at once. It holds `layers` of the model's layers.
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
    """Everything that a worker needs to start its engine. `name` is the base model's name.

    `ranks` are numbered stage by stage, with `tensor_parallel` ranks per stage. At most `max_variants`
    variants run at once; with 0 the engine serves only its base. `variant_host_bytes` of each rank's host
    memory keep more variants ready; only variants of `variant_kinds` are accepted. `max_active_variants` is
    the initial number that may run at once (DeltaZip's N); 0: as many as slots. A step takes at most
    `max_batched_tokens`. `quantization` is that of the hidden layers (`profiler.quantization`). Models and
    variants are read from folders below `roots`; none: from anywhere. A step of the echo engine takes
    `echo_tpot_s`. With `merged_slot` each rank has memory for a copy of its weights in addition to the
    variants. `installation` is the one that launched it. `fingerprint` is the registered checkpoint's: an
    engine refuses any other. `tool_parser` and `reasoning_parser` are vLLM's names of the answers' parsers;
    "": none is known. The engine does not start without those of them in `needed_parsers`.
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
        """The requests that one worker accepts at once. Those beyond its batch wait in the engine."""
        return max(64, 4 * self.max_num_seqs)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(rank.layers for rank in self.ranks[:: self.tensor_parallel])

    @property
    def on_gpu(self) -> bool:
        return any(rank.device_kind != CPU for rank in self.ranks)


@dataclass(frozen=True)
class VariantRef:
    """All that an engine needs to serve a variant that it may not know yet. `uid` identifies its weights."""

    name: str
    uid: int
    path: str


class EngineCall(NamedTuple):
    """One request for the engine's OpenAI application: a path, a JSON body, and its variant.

    `variant_limit` is how many variants the deployment wants to run at once; None: unspecified. A request
    that is not `counted` comes from no client, and does not affect the number of engines. `grammar` is the
    field that restricts the answer; "": no restriction.
    """

    path: str
    body: bytes
    variant: VariantRef | None = None
    variant_limit: int | None = None
    counted: bool = True
    grammar: str = ""


class EngineReply(NamedTuple):
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
    """The memory of one rank on its device, measured when its engine was ready.

    `process_bytes` is all memory of its process. On a GPU the driver reports it. On a CPU it is the resident
    memory, without the KV cache, which has not been written to yet. `total_bytes` includes the whole KV
    cache.
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
    """A worker's report about itself.

    The gateway reaches its HTTP server by `address` and `secret`. It recognises the worker's answers by
    `proof` (older workers send none). `local_name` is the name of its Unix socket, for gateways on its own
    machine; empty: none. The API never shows these values.
    """

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
    local_name: str = field(default="", repr=False)


@dataclass(frozen=True)
class WorkerLoad:
    """A worker's work, and its engine's steps since the last such message to this gateway.

    `ongoing` requests are at its HTTP server, from all gateways. The engine runs `running` requests, has
    `waiting` ones, and uses `kv_usage` (0 to 1) of its KV cache. `steps` counts steps in which rows decoded,
    at a mean distance of `step_s`. Prompts with `prefill_tokens` computed tokens took `prefill_s` in total
    from their first step to the first token; they count once their request has ended. `variants` are those in
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
    """The bytes that one rank holds of a variant."""

    rank: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class VariantPlace:
    """Where a variant is; `reason` is why it is not on the device. It may have a `slot` before it has
    arrived.
    """

    uid: int
    tier: Tier
    slot: int | None
    ranks: tuple[RankBytes, ...]
    reason: str = ""


@dataclass(frozen=True)
class EngineResidency:
    """One engine's variants. At most `limit` of them run at once (DeltaZip's N), which is at most `slots`.

    `skips` counts requests that overtook others whose variant was not running. `preemptions` counts requests
    that returned such places. `blocked` counts the requests that wait for a running variant to end.
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
    """The rates of one device of a node, as measured there. `model` is the manufacturer's name for it."""

    index: int
    kind: str
    memory_bytes_per_s: float
    flops_per_s: float
    model: str = ""


@dataclass(frozen=True)
class NodeReport:
    """A node's devices. `engine_version` is the version of vLLM installed there; empty without vLLM."""

    node: str
    devices: tuple[DeviceReport, ...] = field(default_factory=tuple)
    engine_version: str = ""
