"""What a policy answers: ranks on GPUs, or which constraint binds and what would do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from placement.solver.plan import Figures, Shape


@dataclass(frozen=True)
class RankSeat:
    """Rank `rank` (numbered stage by stage) holds layers [layer_start, layer_end) on one GPU of a node."""

    rank: int
    stage: int
    tp_rank: int
    node: str
    gpu: int
    layer_start: int
    layer_end: int
    memory_bytes: int


@dataclass(frozen=True)
class Placed:
    """`objective` is the intent's value, least is best; `unit` is its unit."""

    deployment: str
    shape: Shape
    layers_per_stage: tuple[int, ...]
    ranks: tuple[RankSeat, ...]
    figures: Figures
    objective: float
    unit: str
    reasons: tuple[str, ...]


class Constraint(StrEnum):
    """What may forbid a deployment."""

    MEMORY = "memory"  # no shape fits the free memory
    HEADROOM = "headroom"
    ANTI_AFFINITY = "antiAffinity"
    PARALLELISM = "parallelism"  # max_tp and max_pp
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
class NotPlaced:
    """`binding` is the constraint whose removal would help first; `relaxations` begin with the nearest."""

    deployment: str
    binding: Constraint
    reason: str
    relaxations: tuple[Relaxation, ...] = ()


Outcome = Placed | NotPlaced
