"""Worker groups: the replicas of a base's deployment, each with an engine, a placement and a phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.state.terms import GroupPhase
from placement.types import DeviceKey, Placement

__all__ = [
    "GroupPhase",
    "MeasuredRank",
    "WorkerGroup",
    "base_of",
    "group_id_of",
    "is_spare",
    "kind_of",
    "next_number",
    "number_of",
]

# Not allowed in names of models, so that no group has the name of another model's group.
_SEPARATOR = "@"


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's planned bytes, and the bytes of its device that it takes with its whole KV cache."""

    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class WorkerGroup:
    """One engine of a deployment; `number` identifies a group within its deployment.

    `measured` is the memory of its ranks when it began to serve. Their plan gave each rank `memory_excess`
    bytes beyond the estimate, from earlier experience; None if there was no calibration to estimate by. A
    pending group that failed `failures` times in a row is placed again at `retry_at_s`. A group that the
    cluster with the key `refused_on` refused is placed again as soon as the cluster's key changes. `reason`
    explains both. It has been starting, or serving, since `since_s`; its start took `start_s`. A group that
    `replaces` another, on none of the devices to `avoid`, has that one drained once it serves. `kind` is the
    kind of its last devices, `node_ids` are Ray's ids of their nodes, by name, at its launch.
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
        """Its kind of devices; empty if it was on none yet. Older records have it only in their placement."""
        return self.kind or (kind_of(self.placement) if self.placement else "")


def kind_of(placement: Placement) -> str:
    """The kind of the first rank's device."""
    return next((rank.device_kind for rank in placement.ranks), "")


def group_id_of(base: str, number: int) -> str:
    """The name of a group in the cluster and in the ledgers; the first group has its base's name."""
    return f"{base}{_SEPARATOR}{number}" if number else base


def base_of(group_id: str) -> str:
    """The base that a group with this name serves."""
    return group_id.partition(_SEPARATOR)[0]


def number_of(group_id: str) -> int:
    return int(group_id.partition(_SEPARATOR)[2] or 0)


def is_spare(group: WorkerGroup, groups: tuple[WorkerGroup, ...]) -> bool:
    """Whether the group exists only to replace another one of these groups, which still exists."""
    return group.phase is not GroupPhase.DRAINING and any(
        other.number == group.replaces and other.phase is not GroupPhase.DRAINING for other in groups
    )


def next_number(groups: tuple[WorkerGroup, ...]) -> int:
    """A number that none of these groups has."""
    return max((group.number for group in groups), default=-1) + 1
