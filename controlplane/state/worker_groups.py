"""Worker groups: the replicas of a base's deployment, each with an engine, a placement and a phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.state.terms import GroupPhase
from placement.types import DeviceKey, Placement

__all__ = [
    "GroupPhase",
    "MeasuredRank",
    "WorkerGroup",
    "group_id_of",
    "host_of",
    "is_spare",
    "kind_of",
    "next_number",
    "number_of",
]

# Not allowed in the names of models, so that no group is called like another model's.
_SEPARATOR = "@"


@dataclass(frozen=True)
class MeasuredRank:
    """What a rank was planned with, and what it takes of its device with its whole KV cache."""

    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class WorkerGroup:
    """One engine of a deployment; `number` tells the groups of a deployment apart.

    `measured` is what its ranks were found to take when it began to serve; their plan gave each
    `memory_excess` bytes beyond the estimate, from earlier experience; None if no calibration was there to
    estimate by. A pending group that `failures` times
    in a row did not last is placed anew at `retry_at_s`, one that was refused by the cluster of the key
    `refused_on` as soon as that differs; `reason` says why. It starts, or serves, since `since_s`; to start
    took `start_s`. One that `replaces` another, on none of the devices to `avoid`, has it drained once it
    serves. `kind` is that of the devices it was placed on last, `node_ids` are Ray's ids of their nodes, by
    name, at its launch.
    """

    number: int
    phase: GroupPhase = GroupPhase.PENDING
    placement: Placement | None = None
    measured: tuple[MeasuredRank, ...] = ()
    memory_excess: int | None = 0
    reason: str = ""
    failures: int = 0
    retry_at_s: float = 0.0
    refused_on: str = ""
    since_s: float = 0.0
    start_s: float = 0.0
    replaces: int | None = None
    avoid: tuple[DeviceKey, ...] = ()
    kind: str = ""
    node_ids: dict[str, str] = field(default_factory=dict)

    @property
    def device_kind(self) -> str:
        """Empty when it was on none yet. Older records have it in their placement only."""
        return self.kind or (kind_of(self.placement) if self.placement else "")


def kind_of(placement: Placement) -> str:
    """The kind of device that its first rank is on."""
    return next((rank.device_kind for rank in placement.ranks), "")


def group_id_of(host: str, number: int) -> str:
    """What a group is called in the cluster and in the ledgers; the first one as its base."""
    return f"{host}{_SEPARATOR}{number}" if number else host


def host_of(group_id: str) -> str:
    """The base that a group of this name serves."""
    return group_id.partition(_SEPARATOR)[0]


def number_of(group_id: str) -> int:
    return int(group_id.partition(_SEPARATOR)[2] or 0)


def is_spare(group: WorkerGroup, groups: tuple[WorkerGroup, ...]) -> bool:
    """Whether it is there only to replace another one of these, which still is there."""
    return group.phase is not GroupPhase.DRAINING and any(
        other.number == group.replaces and other.phase is not GroupPhase.DRAINING for other in groups
    )


def next_number(groups: tuple[WorkerGroup, ...]) -> int:
    """A number that no group of these has."""
    return max((group.number for group in groups), default=-1) + 1
