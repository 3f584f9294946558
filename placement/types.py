"""Plans, the devices they may use, and the outcome of placing one on the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from profiler.types import DeviceRates, Estimate, Plan

__all__ = [
    "Candidate",
    "Device",
    "Infeasible",
    "Intent",
    "Inventory",
    "Placement",
    "Plan",
    "RankPlacement",
    "Slos",
    "Unusable",
    "Use",
]


@dataclass(frozen=True)
class Use:
    """Memory of a device that processes of `holder`, the base of an engine of ours, have taken.

    "" is somebody else; None: the node cannot tell whose it is.
    """

    holder: str | None
    memory_bytes: int


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU host's cores and memory seen as one device (`kind` is then "cpu").

    `model` tells apart devices that need profiles of their own, `engine` is the engine's version there.
    `load` is the share of recent time it was busy, 0 to 1. Fast links join the GPUs with the same `island`.
    `uses` says who has its memory, as far as that is known.
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
    island: int = 0
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True)
class Unusable:
    """A node on which nothing new may be placed; `reason` is a sentence for the user that names it.

    What is placed on a `lost` one is lost too.
    """

    node: str
    reason: str
    lost: bool = False


@dataclass(frozen=True)
class Inventory:
    """`devices` may be placed on; the nodes in `unusable` are there, or were, but may not."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...] = ()


class Intent(StrEnum):
    """What the user asked for (MaverIQ, Table 1). `SLO` means: meet the limits, then least cost."""

    MIN_COST = "minCost"
    MIN_LATENCY = "minLat"
    SLO = "slo"


@dataclass(frozen=True)
class Slos:
    """Limits; None is no limit. Latency is end to end at the deployment's `max_output_tokens`.

    `cost` is in GiB-seconds per request (memory x latency, MaverIQ section 4, formulation 1);
    `accuracy` is the least acceptable registered accuracy.
    """

    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    cost_gib_s: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Candidate:
    plan: Plan
    estimate: Estimate


@dataclass(frozen=True)
class RankPlacement:
    """One worker process: which layers [layer_start, layer_end) of which shard, where, and how big."""

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
class Placement:
    """The launchable outcome: a plan, its ranks' places, its estimate, and why it was chosen."""

    plan: Plan
    ranks: tuple[RankPlacement, ...]
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class Infeasible:
    """Why nothing fits, in words for the user, and what would (the nearest relaxations)."""

    reason: str
    relaxations: tuple[str, ...] = ()
