"""Edits of worker groups in the records, together with what they were promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controlplane.cluster import reservations
from controlplane.controller.transitions import persist, the_group
from controlplane.planning import rescheduling
from controlplane.state.records import Deployment
from controlplane.state.repository import Put, Repository, State
from controlplane.state.transactions import Gone
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import Placement

Unplace = Callable[[Deployment, State, WorkerGroup], WorkerGroup | None]


async def unplace(repository: Repository, name: str, change: Unplace) -> None:
    """Commit what becomes of a group that gives up its place; None: it is no more. Raises Gone.

    `change` gets its deployment, the state and the group.
    """

    def once() -> None:
        state = repository.read()
        found, group = the_group(state, name)
        left = change(found.record, state, group)
        changed = (
            rescheduling.without_group(found.record, group.number)
            if left is None
            else rescheduling.with_group(found.record, left)
        )
        repository.commit([Put(changed, found.version), *reservations.release(state, name)])

    await asyncio.to_thread(persist, once)


def is_still(state: State, name: str, uid: int, placement: Placement | None) -> bool:
    """Whether a group is the one that was meant: of the same deployment, and not placed anew meanwhile."""
    try:
        found, group = the_group(state, name)
    except Gone:
        return False
    return (found.record.uid, group.placement) == (uid, placement)


def require_draining(state: State, name: str, uid: int) -> None:
    """Raises Gone when the group is not, or not of the deployment of this uid."""
    found, group = the_group(state, name)
    if found.record.uid != uid or group.phase is not GroupPhase.DRAINING:
        raise Gone(name)
