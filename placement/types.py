"""Plans, the devices they may use, and the outcome of placing a plan on devices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from profiler.types import CPU, DeviceRates, Estimate, Interval, Plan

__all__ = [
    "CPU",
    "Choice",
    "Constraint",
    "CostMeasure",
    "Device",
    "DeviceKey",
    "EngineSizes",
    "HolderMemory",
    "Intent",
    "Inventory",
    "Placement",
    "Plan",
    "RankPlacement",
    "Relaxation",
    "Scope",
    "Slos",
    "Unusable",
    "key_of",
    "sizes_of",
]


@dataclass(frozen=True)
class HolderMemory:
    """Memory of a device that processes of `holder`, one of our worker groups or measurements, have taken.

    "": other processes; None: the node cannot tell the holder.
    """

    holder: str | None
    memory_bytes: int


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU host's cores and memory seen as one device (`kind` is then "cpu").

    Devices of different `model` need separate profiles; `engine` is the engine's version there. `load` is the
    share of recent time in which it was busy, 0 to 1; `work` is the part of that by our holders. Fast links
    join the GPUs with the same `nvlink_domain`. `uses` are the known holders of its memory.
    """

    node: str
    index: int
    kind: str
    total_bytes: int
    free_bytes: int
    rates: DeviceRates
    model: str = ""
    engine: str = ""
    load: float = 0.0
    nvlink_domain: int = 0
    uses: tuple[HolderMemory, ...] = ()
    work: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Unusable:
    """A node on which nothing new may be placed; `reason` is a sentence for the user that names it.

    Everything placed on a `lost` node is lost, too. `awaited`: the event that soon gives the node devices;
    empty if none is expected.
    """

    node: str
    reason: str
    lost: bool = False
    awaited: str = ""


@dataclass(frozen=True)
class Inventory:
    """`devices` may be used for placements; the nodes in `unusable` exist, or existed, but may not be
    used."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...] = ()


class DeviceKey(NamedTuple):
    """A device of the cluster: the CPU of a host and its GPU 0 are two devices."""

    node: str
    kind: str
    number: int


def key_of(device: Device) -> DeviceKey:
    return DeviceKey(device.node, device.kind, device.index)


class Intent(StrEnum):
    """The user's aim (MaverIQ, Table 1); SLOs are kept with every aim."""

    MIN_COST = "minCost"
    MIN_LATENCY = "minLat"
    MIN_MEMORY = "minMem"
    MIN_GPU_HOURS = "minGpuHours"


class CostMeasure(StrEnum):
    """The meaning of minCost; the provider's choice (MaverIQ, section 4)."""

    MEMORY_LATENCY = "memoryLatency"  # GiB of all ranks x seconds of a request
    MEMORY = "memory"  # GiB of all ranks
    GPU_HOURS = "gpuHours"  # ranks x hours of a request


class Scope(StrEnum):
    """What deployments of one anti-affinity group must not share."""

    NONE = "none"
    GPU = "gpu"
    NODE = "node"


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of an engine; None: not specified.

    `context_tokens`: of a prompt and its answer together. `cached_tokens`: of all requests in its KV cache.
    `variant_slots`: variants in one batch. `lora_rank`: the largest. `variant_host_bytes`: of each rank's
    host memory. `merged_slot`: whether a copy of the weights is kept, into which a variant is merged.
    """

    context_tokens: int | None = None
    requests_at_once: int | None = None
    cached_tokens: int | None = None
    variant_slots: int | None = None
    lora_rank: int | None = None
    variant_host_bytes: int | None = None
    merged_slot: bool | None = None

    def or_else(self, other: EngineSizes | None) -> EngineSizes:
        """These sizes; sizes that are not specified come from `other`."""
        if other is None:
            return self
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return EngineSizes(**{name: theirs if own is None else own for name, (own, theirs) in pairs.items()})


def sizes_of(plan: Plan) -> EngineSizes:
    """The sizes of this plan's engine."""
    return EngineSizes(
        context_tokens=plan.max_model_len,
        requests_at_once=plan.sequences,
        cached_tokens=plan.kv_cache_tokens,
        variant_slots=plan.max_variants,
        lora_rank=plan.max_lora_rank,
        variant_host_bytes=plan.variant_host_bytes or None,
        merged_slot=plan.merged_slot,
    )


@dataclass(frozen=True)
class Slos:
    """Limits; None is no limit. Latency is that of one request end to end, under the expected load.

    `cost` is in the unit of the cost measure; `accuracy` is the least acceptable registered accuracy.
    """

    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    cost: float | None = None
    accuracy: float | None = None


class Constraint(StrEnum):
    """The reasons that can prevent a deployment."""

    MEMORY = "memory"  # no shape fits the free memory
    COMPRESSION = "compressionTechnique"  # no GPU runs any of the model's compressions
    CONTEXT = "context"  # the expected lengths exceed the engine's limit
    ENGINE_CONTEXT = "engine.contextTokens"  # the requested context does not fit
    MAX_OUTPUT = "maxOutputLength"  # an answer of this length does not fit
    HEADROOM = "headroom"
    ANTI_AFFINITY = "antiAffinity"
    PARALLELISM = "parallelism"  # allowed TP and PP
    RATE = "rate"
    LATENCY = "latency_s"
    TTFT = "ttft_s"
    TPOT = "tpot_s"
    COST = "cost"
    ACCURACY = "accuracy"


@dataclass(frozen=True)
class Relaxation:
    """Changing `constraint` from `asked` to `offered` suffices; that is `factor` times worse (1 or more)."""

    constraint: Constraint
    asked: float
    offered: float
    factor: float
    text: str


@dataclass(frozen=True)
class RankPlacement:
    """One worker process: its layers [layer_start, layer_end), its shard, its device, and its size.

    Ranks are numbered stage by stage; `device_index` counts the devices of its kind on the node.
    """

    rank: int
    stage: int
    tp_rank: int
    node: str
    device_index: int
    device_kind: str
    layer_start: int
    layer_end: int
    memory_bytes: int

    @property
    def device(self) -> DeviceKey:
        return DeviceKey(self.node, self.device_kind, self.device_index)


@dataclass(frozen=True)
class Choice:
    """The quality of a placement, and its alternatives.

    `objective` is the intent's value in `unit`, least is best. Latencies are under the expected load;
    `latency_s` is one request's, end to end. Intervals should hold nine times out of ten; None: nothing is
    known. One copy sustains `throughput_per_s` requests; `utilisation` is each stage's busy share under the
    expected rate. `alternatives` layouts of `shapes` shapes kept every limit. `relaxed` lists the limits that
    were relaxed, as the user had allowed. The expected load's requests have `input_tokens` and
    `output_tokens`; 0: an older record does not have them. `sizes` says how large the engine is and why. It
    is `reduced` if memory forced it to be smaller than the usual engine.
    """

    objective: float = 0.0
    unit: str = ""
    latency_s: float = 0.0
    throughput_per_s: float = 0.0
    utilisation: tuple[float, ...] = ()
    shapes: int = 0
    alternatives: int = 0
    ttft: Interval | None = None
    tpot: Interval | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    relaxed: tuple[Relaxation, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    sizes: str = ""
    reduced: bool = False


@dataclass(frozen=True)
class Placement:
    """A launchable outcome: a plan, its ranks' places, its estimate, and the reason for the choice."""

    plan: Plan
    ranks: tuple[RankPlacement, ...]
    estimate: Estimate
    reason: str
    choice: Choice = Choice()
