"""Plans, the devices they may use, and the outcome of placing one on the other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

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
    """Memory of a device that processes of `holder`, a worker group or a measuring of ours, have taken.

    "" is somebody else; None: the node cannot tell whose it is.
    """

    holder: str | None
    memory_bytes: int


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU host's cores and memory seen as one device (`kind` is then "cpu").

    `model` tells apart devices that need profiles of their own, `engine` is the engine's version there.
    `load` is the share of recent time it was busy, 0 to 1, and `work` which part of that ours had, by holder.
    Fast links join the GPUs with the same `nvlink_domain`. `uses` says who has its memory, as far as that is
    known.
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

    What is placed on a `lost` one is lost too. One that is `starting` may soon have devices.
    """

    node: str
    reason: str
    lost: bool = False
    starting: bool = False


@dataclass(frozen=True)
class Inventory:
    """`devices` may be placed on; the nodes in `unusable` are there, or were, but may not."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...] = ()


DeviceKey = tuple[str, str, int]


def key_of(device: Device) -> DeviceKey:
    """(node, kind, index): a host's CPU and its GPU 0 are two devices."""
    return device.node, device.kind, device.index


class Intent(StrEnum):
    """What the user asked for (MaverIQ, Table 1); SLOs are kept whatever it is."""

    MIN_COST = "minCost"
    MIN_LATENCY = "minLat"
    MIN_MEMORY = "minMem"
    MIN_GPU_HOURS = "minGpuHours"


class CostMeasure(StrEnum):
    """What minCost means; the provider's choice (MaverIQ, section 4)."""

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
    """How much an engine takes and holds; None: not said.

    `context_tokens` of a prompt and its answer together, `requests_at_once`, `cached_tokens` of all requests
    in its KV cache; `variant_slots` (variants in one batch), `lora_rank` (the largest), `variant_host_bytes`
    of each rank's host memory, and whether a copy of the weights is kept to merge a variant into.
    """

    context_tokens: int | None = None
    requests_at_once: int | None = None
    cached_tokens: int | None = None
    variant_slots: int | None = None
    lora_rank: int | None = None
    variant_host_bytes: int | None = None
    merged_slot: bool | None = None

    def or_else(self, other: EngineSizes | None) -> EngineSizes:
        """These sizes; of `other` what they do not say."""
        if other is None:
            return self
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return EngineSizes(**{name: theirs if own is None else own for name, (own, theirs) in pairs.items()})


def sizes_of(plan: Plan) -> EngineSizes:
    """Those of an engine of this plan."""
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
    """What may forbid a deployment."""

    MEMORY = "memory"  # no shape fits the free memory
    COMPRESSION = "compressionTechnique"  # no GPU runs any
    CONTEXT = "context"  # the expected lengths exceed what the engine takes
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
    """Moving `constraint` from `asked` to `offered` suffices; that is `factor` times worse (1 or more)."""

    constraint: Constraint
    asked: float
    offered: float
    factor: float
    text: str


@dataclass(frozen=True)
class RankPlacement:
    """One worker process: which layers [layer_start, layer_end) of which shard, where, and how big.

    Ranks are numbered stage by stage; the device is `device_index` of those of its kind on the node.
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


@dataclass(frozen=True)
class Choice:
    """How good a placement is, and what it was chosen from.

    `objective` is the intent's value, least is best, in `unit`. Latencies are under the expected load;
    `latency_s` of one request, end to end; intervals should hold nine times out of ten, None where nothing
    is known of them. One copy keeps up with `throughput_per_s` requests; `utilisation` is each stage's busy
    share under the expected rate. `alternatives` layouts of `shapes` shapes kept every limit. `relaxed` says
    which limits gave way, as the user had allowed. The expected load's requests have `input_tokens` and
    `output_tokens`; 0: an older record does not say it. `sizes` says how large the engine is and why; it is
    `reduced` where memory forced it to be smaller than engines usually are.
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
    """The launchable outcome: a plan, its ranks' places, its estimate, and why it was chosen."""

    plan: Plan
    ranks: tuple[RankPlacement, ...]
    estimate: Estimate
    reason: str
    choice: Choice = Choice()
