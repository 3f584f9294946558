"""How a worker group gets a place and is launched there, or waits for one.

The placement is in the records before its engine is launched: killed in between, the controller's successor
launches the same, or decides anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from controlplane import errors
from controlplane.cluster import reservations as ledger
from controlplane.cluster.inventory import NodeState, ray_ids
from controlplane.controller.interfaces import Engines, Note
from controlplane.controller.profile_actions import RECLAIM_WAIT_S
from controlplane.controller.transitions import find_group, is_still, mark_starting, unplace
from controlplane.planning import (
    engine_config,
    placement_decision,
    rebalancing,
    reclaimable_memory,
    rescheduling,
)
from controlplane.planning.reclaimable_memory import Found, FreeMemory
from controlplane.profiling import memory_feedback, progress, queue
from controlplane.settings import Settings
from controlplane.state import deployments
from controlplane.state.operations import open_operation
from controlplane.state.records import Deployment, OperationKind, Phase
from controlplane.state.repository import Change, Put, Repository, State
from controlplane.state.transactions import Superseded, persist
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, group_id, host_of, is_spare
from placement.rebalancing import without
from placement.types import Inventory, Placement
from workers.messages import EngineConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
SAMPLED_S = 2.5  # samples of devices that are asked for so long after a stop were taken after it
MOST_LAUNCHES = 5  # in a row that the cluster refuses

Fail = Callable[[str, errors.OstinatoError], Awaitable[None]]


@dataclass(frozen=True)
class _Committed:
    """What was committed; the holders that it was placed `preempting` were told to stop."""

    placement: Placement
    uid: int
    config: EngineConfig
    preempting: tuple[str, ...]


@dataclass(frozen=True)
class _Sample:
    """The devices, asked for at these times (of `time.monotonic` and of day). The `last` has to do."""

    inventory: Inventory
    asked_s: float
    asked_at_s: float
    last: bool


@dataclass(frozen=True)
class _Queued:
    """There is room once what is measured has ended."""

    reason: str


class LaunchAction:
    """The action Launch. `stopped_s` is when an engine was last stopped (of `time.monotonic`)."""

    def __init__(
        self, settings: Settings, repository: Repository, engines: Engines, note: Note, fail: Fail
    ) -> None:
        """`fail` ends a deployment that never served, and all that waits for it, with an error."""
        self._settings = settings
        self._repository = repository
        self._runtime = engines
        self._note = note
        self._fail = fail
        self.stopped_s = float("-inf")

    async def launch(self, group: str) -> None:
        try:
            found = await self._decide(group)
        except errors.NoFeasiblePlan as e:
            await self._refused(group, e)
            return
        if isinstance(found, _Queued):
            await self._notify_waiting(host_of(group), found.reason, 0.1)
            return
        placement, uid = found.placement, found.uid
        await self._notify_waiting(host_of(group), f"{placement.reason}; starting the engine", 0.3)
        await self._await_reclaim(found.preempting)
        state = await self._repository.read_async()
        if not is_still(state, group, uid, placement) or _is_cancelled(state, group):
            raise Superseded(group)
        try:
            await self._runtime.launch(found.config)
        except Exception as e:
            log.warning("%s could not be launched: %r", group, e)
            await self._not_launched(group, f"it could not be launched: {e}")

    async def _resample_until(self, decide: Callable[[_Sample], Awaitable[T | None]]) -> T:
        """What is decided on the devices; on newer samples of them while that is None, since they may show
        memory of what was stopped. On the last one something has to be decided."""
        give_up_s = time.monotonic() + RECLAIM_WAIT_S
        while True:
            asked_s, asked_at_s = time.monotonic(), time.time()
            sample = _Sample(await self._runtime.inventory(), asked_s, asked_at_s, asked_s > give_up_s)
            if (found := await decide(sample)) is not None:
                return found
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _await_reclaim(self, holders: Collection[str]) -> None:
        """Wait, not for ever, until no device is seen with memory that these have no more."""

        async def gone(sample: _Sample) -> bool | None:
            leaving = ledger.stale_holders(sample.inventory, (await self._repository.read_async()).ledgers)
            return sample.last or not leaving & set(holders) or None

        if holders:
            await self._resample_until(gone)

    async def _not_launched(self, group: str, reason: str) -> None:
        """It gives up its place, to be placed anew; a few times, if it never served."""
        found, record = find_group(await self._repository.read_async(), group)
        if not found.record.established and record.failures + 1 >= MOST_LAUNCHES:
            await self._fail(host_of(group), errors.EngineFailed(f"the engine of '{group}': {reason}"))
            return

        def change(deployment: Deployment, state: State, record: WorkerGroup) -> WorkerGroup | None:
            _require_wanted(group, record)
            if is_spare(record, deployment.groups):
                return None
            return rescheduling.unplaced(record, reason, time.time())

        await unplace(self._repository, group, change)

    async def _decide(self, group: str) -> _Committed | _Queued:
        """Place it, on newer samples while those may show memory of what was stopped without which it would
        be placed better, or at all. Errors: NoFeasiblePlan."""

        async def decide(sample: _Sample) -> _Committed | _Queued | None:
            nodes = await self._runtime.nodes(wait=False)
            return await asyncio.to_thread(persist, partial(self._place, group, sample, nodes))

        found: _Committed | _Queued = await self._resample_until(decide)
        return found

    def _place(self, name: str, sample: _Sample, nodes: Sequence[NodeState]) -> _Committed | _Queued | None:
        """Decide on the newest state and commit that; nothing, and None, when newer samples are to be
        awaited. Blocking.

        Errors: NoFeasiblePlan; StaleWrite when something was placed or changed meanwhile: decide anew.
        """
        state, host = self._repository.read(), host_of(name)
        found, group = find_group(state, name)
        _require_wanted(name, group)
        if host not in state.models:
            raise Superseded(host)
        usable = placement_decision.suited(without(sample.inventory, group.avoid), group.device_kind)
        place = self._find_placement(state, name, replace(sample, inventory=usable))
        if place is None:
            return None
        if place.victims and not found.record.established:
            return self._wait(name, state, nodes, place.victims)
        return self._commit(name, state, usable, nodes, place)

    def _find_placement(self, state: State, name: str, sample: _Sample) -> Found | None:
        """None when newer samples are to be awaited. Errors: NoFeasiblePlan."""
        found, group = find_group(state, name)

        def sight(inventory: Inventory) -> FreeMemory:
            seen = reclaimable_memory.free_memory(
                inventory, state.ledgers, self._settings.headroom, exclude=name
            )
            # No move is so urgent that it ends or awaits a measuring.
            return seen.beside() if is_spare(group, found.record.groups) else seen

        decide, seen = partial(self._decide_placement, state, name), sight(sample.inventory)
        stopped_lately = sample.asked_s - self.stopped_s < SAMPLED_S
        after = _reclaimed(state, name, sample, stopped_lately)
        may_change = stopped_lately or after != sample.inventory
        if sample.last or not may_change:
            return reclaimable_memory.place(decide, seen)
        return reclaimable_memory.place_or_resample(decide, seen, sight(after))

    def _decide_placement(self, state: State, name: str, free: Inventory) -> Placement:
        """Errors: NoFeasiblePlan."""
        host, (found, group) = host_of(name), find_group(state, name)
        others = placement_decision.exclude_group((d.record for d in state.deployments.values()), name)
        if group.replaces is not None:
            others = placement_decision.exclude_group(others, group_id(host, group.replaces))
        asked = found.record if group.replaces is None else rebalancing.unrelaxed(found.record)
        model, variants = state.models[host].record, state.variants_of(host)
        return placement_decision.decide(model, asked, free, self._settings, variants, state.profiles, others)

    def _commit(
        self, name: str, state: State, usable: Inventory, nodes: Sequence[NodeState], place: Found
    ) -> _Committed:
        """The placement together with its reservations, in the place of what is in its way."""
        host, placement, (found, group) = host_of(name), place.placement, find_group(state, name)
        model, deployment, variants = state.models[host].record, found.record, state.variants_of(host)
        limit = deployment.max_active_variants
        config = engine_config.engine_config(model, placement, self._settings, variants, limit, group=name)
        excess = memory_feedback.applied(state.profiles, model, placement, usable, self._settings)
        now_s, ids = time.time(), ray_ids(nodes)
        begun = Put(mark_starting(deployment, group, placement, excess, now_s, ids), found.version)
        preempting = tuple(map(ledger.measuring, place.victims))
        reservations = ledger.reserve(state, name, deployment.uid, placement, now_s, preempting)
        self._repository.commit([begun, *_preempted(state, place.victims, name, now_s), *reservations])
        return _Committed(placement, deployment.uid, config, preempting)

    def _wait(self, name: str, state: State, nodes: Sequence[NodeState], keys: Sequence[str]) -> _Queued:
        """Commit that a group waits until these profiles were measured: it is due when promises change."""
        found, group = find_group(state, name)
        reason = queue.waiting_reason(state, keys)
        cluster = rescheduling.cluster_key(nodes, state.ledgers, exclude=name)
        waits = deployments.with_group(
            found.record, rescheduling.refused(group, reason, cluster, time.time())
        )
        self._repository.commit([Put(waits, found.version), *ledger.release(state, name)])
        return _Queued(reason)

    async def _refused(self, group: str, error: errors.NoFeasiblePlan) -> None:
        """There is no room: the end of a deployment that never served; another one waits for room."""
        state, nodes = await self._repository.read_async(), await self._runtime.nodes(wait=False)
        found, _ = find_group(state, group)
        if not found.record.established:
            await self._fail(host_of(group), error)
            return

        def change(deployment: Deployment, state: State, record: WorkerGroup) -> WorkerGroup | None:
            _require_wanted(group, record)
            if is_spare(record, deployment.groups):
                return None  # what it was to replace goes on where it is
            cluster = rescheduling.cluster_key(nodes, state.ledgers, exclude=group)
            return rescheduling.refused(record, error.message, cluster, time.time())

        await unplace(self._repository, group, change)
        log.warning("%s finds no place: %s", group, error.message)
        if not set(found.record.serving_ids()) - {group}:
            await self._fail(host_of(group), error)  # the variants that wait for it

    async def _notify_waiting(self, host: str, message: str, progress: float) -> None:
        """Tell the operations of a base and of the variants that wait for it."""
        for found in (await self._repository.read_async()).deployments.values():
            d = found.record
            if d.host == host and d.phase in (Phase.PENDING, Phase.DEPLOYING):
                await self._note(OperationKind.DEPLOY, d.model, Phase.DEPLOYING, message, progress)


def _reclaimed(state: State, name: str, sample: _Sample, stopped_lately: bool) -> Inventory:
    """The devices of a sample once what was stopped is gone, be it that its processes cannot be named."""
    unnamed_on = reclaimable_memory.measured_lately(state, sample.asked_at_s, SAMPLED_S)
    if stopped_lately:
        unnamed_on = reclaimable_memory.models(sample.inventory)
    return reclaimable_memory.reclaimed(sample.inventory, state.ledgers, name, unnamed_on)


def _preempted(state: State, keys: Sequence[str], group: str, now_s: float) -> list[Change]:
    """The profiles of these keys that are measured, stopped for a group."""
    found = [state.profiles[key] for key in keys if key in state.profiles]
    return [
        Put(progress.preempted(one.record, group, now_s), one.version)
        for one in found
        if one.record.phase is Phase.PROFILING
    ]


def _is_cancelled(state: State, name: str) -> bool:
    operation = open_operation(state, OperationKind.DEPLOY, host_of(name))
    return operation is not None and operation.cancel_requested


def _require_wanted(name: str, group: WorkerGroup) -> None:
    """Raises Superseded when it is to go by now."""
    if group.phase is GroupPhase.DRAINING:
        raise Superseded(name)
